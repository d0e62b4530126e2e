"""CPU implementations of the gated activations in native C. Owns the argument passing to ``cpu.c``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import MappingProxyType

import torch

from camshaft.kernels.act.ref import gelu_mul_op, silu_mul_op
from camshaft.kernels.native import KINDS, entry, same_kind
from camshaft.kernels.op import OpCall

_SILU, _GELU_TANH, _GELU = range(3)
"""The ``form`` codes of ``cpu.c``."""
_GELU_FORMS = MappingProxyType({"none": _GELU, "tanh": _GELU_TANH})


def _bind(library: ctypes.CDLL) -> Callable[[torch.Tensor, int], torch.Tensor]:
    run, pack = entry(library, "camshaft_gated", "PPllliii")
    kinds, num_threads = KINDS, torch.get_num_threads

    def gated(gate_up: torch.Tensor, form: int) -> torch.Tensor:
        shape, strides = gate_up.shape, gate_up.stride()
        if len(shape) == 2 and strides[1] == 1:
            rows, stride = shape[0], strides[0]
        else:
            gate_up = gate_up.contiguous()
            rows, stride = gate_up.numel() // max(shape[-1], 1), shape[-1]
        size = shape[-1] // 2
        out = gate_up.new_empty(*shape[:-1], size)
        run(pack(gate_up.data_ptr(), out.data_ptr(), stride, rows, size, form, kinds[gate_up.dtype], num_threads()))
        return out

    return gated


@silu_mul_op.impl("native", device="cpu", native=True, supports=same_kind, rank=10)
def native_silu_mul(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_gated`` as SiLU."""
    gated = _bind(library)

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        return gated(gate_up, _SILU)

    return silu_mul


def _known_form(call: OpCall) -> str | None:
    approximate = call.args[1]
    return same_kind(call) if approximate in _GELU_FORMS else f"approximate={approximate!r} is not none or tanh"


@gelu_mul_op.impl("native", device="cpu", native=True, supports=_known_form, rank=10)
def native_gelu_mul(library: ctypes.CDLL) -> Callable[..., torch.Tensor]:
    """Bind ``camshaft_gated`` as GELU."""
    gated, forms = _bind(library), _GELU_FORMS

    def gelu_mul(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
        return gated(gate_up, forms[approximate])

    return gelu_mul
