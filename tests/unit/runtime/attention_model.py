"""A two-layer model made of embeddings and attention alone, as an engine and as plain dense torch."""

import json

import torch

from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import GenerationDefaults, ModelConfig, RopeConfig
from camshaft.engine.artifact import EngineParts, EngineWriter
from camshaft.engine.manifest import DeviceRequirement
from camshaft.ir.weight import constant

HEADS, HEAD_DIM, LAYERS, LONGEST, PAGE = 8, 4, 2, 96, 16
VOCAB = HEADS * HEAD_DIM
SCALE = 0.7
CONFIG = ModelConfig(architecture="AttentionOnly", vocab_size=VOCAB, hidden_size=VOCAB, intermediate_size=1,
                     num_layers=LAYERS, num_heads=HEADS, num_kv_heads=2, head_dim=HEAD_DIM, max_position=LONGEST,
                     norm_eps=1e-5, rope=RopeConfig())
LIFE_CYCLE = LifeCycleSpec(kind="full", layers=tuple(range(LAYERS)), num_kv_heads=2, head_dim=HEAD_DIM, page_size=PAGE,
                           dtype="float32")


def weights():
    generator = torch.Generator().manual_seed(3)
    return {"tokens.weight": torch.randn(VOCAB, VOCAB, generator=generator),
            "places.weight": torch.randn(LONGEST, VOCAB, generator=generator)}


def graph_text():
    inputs = ["token_ids", "positions", "query_start", "seq_lens", "logits_rows", "slot_mapping_0", "page_table_0",
              *(f"kv_pool_{layer}" for layer in range(LAYERS))]
    lines = [{"name": name, "op": "input", "result": None} for name in inputs]

    def call(name, op, *args):
        lines.append({"name": name, "op": op, "args": list(args), "result": None})
        return f"%{name}"

    h = call("h_0", "aten.add.Tensor", call("token_rows", "aten.embedding.default", "@tokens.weight", "%token_ids"),
             call("place_rows", "aten.embedding.default", "@places.weight", "%positions"))
    for layer in range(LAYERS):
        q = call(f"q_{layer}", "aten.view.default", h, [-1, HEADS, HEAD_DIM])
        k = call(f"k_{layer}", "aten.slice.Tensor", q, 1, 0, 2)
        v = call(f"v_{layer}", "aten.slice.Tensor", q, 1, 2, 4)
        call(f"write_{layer}", "camshaft.kv_write", k, v, f"%kv_pool_{layer}", "%slot_mapping_0")
        o = call(f"o_{layer}", "camshaft.paged_attention", q, f"%kv_pool_{layer}", "%page_table_0", "%query_start",
                 "%seq_lens", SCALE, None, None, 0)
        flat = call(f"flat_{layer}", "aten.view.default", o, [-1, VOCAB])
        h = call(f"h_{layer + 1}", "aten.add.Tensor", h, flat)
    logits = call("logits", "aten.index_select.default", h, 0, "%logits_rows")
    lines.append({"op": "output", "args": [logits]})
    return json.dumps({"graph_format": 1, "nodes": lines})


def engine(folder=None, **changes):
    build = BuildConfig(dtype="float32", device="cpu", max_batch_size=8, max_seq_len=LONGEST, max_num_tokens=64,
                        page_size=PAGE)
    fields = dict(graph_text=graph_text(), model=CONFIG, generation=GenerationDefaults(), build=build,
                  device=DeviceRequirement(kind="cpu", features=()), life_cycles=(LIFE_CYCLE,), history=(), kernels=(),
                  activation_peak_bytes=1 << 20, weights_id="w", tokenizer_files={}, native=None)
    writer = EngineWriter(folder)
    for name, value in weights().items():
        writer.add_tensor(name, constant(value, name))
    return writer.finish(EngineParts(**{**fields, **changes}))


def dense_logits(token_ids):
    """Logits [T, V] of one whole sequence, without pages."""
    table = weights()
    h = table["tokens.weight"][torch.tensor(token_ids)] + table["places.weight"][:len(token_ids)]
    later = torch.ones(len(token_ids), len(token_ids), dtype=torch.bool).triu(1)
    for _ in range(LAYERS):
        q = h.view(-1, HEADS, HEAD_DIM)
        k, v = (part.repeat_interleave(HEADS // 2, dim=1) for part in (q[:, 0:2], q[:, 2:4]))
        scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
        o = torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        h = h + o.reshape(-1, VOCAB)
    return h


def dense_greedy(prompt, count):
    """The next ``count`` tokens of ``prompt``, computed from scratch each time."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(tokens)[-1].argmax()))
    return tokens[len(prompt):]
