"""CPU implementation of ``linear`` in native C. Owns the argument passing to ``cpu.c`` and the one case left to torch.

A row's result has the same bits whatever rows share its batch, except where torch takes over: 16-bit
products of many tokens on a CPU with matrix units for that type.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.core.device import probe_cpu
from camshaft.kernels.gemm.ref import linear as torch_linear
from camshaft.kernels.gemm.ref import linear_op
from camshaft.kernels.native import KINDS, entry, same_kind

_BF16_UNITS = {"avx512_bf16", "amx_tile", "bf16"}
_UNITS_WIN_FROM_TOKENS = 16
"""Tokens from which a CPU's bf16 units (through torch) beat fp32 arithmetic; measured on Zen 4."""


@linear_op.impl("native", device="cpu", native=True, supports=same_kind, rank=10)
def native_linear(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_linear``. The result raises MemoryError where scratch memory cannot be had."""
    run, pack = entry(library, "camshaft_linear", "PPPPlllllii")
    kinds, num_threads, bfloat16 = KINDS, torch.get_num_threads, torch.bfloat16
    units_from = _UNITS_WIN_FROM_TOKENS if _BF16_UNITS & set(probe_cpu().features) else None

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tokens, depth = x.shape
        rows = weight.shape[0]
        dtype = x.dtype
        if dtype is bfloat16 and units_from is not None and tokens >= units_from:
            return torch_linear(x, weight, bias)
        x_row, x_lane = x.stride()
        weight_row, weight_lane = weight.stride()
        if x_lane != 1 or weight_lane != 1:
            x, weight = x.contiguous(), weight.contiguous()
            x_row = weight_row = depth
        y = x.new_empty(tokens, rows)
        if run(pack(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), y.data_ptr(), tokens, rows,
                    depth, x_row, weight_row, kinds[dtype], num_threads())):
            raise MemoryError("linear: no memory for scratch space")
        return y

    return linear
