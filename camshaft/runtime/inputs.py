"""Resident state of request rows, and a step's graph inputs made from it.

Owns the row arrays (page tables, last tokens, sampling parameters) and the edits of the few rows that have some:
applies a plan's diffs and builds the packed inputs with whole-array operations. Checks what is cheap to check; a
wrong plan is an InternalError.

Shapes: T tokens, R scheduled rows, S sampled rows, L rows of logits (sampled and scored), P page-table columns in use.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from camshaft.core.errors import InternalError
from camshaft.engine.manifest import Manifest
from camshaft.runtime.edits import RowEdits, edits_asked
from camshaft.runtime.step import Int32Array, Int64Array, PageUpdates, RowArrival, StepPlan

Scalar = TypeVar("Scalar", bound=np.generic)
_FIRST_ROWS = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Graph inputs of one step as host arrays; per-life-cycle ones in engine order."""

    token_ids: Int64Array
    positions: Int64Array
    slot_mapping: tuple[Int64Array, ...]
    page_table: tuple[Int32Array, ...]
    query_start: Int32Array
    seq_lens: Int32Array
    logits_rows: Int64Array
    """[L] packed tokens whose logits are wanted: of each row the scored ones, then the sampled one."""
    scored: Int64Array | None = None
    """Places of the scored tokens among the L; None: every one of them is sampled."""

    @property
    def sampled(self) -> Int64Array | None:
        """Places of the sampled tokens among the L; None: every one."""
        return None if self.scored is None else np.setdiff1d(np.arange(len(self.logits_rows)), self.scored)


class RowState:
    """One slot a request row, grown as rows appear. ``apply`` then ``build`` for each plan, in order."""

    def __init__(self, manifest: Manifest, num_pages: tuple[int, ...]) -> None:
        build = manifest.build
        self._vocab_size = manifest.model.vocab_size
        self._max_seq_len = build.longest_sequence
        self._max_logits_rows = build.max_logits_rows
        self._max_num_tokens = build.max_num_tokens
        self._max_batch_size = build.max_batch_size
        self._page_sizes = tuple(spec.page_size for spec in manifest.life_cycles)
        self._num_pages = num_pages
        self.page_tables: list[Int32Array] = [np.zeros((_FIRST_ROWS, -(-self._max_seq_len // size)), np.int32)
                                              for size in self._page_sizes]
        self.epoch = np.full(_FIRST_ROWS, -1, np.int32)
        self.last_token = np.full(_FIRST_ROWS, -1, np.int64)
        self.temperature = np.zeros(_FIRST_ROWS, np.float32)
        self.top_k = np.zeros(_FIRST_ROWS, np.int32)
        self.top_p = np.ones(_FIRST_ROWS, np.float32)
        self.min_p = np.zeros(_FIRST_ROWS, np.float32)
        self.seed = np.zeros(_FIRST_ROWS, np.uint64)
        self.choice = np.zeros(_FIRST_ROWS, np.int32)
        self.edits: dict[int, RowEdits] = {}
        """Of the rows whose sampling asks for edits, and for as long as it does."""
        self.num_logprobs: dict[int, int] = {}
        """How many likeliest tokens each row wants beside every output token's log-probability; few rows want any."""
        self.num_prompt_logprobs: dict[int, int] = {}
        """The same for the prompt's tokens."""

    def apply(self, plan: StepPlan) -> None:
        """Take arrivals and page-table changes into the resident state."""
        _require(len(plan.page_updates) == len(self._page_sizes), "one page update a life cycle")
        for arrival in plan.arrivals:
            self._arrive(arrival)
        for index, updates in enumerate(plan.page_updates):
            self._update_pages(index, updates)

    def _arrive(self, arrival: RowArrival) -> None:
        row, sampling = arrival.row, arrival.sampling
        _require(row >= 0, "row numbers that are not negative")
        if row >= len(self.epoch):
            self._grow(row + 1)
        for table in self.page_tables:
            table[row] = 0
        self.epoch[row], self.last_token[row] = arrival.epoch, -1
        self.temperature[row], self.top_k[row] = sampling.temperature, sampling.top_k
        self.top_p[row], self.min_p[row] = sampling.top_p, sampling.min_p
        self.seed[row], self.choice[row] = sampling.seed, sampling.choice
        self.edits.pop(row, None)
        if edits_asked(sampling):
            self.edits[row] = RowEdits(arrival, self._vocab_size)
        for wanted, number in ((self.num_logprobs, sampling.num_logprobs),
                               (self.num_prompt_logprobs, sampling.num_prompt_logprobs)):
            wanted.pop(row, None)
            if number is not None:
                _require(0 <= number <= self._vocab_size, "log-probabilities of at most the whole vocabulary")
                wanted[row] = number

    def _grow(self, rows: int) -> None:
        size = max(rows, 2 * len(self.epoch))
        self.page_tables = [_grown(table, size, 0) for table in self.page_tables]
        for name, filler in (("epoch", -1), ("last_token", -1), ("temperature", 0), ("top_k", 0), ("top_p", 1),
                             ("min_p", 0), ("seed", 0), ("choice", 0)):
            setattr(self, name, _grown(getattr(self, name), size, filler))

    def _update_pages(self, index: int, updates: PageUpdates) -> None:
        _require(len(updates.rows) == len(updates.columns) == len(updates.pages)
                 and len(updates.copy_from) == len(updates.copy_to), "a row and a column for every page")
        for pages in (updates.pages, updates.copy_from, updates.copy_to):
            _require(not len(pages) or (pages.min() > 0 and pages.max() < self._num_pages[index]), "pages of the pool")
        if len(updates.rows):
            _require(updates.rows.min() >= 0 and updates.rows.max() < len(self.epoch), "page updates of known rows")
            self.page_tables[index][updates.rows, updates.columns] = updates.pages

    def build(self, plan: StepPlan) -> StepInputs:
        """The graph inputs of ``plan``, whose diffs have been applied."""
        self._check(plan)
        num_generation, num_tokens, lens = plan.num_generation, plan.num_tokens, plan.query_lens
        query_start = np.zeros(plan.num_rows + 1, np.int32)
        np.cumsum(lens, out=query_start[1:])
        _require(query_start[-1] == num_tokens, "token counts that add up")
        token_ids = np.empty(num_tokens, np.int64)
        token_ids[:num_generation] = self.last_token[plan.rows[:num_generation]]
        token_ids[num_generation:] = plan.context_token_ids
        _require(token_ids.min() >= 0 and token_ids.max() < self._vocab_size, "token ids of the vocabulary")
        if num_tokens == plan.num_rows:
            token_rows, positions = plan.rows, plan.start_positions.astype(np.int64)
        else:
            token_rows = np.repeat(plan.rows, lens)
            positions = np.arange(num_tokens) + np.repeat(plan.start_positions - query_start[:-1], lens)
        seq_lens = plan.start_positions + lens
        longest = int(seq_lens.max())
        _require(longest <= self._max_seq_len, "rows within max_seq_len")
        slots, tables = [], []
        for table, size in zip(self.page_tables, self._page_sizes, strict=True):
            pages = table[token_rows, positions // size].astype(np.int64)
            _require(pages.min() > 0, "a page for every token fed")
            slots.append(pages * size + positions % size)
            tables.append(np.ascontiguousarray(table[plan.rows, :-(-longest // size)]))
        logits_rows, scored = self._logits_rows(plan, query_start)
        return StepInputs(token_ids=token_ids, positions=positions, slot_mapping=tuple(slots), page_table=tuple(tables),
                          query_start=query_start, seq_lens=seq_lens.astype(np.int32), logits_rows=logits_rows,
                          scored=scored)

    def _logits_rows(self, plan: StepPlan, query_start: Int32Array) -> tuple[Int64Array, Int64Array | None]:
        """``logits_rows`` and ``scored`` of ``StepInputs``."""
        ends = query_start[1:].astype(np.int64) - 1
        if plan.score_lens is None:
            return ends[plan.samples], None
        self._check_scores(plan, plan.score_lens)
        counts = plan.score_lens.astype(np.int64) + plan.samples
        firsts = np.cumsum(counts) - counts
        rows = np.arange(counts.sum()) + np.repeat(query_start[:-1] - firsts, counts)
        sampled = (firsts + counts - 1)[plan.samples]
        rows[sampled] = ends[plan.samples]
        _require(len(rows) <= self._max_logits_rows, f"logits of at most {self._max_logits_rows} tokens")
        return rows, np.setdiff1d(np.arange(len(rows)), sampled)

    def _check_scores(self, plan: StepPlan, score_lens: Int32Array) -> None:
        targets = plan.score_targets
        _require(targets is not None and len(targets) == score_lens.sum(), "a target for every scored token")
        if targets is not None and len(targets):
            _require(targets.min() >= 0 and targets.max() < self._vocab_size, "score targets of the vocabulary")
        _require(len(score_lens) == plan.num_rows and score_lens.min() >= 0
                 and bool((score_lens + plan.samples <= plan.query_lens).all()), "no more scored tokens than fed ones")
        _require(all(row in self.num_prompt_logprobs for row in plan.rows[score_lens > 0].tolist()),
                 "scores only of rows that want them")

    def _check(self, plan: StepPlan) -> None:
        extras = (plan.draft_token_ids, plan.draft_parents, plan.grammar_slots, plan.adapter_slots,
                  plan.input_embeddings)
        _require(all(extra is None for extra in extras), "no drafts, grammars, adapters or embeddings")
        _require(0 < plan.num_rows <= self._max_batch_size, "between one row and max_batch_size")
        _require(plan.num_tokens <= self._max_num_tokens, "at most max_num_tokens tokens")
        rows = plan.rows
        _require(all(len(each) == len(rows) for each in (plan.epochs, plan.query_lens, plan.start_positions,
                                                         plan.samples, plan.output_indices)), "a value for every row")
        _require(rows.min() >= 0 and rows.max() < len(self.epoch), "rows that arrived")
        _require(bool((self.epoch[rows] == plan.epochs).all()), "the current epoch of every row")
        _require(plan.query_lens.max() <= plan.num_tokens, "token counts that add up")
        _require(plan.query_lens.min() > 0 and bool((plan.query_lens[:plan.num_generation] == 1).all()),
                 "one token a generation row, at least one a context row")
        _require(plan.start_positions.min() >= 0, "positions that are not negative")


def _require(holds: bool | np.bool_, needed: str) -> None:
    if not holds:
        raise InternalError(f"step plan refused: needs {needed}")


def _grown(array: npt.NDArray[Scalar], rows: int, filler: float) -> npt.NDArray[Scalar]:
    larger = np.full((rows, *array.shape[1:]), filler, dtype=array.dtype)
    larger[:len(array)] = array
    return larger
