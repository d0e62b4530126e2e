"""Removes what computes nothing: identities, repeated pure calls, dead nodes and unread weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.passes.base import Pass, PassContext, PassResult


class Cleanup(Pass):
    """Identity slices, views and casts go; equal pure calls become one; then dead nodes go."""

    name = "cleanup"
    stage = "cleanup"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Rewrite in one sweep: a node's inputs are settled before the node is looked at."""
        identities = repeats = 0
        seen: dict[Any, fx.Node] = {}
        for node in list(program.graph.nodes):
            if node.op not in ("call_function", "get_attr"):
                continue
            source = _identity(node)
            if source is not None:
                identities += 1
            else:
                source = seen.setdefault(_key(node), node) if not nodes.mutates(node) else node
                repeats += source is not node
            if source is not node:
                node.replace_all_uses_with(source)
                program.graph.erase_node(node)
        dead = nodes.erase_dead(program)
        notes = tuple(f"{count} {what}" for count, what in
                      ((identities, "identities"), (repeats, "repeated calls"), (dead, "dead nodes")) if count)
        return PassResult(matches=identities + repeats + dead, notes=notes)


def _identity(node: fx.Node) -> fx.Node | None:
    """The node whose value this one merely repeats; None when it computes something."""
    if node.op != "call_function":
        return None
    args = nodes.arguments(node)
    source = args[0] if args and isinstance(args[0], fx.Node) and args[0].op != "get_attr" else None
    if source is None or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    name = nodes.target_name(node.target)
    before, after = source.meta["val"], node.meta["val"]
    if name in ("aten.view.default", "aten.reshape.default", "aten._to_copy.default"):
        return source if before.dtype == after.dtype and _same_shape(before, after) else None
    if name == "aten.slice.Tensor":
        _, dim, start, end, step = args
        size = before.shape[dim]
        whole = end is None or (isinstance(end, int) and (end == torch.iinfo(torch.int64).max or end == size))
        return source if whole and start in (None, 0) and step == 1 else None
    return None


def _same_shape(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether two shapes are provably equal, dynamic sizes by their expressions."""
    return [nodes.size_expr(size) for size in before.shape] == [nodes.size_expr(size) for size in after.shape]


def _key(node: fx.Node) -> Any:
    """Equal for two nodes exactly when they compute the same."""
    return (node.op, node.target, _hashable(node.args), _hashable(node.kwargs))


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(value[key])) for key in sorted(value))
    # 1, 1.0 and True are equal to Python but not to an op
    return (type(value), value)
