"""CPU implementation of ``kv_write`` in native C. Owns the argument passing to ``cpu.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.kernels.kv_blocks.ref import kv_write_op
from camshaft.kernels.native import KINDS, entry
from camshaft.kernels.op import OpCall, TensorInfo


def _supports(call: OpCall) -> str | None:
    k, v, kv_pool, slot_mapping = call.args
    for name, tensor in (("k", k), ("kv_pool", kv_pool)):
        if isinstance(tensor, TensorInfo) and tensor.dtype not in KINDS:
            return f"{name} is {tensor.dtype}, not one of {', '.join(map(str, KINDS))}"
    if isinstance(k, TensorInfo) and isinstance(v, TensorInfo) and k.dtype != v.dtype:
        return f"k is {k.dtype} but v is {v.dtype}"
    if isinstance(slot_mapping, TensorInfo) and slot_mapping.dtype != torch.int64:
        return f"slot_mapping is {slot_mapping.dtype}, not int64"
    return None


@kv_write_op.impl("native", device="cpu", native=True, supports=_supports, rank=10)
def native_kv_write(library: ctypes.CDLL) -> Callable[..., None]:
    """Bind ``camshaft_kv_write``."""
    run, pack = entry(library, "camshaft_kv_write", "PllPllPPlllliii")
    kinds, num_threads = KINDS, torch.get_num_threads

    def kv_write(k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        tokens, heads, dim = k.shape
        k_token, k_head, k_lane = k.stride()
        v_token, v_head, v_lane = v.stride()
        if k_lane != 1 or v_lane != 1:
            k, v = k.contiguous(), v.contiguous()
            k_token, k_head, v_token, v_head = heads * dim, dim, heads * dim, dim
        run(pack(k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head, kv_pool.data_ptr(),
                 slot_mapping.data_ptr(), tokens, heads, kv_pool.shape[3], dim, kinds[k.dtype], kinds[kv_pool.dtype],
                 num_threads()))

    return kv_write
