"""From logits to tokens: the sampling arguments of a step, suppression of early stops, the bound kernel.

Owns what surrounds the ``sample`` op. The op itself, and the random numbers, are ``kernels/sampling``.
Legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from camshaft.core.device import probe
from camshaft.engine.artifact import Engine
from camshaft.kernels.dispatch import bind, choose
from camshaft.kernels.op import OPS, OpCall, TensorInfo
from camshaft.kernels.sampling.philox import uniforms
from camshaft.runtime.inputs import RowState
from camshaft.runtime.step import BoolArray, Int32Array, StepPlan


class Sampler:
    """Picks a token for every sampled row of a step."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        build = engine.manifest.build
        self._device = device
        self._kernel = _bind_sample(engine, device)
        size = build.max_batch_size
        zeros = torch.zeros(size, device=device)
        self._greedy = (zeros, zeros.to(torch.int32), torch.ones(size, device=device), zeros, zeros)

    def sample(self, logits_SV: torch.Tensor, rows: RowState, plan: StepPlan) -> tuple[Int32Array, BoolArray]:
        """Token ids [S] and whether each row's logits were finite [S]; may overwrite ``logits_SV``."""
        picked, indices = plan.rows[plan.samples], plan.output_indices[plan.samples]
        if rows.suppressed:
            self._suppress(logits_SV, rows, picked, indices)
        temperature = rows.temperature[picked]
        if not temperature.any():
            arguments = tuple(values[:len(picked)] for values in self._greedy)
        else:
            drawn = uniforms(rows.seed[picked], rows.choice[picked], indices)
            arguments = tuple(torch.from_numpy(values).to(self._device) for values in (
                temperature, rows.top_k[picked], rows.top_p[picked], rows.min_p[picked], drawn))
        token_ids, finite = self._kernel(logits_SV, *arguments)
        return token_ids.cpu().numpy().astype(np.int32), finite.cpu().numpy()

    def _suppress(self, logits_SV: torch.Tensor, rows: RowState, picked: Int32Array, indices: Int32Array) -> None:
        """Mask ids that may not be sampled yet; a row whose minimum is reached is forgotten."""
        for place, (row, index) in enumerate(zip(picked.tolist(), indices.tolist(), strict=True)):
            banned = rows.suppressed.get(row)
            if banned is None:
                continue
            if index >= rows.min_tokens[row]:
                del rows.suppressed[row]
            else:
                logits_SV[place, torch.from_numpy(banned.astype(np.int64)).to(self._device)] = -torch.inf


def _bind_sample(engine: Engine, device: torch.device) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The best ``sample`` for this engine's logits; cheap, so it is decided at start and not recorded."""
    op = OPS.get("sample")
    dtype = getattr(torch, engine.manifest.build.dtype)
    parameters = tuple(TensorInfo(kind, (None,)) for kind in (
        torch.float32, torch.int32, torch.float32, torch.float32, torch.float32))
    call = OpCall(probe(device.type), (TensorInfo(dtype, (None, engine.manifest.model.vocab_size)), *parameters))
    library = engine.library()
    return bind(op, choose(op, call, native=library is not None).impl, library)
