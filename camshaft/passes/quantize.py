"""Rounds the weights of products to 8 bits, where the build asks for it."""

from __future__ import annotations

from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.ir.weight import quantised
from camshaft.passes.base import Pass, PassContext, PassResult


class Quantize(Pass):
    """``linear`` on a weight becomes ``linear_w8a16`` or ``linear_w8a8``; other readers keep the weight as it was.

    Nothing is read here: a matrix is rounded, one scale a row, when it is written to the engine.
    """

    name = "quantize"
    stage = "quantize"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """One product at a time, in graph order; a weight read twice is rounded once."""
        kind = ctx.build.quantization
        if kind == "none":
            return PassResult(matches=0)
        before, after, matches = 0, 0, 0
        for node in list(program.graph.nodes):
            if not nodes.is_call(node, "camshaft.linear"):
                continue
            x, weight, bias = nodes.arguments(node)
            name = nodes.weight_name(weight)
            if name is None:
                continue
            names = (f"{name}@int8", f"{name}@scale")
            if names[0] not in program.weights:
                parts = quantised(program.weights[name])
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
