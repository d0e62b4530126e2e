"""CPU implementations of ``sample`` and ``logprobs``: native C, and torch that sorts no more than it must.

Owns the argument passing to ``cpu.c``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from camshaft.kernels.native import KINDS, entry
from camshaft.kernels.op import OpCall, TensorInfo
from camshaft.kernels.sampling.ref import logprobs_op, sample_op
from camshaft.kernels.sampling.ref import sample as reference

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


def _supports_logprobs(call: OpCall) -> str | None:
    logits, targets, _ = call.args
    if isinstance(logits, TensorInfo) and logits.dtype not in KINDS:
        return f"logits are {logits.dtype}, not one of {', '.join(map(str, KINDS))}"
    if isinstance(targets, TensorInfo) and targets.dtype != torch.int64:
        return f"targets are {targets.dtype}, not torch.int64"
    return None


@logprobs_op.impl("native", device="cpu", native=True, supports=_supports_logprobs, rank=10)
def native_logprobs(library: ctypes.CDLL) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Bind ``camshaft_logprobs``."""
    run, pack = entry(library, "camshaft_logprobs", "PPPPPPPllllii")
    kinds, empty, num_threads = KINDS, torch.empty, torch.get_num_threads

    def logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        targets = targets.contiguous()
        rows, count = logits.shape
        of_target, ranks = empty(rows), empty(rows, dtype=torch.int64)
        top_ids, top = empty(rows, num_top, dtype=torch.int64), empty(rows, num_top)
        finite = empty(rows, dtype=torch.bool)
        run(pack(logits.data_ptr(), targets.data_ptr(), of_target.data_ptr(), ranks.data_ptr(),
                 top_ids.data_ptr(), top.data_ptr(), finite.data_ptr(), logits.stride(0), rows, count, num_top,
                 kinds[logits.dtype], num_threads()))
        return of_target, ranks, top_ids, top, finite

    return logprobs


@logprobs_op.impl("top_only", device="any", rank=0)
def logprobs_top_only(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """Counts ranks, and orders no more than the likeliest."""
    values = logits.float()
    finite = torch.isfinite(values.amax(dim=1))
    broken = ~finite[:, None]
    values = values.masked_fill(broken, 0.0)
    normaliser = torch.logsumexp(values, dim=1, keepdim=True).double()
    chosen = values.gather(1, targets[:, None])
    ids = torch.arange(values.shape[1], device=values.device)
    ranks = 1 + (values > chosen).sum(dim=1) + ((values == chosen) & (ids < targets[:, None])).sum(dim=1)
    top_ids = _likeliest(values, num_top)
    top = values.gather(1, top_ids) - normaliser
    return ((chosen - normaliser)[:, 0].float().masked_fill(~finite, 0.0), ranks.masked_fill(~finite, 0),
            top_ids.masked_fill(broken, 0), top.float().masked_fill(broken, 0.0), finite)


def _likeliest(values: torch.Tensor, num_top: int) -> torch.Tensor:
    """Ids [M, num_top] of the largest values [M, V], lower ids first among equals, which ``topk`` leaves open."""
    rows = values.shape[0]
    if num_top == 0 or rows == 0:
        return torch.empty((rows, num_top), dtype=torch.int64, device=values.device)
    least = values.topk(num_top, dim=1).values[:, -1:]
    above, level = values > least, values == least
    kept = above | (level & (level.cumsum(1, dtype=torch.int32) <= num_top - above.sum(dim=1, keepdim=True)))
    ids = kept.nonzero()[:, 1].view(rows, num_top)
    order = values.gather(1, ids).sort(dim=1, descending=True, stable=True).indices
    return ids.gather(1, order)
