"""How much memory a step's intermediate tensors take at the limits, from the graph alone.

Owns liveness: a tensor lives from the call that makes it to the last reader of it or of a view of it. Scratch
inside a kernel is not counted.
"""

from __future__ import annotations

import sympy
import torch
from torch import fx

from camshaft.config.build import BuildConfig
from camshaft.ir import nodes
from camshaft.ir.program import Program


def activation_peak_bytes(program: Program, cfg: BuildConfig) -> int:
    """Most bytes of intermediate tensors alive at once in a step of ``max_num_tokens`` tokens and a full batch."""
    sizes = _largest_sizes(program, cfg)
    holds: dict[fx.Node, frozenset[fx.Node]] = {}
    last_use: dict[fx.Node, int] = {}
    order = list(program.graph.nodes)
    for place, node in enumerate(order):
        held = frozenset().union(*(holds.get(source, frozenset()) for source in node.all_input_nodes))
        last_use.update(dict.fromkeys(held, place))
        if node.op != "call_function":
            continue
        name = nodes.target_name(node.target)
        if name not in ("getitem", *nodes.VIEW_OPS):
            # a reshape is a view or a copy, which only the run decides: it counts as both
            held = held | {node} if name == "aten.reshape.default" else frozenset({node})
            last_use[node] = place
        holds[node] = held
    sizes_of = {node: _result_bytes(node.meta["val"], sizes) for node in last_use}
    freed: dict[int, int] = {}
    for node, place in last_use.items():
        freed[place] = freed.get(place, 0) + sizes_of[node]
    alive = peak = 0
    for place, node in enumerate(order):
        alive += sizes_of.get(node, 0)
        peak = max(peak, alive)
        alive -= freed.get(place, 0)
    return peak


def _largest_sizes(program: Program, cfg: BuildConfig) -> dict[sympy.Symbol, sympy.Integer]:
    largest = {"T": cfg.max_num_tokens, "R": cfg.max_batch_size, "L": min(cfg.max_logits_rows, cfg.max_num_tokens),
               "P": -(-cfg.longest_sequence // cfg.page_size), "N": 1}
    return {symbol: sympy.Integer(largest[letter]) for symbol, letter in nodes.size_symbols(program.graph).items()}


def _result_bytes(val: object, sizes: dict[sympy.Symbol, sympy.Integer]) -> int:
    if isinstance(val, tuple | list):
        return sum(_result_bytes(part, sizes) for part in val)
    if not isinstance(val, torch.Tensor):
        return 0
    count: int = val.dtype.itemsize
    for size in val.shape:
        count *= int(nodes.size_expr(size).xreplace(sizes))
    return count
