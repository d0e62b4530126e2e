"""A graph as text: the engine's ``graph.json``, the golden dump and the diff are one format.

Owns the canonical JSON, one node a line, and reading it back without evaluating anything. In ``args``,
``"%x"`` is the node x, ``"@x"`` the weight x, ``"$float32"`` a dtype and ``"'x"`` the string x; numbers,
true, false, null and lists stand for themselves. Node names are given afresh, so equal programs give equal text.
"""

from __future__ import annotations

import difflib
import json
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from camshaft.core.errors import EngineCorruptError, InternalError
from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.kernels.op import load_families

if TYPE_CHECKING:
    import sympy

GRAPH_FORMAT = 1
MAX_TEXT_BYTES = 64 << 20
MAX_NODES = 200_000
MAX_NESTING = 4
_DTYPES = MappingProxyType({str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
    torch.bool, torch.float8_e4m3fn)})


def dump_graph(program: Program | fx.Graph) -> str:
    """The canonical text of a program's graph. Raises InternalError for anything the format does not hold."""
    graph = program.graph if isinstance(program, Program) else program
    names, symbols = _canonical_names(graph), nodes.size_symbols(graph)
    lines = [json.dumps(_describe(node, names, symbols), ensure_ascii=False, allow_nan=False)
             for node in graph.nodes if node.op != "get_attr"]
    return f'{{"graph_format": {GRAPH_FORMAT}, "nodes": [\n' + ",\n".join(lines) + "\n]}\n"


def diff_graphs(a: str, b: str) -> str:
    """What changed between two dumps, as a unified diff of their lines; empty when they are equal."""
    return "\n".join(difflib.unified_diff(a.splitlines(), b.splitlines(), "before", "after", lineterm="", n=1))


def _canonical_names(graph: fx.Graph) -> dict[fx.Node, str]:
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name
        elif node.op == "call_function":
            full = nodes.target_name(node.target)
            if not full:
                raise InternalError(f"program node {node.name!r} calls {node.target}, which the engine cannot hold")
            short = full.split(".")[1] if "." in full else full
            number = counts.get(short, 0)
            counts[short] = number + 1
            names[node] = f"{short}_{number}"
    return names


def _describe(node: fx.Node, names: dict[fx.Node, str], symbols: dict[sympy.Symbol, str]) -> dict[str, Any]:
    if node.op == "output":
        return {"op": "output", "args": [_encode(argument, names) for argument in node.args]}
    line: dict[str, Any] = {"name": names[node], "op": "input"}
    if node.op == "call_function":
        line["op"] = nodes.target_name(node.target)
        line["args"] = [_encode(argument, names) for argument in node.args]
        if node.kwargs:
            line["kwargs"] = {key: _encode(node.kwargs[key], names) for key in sorted(node.kwargs)}
        if "kernel" in node.meta:
            line["kernel"] = node.meta["kernel"]
    line["result"] = _result(node.meta["val"], symbols) if "val" in node.meta else node.meta.get("result")
    return line


def _result(val: Any, symbols: dict[sympy.Symbol, str]) -> Any:
    if isinstance(val, tuple | list):
        return [_result(part, symbols) for part in val]
    if isinstance(val, torch.Tensor):
        sizes = (_size_text(size, symbols) for size in val.shape)
        return f"{str(val.dtype).removeprefix('torch.')}[{','.join(sizes)}]"
    return None if val is None else "size"


def _size_text(size: int | torch.SymInt, symbols: dict[sympy.Symbol, str]) -> str:
    if isinstance(size, int):
        return str(size)
    import sympy

    letters = {symbol: sympy.Symbol(name) for symbol, name in symbols.items()}
    return str(size.node.expr.xreplace(letters)).replace(" ", "")


def _encode(value: Any, names: dict[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return f"@{value.target}" if value.op == "get_attr" else f"%{names[value]}"
    if isinstance(value, str):
        return f"'{value}"
    if isinstance(value, torch.dtype):
        return f"${str(value).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        return [_encode(item, names) for item in value]
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise InternalError(f"a graph argument of type {type(value).__name__} ({value!r}) cannot be written")


def parse_graph(text: str) -> fx.Graph:
    """Read a dump. Calls keep ``meta["kernel"]`` and ``meta["result"]`` (as written); weights become get_attr nodes.

    Raises EngineCorruptError for text that is not a graph of allowed ops.
    """
    if len(text) > MAX_TEXT_BYTES:
        raise _corrupt(f"{len(text)} characters", f"at most {MAX_TEXT_BYTES}")
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"text that is not JSON ({error})", "the graph as it was written") from error
    lines = data.get("nodes") if isinstance(data, dict) else None
    if not isinstance(lines, list) or data.get("graph_format") != GRAPH_FORMAT or len(lines) > MAX_NODES:
        raise _corrupt("no list of nodes of this format", f"graph_format {GRAPH_FORMAT}, at most {MAX_NODES} nodes")
    load_families("cpu")
    reader = _Reader()
    for line in lines:
        if reader.finished or not isinstance(line, dict):
            raise _corrupt(f"node {str(line)[:80]}", "nodes as objects, the output last")
        reader.read(line)
    if not reader.finished:
        raise _corrupt("no output", "an output as the last node")
    return reader.graph


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _corrupt(found: object, needed: str) -> EngineCorruptError:
    return EngineCorruptError("engine graph", found=found, needed=needed, remedy="Build the engine again")


class _Reader:
    """Builds the graph line by line; names already seen are the only ones a line may use."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.finished = False
        self._named: dict[str, fx.Node] = {}
        self._weights: dict[str, fx.Node] = {}

    def read(self, line: dict[str, Any]) -> None:
        """Append one node."""
        op, args, kwargs = line.get("op"), line.get("args", []), line.get("kwargs", {})
        if not isinstance(op, str) or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise _corrupt(f"node {str(line)[:80]}", "op, args and kwargs")
        if op == "output":
            if len(args) != 1:
                raise _corrupt(f"an output of {len(args)} values", "one value")
            self.graph.output(self._decode(args[0], 0))
            self.finished = True
            return
        name = line.get("name")
        if not isinstance(name, str) or not name.isidentifier() or name in self._named:
            raise _corrupt(f"node name {str(name)[:80]!r}", "a fresh identifier")
        node = self._input(name) if op == "input" else self._call(op, name, args, kwargs)
        if node.name != name:
            raise _corrupt(f"node name {name!r}", "a name Python does not reserve")
        kernel = line.get("kernel")
        if kernel is not None:
            if not isinstance(kernel, str):
                raise _corrupt(f"kernel {str(kernel)[:80]!r}", "the name of an implementation")
            node.meta["kernel"] = kernel
        node.meta["result"] = line.get("result")
        self._named[name] = node

    def _input(self, name: str) -> fx.Node:
        if any(node.op != "placeholder" for node in self._named.values()):
            raise _corrupt(f"input {name!r} after a call", "inputs first")
        return self.graph.placeholder(name)

    def _call(self, op: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        target = nodes.find_target(op)
        if target is None:
            raise _corrupt(f"op {op[:80]!r}", "a camshaft op, an allowed aten op or getitem")
        decoded = tuple(self._decode(value, 0) for value in args)
        named = {key: self._decode(value, 0) for key, value in kwargs.items()}
        return self.graph.create_node("call_function", target, decoded, named, name)

    def _decode(self, value: Any, depth: int) -> Any:
        if isinstance(value, list):
            if depth >= MAX_NESTING:
                raise _corrupt("arguments nested too deep", f"at most {MAX_NESTING} levels")
            return [self._decode(item, depth + 1) for item in value]
        if not isinstance(value, str):
            if isinstance(value, dict):
                raise _corrupt(f"argument {str(value)[:80]}", "a number, a list or a marked string")
            return value
        mark, rest = value[:1], value[1:]
        if mark == "'":
            return rest
        if mark == "@" and rest:
            return self._weight(rest)
        if mark == "%" and rest in self._named:
            return self._named[rest]
        if mark == "$" and rest in _DTYPES:
            return _DTYPES[rest]
        raise _corrupt(f"argument {value[:80]!r}", "an earlier node, a weight, a dtype or a quoted string")

    def _weight(self, name: str) -> fx.Node:
        if name not in self._weights:
            # graph.get_attr would look for an attribute of a module that does not exist
            self._weights[name] = self.graph.create_node("get_attr", name)
        return self._weights[name]
