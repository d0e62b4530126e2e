"""What the optimiser makes of each family: nothing that Llama gets fused stays apart in another."""

import collections

import pytest
import torch

from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from camshaft.ir import nodes
from camshaft.ir.verify import verify
from camshaft.passes.pipeline import run_passes
from camshaft.testing.tiny import TINY_FAMILIES, write_tiny
from tests.passes.graphs import context

FUSED = ("2 × q_proj+k_proj+v_proj", "2 × gate_proj+up_proj"), ("4 × add_rms_norm", "2 × silu_mul")
NOTES = {
    "llama": FUSED,
    "qwen2": FUSED,
    "qwen3": FUSED,
    "gemma3": (("3 × q_proj+k_proj+v_proj", "3 × gate_proj+up_proj"), ("6 × add_rms_norm", "3 × gelu_mul")),
}
NORMS_ALONE = {"llama": 1, "qwen2": 1, "qwen3": 1 + 2 * 2, "gemma3": 1 + 3 * 4}
"""The first block's, nothing being added before it; then each block's of queries and keys, and Gemma's after the
output projections."""


def optimised(folder, family, *, dtype=torch.float32, build=None, **changes):
    write_tiny(folder, family, tokenizer=False, **changes)
    program = program_from_checkpoint(open_checkpoint(folder), dtype)
    run_passes(program, context(**(build or {})))
    ops = collections.Counter(nodes.target_name(node.target) for node in program.graph.nodes
                              if node.op == "call_function")
    return program, ops


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_every_family_fuses_as_far_as_its_structure_allows(family, tmp_path):
    program, ops = optimised(tmp_path, family)
    notes = {record.name: record.notes for record in program.history}
    assert (notes["fuse_linear"], notes["fuse_pointwise"]) == NOTES[family]
    assert ops["camshaft.rms_norm"] == NORMS_ALONE[family]
    assert not {"aten.add.Tensor", "aten.silu.default", "aten.gelu.default", "aten._to_copy.default"} & ops.keys()
    assert ops["aten.mul.Tensor"] == (family == "gemma3")


@pytest.mark.parametrize("quantization", ["none", "w8a16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_norms_with_float32_weights_are_fused_and_run_natively_in_16_bits(dtype, quantization, tmp_path):
    build = {"native": True, "dtype": dtype, "weight_dtype": dtype, "quantization": quantization}
    program, ops = optimised(tmp_path, "gemma3", dtype=getattr(torch, dtype), build=build)
    assert (ops["camshaft.rms_norm"], ops["camshaft.add_rms_norm"]) == (NORMS_ALONE["gemma3"], 6)
    norms = [node for node in program.graph.nodes if "rms_norm" in nodes.target_name(node.target)]
    for node in norms:
        weight = program.weights[nodes.weight_name(nodes.arguments(node)[-2])]
        assert (weight.dtype, node.meta["kernel"]) == (torch.float32, "native")
    verify(program)


def test_a_family_has_one_rotary_table_for_each_setting_its_layers_use(tmp_path):
    _, both = optimised(tmp_path / "both", "gemma3")
    assert both["camshaft.rope_cos_sin"] == 2
    for kind in ("full_attention", "sliding_attention"):
        _, one = optimised(tmp_path / kind, "gemma3", layer_types=[kind] * 3)
        assert one["camshaft.rope_cos_sin"] == 1


def test_biases_are_merged_with_their_products(tmp_path):
    program, _ = optimised(tmp_path, "qwen2")
    assert "model.layers.0.self_attn.q_proj+k_proj+v_proj.bias" in program.weights
    assert not any(name.endswith("o_proj.bias") for name in program.weights)
