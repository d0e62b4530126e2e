"""The Program: what every frontend makes, every pass rewrites and the builder turns into an engine.

Owns the graph, its weights and the record of what was done to it. The graph is ``torch.fx`` with

- ``placeholder`` nodes named as in ``STEP_INPUTS`` (plus, after lowering, the per-life-cycle and pool inputs),
- ``get_attr`` nodes whose target is a key of ``weights`` (names may hold dots; nothing resolves them as attributes),
- ``call_function`` nodes whose target is an OpOverload of ``camshaft`` or of ``ALLOWED_ATEN`` (or ``operator.getitem``
  on an op with several results),
- one ``output`` node returning the logits ``[L, V]``.

Every node but get_attr placeholders carries ``meta["val"]`` (a FakeTensor or SymInt) from export.
"""

from __future__ import annotations

import dataclasses

from torch import fx

from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import ModelConfig
from camshaft.ir.weight import Weight

PURE_INPUTS = ("token_ids", "positions", "logits_rows")
"""Placeholders of a program as exported: token_ids[T] i64, positions[T] i64, logits_rows[L] i64."""

STEP_INPUTS = ("token_ids", "positions", "query_start", "seq_lens", "logits_rows")
"""Placeholders after ``page_attention`` that do not depend on life cycles; query_start[R+1] i32, seq_lens[R] i32."""

LIFE_CYCLE_INPUTS = ("slot_mapping", "page_table")
"""After lowering, a life cycle c adds slot_mapping_c[T] i64 (page * page_size + offset) and page_table_c[R, P] i32."""

ALLOWED_ATEN = (
    "aten.add.Tensor", "aten.embedding.default", "aten.index_select.default", "aten.mul.Tensor", "aten.reshape.default",
    "aten.silu.default", "aten.gelu.default", "aten.slice.Tensor", "aten.split_with_sizes.default", "aten.view.default",
    "aten._to_copy.default", "aten.sym_size.int", "aten.unsqueeze.default", "aten.div.Tensor", "aten.tanh.default",
)


def pool_input(layer: int) -> str:
    """Placeholder of one layer's KV pool: ``[num_pages, 2, num_kv_heads, page_size, head_dim]``."""
    return f"kv_pool_{layer}"


@dataclasses.dataclass(frozen=True, slots=True)
class PassRecord:
    """What one pass did: its name, how many places it rewrote, and notes a reader of ``inspect`` sees."""

    name: str
    matches: int
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(slots=True, kw_only=True)
class Program:
    """A decoder as a graph. Passes mutate ``graph``, ``weights`` and ``history``; nothing else does."""

    graph: fx.Graph
    weights: dict[str, Weight]
    config: ModelConfig
    life_cycles: tuple[LifeCycleSpec, ...] = ()
    """Empty until ``page_attention`` has lowered the graph."""
    history: list[PassRecord] = dataclasses.field(default_factory=list)
