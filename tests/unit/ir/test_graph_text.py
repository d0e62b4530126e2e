"""Graph text: stable, exact round trip, nothing but the allow-list comes back in."""

import json
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from camshaft.core.errors import EngineCorruptError, InternalError
from camshaft.ir.text import diff_graphs, dump_graph, parse_graph
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import context, tiny_llama


@pytest.fixture(scope="module")
def lowered_text():
    program = tiny_llama()
    run_passes(program, context())
    return dump_graph(program)


def edited(text, **changes):
    """``text`` with fields of its first op line replaced."""
    data = json.loads(text)
    line = next(line for line in data["nodes"] if line["op"] not in ("input", "output"))
    line.update(changes)
    return json.dumps(data)


def test_text_is_json_with_one_node_a_line(lowered_text):
    nodes = json.loads(lowered_text)["nodes"]
    assert len(lowered_text.splitlines()) == len(nodes) + 2
    by_name = {node.get("name"): node for node in nodes}
    assert by_name["token_ids"]["result"] == "int64[T]"
    assert by_name["query_start"]["result"] == "int32[R+1]"
    assert by_name["page_table_0"]["result"] == "int32[R,P]"
    assert by_name["kv_pool_0"]["result"] == "float32[N,2,2,16,4]"
    assert by_name["kv_write_0"]["result"] is None
    assert by_name["linear_0"]["kernel"] == "ref"
    assert nodes[-1] == {"op": "output", "args": ["%linear_8"]}


@pytest.mark.parametrize("lowered", [False, True])
def test_round_trip_is_identical(lowered):
    program = tiny_llama()
    if lowered:
        run_passes(program, context())
    text = dump_graph(program)
    assert dump_graph(parse_graph(text)) == text


def test_parsing_restores_targets_weights_and_kernels(lowered_text):
    graph = parse_graph(lowered_text)
    linear = next(node for node in graph.nodes if node.name == "linear_0")
    assert linear.target is torch.ops.camshaft.linear.default
    assert linear.meta["kernel"] == "ref"
    assert linear.args[1].op == "get_attr"
    assert linear.args[1].target == "model.layers.0.self_attn.q_proj+k_proj+v_proj.weight"
    assert linear.args[2] is None
    assert next(node for node in graph.nodes if node.name == "getitem_0").target is operator.getitem


def test_equal_programs_give_equal_text_whatever_their_node_names():
    first, second = tiny_llama(), tiny_llama()
    for node in second.graph.nodes:
        if node.op != "placeholder":
            node.name = f"other_{node.name}"
    assert dump_graph(first) == dump_graph(second)
    assert diff_graphs(dump_graph(first), dump_graph(second)) == ""


def test_diff_names_what_changed():
    plain, biased = dump_graph(tiny_llama()), dump_graph(tiny_llama(bias=True))
    changed = [line for line in diff_graphs(plain, biased).splitlines() if line.startswith("+{")]
    assert len(changed) == 14
    assert all("bias" in line for line in changed)


@pytest.mark.parametrize("value", [None, True, False, 3, -1, 0.1, 1e-5, 2.0, "tanh", "%token_ids", torch.bfloat16,
                                   [1, [2.5, None]], 10**18])
def test_every_kind_of_argument_survives(value):
    graph = fx.Graph()
    tokens = graph.placeholder("token_ids")
    node = graph.call_function(torch.ops.aten.silu.default, (tokens, value), {"extra": value})
    graph.output(node)
    again = next(node for node in parse_graph(dump_graph(graph)).nodes if node.op == "call_function")
    assert again.args[1] == value
    assert isinstance(again.args[1], type(value))
    assert again.kwargs["extra"] == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1j, {"a": 1}, torch.device("cpu")])
def test_what_the_format_cannot_hold_is_refused(value):
    graph = fx.Graph()
    graph.output(graph.create_node("call_function", torch.ops.aten.silu.default, (graph.placeholder("x"), value)))
    with pytest.raises(InternalError, match="cannot be written"):
        dump_graph(graph)


def test_a_foreign_op_is_not_written():
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.cos.default, (graph.placeholder("x"),)))
    with pytest.raises(InternalError, match=r"aten\.cos"):
        dump_graph(graph)


@pytest.mark.parametrize("changes", [
    {"op": "aten.cos.default"}, {"op": "os.system"}, {"op": "camshaft.nothing"}, {"op": "camshaft.rms_norm.default"},
    {"op": 3}, {"op": None}, {"name": "token_ids"}, {"name": "a b"}, {"name": "import"}, {"name": 5}, {"name": None},
    {"args": ["%later"]}, {"args": ["%"]}, {"args": ["@"]}, {"args": ["free text"]}, {"args": [""]},
    {"args": ["$complex64"]}, {"args": [{"a": 1}]}, {"args": [[[[[[1]]]]]]}, {"args": "x"}, {"kwargs": []},
    {"kernel": 3}, {"op": "input", "name": "late", "args": 3},
])
def test_edited_nodes_are_refused(lowered_text, changes):
    with pytest.raises(EngineCorruptError):
        parse_graph(edited(lowered_text, **changes))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "3", '{"graph_format": 2, "nodes": []}',
                                  '{"graph_format": 1, "nodes": []}', '{"graph_format": 1, "nodes": [3]}',
                                  '{"graph_format": 1, "nodes": [{"op": "output", "args": []}]}',
                                  '{"graph_format": 1, "nodes": {}}',
                                  '{"graph_format": 1, "nodes": [{"op": "output", "args": [NaN]}]}', "[" * 100_000])
def test_text_that_is_no_graph_is_refused(text):
    with pytest.raises(EngineCorruptError):
        parse_graph(text)


def test_nothing_may_follow_the_output(lowered_text):
    data = json.loads(lowered_text)
    data["nodes"].append(data["nodes"][0])
    with pytest.raises(EngineCorruptError, match="output last"):
        parse_graph(json.dumps(data))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_text_is_refused_or_still_a_graph(data):
    program = tiny_llama_text()
    place = data.draw(st.integers(0, len(program) - 1))
    with_byte = data.draw(st.characters(codec="ascii"))
    damaged = program[:place] + with_byte + program[place + data.draw(st.integers(0, 40)):]
    try:
        graph = parse_graph(damaged)
    except EngineCorruptError:
        return
    assert dump_graph(parse_graph(dump_graph(graph))) == dump_graph(graph)


def tiny_llama_text(cache={}):  # noqa: B006  built once: hypothesis calls this for every example
    if "text" not in cache:
        cache["text"] = dump_graph(tiny_llama())
    return cache["text"]
