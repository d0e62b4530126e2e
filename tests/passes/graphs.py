"""Small programs built node by node, and a plain interpreter for pure ones: what every pass test starts from."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from camshaft.config.build import BuildConfig
from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.core.device import DeviceSpec
from camshaft.ir import nodes
from camshaft.ir.program import PURE_INPUTS, Program
from camshaft.ir.weight import constant
from camshaft.kernels.op import load_families
from camshaft.passes.base import PassContext

CONFIG = ModelConfig(architecture="LlamaForCausalLM", vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=2,
                     num_heads=4, num_kv_heads=2, head_dim=4, max_position=64, norm_eps=1e-5, rope=RopeConfig())
BUILD = BuildConfig(dtype="float32", weight_dtype="float32", device="cpu", max_batch_size=4, max_num_tokens=16,
                    max_seq_len=64)
DEVICE = DeviceSpec(kind="cpu", name="test", features=("x86_64",), num_threads=1, memory_bytes=1 << 30)


def context(*, native=False, **build):
    return PassContext(build=BuildConfig(**{**BUILD.to_dict(), **build}), device=DEVICE, native=native)


class Builder:
    """Appends nodes to a fresh program; ``call`` infers results, ``weight`` makes seeded random weights."""

    def __init__(self, config=CONFIG, dtype=torch.float32):
        load_families("cpu")
        self.dtype = dtype
        self.random = torch.Generator().manual_seed(1)
        self.program = Program(graph=fx.Graph(), weights={}, config=config)
        mode = FakeTensorMode(shape_env=ShapeEnv())
        sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        token_sized = mode.from_tensor(torch.zeros(7, dtype=torch.int64), symbolic_context=sizes)
        with mode:
            found = {"token_ids": token_sized, "positions": torch.empty_like(token_sized)}
        found["logits_rows"] = mode.from_tensor(torch.zeros(5, dtype=torch.int64), symbolic_context=sizes)
        for name in PURE_INPUTS:
            setattr(self, name, self.program.graph.placeholder(name))
            getattr(self, name).meta["val"] = found[name]

    def weight(self, name, *shape, dtype=None):
        values = torch.randn(shape, generator=self.random) * 0.5
        self.program.weights[name] = constant(values.to(dtype or self.dtype), name)
        return self.read(name)

    def read(self, name):
        return self.program.graph.create_node("get_attr", name)

    def call(self, name, *args):
        return nodes.add_call(self.program, name, args)

    def cast(self, source, dtype):
        node = self.program.graph.call_function(torch.ops.aten._to_copy.default, (source,), {"dtype": dtype})
        node.meta["val"] = nodes.infer(self.program, node.target, node.args, node.kwargs)
        return node

    def finish(self, result):
        self.program.graph.output(result)
        return self.program


def tiny_llama(*, bias=False, tied=False, up_first=False, dtype=torch.float32):
    """Two blocks as a frontend exports them: separate q, k and v, plain norms, plain residual adds."""
    b = Builder(dtype=dtype)
    cfg, layers = CONFIG, range(CONFIG.num_layers)
    embedding = b.weight("model.embed_tokens.weight", cfg.vocab_size, cfg.hidden_size)
    h = b.call("aten.embedding.default", embedding, b.token_ids)
    frequencies = b.weight("rope.inv_freq", cfg.head_dim // 2, dtype=torch.float32)
    cos_sin = b.call("camshaft.rope_cos_sin", b.positions, frequencies, 1.0)

    def linear(x, name, rows, columns):
        weight = b.weight(f"{name}.weight", rows, columns)
        return b.call("camshaft.linear", x, weight, b.weight(f"{name}.bias", rows) if bias else None)

    def norm(x, name):
        return b.call("camshaft.rms_norm", x, b.weight(f"{name}.weight", cfg.hidden_size), cfg.norm_eps)

    for layer in layers:
        at = f"model.layers.{layer}"
        x = norm(h, f"{at}.input_layernorm")
        heads = {}
        for part, count in (("q", cfg.num_heads), ("k", cfg.num_kv_heads), ("v", cfg.num_kv_heads)):
            flat = linear(x, f"{at}.self_attn.{part}_proj", count * cfg.head_dim, cfg.hidden_size)
            heads[part] = b.call("aten.view.default", flat, [-1, count, cfg.head_dim])
        turned = b.call("camshaft.rope", heads["q"], heads["k"], cos_sin)
        q, k = b.call("getitem", turned, 0), b.call("getitem", turned, 1)
        o = b.call("camshaft.attention", q, k, heads["v"], layer, 0.5, None, None, 0)
        o = b.call("aten.reshape.default", o, [-1, cfg.num_heads * cfg.head_dim])
        attended = linear(o, f"{at}.self_attn.o_proj", cfg.hidden_size, cfg.num_heads * cfg.head_dim)
        h = b.call("aten.add.Tensor", h, attended)
        x = norm(h, f"{at}.post_attention_layernorm")
        parts = {}
        for part in ("up", "gate") if up_first else ("gate", "up"):
            parts[part] = linear(x, f"{at}.mlp.{part}_proj", cfg.intermediate_size, cfg.hidden_size)
        gated = b.call("aten.mul.Tensor", b.call("aten.silu.default", parts["gate"]), parts["up"])
        h = b.call("aten.add.Tensor", h, linear(gated, f"{at}.mlp.down_proj", cfg.hidden_size, cfg.intermediate_size))
    last = b.call("aten.index_select.default", norm(h, "model.norm"), 0, b.logits_rows)
    head = b.read("model.embed_tokens.weight") if tied else b.weight("lm_head.weight", cfg.vocab_size, cfg.hidden_size)
    return b.finish(b.call("camshaft.linear", last, head, None))


def run_program(program, inputs):
    """Interpret a program: every op by its reference. ``inputs`` by placeholder name; pools are written in place."""
    values = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[node.name]
        elif node.op == "get_attr":
            values[node] = program.weights[node.target].read()
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
        else:
            return values[node.args[0]]
    raise AssertionError("the program has no output")


def pure_inputs(num_tokens=6):
    random = torch.Generator().manual_seed(2)
    return {"token_ids": torch.randint(CONFIG.vocab_size, (num_tokens,), generator=random),
            "positions": torch.arange(num_tokens), "logits_rows": torch.tensor([0, num_tokens - 1])}
