"""CPU implementations of the products in native C. Owns the argument passing to ``cpu.c`` (with ``cpu_tiles.c``
behind it) and ``cpu_int8.c``, and the one case left to torch.

A row's result has the same bits whatever rows share its batch, except where torch takes over: 16-bit
products of many tokens on a CPU with matrix units for that type.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.core.device import probe_cpu
from camshaft.kernels.gemm.ref import linear as torch_linear
from camshaft.kernels.gemm.ref import linear_op, linear_w8a8_op, linear_w8a16_op
from camshaft.kernels.native import KINDS, entry, same_kind
from camshaft.kernels.op import OpCall

_BF16_UNITS = frozenset({"avx512_bf16", "amx_tile", "bf16"})
_UNITS_WIN_FROM_TOKENS = 16
"""Tokens from which a CPU's bf16 units (through torch) beat fp32 arithmetic; measured on Zen 4."""
_INT8 = 3
"""The code of int8 in ``native.h``."""


def _kinds_fit(call: OpCall) -> str | None:
    """Weights may be narrower than x; a bias is of x's type."""
    x, weight, bias = call.args
    if x.dtype is torch.float32 and weight.dtype in KINDS:
        weight = x
    return same_kind(OpCall(call.device, (x, weight, bias)))


def _int8_fits(call: OpCall) -> str | None:
    x, weight, scale, bias = call.args
    if weight.dtype is not torch.int8 or scale.dtype is not torch.float32:
        return f"weight and scale are {weight.dtype} and {scale.dtype}, not int8 and float32"
    return same_kind(OpCall(call.device, (x, bias)))


def _lines(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """x with contiguous lanes, copied only where it must be, and the stride of its rows."""
    row, lane = x.stride()
    if lane == 1:
        return x, row
    return x.contiguous(), x.shape[1]


@linear_op.impl("native", device="cpu", native=True, supports=_kinds_fit, rank=10)
def native_linear(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_linear``. The result raises MemoryError where scratch memory cannot be had."""
    run, pack = entry(library, "camshaft_linear", "PPPPPllllliii")
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
        if run(pack(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, y.data_ptr(), tokens,
                    rows, depth, x_row, weight_row, kinds[dtype], kinds[weight.dtype], num_threads())):
            raise MemoryError("linear: no memory for scratch space")
        return y

    return linear


def _bind_scaled(library: ctypes.CDLL, name: str, layout: str, *codes: int) -> Callable[..., torch.Tensor]:
    """Bind a product with int8 weights; ``codes`` are what its struct has between the code of x and the threads."""
    run, pack = entry(library, name, layout)
    kinds, num_threads = KINDS, torch.get_num_threads

    def scaled(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        tokens, depth = x.shape
        rows = weight.shape[0]
        x, x_row = _lines(x)
        weight, weight_row = _lines(weight)
        y = x.new_empty(tokens, rows)
        if run(pack(x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), scale.data_ptr(),
                    y.data_ptr(), tokens, rows, depth, x_row, weight_row, kinds[x.dtype], *codes, num_threads())):
            raise MemoryError(f"{name}: no memory for scratch space")
        return y

    return scaled


@linear_w8a16_op.impl("native", device="cpu", native=True, supports=_int8_fits, rank=10)
def native_linear_w8a16(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_linear`` with int8 weights. The result raises MemoryError where scratch memory cannot be had."""
    return _bind_scaled(library, "camshaft_linear", "PPPPPllllliii", _INT8)


@linear_w8a8_op.impl("native", device="cpu", native=True, supports=_int8_fits, rank=10)
def native_linear_w8a8(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_linear_int8``. The result raises MemoryError where scratch memory cannot be had."""
    return _bind_scaled(library, "camshaft_linear_int8", "PPPPPlllllii")
