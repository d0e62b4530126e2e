"""Joins linears that read the same input (q, k and v; gate and up) into one product over joined weights."""

from __future__ import annotations

from torch import fx

from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.ir.weight import concat
from camshaft.passes.base import Pass, PassContext, PassResult

_ACTIVATIONS = ("aten.silu.default", "aten.gelu.default")


class FuseLinear(Pass):
    """One product instead of several: their outputs become strided views of the joined output, no copies.

    The product that feeds an activation comes first, so gated-activation kernels find ``[gate, up]``.
    Weights read elsewhere too (tied embeddings, shared layers) are left alone.
    """

    name = "fuse_linear"
    stage = "fuse"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Group by input, then join each group whose members agree in dtype and in having a bias."""
        matches = 0
        joined: list[str] = []
        for node in list(program.graph.nodes):
            for group in _groups(program, node):
                joined.append(_join(program, node, group))
                matches += 1
        nodes.erase_dead(program)
        counts = {label: joined.count(label) for label in dict.fromkeys(joined)}
        return PassResult(matches=matches, notes=tuple(f"{count} × {label}" for label, count in counts.items()))


def _groups(program: Program, source: fx.Node) -> list[list[fx.Node]]:
    """Linears reading ``source`` that may be joined, in joining order."""
    groups: dict[object, list[fx.Node]] = {}
    for user in source.users:
        if not nodes.is_call(user, "camshaft.linear") or user.args[0] is not source:
            continue
        _, weight, bias = nodes.arguments(user)
        owned = [argument for argument in (weight, bias) if argument is not None]
        if all(_is_owned(program, argument) for argument in owned):
            dtypes = tuple(nodes.info_of(program, argument).dtype for argument in owned)
            groups.setdefault(dtypes, []).append(user)
    return [sorted(group, key=_feeds_no_activation) for group in groups.values() if len(group) > 1]


def _is_owned(program: Program, argument: fx.Node) -> bool:
    """Whether the argument is a weight that this one call alone reads."""
    name = nodes.weight_name(argument)
    if name is None or len(argument.users) != 1:
        return False
    return sum(nodes.weight_name(node) == name for node in program.graph.nodes) == 1


def _feeds_no_activation(linear: fx.Node) -> bool:
    return not any(nodes.is_call(user, name) for user in linear.users for name in _ACTIVATIONS)


def _join(program: Program, source: fx.Node, group: list[fx.Node]) -> str:
    """Replace ``group`` by one linear and views of its output; returns what was joined, in words."""
    columns = list(zip(*(nodes.arguments(linear)[1:] for linear in group), strict=True))
    joined: list[fx.Node | None] = []
    for arguments in columns:
        if arguments[0] is None:
            joined.append(None)
            continue
        names = [str(argument.target) for argument in arguments]
        name = _joined_name(names)
        program.weights[name] = concat(tuple(program.weights[part] for part in names))
        joined.append(nodes.weight_node(program, name))
    sizes = [linear.meta["val"].shape[-1] for linear in group]
    first = next(node for node in program.graph.nodes if node in group)
    with program.graph.inserting_before(first):
        product = nodes.add_call(program, "camshaft.linear", (source, *joined))
        parts = nodes.add_call(program, "aten.split_with_sizes.default", (product, sizes, -1))
        for index, linear in enumerate(group):
            linear.replace_all_uses_with(nodes.add_call(program, "getitem", (parts, index)))
    for linear in group:
        program.graph.erase_node(linear)
    return "+".join(_differing([str(arguments.target) for arguments in columns[0]])[1])


def _differing(names: list[str]) -> tuple[str, list[str], str]:
    """Split dotted names into their common head, the parts in which they differ, and their common tail."""
    split = [name.split(".") for name in names]
    shortest = min(map(len, split))
    head = next((i for i in range(shortest) if len({parts[i] for parts in split}) > 1), shortest)
    room = shortest - head
    tail = next((i for i in range(room) if len({parts[-1 - i] for parts in split}) > 1), room)
    middles = [".".join(parts[head:len(parts) - tail]) for parts in split]
    return ".".join(split[0][:head]), middles, ".".join(split[0][len(split[0]) - tail:])


def _joined_name(names: list[str]) -> str:
    head, middles, tail = _differing(names)
    return ".".join(part for part in (head, "+".join(middles), tail) if part)
