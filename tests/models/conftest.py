"""A straightforward interpreter of Programs: what a graph means, without passes, engine or kernels chosen."""

import pytest
import torch
from torch.fx.node import map_arg


def _run(program, token_ids, positions, logits_rows):
    inputs = {"token_ids": token_ids, "positions": positions, "logits_rows": logits_rows}
    values = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = inputs[node.target]
        elif node.op == "get_attr":
            values[node] = program.weights[node.target].read()
        elif node.op == "output":
            return values[node.args[0]]
        else:
            values[node] = node.target(*map_arg(node.args, values.__getitem__), **node.kwargs)
    raise AssertionError("the graph has no output")


@pytest.fixture
def run_program():
    """``run(program, ids[T]) -> logits[T, V]`` of one sequence; ``rows`` picks some rows."""

    def run(program, ids, rows=None):
        every = torch.arange(len(ids))
        with torch.inference_mode():
            return _run(program, ids, every, every if rows is None else rows)

    return run
