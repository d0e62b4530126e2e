"""Reading and making nodes: arguments in schema order, weights, results inferred by the op's own fake.

Owns the edits every pass needs, so that a new node always carries its result (``meta["val"]``) and a weight
nobody reads is never left behind. Knows no rewrite.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from camshaft.core.errors import InternalError
from camshaft.ir.program import ALLOWED_ATEN, LIFE_CYCLE_INPUTS, Program
from camshaft.kernels.op import NAMESPACE, OPS, TensorInfo

if TYPE_CHECKING:
    # a run reads graphs through this module and never infers a result: these take a second to import
    import sympy
    from torch._subclasses.fake_tensor import FakeTensorMode

VIEW_OPS = ("aten.slice.Tensor", "aten.split_with_sizes.default", "aten.unsqueeze.default", "aten.view.default")
"""Ops whose results share the storage of their first argument."""


def target_name(target: Any) -> str:
    """``"camshaft.rms_norm"``, ``"aten.add.Tensor"`` or ``"getitem"``; "" for what a program may not call."""
    if target is operator.getitem:
        return "getitem"
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    name = str(target)
    if target.namespace == NAMESPACE:
        return name.removesuffix(".default")
    return name if name in ALLOWED_ATEN else ""


def find_target(name: str) -> Callable[..., Any] | None:
    """Inverse of :func:`target_name`; None for a name outside the allow-list."""
    if name == "getitem":
        return operator.getitem
    namespace, _, rest = name.partition(".")
    if namespace == NAMESPACE:
        return OPS.get(rest).overload if rest in OPS else None
    if name not in ALLOWED_ATEN:
        return None
    packet, _, overload = rest.partition(".")
    found: Callable[..., Any] = getattr(getattr(torch.ops.aten, packet), overload)
    return found


def is_call(node: Any, name: str) -> bool:
    """Whether ``node`` is a call of the op called ``name``."""
    return isinstance(node, fx.Node) and node.op == "call_function" and target_name(node.target) == name


def mutates(node: fx.Node) -> bool:
    """Whether the node writes to one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The arguments of an op call in schema order, defaults filled in."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return tuple(node.args)
    found = list(node.args)
    for argument in target._schema.arguments[len(found):]:
        if argument.name in node.kwargs:
            found.append(node.kwargs[argument.name])
        else:
            found.append(argument.default_value if argument.has_default_value() else None)
    return tuple(found)


def fake_mode(graph: fx.Graph) -> FakeTensorMode:
    """The mode the program's results were inferred under."""
    mode: FakeTensorMode = _first_result(graph).fake_mode
    return mode


def fake_device(graph: fx.Graph) -> torch.device:
    """The device the program's results pretend to be on: all of them the same one."""
    device: torch.device = _first_result(graph).device
    return device


def _first_result(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        if hasattr(node.meta.get("val"), "fake_mode"):
            return node.meta["val"]
    raise InternalError("the program has no node with a known result")


def infer(program: Program, target: Callable[..., Any], args: tuple[Any, ...],
          kwargs: Mapping[str, Any] | None = None) -> Any:
    """The result of a call, as FakeTensors, from the results of the nodes it reads."""
    mode, device = fake_mode(program.graph), fake_device(program.graph)

    def value(node: fx.Node) -> Any:
        if node.op != "get_attr":
            return node.meta["val"]
        weight = program.weights[str(node.target)]
        with mode:
            return torch.empty(weight.shape, dtype=weight.dtype, device=device)

    fake_args, fake_kwargs = fx.node.map_arg((args, dict(kwargs or {})), value)
    with mode:
        return target(*fake_args, **fake_kwargs)


def add_call(program: Program, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """Append a call at the graph's insertion point, its result inferred."""
    target = find_target(name)
    if target is None:
        raise InternalError(f"{name} is not an op a program may call")
    val = infer(program, target, args, kwargs)
    node = program.graph.call_function(target, args, dict(kwargs or {}))
    node.meta["val"] = val
    return node


def weight_node(program: Program, name: str) -> fx.Node:
    """The node reading weight ``name``: the first one there is, moved to or made right after the inputs."""
    node: fx.Node
    last_input: fx.Node | None = None
    for node in program.graph.nodes:
        if node.op == "placeholder":
            last_input = node
        elif node.op == "get_attr" and node.target == name:
            if last_input is not None and node.prev is not last_input:
                last_input.append(node)
            return node
    if last_input is None:
        raise InternalError("the program has no inputs")
    with program.graph.inserting_after(last_input):
        # graph.get_attr would look for an attribute of a module that does not exist
        node = program.graph.create_node("get_attr", name)
    return node


def weight_name(node: Any) -> str | None:
    """The weight a node reads; None when it is no weight."""
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def matrix_read(node: fx.Node) -> tuple[int, str] | None:
    """Place and name of the matrix that a product or a lookup reads as a weight; None for any other node."""
    place = {"camshaft.linear": 1, "aten.embedding.default": 0}.get(target_name(node.target))
    name = None if node.op != "call_function" or place is None else weight_name(node.args[place])
    return None if place is None or name is None else (place, name)


def erase_dead(program: Program) -> int:
    """Remove calls nothing reads and weights nothing needs; returns how many nodes went."""
    erased = 0
    for node in reversed(list(program.graph.nodes)):
        dead = not node.users and node.op in ("call_function", "get_attr") and not mutates(node)
        if dead:
            program.graph.erase_node(node)
            erased += 1
    used = {node.target for node in program.graph.nodes if node.op == "get_attr"}
    for name in [name for name in program.weights if name not in used]:
        del program.weights[name]
    return erased


def info_of(program: Program, node: fx.Node) -> TensorInfo:
    """What a capability check may know of a node's single tensor."""
    name = weight_name(node)
    if name is not None:
        weight = program.weights[name]
        return TensorInfo(weight.dtype, weight.shape)
    val = node.meta["val"]
    return TensorInfo(val.dtype, tuple(size if isinstance(size, int) else None for size in val.shape))


def size_symbols(graph: fx.Graph) -> dict[sympy.Symbol, str]:
    """The names of dynamic sizes, read off the inputs: T tokens, R rows, L logit rows, P table columns, N pages."""
    letters = {"token_ids": "T", "logits_rows": "L", "seq_lens": "R"}
    found: dict[sympy.Symbol, str] = {}
    for node in graph.nodes:
        if node.op != "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        name = letters.get(node.name, "")
        if node.name.startswith(LIFE_CYCLE_INPUTS[1]):
            name = "RP"
        elif node.name.startswith("kv_pool_"):
            name = "N"
        for letter, size in zip(name, node.meta["val"].shape, strict=False):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, letter)
    return found


def size_expr(size: int | torch.SymInt) -> sympy.Expr:
    """A size as an expression over the graph's symbols."""
    import sympy

    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
