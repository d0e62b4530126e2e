"""The rules of a Program, checked between passes.

Owns the list of rules in ``ir/program.py`` as code. A broken rule is our bug: InternalError names the node
and the rule. Repairs nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from camshaft.core.errors import InternalError
from camshaft.ir import nodes
from camshaft.ir.program import LIFE_CYCLE_INPUTS, PURE_INPUTS, STEP_INPUTS, Program, pool_input


def verify(program: Program, checked: set[Any] | None = None) -> None:
    """Raise InternalError unless ``program`` keeps every rule.

    ``checked`` holds the calls whose results earlier verifications of the same program found right, and takes those of
    this one: layers repeat, passes leave most calls as they are, and inferring a result is slow.
    """
    graph_nodes = list(program.graph.nodes)
    _check_order(graph_nodes)
    _check_inputs(program, [node.name for node in graph_nodes if node.op == "placeholder"])
    for node in graph_nodes:
        if node.op in ("placeholder", "call_function") and "val" not in node.meta:
            _fail(node, "every input and call knows its result (meta['val'])")
    _check_weights(program, graph_nodes)
    checked = set() if checked is None else checked
    for node in graph_nodes:
        if node.op == "call_function":
            _check_call(program, node)
            _check_result(program, node, checked)
    _check_output(graph_nodes)
    _check_cache(program, graph_nodes)


def _fail(node: fx.Node, rule: str) -> None:
    raise InternalError(f"program node {node.name!r} ({node.op} {node.target}): {rule}")


def _check_order(graph_nodes: list[fx.Node]) -> None:
    seen: set[fx.Node] = set()
    calls_began = False
    for node in graph_nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            _fail(node, "only inputs, weights, calls and one output are allowed")
        if node.op == "placeholder" and calls_began:
            _fail(node, "inputs come before every call")
        calls_began |= node.op == "call_function"
        if any(argument not in seen for argument in node.all_input_nodes):
            _fail(node, "a node reads only nodes before it")
        seen.add(node)


def _check_inputs(program: Program, found: list[str]) -> None:
    expected: list[str] = list(PURE_INPUTS)
    if program.life_cycles:
        count = range(len(program.life_cycles))
        expected = [*STEP_INPUTS, *(f"{name}_{c}" for c in count for name in LIFE_CYCLE_INPUTS),
                    *(pool_input(layer) for spec in program.life_cycles for layer in spec.layers)]
    if found != expected:
        raise InternalError(f"program inputs are {found}, the signature is {expected}")


def _check_call(program: Program, node: fx.Node) -> None:
    name = nodes.target_name(node.target)
    if not name:
        _fail(node, "the target is a camshaft op, an allowed aten op or getitem")
    if name == "getitem" and not isinstance(node.args[0].meta["val"], tuple | list):  # type: ignore[union-attr]
        _fail(node, "getitem reads an op with several results")
    if nodes.mutates(node) and not program.life_cycles:
        _fail(node, "nothing mutates before page_attention has run")


def _check_result(program: Program, node: fx.Node, checked: set[Any]) -> None:
    """Infer the result afresh and compare, unless an equal call is among the ``checked`` ones."""
    if node.meta.get("prepared"):
        return
    call = _signature(program, (node.target, node.args, node.kwargs, node))
    if call in checked:
        return
    name = nodes.target_name(node.target)
    try:
        again = nodes.infer(program, node.target, node.args, node.kwargs)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InternalError(f"program node {node.name!r} ({name}): its arguments are refused: {error}") from error
    if not _same_result(again, node.meta["val"]):
        _fail(node, f"the recorded result {node.meta['val']} is not what the op gives, {again}")
    checked.add(call)


def _signature(program: Program, value: Any) -> Any:
    """Equal for two calls of one op on arguments of equal type and shape that record equal results."""
    if isinstance(value, fx.Node):
        weight = nodes.weight_name(value)
        if weight is not None:
            return ("weight", program.weights[weight].dtype, program.weights[weight].shape)
        value = value.meta["val"]
    if isinstance(value, torch.Tensor):
        sizes = (*value.shape, *value.stride())
        return (value.dtype, tuple(nodes.size_expr(size) for size in sizes))
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, tuple | list):
        return tuple(_signature(program, item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _signature(program, value[key])) for key in sorted(value))
    return (type(value), value)


def _same_result(left: Any, right: Any) -> bool:
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(_same_result, left, right))
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        # two forms of one symbolic size need not be equal as expressions, so those compare as "dynamic"
        shapes = [[size if isinstance(size, int) else None for size in val.shape] for val in (left, right)]
        return left.dtype == right.dtype and shapes[0] == shapes[1]
    return type(left) is type(right)


def _check_weights(program: Program, graph_nodes: list[fx.Node]) -> None:
    used = set()
    for node in graph_nodes:
        if node.op == "get_attr":
            if node.target not in program.weights:
                _fail(node, "a weight node names a weight of the program")
            if not node.users:
                _fail(node, "a weight node has a user")
            used.add(node.target)
    unused = sorted(set(program.weights) - used)
    if unused:
        raise InternalError(f"program weights that no node reads: {', '.join(unused[:5])}")


def _check_output(graph_nodes: list[fx.Node]) -> None:
    outputs = [node for node in graph_nodes if node.op == "output"]
    if len(outputs) != 1 or graph_nodes[-1] is not outputs[0]:
        raise InternalError(f"a program ends with its one output; found {len(outputs)}")
    result = outputs[0].args[0]
    if not isinstance(result, fx.Node):
        _fail(outputs[0], "the output is one node")
    elif result.op != "call_function" or not isinstance(result.meta["val"], torch.Tensor) \
            or result.meta["val"].dim() != 2:
        _fail(outputs[0], "the output is logits [L, V]")


def _check_cache(program: Program, graph_nodes: list[fx.Node]) -> None:
    """Each layer writes its pool once and reads it after; before lowering, layers are named once."""
    written: set[str] = set()
    layers: set[int] = set()
    for node in graph_nodes:
        if nodes.is_call(node, "camshaft.attention"):
            layer = nodes.arguments(node)[3]
            if program.life_cycles:
                _fail(node, "page_attention leaves no unlowered attention")
            if layer in layers:
                _fail(node, f"layer {layer} has one attention")
            layers.add(layer)
        elif nodes.is_call(node, "camshaft.kv_write"):
            pool = nodes.arguments(node)[2].name
            if pool in written:
                _fail(node, f"{pool} is written once a step")
            written.add(pool)
        elif nodes.is_call(node, "camshaft.paged_attention") and nodes.arguments(node)[1].name not in written:
            _fail(node, "a layer's keys and values are written before they are read")
