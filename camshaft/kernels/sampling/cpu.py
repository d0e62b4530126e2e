"""CPU implementations of ``sample``: native C, and torch that sorts the sampled rows only.

Owns the argument passing to ``cpu.c``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.kernels.native import KINDS, entry
from camshaft.kernels.op import OpCall, TensorInfo
from camshaft.kernels.sampling.ref import sample as reference
from camshaft.kernels.sampling.ref import sample_op

_PARAMETERS = (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
               ("min_p", torch.float32), ("uniform", torch.float32))


def _supports(call: OpCall) -> str | None:
    logits, *parameters = call.args
    if isinstance(logits, TensorInfo) and logits.dtype not in KINDS:
        return f"logits are {logits.dtype}, not one of {', '.join(map(str, KINDS))}"
    for (name, dtype), tensor in zip(_PARAMETERS, parameters, strict=True):
        if isinstance(tensor, TensorInfo) and tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
    return None


@sample_op.impl("native", device="cpu", native=True, supports=_supports, rank=10)
def native_sample(library: ctypes.CDLL) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Bind ``camshaft_sample``. The result raises MemoryError where scratch memory cannot be had."""
    run, pack = entry(library, "camshaft_sample", "PPPPPPPPlllii")
    kinds, empty, num_threads = KINDS, torch.empty, torch.get_num_threads

    def sample(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
               min_p: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        rows, count = logits.shape
        ids, finite = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.bool)
        if run(pack(logits.data_ptr(), temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr(),
                    uniform.data_ptr(), ids.data_ptr(), finite.data_ptr(), logits.stride(0), rows, count,
                    kinds[logits.dtype], num_threads())):
            raise MemoryError("sample: no memory for scratch space")
        return ids, finite

    return sample


@sample_op.impl("greedy_first", device="cpu", rank=0)
def sample_greedy_first(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
                        min_p: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy rows need no order of the vocabulary, which costs a hundred times their maximum; the others do."""
    best, ids = logits.max(dim=1)
    finite = torch.isfinite(best)
    picked = torch.where(finite, ids, 0)
    sampled = temperature.nonzero()[:, 0]
    if len(sampled):
        chosen, _ = reference(logits[sampled], *(values[sampled] for values in (temperature, top_k, top_p, min_p,
                                                                                 uniform)))
        picked[sampled] = chosen
    return picked, finite
