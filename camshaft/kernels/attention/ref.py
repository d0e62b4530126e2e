"""Contracts of ``attention`` and ``paged_attention``, in readable torch.

Owns the meaning of causality, window and soft cap. Half precision is computed in float32. Shapes are
static and nothing is read back to the host, so the references also run under a captured CUDA graph.

Shapes: T tokens, R rows, P pages, C columns of the page table, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, define_op


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float,
           softcap: float | None) -> torch.Tensor:
    """Attention of q [T, Hq, D] over k, v [..., S, Hkv, D] where visible [..., T, S] says so; [..., T, Hq, D].

    The result has q's dtype. A query that sees nothing gets zeros, one that sees NaN or infinity NaN; what it does not
    see has no influence, whatever it is.
    """
    compute = q.dtype if q.dtype == torch.float64 else torch.float32
    grouped = q.to(compute).reshape(q.shape[0], k.shape[-2], q.shape[1] // k.shape[-2], q.shape[2])
    scores = torch.einsum("thgd,...shd->hg...ts", grouped, k.to(compute)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1).masked_fill(~visible, 0.0)
    values, odd = v.to(compute), ~v.isfinite()
    mixed = torch.einsum("hg...ts,...shd->...thgd", weights, values.masked_fill(odd, 0.0))
    spoilt = torch.einsum("...ts,...shd->...thd", visible.to(compute), odd.to(compute)) > 0
    return mixed.masked_fill(spoilt.unsqueeze(-2), math.nan).flatten(-3, -2).to(q.dtype).contiguous()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, scale: float, window: int | None,
              softcap: float | None, sinks: int) -> torch.Tensor:
    """Causal attention over T packed tokens as one sequence: q [T, Hq, D], k, v [T, Hkv, D] -> [T, Hq, D].

    Head h reads KV head ``h // (Hq / Hkv)``. Token i sees j with ``i - window < j <= i``, and the first ``sinks``
    tokens (attention sinks, Xiao et al., 2023) however far back. A score s becomes ``softcap * tanh(s / softcap)``.
    ``layer`` names the cache this call will use once it is lowered.
    """
    del layer
    index = torch.arange(q.shape[0], device=q.device)
    visible = index[None, :] <= index[:, None]
    if window is not None:
        visible &= (index[None, :] > index[:, None] - window) | (index[None, :] < sinks)
    return attend(q, k, v, visible, scale, softcap)


def paged_attention(q: torch.Tensor, kv_pool: torch.Tensor, page_table: torch.Tensor, query_start: torch.Tensor,
                    seq_lens: torch.Tensor, scale: float, window: int | None, softcap: float | None,
                    sinks: int) -> torch.Tensor:
    """Causal attention against cached tokens: q [T, Hq, D], kv_pool [P, 2, Hkv, page, D] -> [T, Hq, D].

    Row r has ``seq_lens[r]`` tokens cached, the i-th in page ``page_table[r, i // page]``; its queries are
    ``q[query_start[r]:query_start[r + 1]]`` (perhaps none) and belong to its last positions. Nothing but the
    tokens a query sees influences its result: not NaN in later tokens of its chunk or in unused slots, nor page-table
    columns of no token a row sees, which may hold the trash page 0 or a page that another row writes by now. Window and
    ``sinks`` as in ``attention``.
    page_table [R, C], query_start [R + 1] and seq_lens [R] are int32.
    """
    page_size = kv_pool.shape[3]
    slot = torch.arange(page_table.shape[1] * page_size, device=q.device)
    first_position = seq_lens - query_start.diff()
    lowest = torch.zeros_like(first_position) if window is None else first_position - window + 1
    live = (slot < seq_lens[:, None]) & ((slot >= lowest[:, None]) | (slot < sinks))
    pages = page_table.masked_fill(~live.reshape(*page_table.shape, page_size).any(2), 0)
    keys, values = (
        kv_pool[pages, side].transpose(2, 3).flatten(1, 2).masked_fill(~live[:, :, None, None], 0.0)
        for side in (0, 1)
    )
    token = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
    row = (torch.searchsorted(query_start, token, right=True) - 1).clamp(max=max(len(seq_lens) - 1, 0))
    position = (first_position[row] + token - query_start[row])[:, None]
    visible = live[:, None, :] & (slot <= position)
    if window is not None:
        visible &= (slot > position - window) | (slot < sinks)
    by_row = attend(q, keys, values, visible, scale, softcap)
    return by_row[row, token]


def _same_as_q(q: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _with_room(tokens: int, heads: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """A row more than asked for, so that even views of no rows lie inside their storage."""
    return torch.randn(tokens + 1, heads, size, generator=generator)


def _attention_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    """(name, T, Hq, Hkv, D, window, softcap, sinks) at the sizes where implementations break."""
    cases = (
        ("empty", 0, 2, 2, 8, None, None, 0), ("one", 1, 4, 4, 16, None, None, 0), ("mqa", 5, 6, 1, 20, None, None, 0),
        ("grouped", 33, 6, 2, 64, None, None, 0), ("window", 19, 4, 2, 32, 7, None, 0),
        ("softcap", 9, 4, 2, 32, None, 5.0, 0), ("window_one", 9, 2, 2, 8, 1, None, 0),
        ("eight_kv_heads", 7, 16, 8, 16, None, None, 0), ("sinks", 19, 4, 2, 32, 7, None, 3),
    )
    for name, tokens, heads, kv_heads, size, window, softcap, sinks in cases:
        merged = _with_room(tokens, heads + 2 * kv_heads, size, generator).to(device, dtype)[:tokens]
        q, k, v = torch.split(merged, [heads, kv_heads, kv_heads], dim=1)
        yield Sample(name, (q, k, v, 0, size**-0.5, window, softcap, sinks))


def paged_sample(dtype: torch.dtype, device: torch.device, generator: torch.Generator, *,
                 rows: tuple[tuple[int, int], ...], heads: tuple[int, int] = (4, 2), head_dim: int = 16,
                 page_size: int = 16, window: int | None = None, softcap: float | None = None,
                 sinks: int = 0) -> tuple[object, ...]:
    """Arguments of ``paged_attention`` for ``rows`` of (cached tokens before this step, queries).

    ``heads`` is (Hq, Hkv). q is a view into a wider merged tensor. Pages lie shuffled in a pool twice as
    large as needed; every slot that no row may see holds NaN. Page-table columns before those that are seen hold
    page 0, columns after them another page; both are poisoned.
    """
    num_tokens = sum(queries for _, queries in rows)
    pages_of = [-(-(past + queries) // page_size) for past, queries in rows]
    columns = max([*pages_of, 0]) + 1
    pool = torch.full((2 * sum(pages_of) + 2, 2, heads[1], page_size, head_dim), math.nan)
    order = (torch.randperm(len(pool) - 1, generator=generator) + 1).tolist()
    table = torch.full((len(rows), columns), order.pop(), dtype=torch.int32)
    for index, (past, queries) in enumerate(rows):
        position = torch.arange(pages_of[index] * page_size)
        lowest = 0 if window is None else past - window + 1
        seen = ((position < past + queries) & ((position >= lowest) | (position < sinks))).view(-1, page_size)
        for column, slots in enumerate(seen):
            page = table[index, column] = order.pop() if slots.any() else 0
            pool[page, :, :, slots] = torch.randn(2, heads[1], int(slots.sum()), head_dim, generator=generator)
    merged = _with_room(num_tokens, heads[0] + 3, head_dim, generator).to(device, dtype)[:num_tokens]
    starts = torch.tensor([0, *(queries for _, queries in rows)]).cumsum(0).int()
    lens = torch.tensor([past + queries for past, queries in rows], dtype=torch.int32)
    return (merged[:, 2:2 + heads[0]], pool.to(device, dtype), table.to(device), starts.to(device), lens.to(device),
            head_dim**-0.5, window, softcap, sinks)


def _paged_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    def sample(name: str, rows: tuple[tuple[int, int], ...], **options: object) -> Sample:
        return Sample(name, paged_sample(dtype, device, generator, rows=rows, **options))  # type: ignore[arg-type]

    yield sample("empty", ((5, 0), (16, 0)))
    yield sample("one", ((0, 1),))
    yield sample("decode_page_edges", ((14, 1), (15, 1), (16, 1), (30, 1), (31, 1)))
    yield sample("mixed_with_idle_rows", ((40, 1), (9, 0), (0, 17), (20, 13), (3, 0)))
    yield sample("prefill_off_block", ((0, 131),), heads=(6, 2), head_dim=64)
    yield sample("decode_long", ((700, 1), (260, 1)), heads=(9, 3), head_dim=64)
    yield sample("mha", ((10, 3), (33, 1)), heads=(3, 3), head_dim=80)
    yield sample("mqa_wide", ((70, 5),), heads=(8, 1), head_dim=128)
    yield sample("eight_kv_heads", ((18, 3), (5, 1)), heads=(32, 8))
    yield sample("odd_head_size", ((20, 6), (4, 1)), heads=(4, 2), head_dim=20, page_size=4)
    for past in (6, 7, 8):
        yield sample(f"window_8_at_{past}", ((past, 1), (0, past)), window=8, page_size=4)
    yield sample("window_long", ((200, 90),), window=70, head_dim=32)
    for past in (11, 12, 13):
        yield sample(f"sinks_3_window_8_at_{past}", ((past, 1), (past, 5), (0, past)), window=8, sinks=3, page_size=4)
    yield sample("sinks_long", ((300, 1), (200, 90), (60, 20)), window=70, sinks=20, head_dim=32)
    yield sample("sinks_over_blocks", ((400, 3), (150, 70)), window=33, sinks=100, heads=(8, 1), head_dim=20)
    yield sample("sinks_window_one", ((9, 1), (3, 9)), window=1, sinks=4, page_size=4, softcap=5.0)
    yield sample("sinks_without_window", ((20, 3),), sinks=4)
    yield sample("softcap", ((20, 5), (64, 1)), softcap=5.0, head_dim=32)


attention_op = define_op(OpSpec(
    name="attention",
    schema="(Tensor q, Tensor k, Tensor v, int layer, float scale, int? window, float? softcap, "
           "int sinks) -> Tensor",
    reference=attention, fake=_same_as_q, samples=_attention_samples,
))

paged_attention_op = define_op(OpSpec(
    name="paged_attention",
    schema="(Tensor q, Tensor kv_pool, Tensor page_table, Tensor query_start, Tensor seq_lens, float scale, "
           "int? window, float? softcap, int sinks) -> Tensor",
    reference=paged_attention, fake=_same_as_q, samples=_paged_samples,
))
