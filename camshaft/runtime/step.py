"""StepPlan and StepOutput: the only things that cross between executor and runtime.

Owns the plain-data format of a step. A plan is arrays plus a diff: Python objects appear only when a
request arrives. It names rows and pages, never executor objects.

Rows. A request owns one row of the runtime's resident state from arrival to release: its sampling
parameters, its page table, its last sampled token. A plan's scheduled rows come in packed order,
generation rows first. A generation row feeds exactly one token, the last one sampled for that row,
which the executor need not know yet. A context row feeds the next ``query_lens`` prompt tokens, found
in ``context_token_ids`` in packed order.

Order inside a step: arrivals, page updates, page copies, forward (KV writes and attention), sampling.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]


class LogitsProcessor(Protocol):
    """Custom code that changes one request's logits before a token is picked."""

    def __call__(self, token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        """New logits ``[V]`` from prompt and output so far and the logits (float32, on the CPU), which it may change.

        What it raises ends that request alone.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of a row, resolved: no None where a number is meant, no "auto".

    Order of effects on a row's logits: bias, allowed ids, repetition penalty, presence and frequency penalties, bad
    words and n-grams, ids suppressed before ``min_tokens``, processors; then the ``sample`` op. Log-probabilities
    are those of the raw logits, before all of it.
    """

    temperature: float
    """0 is greedy."""
    top_k: int
    """0 keeps all."""
    top_p: float
    """1 keeps all."""
    min_p: float
    """0 keeps all."""
    seed: int
    """64-bit; the random stream is (seed, choice, output index)."""
    choice: int
    min_tokens: int
    """While the output index is below this, ``suppressed_token_ids`` cannot be sampled."""
    suppressed_token_ids: Int32Array
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of every token in prompt or output (Keskar et al., 2019)."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logit of every token in the output, once an occurrence."""
    no_repeat_ngram_size: int = 0
    """No n-gram of prompt and output comes twice; 0: off."""
    bad_words: tuple[Int32Array, ...] = ()
    """Token sequences that must not appear in the output; what completes one is never picked."""
    bias_token_ids: Int32Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    bias_values: Float32Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    """Added to the logits of ``bias_token_ids``."""
    allowed_token_ids: Int32Array | None = None
    """Nothing else can be picked; None: everything may."""
    num_logprobs: int | None = None
    """Log-probabilities wanted for every output token: its own and those of so many likeliest; None: none."""
    num_prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def needs_history(self) -> bool:
        """Whether picking a token depends on those before it."""
        return bool(self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty
                    or self.no_repeat_ngram_size or self.bad_words or self.processors)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowArrival:
    """A request takes a row. Its page-table row starts empty; pages follow in ``PageUpdates``."""

    row: int
    epoch: int
    sampling: RowSampling
    history: Int32Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Prompt and the output so far (a preempted request has some), where ``sampling.needs_history``; else empty."""
    num_prompt_tokens: int = 0
    """How many tokens of ``history`` are prompt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageUpdates:
    """Diff of one life cycle's page tables and the pages to copy before the step writes.

    ``page_table[rows[i], columns[i]] = pages[i]``; then page ``copy_from[j]`` is copied whole to ``copy_to[j]``.
    """

    rows: Int32Array
    columns: Int32Array
    pages: Int32Array
    copy_from: Int32Array
    copy_to: Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. R scheduled rows, T packed tokens, S sampled rows (those with ``samples`` set)."""

    step: int
    arrivals: tuple[RowArrival, ...]
    page_updates: tuple[PageUpdates, ...]
    """One entry a life cycle, in engine order."""
    rows: Int32Array
    """[R] row of each scheduled request, generation rows first."""
    epochs: Int32Array
    """[R] the row's epoch; echoed in the output."""
    num_generation: int
    """How many of ``rows``, from the front, are generation rows."""
    query_lens: Int32Array
    """[R] tokens this step feeds for the row; 1 for a generation row."""
    start_positions: Int32Array
    """[R] position of the row's first fed token = tokens already in its cache."""
    context_token_ids: Int32Array
    """[T - num_generation] prompt tokens of the context rows, packed."""
    samples: BoolArray
    """[R] whether the row's last fed token yields a sampled token (false for a chunk before the last)."""
    output_indices: Int32Array
    """[R] index the sampled token will have in the request's output; meaningful where ``samples``."""
    score_lens: Int32Array | None = None
    """[R] how many of the row's fed tokens, from the first, are scored: the log-probability of the prompt token that
    follows each is wanted. None: no row has any. A scored row's last fed token is scored too unless it ``samples``
    or is the prompt's last."""
    score_targets: Int32Array | None = None
    """[sum of score_lens] the prompt token after each scored one, packed in row order."""
    draft_token_ids: Int32Array | None = None
    """Speculated tokens of generation rows; None: no speculation."""
    draft_parents: Int32Array | None = None
    """Tree shape of the drafts; None: chains."""
    grammar_slots: Int32Array | None = None
    """[R] row of the grammar mask buffer that applies; None: no grammar."""
    adapter_slots: Int32Array | None = None
    """[R] loaded adapter of each row; None: base model only."""
    input_embeddings: Float32Array | None = None
    """[T, H] replaces token embeddings where given."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.num_generation + len(self.context_token_ids)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLogprobs:
    """Log-probabilities of M tokens, from the fp32 log-softmax of raw logits."""

    logprobs: Float32Array
    """[M] of the token picked, or of the prompt token that came."""
    ranks: Int32Array
    """[M] its place among all tokens by likelihood, from 1."""
    top_ids: Int32Array
    """[M, K] the likeliest tokens in order (ties by id); K is the most any of the M asked for."""
    top_logprobs: Float32Array
    """[M, K]"""
    finite: BoolArray
    """[M] False where the logits held NaN or infinity above the mask."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """Results of a step, in the plan's row order restricted to sampled rows."""

    step: int
    rows: Int32Array
    """[S]"""
    epochs: Int32Array
    """[S]"""
    token_ids: Int32Array
    """[S]"""
    finite: BoolArray
    """[S] False where the row's logits held NaN or infinity above the mask: that request ends with an error."""
    logprobs: StepLogprobs | None = None
    """For all S rows, when any of them wants log-probabilities."""
    scores: StepLogprobs | None = None
    """For the plan's scored tokens, packed as ``score_targets``; a row that is not finite in one ends with an error."""
    failures: tuple[tuple[int, Exception], ...] = ()
    """(place among the S rows, error) of rows whose logits processor raised; their token means nothing."""


class StepHandle(Protocol):
    """A submitted step. ``result`` waits for it and may be called once."""

    def result(self) -> StepOutput:
        """The step's output; raises what the step raised."""
        ...


class StepRunner(Protocol):
    """What an executor needs of a model engine; ``runtime.model_engine.ModelEngine`` is the real one."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step. Steps run in submission order, so a generation row may feed a token still in flight."""
        ...
