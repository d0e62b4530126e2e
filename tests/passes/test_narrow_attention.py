"""The window a build asks for narrows every layer, and never widens one."""

import pytest
import torch

from camshaft.ir.text import dump_graph
from camshaft.ir.verify import verify
from camshaft.passes.narrow_attention import NarrowAttention
from tests.passes.graphs import context, tiny_llama


def attentions(program):
    return program.graph.find_nodes(op="call_function", target=torch.ops.camshaft.attention.default)


@pytest.mark.parametrize(("asked", "found"), [
    ({}, [(None, 0), (6, 1)]),
    ({"max_attention_window": 9}, [(9, 0), (6, 1)]),
    ({"max_attention_window": 4}, [(4, 0), (4, 1)]),
    ({"max_attention_window": 9, "sink_tokens": 3}, [(9, 3), (6, 3)]),
    ({"sink_tokens": 3}, [(None, 0), (6, 3)]),
])
def test_windows_and_sinks_of_every_layer(asked, found):
    program = tiny_llama()
    second = attentions(program)[1]
    second.args = (*second.args[:5], 6, None, 1)
    NarrowAttention().run(program, context(**asked))
    verify(program)
    assert [(node.args[5], node.args[7]) for node in attentions(program)] == found
    before = dump_graph(program)
    again = NarrowAttention().run(program, context(**asked))
    assert (again.matches, again.notes, dump_graph(program)) == (0, (), before)


def test_what_was_asked_is_noted():
    result = NarrowAttention().run(tiny_llama(), context(max_attention_window=5, sink_tokens=2))
    assert (result.matches, result.notes) == (2, ("windows of at most 5 tokens", "the first 2 tokens stay visible"))
    assert NarrowAttention().run(tiny_llama(), context()).notes == ()
