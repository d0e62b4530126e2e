"""Every rule of a Program: a program that breaks it is refused, and the node is named."""

import operator

import pytest
import torch

from camshaft.core.errors import InternalError
from camshaft.ir.verify import verify
from camshaft.ir.weight import constant
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import Builder, context, tiny_llama


def calls(program, name):
    return [node for node in program.graph.nodes if node.op == "call_function" and name in str(node.target)]


@pytest.fixture
def program():
    return tiny_llama()


@pytest.fixture
def lowered():
    program = tiny_llama()
    run_passes(program, context())
    return program


def test_programs_are_valid_before_and_after_the_passes(program, lowered):
    verify(program)
    verify(lowered)


def test_foreign_op(program):
    node = calls(program, "silu")[0]
    node.target = torch.ops.aten.cos.default
    with pytest.raises(InternalError, match=f"{node.name}.*allowed aten op"):
        verify(program)


def test_python_callable_is_no_target(program):
    calls(program, "add.Tensor")[0].target = operator.add
    with pytest.raises(InternalError, match="allowed aten op"):
        verify(program)


def test_renamed_input(program):
    next(iter(program.graph.nodes)).name = "tokens"
    with pytest.raises(InternalError, match="signature"):
        verify(program)


def test_missing_cache_input(lowered):
    lowered.life_cycles = ()
    with pytest.raises(InternalError, match="signature"):
        verify(lowered)


def test_weight_that_does_not_exist(program):
    del program.weights["model.norm.weight"]
    with pytest.raises(InternalError, match=r"model\.norm\.weight"):
        verify(program)


def test_weight_that_nobody_reads(program):
    program.weights["extra"] = constant(torch.zeros(1), "extra")
    with pytest.raises(InternalError, match="no node reads: extra"):
        verify(program)


def test_unread_weight_node(program):
    with program.graph.inserting_before(calls(program, "linear")[0]):
        program.graph.create_node("get_attr", "model.norm.weight")
    with pytest.raises(InternalError, match="has a user"):
        verify(program)


def test_missing_result(program):
    node = calls(program, "silu")[0]
    del node.meta["val"]
    with pytest.raises(InternalError, match=f"{node.name}.*knows its result"):
        verify(program)


@pytest.mark.parametrize("wrong", ["dtype", "shape", "kind"])
def test_wrong_result(program, wrong):
    node = calls(program, "silu")[0]
    val = node.meta["val"]
    with val.fake_mode:
        node.meta["val"] = {"dtype": val.to(torch.bfloat16), "shape": val[:, :3], "kind": [val, val]}[wrong]
    with pytest.raises(InternalError, match=node.name):
        verify(program)


def test_arguments_an_op_refuses(program):
    node = calls(program, "linear")[0]
    node.args = (node.args[0], program.graph.find_nodes(op="get_attr", target="model.norm.weight")[0], None)
    with pytest.raises(InternalError, match=node.name):
        verify(program)


def test_order(program):
    first, second = calls(program, "silu")[0], calls(program, "mul.Tensor")[0]
    second.append(first)
    with pytest.raises(InternalError, match=f"{second.name}.*nodes before it"):
        verify(program)


def test_late_input(program):
    with program.graph.inserting_after(calls(program, "silu")[0]):
        program.graph.placeholder("late")
    with pytest.raises(InternalError, match=r"late.*inputs come before"):
        verify(program)


def test_output_is_two_dimensional():
    b = Builder()
    program = b.finish(b.call("aten.unsqueeze.default", b.token_ids, 0))
    verify(program)
    b = Builder()
    with pytest.raises(InternalError, match="logits"):
        verify(b.finish(b.call("aten.add.Tensor", b.token_ids, b.positions)))


def test_output_is_one_node(program):
    output = next(iter(reversed(program.graph.nodes)))
    output.args = ((output.args[0], output.args[0]),)
    with pytest.raises(InternalError, match="one node"):
        verify(program)


def test_no_output(program):
    program.graph.erase_node(next(iter(reversed(program.graph.nodes))))
    with pytest.raises(InternalError, match="one output"):
        verify(program)


def test_a_layer_has_one_attention(program):
    second = calls(program, "camshaft.attention")[1]
    second.args = (*second.args[:3], 0, *second.args[4:])
    with pytest.raises(InternalError, match="layer 0 has one attention"):
        verify(program)


def test_mutation_before_lowering(program):
    source = next(node for node in program.graph.nodes if node.name == "token_ids")
    b = Builder()
    b.program = program
    with program.graph.inserting_before(calls(program, "silu")[0]):
        k = calls(program, "view")[1]
        pool = b.weight("pool", 3, 2, 2, 16, 4)
        b.call("camshaft.kv_write", k, k, pool, source)
    with pytest.raises(InternalError, match="nothing mutates"):
        verify(program)


def test_reading_a_pool_before_it_is_written(lowered):
    write, read = calls(lowered, "kv_write")[0], calls(lowered, "paged_attention")[0]
    read.append(write)
    with pytest.raises(InternalError, match=f"{read.name}.*written before"):
        verify(lowered)


def test_writing_a_pool_twice(lowered):
    write = calls(lowered, "kv_write")[0]
    with lowered.graph.inserting_after(write):
        again = lowered.graph.node_copy(write)
    with pytest.raises(InternalError, match=f"{again.name}.*written once"):
        verify(lowered)
