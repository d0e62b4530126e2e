"""Rounds the weights of products to 8 bits, where the build asks for it."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import fx

from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.ir.weight import quantised
from camshaft.passes.base import Pass, PassContext, PassResult

_DTYPES = MappingProxyType({"w8a16": torch.int8, "w8a8": torch.int8, "fp8": torch.float8_e4m3fn})


class Quantize(Pass):
    """``linear`` on a weight becomes ``linear_w8a16``, ``_w8a8`` or ``_fp8``; other readers keep the weight as it was.

    fp8 leaves the products whose results the program returns: three bits of mantissa are few for logits.
    Nothing is read here: a matrix is rounded, one scale a row, when it is written to the engine.
    """

    name = "quantize"
    stage = "quantize"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """One product at a time, in graph order; a weight read twice is rounded once."""
        kind = ctx.build.quantization
        if kind == "none":
            return PassResult(matches=0)
        dtype = _DTYPES[kind]
        left = _last_products(program) if kind == "fp8" else frozenset()
        before, after, matches = 0, 0, 0
        for node in list(program.graph.nodes):
            if node in left or not nodes.is_call(node, "camshaft.linear"):
                continue
            x, weight, bias = nodes.arguments(node)
            name = nodes.weight_name(weight)
            if name is None:
                continue
            names = (f"{name}@{'fp8' if kind == 'fp8' else 'int8'}", f"{name}@scale")
            if names[0] not in program.weights:
                parts = quantised(program.weights[name], dtype)
                program.weights.update(zip(names, parts, strict=True))
                before += program.weights[name].num_bytes
                after += sum(part.num_bytes for part in parts)
            placed = [nodes.weight_node(program, part) for part in names]
            with program.graph.inserting_before(node):
                product = nodes.add_call(program, f"camshaft.linear_{kind}", (x, *placed, bias))
            node.replace_all_uses_with(product)
            program.graph.erase_node(node)
            matches += 1
        nodes.erase_dead(program)
        notes = (f"{matches} × linear_{kind}, {before / 1e6:.1f} MB as {after / 1e6:.1f} MB",) if matches else ()
        return PassResult(matches=matches, notes=notes)


def _last_products(program: Program) -> frozenset[fx.Node]:
    """The ``linear`` calls from which a result of the program comes with no other between."""
    found, seen = set[fx.Node](), set[fx.Node]()
    pending = [node for node in program.graph.nodes if node.op == "output"]
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if nodes.is_call(node, "camshaft.linear"):
            found.add(node)
        else:
            pending.extend(node.all_input_nodes)
    return frozenset(found)
