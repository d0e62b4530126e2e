"""Stores matrices in 16 bits under fp32 arithmetic, where the build asks for it."""

from __future__ import annotations

import torch
from torch import fx

from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.passes.base import Pass, PassContext, PassResult


class NarrowWeights(Pass):
    """Products and embeddings read a cast of their weight: products widen it themselves, looked-up rows are cast back.

    What else reads the weight, and norms and biases, keep the type of the arithmetic.
    """

    name = "narrow_weights"
    stage = "quantize"
    after = ("quantize",)

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Nothing where matrices are stored in the type of the arithmetic."""
        if ctx.build.weight_dtype == ctx.build.dtype:
            return PassResult(matches=0)
        dtype: torch.dtype = getattr(torch, ctx.build.weight_dtype)
        matches = sum(_narrow(program, node, dtype) for node in list(program.graph.nodes))
        nodes.erase_dead(program)
        return PassResult(matches=matches, notes=(f"matrices stored in {ctx.build.weight_dtype}",) if matches else ())


def _narrow(program: Program, node: fx.Node, dtype: torch.dtype) -> bool:
    """Let ``node`` read its weight in ``dtype``; whether there was anything to do."""
    read = nodes.matrix_read(node)
    if read is None or program.weights[read[1]].dtype == dtype:
        return False
    place, name = read
    narrow = f"{name}@{str(dtype).removeprefix('torch.')}"
    program.weights.setdefault(narrow, program.weights[name].cast(dtype))
    node.update_arg(place, nodes.weight_node(program, narrow))
    if nodes.is_call(node, "aten.embedding.default"):
        wide = node.meta["val"].dtype
        node.meta["val"] = nodes.infer(program, node.target, node.args, node.kwargs)  # type: ignore[arg-type]
        with program.graph.inserting_after(node):
            cast = nodes.add_call(program, "aten._to_copy.default", (node,), {"dtype": wide})
        node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return True
