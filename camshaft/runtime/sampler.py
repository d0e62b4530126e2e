"""From logits to tokens: the sampling arguments of a step, the edits of rows that have some, the bound kernel.

Owns what surrounds the ``sample`` op. The op itself, and the random numbers, are ``kernels/sampling``; what an edit
does is ``edits.py``. Rows without edits are sampled where they lie, edited ones on a copy: the logits stay raw.
Legend: S sampled rows, E edited ones among them, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from camshaft.core.errors import UserError
from camshaft.engine.artifact import Engine
from camshaft.kernels.op import TensorInfo
from camshaft.kernels.sampling.philox import uniforms
from camshaft.runtime.binding import bind_op
from camshaft.runtime.edits import RowEdits, apply_edits
from camshaft.runtime.inputs import RowState
from camshaft.runtime.logprobs import copied_rows, slices
from camshaft.runtime.processors import run_processors
from camshaft.runtime.step import BoolArray, Int32Array, StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picks:
    """What was sampled for a step's S rows; the fields are those of ``StepOutput``."""

    token_ids: Int32Array
    finite: BoolArray
    failures: tuple[tuple[int, Exception], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _EditedRow:
    """Its place among the S rows, its edits, and the index of the token to come in its output."""

    place: int
    edits: RowEdits
    output_index: int


class Sampler:
    """Picks a token for every sampled row of a step, none at ``num_token_ids`` or above."""

    def __init__(self, engine: Engine, device: torch.device, num_token_ids: int) -> None:
        build, vocab_size = engine.manifest.build, engine.manifest.model.vocab_size
        self._device = device
        self._vocab_size = vocab_size
        self._num_token_ids = num_token_ids
        self._kernel = _bind_sample(engine, device, getattr(torch, build.dtype))
        self._edited_kernel = _bind_sample(engine, device, torch.float32)
        zeros = torch.zeros(build.max_batch_size, device=device)
        self._greedy = (zeros, zeros.to(torch.int32), torch.ones_like(zeros), zeros, zeros)

    def sample(self, logits_SV: torch.Tensor, rows: RowState, plan: StepPlan) -> Picks:
        """Tokens of the plan's S sampled rows; an edited row's history takes its own. Leaves the logits as they are."""
        picked, indices = plan.rows[plan.samples], plan.output_indices[plan.samples]
        arguments = self._arguments(rows, picked, indices)
        edited = _edited_rows(rows, picked, indices) if rows.edits else []
        if not edited:
            token_ids, finite = self._kernel(self._existing(logits_SV), *arguments)
            return Picks(token_ids=token_ids.cpu().numpy().astype(np.int32), finite=finite.cpu().numpy())
        return self._sample_mixed(logits_SV, arguments, edited)

    def _arguments(self, rows: RowState, picked: Int32Array, indices: Int32Array) -> tuple[torch.Tensor, ...]:
        temperature = rows.temperature[picked]
        if not temperature.any():
            return tuple(values[:len(picked)] for values in self._greedy)
        drawn = uniforms(rows.seed[picked], rows.choice[picked], indices)
        return tuple(torch.from_numpy(values).to(self._device) for values in (
            temperature, rows.top_k[picked], rows.top_p[picked], rows.min_p[picked], drawn))

    def _existing(self, logits: torch.Tensor) -> torch.Tensor:
        """Without the ids that pad the vocabulary."""
        return logits if self._num_token_ids == self._vocab_size else logits[:, :self._num_token_ids]

    def _sample_mixed(self, logits_SV: torch.Tensor, arguments: tuple[torch.Tensor, ...],
                      edited: list[_EditedRow]) -> Picks:
        """All rows where they lie, then the edited ones again: that costs less than leaving them out by a copy."""
        places = np.array([row.place for row in edited], np.int64)
        index = torch.from_numpy(places).to(self._device)
        temperature, *others = arguments
        token_ids, finite = (tensor.cpu().numpy() for tensor in self._kernel(
            self._existing(logits_SV), temperature.index_fill(0, index, 0.0), *others))
        token_ids = token_ids.astype(np.int32)
        failures: dict[int, Exception] = {}
        for piece in slices(len(edited), self._vocab_size):
            logits_EV = copied_rows(logits_SV, places[piece]).to(torch.float32)
            token_ids[places[piece]], errors = self._sample_edited(
                logits_EV, tuple(part[index[piece]] for part in arguments), edited[piece],
                finite[places[piece]].tolist())
            failures |= errors
        for row in edited:
            row.edits.append(int(token_ids[row.place]))
        return Picks(token_ids=token_ids, finite=finite, failures=tuple(sorted(failures.items())))

    def _sample_edited(self, logits_EV: torch.Tensor, arguments: tuple[torch.Tensor, ...],
                       edited: Sequence[_EditedRow], sound: list[bool]) -> tuple[Any, dict[int, Exception]]:
        """Tokens [E], and errors by place; ``sound`` [E] are the rows of finite logits. Edits ``logits_EV``."""
        logits_EV[:, self._num_token_ids:] = -torch.inf
        apply_edits(logits_EV, [row.edits for row in edited], [row.output_index for row in edited])
        failures: dict[int, Exception] = {}
        for row, logits_V, is_sound in zip(edited, logits_EV, sound, strict=True):
            if row.edits.sampling.processors and is_sound:
                try:
                    logits_V.copy_(run_processors(row.edits.sampling.processors, row.edits.tokens, logits_V.cpu()))
                except UserError as error:
                    failures[row.place] = error
        token_ids, pickable = (tensor.cpu().numpy() for tensor in self._edited_kernel(
            self._existing(logits_EV), *arguments))
        for row, is_sound, is_pickable in zip(edited, sound, pickable.tolist(), strict=True):
            if is_sound and not is_pickable:
                failures.setdefault(row.place, row.edits.exhausted(row.output_index))
        return token_ids, failures


def _edited_rows(rows: RowState, picked: Int32Array, indices: Int32Array) -> list[_EditedRow]:
    """The edited ones of ``picked``; edits that have come to their end are forgotten."""
    found = []
    for place, (row, index) in enumerate(zip(picked.tolist(), indices.tolist(), strict=True)):
        edits = rows.edits.get(row)
        if edits is None:
            continue
        if edits.is_over(index):
            del rows.edits[row]
            continue
        edits.check_index(index)
        found.append(_EditedRow(place, edits, index))
    return found


def _bind_sample(engine: Engine, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
    column = {kind: TensorInfo(kind, (None,)) for kind in (torch.float32, torch.int32)}
    number, count = column[torch.float32], column[torch.int32]
    logits = TensorInfo(dtype, (None, engine.manifest.model.vocab_size))
    return bind_op(engine, "sample", device, (logits, number, count, number, number, number))
