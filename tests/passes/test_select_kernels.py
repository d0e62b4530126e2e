"""Kernel choices: recorded, forced, explained, and packed weights that disturb nobody else."""

import pytest
import torch

from camshaft.core.errors import InternalError, UserError
from camshaft.ir.verify import verify
from camshaft.kernels.op import OPS, Impl
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import context, pure_inputs, run_program, tiny_llama


@pytest.fixture
def extra_impl():
    """Registers an implementation for one test."""
    added = []

    def add(op, **fields):
        impl = Impl(**{"name": "extra", "device": "cpu", "fn": OPS.get(op).spec.reference, "rank": 1000, **fields})
        OPS.get(op).add(impl)
        added.append((op, impl.name))

    yield add
    for op, name in added:
        del OPS.get(op).impls[name]


def selected(program, op):
    return [node for node in program.graph.nodes if node.op == "call_function" and str(node.target) == op]


def test_every_camshaft_op_has_a_kernel_and_a_reason():
    program = tiny_llama()
    run_passes(program, context())
    for node in program.graph.nodes:
        ours = node.op == "call_function" and "camshaft" in str(node.target)
        assert ("kernel" in node.meta) == ours
        assert bool(node.meta.get("why")) == ours


def test_the_best_supporting_implementation_wins(extra_impl):
    extra_impl("silu_mul", name="best")
    extra_impl("rope", name="refuses", supports=lambda call: "never")
    extra_impl("linear", name="large", supports=lambda call: None if call.args[1].shape[0] > 16 else "too small")
    program = tiny_llama()
    run_passes(program, context())
    assert {node.meta["kernel"] for node in selected(program, "camshaft.silu_mul.default")} == {"best"}
    assert {node.meta["kernel"] for node in selected(program, "camshaft.rope.default")} != {"refuses"}
    kernels = {node.args[1].target: node.meta["kernel"] for node in selected(program, "camshaft.linear.default")}
    assert kernels["model.layers.0.self_attn.q_proj+k_proj+v_proj.weight"] == "large"
    assert kernels["model.layers.0.mlp.down_proj.weight"] != "large"


def test_capability_checks_see_dynamic_sizes_as_none(extra_impl):
    seen = []
    extra_impl("linear", supports=lambda call: seen.append(call) or "looking only")
    run_passes(tiny_llama(), context())
    x, weight, bias = seen[0].args
    assert (x.shape, weight.shape, bias) == ((None, 8), (32, 8), None)
    assert x.dtype == weight.dtype == torch.float32


def test_a_forced_kernel_is_taken(extra_impl):
    extra_impl("linear", name="best")
    program = tiny_llama()
    run_passes(program, context(kernels=("linear=ref",)))
    assert {(node.meta["kernel"], node.meta["why"]) for node in selected(program, "camshaft.linear.default")} == {
        ("ref", "forced")}


@pytest.mark.parametrize(("choice", "message"), [
    ("linaer=ref", "linear"), ("linear=fastest", "one of"), ("linear=refuses", "too old"),
    ("gelu_mul=ref", "not in it"), ("attention=ref", "not in it"),
])
def test_forcing_what_cannot_be(extra_impl, choice, message):
    extra_impl("linear", name="refuses", supports=lambda call: "too old")
    with pytest.raises(UserError, match=message):
        run_passes(tiny_llama(), context(kernels=(choice,)))


def test_prepared_weights_have_names_of_their_own(extra_impl):
    extra_impl("linear", name="packed", prepare={"weight": lambda weight: weight.t().contiguous()},
               fn=lambda x, weight, bias: x @ weight)
    program = tiny_llama(tied=True)
    plain = program.weights["model.embed_tokens.weight"].read()
    run_passes(program, context())
    verify(program)
    packed = program.weights["model.embed_tokens.weight@linear.packed"]
    assert packed.shape == (8, 11)
    assert torch.equal(packed.read(), plain.t())
    assert torch.equal(program.weights["model.embed_tokens.weight"].read(), plain)
    # every plain weight that only linears read is gone
    assert "model.layers.0.mlp.down_proj.weight" not in program.weights
    assert "model.layers.0.mlp.down_proj.weight@linear.packed" in program.weights


def test_preparing_something_that_is_no_weight_is_our_bug(extra_impl):
    extra_impl("silu_mul", prepare={"gate_up": lambda tensor: tensor})
    with pytest.raises(InternalError, match="is no weight"):
        run_passes(tiny_llama(), context())


def test_an_absent_optional_weight_is_not_prepared(extra_impl):
    extra_impl("linear", name="packed", prepare={"bias": lambda bias: bias * 2})
    program = tiny_llama()
    run_passes(program, context())
    assert not any("@" in name for name in program.weights)
    biased = tiny_llama(bias=True)
    run_passes(biased, context())
    assert sum("@linear.packed" in name for name in biased.weights) == 8


def test_references_still_run_what_was_selected():
    program = tiny_llama()
    expected = run_program(tiny_llama(), pure_inputs())
    run_passes(program, context())
    inputs = pure_inputs()
    pages = torch.zeros(2, 2, 2, 16, 4)
    found = run_program(program, {
        **inputs, "query_start": torch.tensor([0, 6], dtype=torch.int32),
        "seq_lens": torch.tensor([6], dtype=torch.int32), "slot_mapping_0": 16 + torch.arange(6),
        "page_table_0": torch.tensor([[1]], dtype=torch.int32), "kv_pool_0": pages, "kv_pool_1": pages.clone()})
    torch.testing.assert_close(found, expected)
