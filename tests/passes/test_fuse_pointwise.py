"""Fused element-wise ops give the unfused values; near misses are left alone."""

import pytest
import torch

from camshaft.ir import nodes
from camshaft.ir.verify import verify
from camshaft.passes.fuse_linear import FuseLinear
from camshaft.passes.fuse_pointwise import FusePointwise
from tests.passes.graphs import CONFIG, Builder, context, pure_inputs, run_program, tiny_llama


def ops(program):
    found = [nodes.target_name(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in found if name != "getitem"]


def fuse(program):
    before = run_program(program, pure_inputs())
    result = FusePointwise().run(program, context())
    verify(program)
    torch.testing.assert_close(run_program(program, pure_inputs()), before)
    return result


@pytest.fixture
def b():
    return Builder()


@pytest.fixture
def x(b):
    return b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)


@pytest.mark.parametrize("up_first", [False, True])
def test_the_tiny_llama_fuses_every_add_and_activation(up_first):
    program = tiny_llama(up_first=up_first)
    FuseLinear().run(program, context())
    assert fuse(program).notes == ("4 × add_rms_norm", "2 × silu_mul")
    left = ops(program)
    assert left.count("rms_norm") == 1  # the first block's: nothing is added before it
    assert not {"add", "silu", "mul"} & set(left)


def test_without_joined_products_only_norms_fuse():
    assert fuse(tiny_llama()).notes == ("4 × add_rms_norm",)


def test_a_sum_read_before_and_after_the_norm_is_the_second_result(b, x):
    total = b.call("aten.add.Tensor", x, b.call("aten.silu.default", x))
    early = b.call("aten.silu.default", total)
    norm = b.call("camshaft.rms_norm", total, b.weight("w", 8), 1e-5)
    program = b.finish(b.call("aten.add.Tensor", b.call("aten.mul.Tensor", early, norm), total))
    assert fuse(program).matches == 1
    assert ops(program).count("add") == 1


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(b, x, bias):
    total = b.call("aten.add.Tensor", x, x)
    norm = b.call("camshaft.layer_norm", total, b.weight("w", 8), b.weight("bias", 8) if bias else None, 1e-5)
    program = b.finish(b.call("aten.add.Tensor", norm, total))
    assert fuse(program).notes == ("1 × add_layer_norm",)


def test_two_norms_of_one_sum_fuse_once(b, x):
    total = b.call("aten.add.Tensor", x, x)
    norms = [b.call("camshaft.rms_norm", total, b.weight(name, 8), 1e-5) for name in ("w1", "w2")]
    program = b.finish(b.call("aten.mul.Tensor", *norms))
    assert fuse(program).matches == 1
    assert sorted(set(ops(program))) == ["add_rms_norm", "embedding", "mul", "rms_norm"]


def test_a_broadcast_or_scaled_add_is_no_residual(b, x):
    row = b.call("aten.slice.Tensor", x, 0, 0, 1)
    norm = b.call("camshaft.rms_norm", b.call("aten.add.Tensor", x, row), b.weight("w", 8), 1e-5)
    scaled = b.call("aten.add.Tensor", norm, norm)
    scaled.kwargs = {"alpha": 2}
    program = b.finish(b.call("camshaft.rms_norm", scaled, b.weight("w2", 8), 1e-5))
    assert fuse(program).matches == 0


def gated(b, x, activation, *, sizes=(4, 4), swap=False, reuse=False, dim=-1, extra=None):
    parts = b.call("aten.split_with_sizes.default", x, list(sizes), dim)
    gate, up = b.call("getitem", parts, 0), b.call("getitem", parts, 1)
    active = b.call(activation, up if swap else gate)
    active.kwargs = extra or {}
    result = b.call("aten.mul.Tensor", gate if swap else up, active)
    return b.finish(b.call("aten.add.Tensor", result, up) if reuse else result)


def test_silu_of_the_first_half(b, x):
    program = gated(b, x, "aten.silu.default")
    assert fuse(program).notes == ("1 × silu_mul",)
    assert ops(program) == ["embedding", "silu_mul"]


@pytest.mark.parametrize("how", ["none", "tanh"])
def test_gelu_keeps_its_approximation(b, x, how):
    program = gated(b, x, "aten.gelu.default", extra={} if how == "none" else {"approximate": how})
    assert fuse(program).notes == ("1 × gelu_mul",)
    fused = program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.gelu_mul.default)[0]
    assert fused.args[1] == how


@pytest.mark.parametrize("miss", [{"swap": True}, {"reuse": True}])
def test_near_misses_stay(b, x, miss):
    program = gated(b, x, "aten.silu.default", **miss)
    assert fuse(program).matches == 0


def test_halves_of_a_larger_whole_stay(b, x):
    parts = b.call("aten.split_with_sizes.default", x, [3, 3, 2], -1)
    product = b.call("aten.mul.Tensor", b.call("aten.silu.default", b.call("getitem", parts, 0)),
                     b.call("getitem", parts, 1))
    assert fuse(b.finish(product)).matches == 0
