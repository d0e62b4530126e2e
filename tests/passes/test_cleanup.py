"""What cleanup removes, and what only looks removable."""

import pytest
import torch

from camshaft.passes.cleanup import Cleanup
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import CONFIG, Builder, context, pure_inputs, run_program

END = torch.iinfo(torch.int64).max


@pytest.fixture
def b():
    return Builder()


def start(b):
    return b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)


def finish(b, x):
    program = b.finish(b.call("aten.silu.default", x))
    before = run_program(program, pure_inputs())
    result = Cleanup().run(program, context())
    torch.testing.assert_close(run_program(program, pure_inputs()), before, rtol=0, atol=0)
    # every program here ends in the embedding and one silu once its identities are gone
    return result, [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("identity", [
    lambda b, x: b.call("aten.slice.Tensor", x, 1, 0, END), lambda b, x: b.call("aten.slice.Tensor", x, 0, 0, END),
    lambda b, x: b.call("aten.slice.Tensor", x, 1, 0, 8), lambda b, x: b.call("aten.slice.Tensor", x, 0, None, None),
    lambda b, x: b.call("aten.view.default", x, [-1, 8]), lambda b, x: b.call("aten.reshape.default", x, [-1, 8]),
    lambda b, x: b.cast(x, torch.float32),
])
def test_identities_go(b, identity):
    result, left = finish(b, identity(b, start(b)))
    assert (result.matches, result.notes) == (1, ("1 identities",))
    assert left == ["aten.embedding.default", "aten.silu.default"]


@pytest.mark.parametrize("change", [
    lambda b, x: b.call("aten.slice.Tensor", x, 1, 0, 7), lambda b, x: b.call("aten.slice.Tensor", x, 1, 1, END),
    lambda b, x: b.call("aten.slice.Tensor", x, 1, 0, END, 2), lambda b, x: b.call("aten.slice.Tensor", x, 0, 0, 3),
    lambda b, x: b.call("aten.view.default", x, [-1, 4]), lambda b, x: b.cast(x, torch.bfloat16),
])
def test_what_changes_shape_or_dtype_stays(b, change):
    result, left = finish(b, change(b, start(b)))
    assert result.matches == 0
    assert len(left) == 3


def test_repeated_calls_become_one(b):
    x = start(b)
    left, right = (b.call("aten.silu.default", b.call("aten.view.default", x, [-1, 2, 4])) for _ in range(2))
    program = b.finish(b.call("aten.view.default", b.call("aten.add.Tensor", left, right), [-1, 8]))
    before = run_program(program, pure_inputs())
    assert Cleanup().run(program, context()).notes == ("2 repeated calls",)
    assert sum("silu" in str(node.target) for node in program.graph.nodes) == 1
    torch.testing.assert_close(run_program(program, pure_inputs()), before, rtol=0, atol=0)


def test_two_readers_of_a_weight_share_one_node(b):
    x = start(b)
    y = b.call("camshaft.rms_norm", x, b.weight("norm", 8), 1e-5)
    y = b.call("camshaft.rms_norm", y, b.read("norm"), 1e-5)
    program = b.finish(y)
    assert Cleanup().run(program, context()).notes == ("1 repeated calls",)
    assert len(program.graph.find_nodes(op="get_attr", target="norm")) == 1


def test_constants_that_python_calls_equal_are_told_apart(b):
    x = start(b)
    parts = [b.call("camshaft.rms_norm", x, b.read("norm") if "norm" in b.program.weights else b.weight("norm", 8), eps)
             for eps in (1.0, 0.0, 1.0)]
    program = b.finish(b.call("aten.add.Tensor", b.call("aten.add.Tensor", parts[0], parts[1]), parts[2]))
    before = run_program(program, pure_inputs())
    Cleanup().run(program, context())
    assert sum("rms_norm" in str(node.target) for node in program.graph.nodes) == 2
    torch.testing.assert_close(run_program(program, pure_inputs()), before, rtol=0, atol=0)


def test_dead_chains_and_their_weights_go(b):
    x = start(b)
    dead = b.call("camshaft.rms_norm", b.call("aten.silu.default", x), b.weight("unused", 8), 1e-5)
    b.call("aten.add.Tensor", dead, dead)
    program = b.finish(b.call("aten.silu.default", b.call("aten.add.Tensor", x, x)))
    assert Cleanup().run(program, context()).notes == ("4 dead nodes",)
    assert sorted(program.weights) == ["table"]


def test_an_identity_right_before_the_output(b):
    program = b.finish(b.call("aten.view.default", start(b), [-1, 8]))
    run_passes(program, context(), passes=[Cleanup()])
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default)) == 0
