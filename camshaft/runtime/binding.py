"""From an engine's graph to one plain Python function: every op bound to its kernel, weights as constants.

Owns that translation. A step then is straight calls, one after another, with no interpreter, no module
attribute lookups and no dispatcher between graph and kernel; intermediates are dropped after their last use.
"""

from __future__ import annotations

import ctypes
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from camshaft.core.device import probe
from camshaft.core.errors import EngineCorruptError, EngineDeviceError
from camshaft.engine.artifact import Engine
from camshaft.ir.text import parse_graph
from camshaft.kernels.dispatch import bind, choose
from camshaft.kernels.op import NAMESPACE, OPS, OpCall, TensorInfo, load_families
from camshaft.runtime.cache_check import check_cache

_DIRECT: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("aten.add.Tensor", torch.add),
    ("aten.embedding.default", torch.embedding),
    ("aten.index_select.default", torch.index_select),
    ("aten.mul.Tensor", torch.mul),
    ("aten.reshape.default", torch.reshape),
    ("aten.split_with_sizes.default", torch.split_with_sizes),
    ("aten.unsqueeze.default", torch.unsqueeze),
    ("aten.view.default", torch.Tensor.view),
)
"""Functions of the same signature as an overload, cheaper to call."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoundGraph:
    """A graph ready to run. ``call(*[values[name] for name in inputs])`` returns the logits ``[L, V]``."""

    inputs: tuple[str, ...]
    call: Callable[..., torch.Tensor]
    source: str
    """The generated function, for reading."""
    native: bool
    """Whether every camshaft op in it is native code."""


def bind_graph(engine: Engine, device: torch.device, library: ctypes.CDLL | None = None) -> BoundGraph:
    """Bind every op of the engine's graph on ``device``; weights move there once. ``library`` stands in for the
    engine's own.

    On another device kind than the engine was built for, the reference implementations serve (a way to look
    at a graph elsewhere, not to run it fast). Raises EngineCorruptError for a graph or kernel that is unknown
    here, EngineDeviceError where weights were packed for the other device's kernels.
    """
    load_families(device.type)
    graph = parse_graph(engine.graph_text)
    check_cache(graph, engine.manifest.life_cycles)
    writer = _FunctionWriter(engine, device, library or engine.library())
    last_use = _last_uses(graph)
    for node in graph.nodes:
        writer.add(node, last_use.get(node, ()))
    return writer.finish()


def bind_op(engine: Engine, name: str, device: torch.device, args: tuple[TensorInfo | int, ...]) -> Callable[..., Any]:
    """The best kernel for an op beside the graph; cheap, so it is decided at start and not recorded."""
    op, library = OPS.get(name), engine.library()
    return bind(op, choose(op, OpCall(probe(device.type), args), native=library is not None).impl, library)


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For every node, the values that no later node reads. Inputs and weights live on."""
    seen: set[fx.Node] = set()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        for source in (node, *node.all_input_nodes):
            if source.op == "call_function" and source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source)
    return found


class _FunctionWriter:
    """Writes the function's lines and collects the objects they name."""

    def __init__(self, engine: Engine, device: torch.device, library: ctypes.CDLL | None) -> None:
        self._engine = engine
        self._device = device
        self._library = library
        self._native = True
        self._foreign = engine.manifest.device.kind != device.type
        self._names: dict[fx.Node, str] = {}
        self._inputs: list[str] = []
        self._lines: list[str] = []
        self._scope: dict[str, Any] = {}
        self._functions: dict[tuple[Any, str | None], str] = {}
        self._direct = dict(_DIRECT)

    def add(self, node: fx.Node, dead: list[fx.Node] | tuple[()]) -> None:
        """Append one node; ``dead`` are the values to drop after it."""
        if node.op == "placeholder":
            self._names[node] = f"in{len(self._inputs)}"
            self._inputs.append(str(node.target))
        elif node.op == "get_attr":
            self._names[node] = self._constant("w", self._weight(str(node.target)))
        elif node.op == "output":
            self._lines.append(f"return {self._render(node.args[0])}")
        else:
            self._names[node] = f"v{len(self._names)}"
            self._lines.append(f"{self._names[node]} = {self._call(node)}")
            if dead:
                self._lines.append("del " + ", ".join(self._names[value] for value in dead))

    def _weight(self, name: str) -> torch.Tensor:
        if name not in self._engine.tensors():
            raise EngineCorruptError("engine graph", found=f"no weight {name!r}", needed="every weight it reads",
                                     remedy="Build the engine again")
        return self._engine.tensor(name).to(self._device)

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            source, index = node.args
            return f"{self._render(source)}[{self._render(index)}]"
        arguments = [self._render(value) for value in node.args]
        arguments += [f"{name}={self._render(value)}" for name, value in node.kwargs.items()]
        return f"{self._function(node)}({', '.join(arguments)})"

    def _function(self, node: fx.Node) -> str:
        key = (node.target, node.meta.get("kernel"))
        if key not in self._functions:
            self._functions[key] = self._constant("k", self._resolve(node))
        return self._functions[key]

    def _resolve(self, node: fx.Node) -> Callable[..., Any]:
        target: Any = node.target
        if target.namespace != NAMESPACE:
            found: Callable[..., Any] = self._direct.get(str(target), target)
            return found
        op = OPS.get(target._opname)
        kernel = node.meta.get("kernel", "ref")
        if kernel not in op.impls and not self._foreign:
            raise EngineCorruptError(f"kernel {kernel!r} of {op.spec.name}", found="no such implementation here",
                                     needed=", ".join(sorted(op.impls)), remedy="Build the engine again")
        if self._foreign:
            if kernel in op.impls and op.impls[kernel].prepare:
                raise EngineDeviceError(f"weights of {op.spec.name}", found=f"packed for kernel {kernel!r}",
                                        needed=f"plain weights on {self._device.type}",
                                        remedy="Build the engine for this device")
            kernel = "ref"
        function = bind(op, kernel, self._library)
        self._native &= op.impls[kernel].native
        return function

    def _constant(self, kind: str, value: Any) -> str:
        name = f"{kind}{len(self._scope)}"
        self._scope[name] = value
        return name

    def _render(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._names[value]
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self._render(item) for item in value) + "]"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        return self._constant("c", value)

    def finish(self) -> BoundGraph:
        """Compile the lines."""
        arguments = ", ".join(f"in{index}" for index in range(len(self._inputs)))
        source = f"def step({arguments}):\n" + "".join(f"    {line}\n" for line in self._lines)
        # the text holds only names made here and numbers: graph text never reaches the compiler
        exec(compile(source, "<engine graph>", "exec"), self._scope)
        # the function holds its scope; a scope that held the function would keep the weights for as long as
        # collections leave out what lived when they were last frozen
        return BoundGraph(inputs=tuple(self._inputs), call=self._scope.pop("step"), source=source,
                          native=self._native)
