"""Narrows attention to the window that the build asks for.

A pass of its own, as the model's configuration must keep saying which layers it was trained to slide: some rotate
by settings of their own.
"""

from __future__ import annotations

from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.passes.base import Pass, PassContext, PassResult


class NarrowAttention(Pass):
    """No layer sees further back than ``max_attention_window``; those with a window go on seeing ``sink_tokens``."""

    name = "narrow_attention"
    stage = "lower"

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Nothing where neither is asked for."""
        widest, asked = ctx.build.max_attention_window, ctx.build.sink_tokens
        matches = 0
        for node in program.graph.nodes:
            if not nodes.is_call(node, "camshaft.attention"):
                continue
            q, k, v, layer, scale, window, softcap, sinks = nodes.arguments(node)
            narrow = min((width for width in (window, widest) if width is not None), default=None)
            kept = max(sinks, asked) if narrow is not None else sinks
            if (narrow, kept) != (window, sinks):
                node.args = (q, k, v, layer, scale, narrow, softcap, kept)
                matches += 1
        notes = [f"windows of at most {widest} tokens"] if widest is not None else []
        notes += [f"the first {asked} tokens stay visible"] if asked else []
        return PassResult(matches=matches, notes=tuple(notes) if matches else ())
