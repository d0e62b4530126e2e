"""CPU implementations of rotary embedding in native C. Owns the argument passing to ``cpu.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.kernels.native import KINDS, entry
from camshaft.kernels.op import OpCall, TensorInfo
from camshaft.kernels.rope.ref import rope_cos_sin_op, rope_op


def _table_supports(call: OpCall) -> str | None:
    for name, tensor, dtype in (("positions", call.args[0], torch.int64), ("inv_freq", call.args[1], torch.float32)):
        if isinstance(tensor, TensorInfo) and tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
    return None


@rope_cos_sin_op.impl("native", device="cpu", native=True, supports=_table_supports, rank=10)
def native_rope_cos_sin(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_rope_table``."""
    run, pack = entry(library, "camshaft_rope_table", "PPPlllfi")
    num_threads, float32 = torch.get_num_threads, torch.float32

    def rope_cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> torch.Tensor:
        tokens, half = len(positions), len(inv_freq)
        if inv_freq.stride(0) != 1:
            inv_freq = inv_freq.contiguous()
        table = inv_freq.new_empty(tokens, 2 * half, dtype=float32)
        run(pack(positions.data_ptr(), inv_freq.data_ptr(), table.data_ptr(), positions.stride(0), tokens, half,
                 scaling, num_threads()))
        return table

    return rope_cos_sin


def _rope_supports(call: OpCall) -> str | None:
    q, k, cos_sin = call.args
    if q.dtype not in KINDS or q.dtype != k.dtype:
        return f"q is {q.dtype} and k is {k.dtype}, not one of {', '.join(map(str, KINDS))} both"
    return None if cos_sin.dtype == torch.float32 else f"cos_sin is {cos_sin.dtype}, not float32"


@rope_op.impl("native", device="cpu", native=True, supports=_rope_supports, rank=10)
def native_rope(library: ctypes.CDLL) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Bind ``camshaft_rope``."""
    run, pack = entry(library, "camshaft_rope", "PPlllPPlllPllllii")
    kinds, num_threads = KINDS, torch.get_num_threads

    def rope(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, heads, size = q.shape
        kv_heads = k.shape[1]
        if cos_sin.stride(1) != 1:
            cos_sin = cos_sin.contiguous()
        q_token, q_head, q_lane = q.stride()
        k_token, k_head, k_lane = k.stride()
        if q_lane != 1 or k_lane != 1:
            q, k = q.contiguous(), k.contiguous()
            q_token, q_head, k_token, k_head = heads * size, size, kv_heads * size, size
        q_out, k_out = q.new_empty(tokens, heads, size), q.new_empty(tokens, kv_heads, size)
        run(pack(q.data_ptr(), q_out.data_ptr(), q_token, q_head, heads,
                 k.data_ptr(), k_out.data_ptr(), k_token, k_head, kv_heads,
                 cos_sin.data_ptr(), cos_sin.stride(0), tokens, cos_sin.shape[1] // 2, size, kinds[q.dtype],
                 num_threads()))
        return q_out, k_out

    return rope
