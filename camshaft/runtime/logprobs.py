"""Log-probabilities of tokens from a step's raw logits, as host arrays.

Owns what surrounds the ``logprobs`` op: which rows, and in slices, so that what a kernel takes beside the logits
stays bounded. The op itself is ``kernels/sampling``.
Legend: L rows of logits, V vocabulary, M tokens asked about, K likeliest ones.
"""

from __future__ import annotations

import numpy as np
import torch

from camshaft.engine.artifact import Engine
from camshaft.kernels.op import TensorInfo
from camshaft.runtime.binding import bind_op
from camshaft.runtime.step import Int64Array, StepLogprobs

SLICE_LOGITS = 1 << 23
"""Most logits that a step copies at once: 32 MiB of float32."""


def slices(num_rows: int, vocab_size: int) -> list[slice]:
    """``num_rows`` rows of logits in pieces of at most SLICE_LOGITS, or of one row."""
    step = max(1, SLICE_LOGITS // vocab_size)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def copied_rows(logits_LV: torch.Tensor, places: Int64Array) -> torch.Tensor:
    """The rows ``places`` of the logits, as a copy.

    On a CPU not by torch where that is possible: it would copy a whole vocabulary on OpenMP's threads, which
    wait for the cores that the kernels' own threads hold.
    """
    if logits_LV.device.type == "cpu" and logits_LV.dtype != torch.bfloat16:
        return torch.from_numpy(logits_LV.numpy()[places])
    return logits_LV.index_select(0, torch.from_numpy(places).to(logits_LV.device))


class LogprobReader:
    """Reads log-probabilities off logits it leaves as they are."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._device = device
        dtype = getattr(torch, engine.manifest.build.dtype)
        logits = TensorInfo(dtype, (None, engine.manifest.model.vocab_size))
        self._kernel = bind_op(engine, "logprobs", device, (logits, TensorInfo(torch.int64, (None,)), 1))

    def read(self, logits_LV: torch.Tensor, places: Int64Array, targets: Int64Array, num_top: int) -> StepLogprobs:
        """Of ``targets`` [M] in the rows ``places`` [M] of the logits, and of their ``num_top`` likeliest tokens."""
        parts = []
        for piece in slices(len(places), logits_LV.shape[1]):
            chosen, count = places[piece], piece.stop - piece.start
            if np.array_equal(chosen, np.arange(chosen[0], chosen[0] + count)):
                logits = logits_LV[int(chosen[0]):int(chosen[0]) + count]
            else:
                logits = copied_rows(logits_LV, chosen)
            found = self._kernel(logits, torch.from_numpy(targets[piece]).to(self._device), num_top)
            parts.append([tensor.cpu().numpy() for tensor in found])
        logprobs, ranks, top_ids, top_logprobs, finite = (np.concatenate(column) for column in zip(*parts, strict=True))
        return StepLogprobs(logprobs=logprobs, ranks=ranks.astype(np.int32), top_ids=top_ids.astype(np.int32),
                            top_logprobs=top_logprobs, finite=finite)


def spread(found: StepLogprobs, places: Int64Array, num_rows: int) -> StepLogprobs:
    """``found``, which are of the rows ``places``, among ``num_rows``; the others hold zeros and count as finite."""
    if len(places) == num_rows:
        return found
    num_top = found.top_ids.shape[1]
    whole = StepLogprobs(logprobs=np.zeros(num_rows, np.float32), ranks=np.zeros(num_rows, np.int32),
                         top_ids=np.zeros((num_rows, num_top), np.int32),
                         top_logprobs=np.zeros((num_rows, num_top), np.float32), finite=np.ones(num_rows, np.bool_))
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs", "finite"):
        getattr(whole, name)[places] = getattr(found, name)
    return whole
