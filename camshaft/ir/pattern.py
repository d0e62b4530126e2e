"""Matching a few nodes against a declared shape.

Owns patterns as data (``Call``, ``Item``, ``Var``) and the matcher. Rewrites nothing: a pass takes the
captures and does its own surgery.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import fx

from camshaft.ir import nodes

Captures = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Var:
    """Anything: a node or a constant. The same name twice must be the same thing."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call of the op ``op`` (as in dumps, e.g. ``"aten.add.Tensor"``) with these arguments in schema order.

    Arguments beyond those given must have their schema defaults. ``name`` captures the node; ``single_use``
    asks that nothing else reads it; ``commutative`` also tries the first two arguments swapped.
    """

    op: str
    args: tuple[Pattern, ...]
    name: str = ""
    single_use: bool = False
    commutative: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """Result ``index`` of a call with several results."""

    index: int
    source: Call
    name: str = ""
    single_use: bool = False


Pattern = Var | Call | Item | int | float | str | None


def match(pattern: Pattern, node: Any) -> Captures | None:
    """What the pattern's names stand for when it matches at ``node``; None when it does not."""
    return _match(pattern, node, {})


def _match(pattern: Pattern, found: Any, captures: Captures) -> Captures | None:
    if isinstance(pattern, Var):
        return _bind(pattern.name, found, captures)
    if isinstance(pattern, Item):
        if not nodes.is_call(found, "getitem") or found.args[1] != pattern.index or not _uses_fit(pattern, found):
            return None
        inner = _match(pattern.source, found.args[0], captures)
        return None if inner is None else _bind(pattern.name, found, inner)
    if isinstance(pattern, Call):
        if not nodes.is_call(found, pattern.op) or not _uses_fit(pattern, found):
            return None
        inner = _match_args(pattern, found, captures)
        return None if inner is None else _bind(pattern.name, found, inner)
    return captures if type(pattern) is type(found) and pattern == found else None


def _uses_fit(pattern: Call | Item, node: fx.Node) -> bool:
    return not pattern.single_use or len(node.users) == 1


def _bind(name: str, found: Any, captures: Captures) -> Captures | None:
    if not name:
        return captures
    if name in captures:
        same = captures[name] is found or (not isinstance(found, fx.Node) and captures[name] == found)
        return captures if same else None
    return {**captures, name: found}


def _match_args(pattern: Call, node: fx.Node, captures: Captures) -> Captures | None:
    found = nodes.arguments(node)
    if len(found) < len(pattern.args) or any(_given(node, place) for place in range(len(pattern.args), len(found))):
        return None
    orders = [found]
    if pattern.commutative:
        orders.append((found[1], found[0], *found[2:]))
    for order in orders:
        inner: Captures | None = captures
        for part, value in zip(pattern.args, order, strict=False):
            inner = _match(part, value, inner) if inner is not None else None
        if inner is not None:
            return inner
    return None


def _given(node: fx.Node, place: int) -> bool:
    """Whether the argument in this place differs from its schema default."""
    argument = node.target._schema.arguments[place]  # type: ignore[union-attr]
    default = argument.default_value if argument.has_default_value() else None
    return bool(nodes.arguments(node)[place] != default)
