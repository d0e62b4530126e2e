"""Joined products give the joined parts' values, as views; what must not be joined is not."""

import pytest
import torch

from camshaft.ir.verify import verify
from camshaft.passes.fuse_linear import FuseLinear
from tests.passes.graphs import CONFIG, Builder, context, pure_inputs, run_program, tiny_llama


def linears(program):
    return program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.linear.default)


def fuse(program):
    before = run_program(program, pure_inputs())
    result = FuseLinear().run(program, context())
    verify(program)
    torch.testing.assert_close(run_program(program, pure_inputs()), before)
    return result


@pytest.mark.parametrize("bias", [False, True])
def test_qkv_and_gate_up_are_joined(bias):
    program = tiny_llama(bias=bias)
    plain = {name: weight.read() for name, weight in program.weights.items()}
    result = fuse(program)
    assert result.matches == 4
    assert result.notes == ("2 × q_proj+k_proj+v_proj", "2 × gate_proj+up_proj")
    assert len(linears(program)) == 9
    at = "model.layers.1.self_attn"
    for kind in ("weight", "bias") if bias else ("weight",):
        joined = program.weights[f"{at}.q_proj+k_proj+v_proj.{kind}"].read()
        assert torch.equal(joined, torch.cat([plain[f"{at}.{part}_proj.{kind}"] for part in "qkv"]))
    assert not any(name.endswith("q_proj.weight") for name in program.weights)


def test_gate_comes_first_whatever_the_order_of_definition():
    program = tiny_llama(up_first=True)
    fuse(program)
    assert "model.layers.0.mlp.gate_proj+up_proj.weight" in program.weights


def test_parts_are_views_of_the_joined_output():
    program = tiny_llama()
    fuse(program)
    values = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = pure_inputs()[node.name]
        elif node.op == "get_attr":
            values[node] = program.weights[node.target].read()
        elif node.op == "call_function":
            args = torch.fx.node.map_arg(node.args, values.__getitem__)
            values[node] = node.target(*args, **node.kwargs)
    product = linears(program)[0]
    storage = values[product].untyped_storage().data_ptr()
    rope = program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.rope.default)[0]
    for argument in rope.args[:2]:
        assert values[argument].untyped_storage().data_ptr() == storage
        assert values[argument].stride(0) == (CONFIG.num_heads + 2 * CONFIG.num_kv_heads) * CONFIG.head_dim


def two_linears(**changes):
    """Two products of one input, with one thing about the second changed."""
    b = Builder()
    x = b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)
    y = b.call("aten.silu.default", x) if changes.get("other_input") else x
    first, second = b.weight("first", 8, 8), b.weight("second", 8, 8)
    left = b.call("camshaft.linear", x, first, None)
    weight = b.read("first") if changes.get("shared_by_name") else first if changes.get("shared_node") else second
    right = b.call("camshaft.linear", y, weight, b.weight("bias", 8) if changes.get("bias") else None)
    total = b.call("aten.add.Tensor", left, right)
    if changes.get("read_elsewhere"):
        total = b.call("aten.add.Tensor", total, b.call("aten.embedding.default", second, b.token_ids))
    if not second.users:
        b.program.graph.erase_node(second)
        del b.program.weights["second"]
    return b.finish(total)


def test_two_products_of_one_input_are_joined():
    program = two_linears()
    assert fuse(program).matches == 1
    assert sorted(program.weights) == ["first+second", "table"]


@pytest.mark.parametrize("reason", ["other_input", "shared_node", "shared_by_name", "bias"])
def test_products_that_stay_apart(reason):
    program = two_linears(**{reason: True})
    before = sorted(program.weights)
    assert fuse(program).matches == 0
    assert sorted(program.weights) == before


def test_a_tied_weight_is_left_alone():
    program = tiny_llama(tied=True)
    assert fuse(program).matches == 4
    assert program.weights["model.embed_tokens.weight"].shape == (CONFIG.vocab_size, CONFIG.hidden_size)


def test_a_weight_an_embedding_reads_too_is_left_alone():
    program = two_linears(read_elsewhere=True)
    assert FuseLinear().run(program, context()).matches == 0


def test_joining_reads_nothing_until_asked():
    program = tiny_llama()
    reads = []
    for name, weight in list(program.weights.items()):
        program.weights[name] = type(weight)(shape=weight.shape, dtype=weight.dtype, origin=name,
                                             read=lambda weight=weight, name=name: reads.append(name) or weight.read())
    FuseLinear().run(program, context())
    assert reads == []
    program.weights["model.layers.0.mlp.gate_proj+up_proj.weight"].read()
    assert reads == ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]
