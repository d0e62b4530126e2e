"""Lowers pure attention to a write into the paged KV cache and attention over it.

The last rewrite: the write has no data edge to the read, so nothing may reorder nodes after it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.ir import nodes
from camshaft.ir.program import LIFE_CYCLE_INPUTS, STEP_INPUTS, Program, pool_input
from camshaft.passes.base import Pass, PassContext, PassResult


class PageAttention(Pass):
    """``attention(q, k, v, …)`` becomes ``kv_write`` then ``paged_attention``; the cache inputs are added.

    Layers that keep the same tokens in pages of the same shape share a life cycle; cycles come in the order of their
    first layers. A window no narrower than ``max_seq_len`` keeps everything.
    """

    name = "page_attention"
    stage = "lower"
    after = ("narrow_attention",)

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Raises InternalError where a layer's keys and values differ in shape, or the program has no attention."""
        found = [node for node in program.graph.nodes if nodes.is_call(node, "camshaft.attention")]
        if not found:
            if program.life_cycles:
                return PassResult(matches=0)
            raise InternalError("the program has no attention to lower")
        specs = _life_cycles(found, ctx.build)
        inputs = _add_inputs(program, specs)
        program.life_cycles = specs
        cycle_of = {layer: c for c, spec in enumerate(specs) for layer in spec.layers}
        for node in found:
            _lower(program, node, inputs, cycle_of)
        return PassResult(matches=len(found), notes=tuple(_note(c, spec) for c, spec in enumerate(specs)))


def _note(c: int, spec: LifeCycleSpec) -> str:
    kept = "everything"
    if spec.window is not None:
        kept = f"the last {spec.window} tokens" + (f" and the first {spec.sinks}" if spec.sinks else "")
    return (f"life cycle {c} keeps {kept}: {len(spec.layers)} layers, {spec.num_kv_heads} KV heads of {spec.head_dim}, "
            f"{spec.page_bytes} bytes a page of {spec.page_size} tokens")


def _life_cycles(attentions: list[fx.Node], build: BuildConfig) -> tuple[LifeCycleSpec, ...]:
    groups: dict[LifeCycleSpec, list[int]] = {}
    for node in sorted(attentions, key=lambda node: int(nodes.arguments(node)[3])):
        _, k, v, layer, _, window, _, sinks = nodes.arguments(node)
        shapes = {(val.shape[1], val.shape[2], str(val.dtype).removeprefix("torch."))
                  for val in (k.meta["val"], v.meta["val"])}
        if len(shapes) != 1:
            raise InternalError(f"keys and values of layer {layer} differ in (KV heads, head size, dtype): "
                                f"{sorted(shapes)}")
        num_kv_heads, head_dim, dtype = shapes.pop()
        slides = window is not None and (build.max_seq_len is None or window < build.max_seq_len)
        spec = LifeCycleSpec(kind="window" if slides else "full", layers=(), num_kv_heads=num_kv_heads,
                             head_dim=head_dim, page_size=build.page_size, dtype=dtype,
                             window=window if slides else None, sinks=sinks if slides else 0)
        groups.setdefault(spec, []).append(layer)
    return tuple(dataclasses.replace(spec, layers=tuple(layers)) for spec, layers in groups.items())


def _add_inputs(program: Program, specs: tuple[LifeCycleSpec, ...]) -> dict[str, fx.Node]:
    """Add the cache inputs, in signature order, their dynamic sizes as symbols of their own."""
    graph, mode, device = program.graph, nodes.fake_mode(program.graph), nodes.fake_device(program.graph)
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    last: fx.Node | None = None
    wanted = _cache_inputs(program, specs)
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


def _cache_inputs(program: Program, specs: tuple[LifeCycleSpec, ...]) -> dict[str, tuple[tuple[Any, ...], torch.dtype]]:
    """Shape and type of every input that the lowered program has and the pure one lacks."""
    sizes = nodes.fake_mode(program.graph).shape_env
    if sizes is None:
        raise InternalError("the program was exported without dynamic sizes")
    (token_ids,) = (node for node in program.graph.nodes if node.name == "token_ids")
    rows, columns = sizes.create_unbacked_symint(), sizes.create_unbacked_symint()
    wanted: dict[str, tuple[tuple[Any, ...], torch.dtype]] = {
        "query_start": ((rows + 1,), torch.int32), "seq_lens": ((rows,), torch.int32)}
    for c in range(len(specs)):
        slot_mapping, page_table = (f"{name}_{c}" for name in LIFE_CYCLE_INPUTS)
        wanted[slot_mapping] = ((token_ids.meta["val"].shape[0],), torch.int64)
        wanted[page_table] = ((rows, columns), torch.int32)
    for spec in specs:
        pool_shape = (sizes.create_unbacked_symint(), *spec.pool_shape(1)[2:])
        wanted.update({pool_input(layer): (pool_shape, getattr(torch, spec.dtype)) for layer in spec.layers})
    return wanted


def _lower(program: Program, node: fx.Node, inputs: dict[str, fx.Node], cycle_of: dict[int, int]) -> None:
    q, k, v, layer, scale, window, softcap, sinks = nodes.arguments(node)
    pool = inputs[pool_input(layer)]
    slot_mapping, page_table = (inputs[f"{name}_{cycle_of[layer]}"] for name in LIFE_CYCLE_INPUTS)
    with program.graph.inserting_before(node):
        nodes.add_call(program, "camshaft.kv_write", (k, v, pool, slot_mapping))
        read = nodes.add_call(program, "camshaft.paged_attention",
                              (q, pool, page_table, inputs["query_start"], inputs["seq_lens"], scale, window,
                               softcap, sinks))
    node.replace_all_uses_with(read)
    program.graph.erase_node(node)
