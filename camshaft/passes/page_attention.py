"""Lowers pure attention to a write into the paged KV cache and attention over it.

The last rewrite: the write has no data edge to the read, so nothing may reorder nodes after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.ir import nodes
from camshaft.ir.program import LIFE_CYCLE_INPUTS, STEP_INPUTS, Program, pool_input
from camshaft.passes.base import Pass, PassContext, PassResult


class PageAttention(Pass):
    """``attention(q, k, v, …)`` becomes ``kv_write`` then ``paged_attention``; the cache inputs are added.

    All layers share one life cycle: a sliding window limits what is read, not yet what is kept.
    """

    name = "page_attention"
    stage = "lower"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Raises InternalError where layers disagree in KV shape or the program has no attention at all."""
        found = [node for node in program.graph.nodes if nodes.is_call(node, "camshaft.attention")]
        if not found:
            if program.life_cycles:
                return PassResult(matches=0)
            raise InternalError("the program has no attention to lower")
        spec = _life_cycle(found, ctx.build.page_size)
        inputs = _add_inputs(program, spec)
        program.life_cycles = (spec,)
        for node in found:
            _lower(program, node, inputs)
        return PassResult(matches=len(found),
                          notes=(f"1 life cycle: {len(spec.layers)} layers, {spec.num_kv_heads} KV heads of "
                                 f"{spec.head_dim}, {spec.page_bytes} bytes a page of {spec.page_size} tokens",))


def _life_cycle(attentions: list[fx.Node], page_size: int) -> LifeCycleSpec:
    shapes, layers = set(), []
    for node in attentions:
        _, k, v, layer, *_ = nodes.arguments(node)
        for part in (k, v):
            val = part.meta["val"]
            shapes.add((val.shape[1], val.shape[2], str(val.dtype).removeprefix("torch.")))
        layers.append(layer)
    if len(shapes) != 1:
        raise InternalError(f"layers differ in (KV heads, head size, dtype): {sorted(shapes)}")
    num_kv_heads, head_dim, dtype = shapes.pop()
    return LifeCycleSpec(kind="full", layers=tuple(sorted(layers)), num_kv_heads=num_kv_heads, head_dim=head_dim,
                         page_size=page_size, dtype=dtype)


def _add_inputs(program: Program, spec: LifeCycleSpec) -> dict[str, fx.Node]:
    """Add the cache inputs, in signature order, their dynamic sizes as symbols of their own."""
    graph, mode, device = program.graph, nodes.fake_mode(program.graph), nodes.fake_device(program.graph)
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    num_tokens = inputs["token_ids"].meta["val"].shape[0]
    if mode.shape_env is None:
        raise InternalError("the program was exported without dynamic sizes")
    rows, columns, pages = (mode.shape_env.create_unbacked_symint() for _ in range(3))
    pool_shape = (pages, *spec.pool_shape(1)[2:])
    slot_mapping, page_table = (f"{name}_0" for name in LIFE_CYCLE_INPUTS)
    wanted: dict[str, tuple[tuple[Any, ...], torch.dtype]] = {
        "query_start": ((rows + 1,), torch.int32), "seq_lens": ((rows,), torch.int32),
        slot_mapping: ((num_tokens,), torch.int64), page_table: ((rows, columns), torch.int32),
        **{pool_input(layer): (pool_shape, getattr(torch, spec.dtype)) for layer in spec.layers}}
    last: fx.Node | None = None
    for name in (*STEP_INPUTS, *(name for name in wanted if name not in STEP_INPUTS)):
        if name in inputs:
            if last is not None and last.next is not inputs[name]:
                last.append(inputs[name])
        else:
            shape, dtype = wanted[name]
            with graph.inserting_after(last):
                inputs[name] = graph.placeholder(name)
            with mode:
                inputs[name].meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        last = inputs[name]
    return inputs


def _lower(program: Program, node: fx.Node, inputs: dict[str, fx.Node]) -> None:
    q, k, v, layer, scale, window, softcap, sinks = nodes.arguments(node)
    pool = inputs[pool_input(layer)]
    slot_mapping, page_table = (inputs[f"{name}_0"] for name in LIFE_CYCLE_INPUTS)
    with program.graph.inserting_before(node):
        nodes.add_call(program, "camshaft.kv_write", (k, v, pool, slot_mapping))
        read = nodes.add_call(program, "camshaft.paged_attention",
                              (q, pool, page_table, inputs["query_start"], inputs["seq_lens"], scale, window,
                               softcap, sinks))
    node.replace_all_uses_with(read)
    program.graph.erase_node(node)
