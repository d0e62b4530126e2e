"""A small engine made by hand, for tests of the artifact."""

import torch

from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import GenerationDefaults, ModelConfig, RopeConfig
from camshaft.engine.artifact import EngineParts, EngineWriter
from camshaft.engine.manifest import DeviceRequirement
from camshaft.ir.weight import constant

MODEL = ModelConfig(architecture="LlamaForCausalLM", vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=1,
                    num_heads=2, num_kv_heads=1, head_dim=4, max_position=64, norm_eps=1e-5, rope=RopeConfig())


def tensors():
    """Several types, and sizes that are no multiple of the alignment."""
    generator = torch.Generator().manual_seed(0)
    return {"a.weight": torch.randn(3, 5, generator=generator),
            "b.half": torch.randn(7, generator=generator).to(torch.bfloat16),
            "c.bytes": torch.arange(-3, 8, dtype=torch.int8),
            "d.scalar": torch.tensor(2.5), "e.empty": torch.empty(0, 4), "f.mask": torch.tensor([True, False])}


def parts(**changes):
    fields = dict(
        graph_text="one line a node\n", model=MODEL, generation=GenerationDefaults(eos_token_ids=(2, 3)),
        build=BuildConfig(dtype="float32", device="cpu", max_batch_size=4, max_seq_len=64, max_num_tokens=16),
        device=DeviceRequirement(kind="cpu", features=()),
        life_cycles=(LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=16,
                                   dtype="float32"),),
        history=({"name": "cleanup", "matches": 3, "notes": []},), kernels=(), activation_peak_bytes=1 << 16,
        weights_id="w", tokenizer_files={"tokenizer.json": b"{}", "tokenizer_config.json": b'{"a": 1}'}, native=None)
    return EngineParts(**{**fields, **changes})


def write(folder, *, weights=None, allow_pointers=False, **changes):
    writer = EngineWriter(folder, allow_pointers=allow_pointers)
    for name, weight in (weights or {name: constant(value, name) for name, value in tensors().items()}).items():
        writer.add_tensor(name, weight)
    return writer.finish(parts(**changes))
