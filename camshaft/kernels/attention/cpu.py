"""CPU implementations of ``paged_attention``: native C, and torch a row at a time where there is no compiler.

Owns the argument passing to ``cpu.c``. Arguments are trusted as the op's contract gives them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.kernels.attention.ref import attend, paged_attention_op
from camshaft.kernels.native import KINDS, entry
from camshaft.kernels.op import OpCall, TensorInfo

_NO_WINDOW = 1 << 40
"""A window wider than any sequence."""


def _supports(call: OpCall) -> str | None:
    q, kv_pool, page_table, query_start, seq_lens = call.args[:5]
    for name, tensor in (("q", q), ("kv_pool", kv_pool)):
        if isinstance(tensor, TensorInfo) and tensor.dtype not in KINDS:
            return f"{name} is {tensor.dtype}, not one of {', '.join(map(str, KINDS))}"
    for name, tensor in (("page_table", page_table), ("query_start", query_start), ("seq_lens", seq_lens)):
        if isinstance(tensor, TensorInfo) and tensor.dtype != torch.int32:
            return f"{name} is {tensor.dtype}, not int32"
    return None


@paged_attention_op.impl("native", device="cpu", native=True, supports=_supports, rank=10)
def native_paged_attention(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_paged_attention``. The result raises MemoryError where scratch memory cannot be had."""
    run, pack = entry(library, "camshaft_paged_attention", "PPPPPPlllllllllllffiii")
    kinds, empty, num_threads = KINDS, torch.empty, torch.get_num_threads

    def paged_attention(q: torch.Tensor, kv_pool: torch.Tensor, page_table: torch.Tensor, query_start: torch.Tensor,
                        seq_lens: torch.Tensor, scale: float, window: int | None, softcap: float | None,
                        sinks: int) -> torch.Tensor:
        tokens, heads, dim = q.shape
        token_stride, head_stride, lane_stride = q.stride()
        if lane_stride != 1:
            q = q.contiguous()
            token_stride, head_stride = heads * dim, dim
        out = empty((tokens, heads, dim), dtype=q.dtype)
        _, _, kv_heads, page_size, _ = kv_pool.shape
        if run(pack(q.data_ptr(), out.data_ptr(), kv_pool.data_ptr(), page_table.data_ptr(), query_start.data_ptr(),
                    seq_lens.data_ptr(), token_stride, head_stride, page_table.stride(0), seq_lens.shape[0], tokens,
                    heads, kv_heads, page_size, dim, _NO_WINDOW if window is None else window, sinks, scale,
                    softcap or 0.0, kinds[q.dtype], kinds[kv_pool.dtype], num_threads())):
            raise MemoryError("paged_attention: no memory for scratch space")
        return out

    return paged_attention


@paged_attention_op.impl("rows", device="cpu", rank=0)
def paged_attention_by_rows(q: torch.Tensor, kv_pool: torch.Tensor, page_table: torch.Tensor,
                            query_start: torch.Tensor, seq_lens: torch.Tensor, scale: float, window: int | None,
                            softcap: float | None, sinks: int) -> torch.Tensor:
    """One row after another with its own length: no work on other rows' keys, as the reference does."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    page_size, starts = kv_pool.shape[3], query_start.tolist()
    for row, length in enumerate(seq_lens.tolist()):
        start, stop = starts[row], starts[row + 1]
        if start == stop:
            continue
        first = length - (stop - start)
        lowest = 0 if window is None else max(0, first - window + 1)
        spans = [(lowest, length)] if lowest == 0 or sinks == 0 else [(0, min(sinks, lowest)), (lowest, length)]
        parts = [_span(kv_pool, page_table[row], page_size, span) for span in spans]
        keys, values = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        key = torch.cat([torch.arange(*span) for span in spans])
        query = torch.arange(first, length)[:, None]
        visible = key <= query
        if window is not None:
            visible &= (key > query - window) | (key < sinks)
        out[start:stop] = attend(q[start:stop], keys, values, visible, scale, softcap)
    return out


def _span(kv_pool: torch.Tensor, table: torch.Tensor, page_size: int, span: tuple[int, int]) -> torch.Tensor:
    """Keys and values [2, n, Hkv, D] of the positions of ``span``."""
    start, stop = span
    column = start // page_size
    cached = kv_pool[table[column:-(-stop // page_size)].long()].permute(1, 0, 3, 2, 4).flatten(1, 2)
    return cached[:, start - column * page_size:stop - column * page_size]
