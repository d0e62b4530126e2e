"""Chooses an implementation for every camshaft op and packs the weights it asks for.

Owns recording the choice (``meta["kernel"]``, ``meta["why"]``); ranking is ``kernels/dispatch.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from camshaft.core.errors import InternalError, UserError
from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.ir.weight import Weight
from camshaft.kernels.dispatch import choose
from camshaft.kernels.op import NAMESPACE, OPS, Impl, Op, OpCall, load_families
from camshaft.passes.base import Pass, PassContext, PassResult

Prepare = Callable[[torch.Tensor], torch.Tensor]


class SelectKernels(Pass):
    """Every camshaft op gets the best kernel that serves its call on this device, or the one that was forced."""

    name = "select_kernels"
    stage = "select"
    needs = ("page_attention",)

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Raises UserError for a forced op or kernel that is unknown or cannot serve its call."""
        load_families(ctx.device.kind)
        forced = dict(choice.split("=") for choice in ctx.build.kernels)
        present = {nodes.target_name(node.target).removeprefix(f"{NAMESPACE}.") for node in program.graph.nodes}
        for name, kernel in forced.items():
            OPS.get(name)
            if name not in present:
                raise UserError("kernels", f"{name}={kernel}", f"an op of this model's graph; {name} is not in it")
        matches = 0
        for node in list(program.graph.nodes):
            name = nodes.target_name(node.target) if node.op == "call_function" else ""
            if name.startswith(f"{NAMESPACE}.") and "kernel" not in node.meta:
                op = OPS.get(name.removeprefix(f"{NAMESPACE}."))
                _select(program, node, op, forced.get(op.spec.name), ctx)
                matches += 1
        nodes.erase_dead(program)
        used = {(node.target, node.meta["kernel"]) for node in program.graph.nodes if "kernel" in node.meta}
        return PassResult(matches=matches, notes=(f"{len(used)} kernels in use",) if matches else ())


def _select(program: Program, node: fx.Node, op: Op, forced: str | None, ctx: PassContext) -> None:
    args = nodes.arguments(node)
    described = tuple(nodes.info_of(program, value) if isinstance(value, fx.Node) else value for value in args)
    verdict = choose(op, OpCall(ctx.device, described), native=ctx.native, forced=forced)
    impl = op.impls[verdict.impl]
    node.meta["kernel"], node.meta["why"] = verdict.impl, verdict.reason
    _prepare_weights(program, node, op, impl, args)


def _prepare_weights(program: Program, node: fx.Node, op: Op, impl: Impl, args: tuple[Any, ...]) -> None:
    """Give the call packed copies of the weights its kernel wants packed; other readers keep the plain ones."""
    packed = list(args)
    for argument, prepare in impl.prepare.items():
        place = op.arg_names.index(argument)
        if args[place] is None:
            continue
        name = nodes.weight_name(args[place])
        if name is None:
            raise InternalError(f"{op.spec.name} kernel {impl.name!r} prepares {argument!r}, which is no weight "
                                f"at {node.name!r}; its supports() must refuse that")
        new_name = f"{name}@{op.spec.name}.{impl.name}"
        if new_name not in program.weights:
            program.weights[new_name] = _prepared(program.weights[name], prepare)
        packed[place] = nodes.weight_node(program, new_name)
        # the op's own shape rule speaks of plain weights, so verification leaves this call out
        node.meta["prepared"] = True
    if node.meta.get("prepared"):
        node.args, node.kwargs = tuple(packed), {}


def _prepared(weight: Weight, prepare: Prepare) -> Weight:
    """The packed weight, lazily; its shape is learnt by packing a tensor without storage."""
    shape = prepare(torch.empty(weight.shape, dtype=weight.dtype, device="meta"))
    return Weight(shape=tuple(shape.shape), dtype=shape.dtype, read=lambda: prepare(weight.read()).contiguous(),
                  origin=weight.origin)
