"""CPU implementations of the norms in native C. Owns the argument passing to ``cpu.c``."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import torch

from camshaft.kernels.native import KINDS, entry, same_kind
from camshaft.kernels.norm.ref import add_layer_norm_op, add_rms_norm_op, layer_norm_op, rms_norm_op
from camshaft.kernels.op import OpCall

_Norm = Callable[[torch.Tensor, "torch.Tensor | None", torch.Tensor, "torch.Tensor | None", float],
                 tuple[torch.Tensor, "torch.Tensor | None"]]


def _rms_kinds(call: OpCall) -> str | None:
    """``same_kind``, but for a weight in float32, which 16-bit values may stand beside."""
    *values, weight, _ = call.args
    return same_kind(dataclasses.replace(call, args=tuple(values)) if weight.dtype == torch.float32 else call)


def _lines(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """x with contiguous lanes, and the strides of its first and second dimension; copied only where it must be."""
    strides = x.stride()
    if strides[-1] == 1:
        if len(strides) == 2:
            return x, strides[0], 0
        if len(strides) == 3:
            return x, strides[0], strides[1]
    x = x.contiguous()
    return (x, x.stride(0), x.stride(1)) if len(strides) == 3 else (x, x.shape[-1], 0)


def _bind(library: ctypes.CDLL, centre: bool) -> _Norm:
    """``norm(x, residual, weight, bias, eps) -> (result, x + residual or None)``."""
    run, pack = entry(library, "camshaft_norm", "PPPPPPlllllllfiiii")
    kinds, num_threads = KINDS, torch.get_num_threads

    def norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None,
             eps: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = x.shape
        size = shape[-1]
        out = x.new_empty(*shape)
        x, x_outer, x_inner = _lines(x)
        total, total_address, r_address, r_outer, r_inner = None, 0, 0, 0, 0
        if residual is not None:
            residual, r_outer, r_inner = _lines(residual)
            total = x.new_empty(*shape)
            r_address, total_address = residual.data_ptr(), total.data_ptr()
        run(pack(x.data_ptr(), r_address, weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
                 total_address, x_outer, x_inner, r_outer, r_inner, x.numel() // size if size else 0,
                 shape[1] if len(shape) == 3 else 1, size, eps, centre, kinds[x.dtype], kinds[weight.dtype],
                 num_threads()))
        return out, total

    return norm


@rms_norm_op.impl("native", device="cpu", native=True, supports=_rms_kinds, rank=10)
def native_rms_norm(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_norm`` as RMS norm."""
    norm = _bind(library, centre=False)

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm(x, None, weight, None, eps)[0]

    return rms_norm


@add_rms_norm_op.impl("native", device="cpu", native=True, supports=_rms_kinds, rank=10)
def native_add_rms_norm(library: ctypes.CDLL) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Bind ``camshaft_norm`` as RMS norm after a residual add."""
    norm = _bind(library, centre=False)

    def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        return norm(x, residual, weight, None, eps)

    return add_rms_norm


@layer_norm_op.impl("native", device="cpu", native=True, supports=same_kind, rank=10)
def native_layer_norm(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_norm`` as layer norm."""
    norm = _bind(library, centre=True)

    def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        return norm(x, None, weight, bias, eps)[0]

    return layer_norm


@add_layer_norm_op.impl("native", device="cpu", native=True, supports=same_kind, rank=10)
def native_add_layer_norm(library: ctypes.CDLL) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Bind ``camshaft_norm`` as layer norm after a residual add."""
    return _bind(library, centre=True)
