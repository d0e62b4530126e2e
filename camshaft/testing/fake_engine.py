"""A StepRunner without a model: it stores prefix hashes where a real engine stores keys and values.

Owns a strict model of the world that a stream of plans must respect. Every slot of every page holds the
hash of the sequence up to that token, every row's reads are compared with the row's own history, and a
plan that breaks a rule raises InternalError naming it (also kept in ``violations``, because an executor
turns the exception into error increments). Needs numpy only. Public: policy and cache authors use it.

Rules beyond the content check: page 0 is never read or written; a page is written by one row at a time,
from its first slot or after this row's own copy; a page that a row holds is not written by another;
epochs, positions and output indices advance exactly.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from camshaft.core.errors import InternalError
from camshaft.runtime.step import (
    BoolArray,
    Int32Array,
    Int64Array,
    PageUpdates,
    RowArrival,
    RowSampling,
    StepOutput,
    StepPlan,
)

UInt64Array = npt.NDArray[np.uint64]
_BASE = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1
_NO_PAGE = -1


def _mix(value: int) -> int:
    """Finaliser of splitmix64: spreads every input bit over the word."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _powers(count: int) -> UInt64Array:
    """``_BASE ** i`` modulo 2**64 for i below ``count``."""
    return np.cumprod(np.full(count, _BASE, dtype=np.uint64), dtype=np.uint64)


def _sampled_token(prefix: int, index: int, sampling: RowSampling, vocab_size: int) -> int:
    """The token after a history with hash ``prefix``: greedy depends on it alone, sampling on the seed too."""
    key = prefix
    if sampling.temperature > 0:
        key ^= _mix((_mix(sampling.seed) + sampling.choice * _BASE + _mix(index + 1)) & _WORD)
    token = _mix(key) % vocab_size
    if index < sampling.min_tokens:
        suppressed = set(sampling.suppressed_token_ids.tolist())
        while token in suppressed and len(suppressed) < vocab_size:
            token = (token + 1) % vocab_size
    return token


def expected_tokens(prompt: Int32Array, count: int, *, sampling: RowSampling, vocab_size: int) -> list[int]:
    """The first ``count`` tokens that ``prompt`` yields when it runs alone."""
    powers = _powers(len(prompt) + count)
    prefix = int(((prompt.astype(np.uint64) + np.uint64(1)) * powers[:len(prompt)]).sum(dtype=np.uint64))
    tokens: list[int] = []
    for index in range(count):
        tokens.append(_sampled_token(prefix, index, sampling, vocab_size))
        prefix = (prefix + (tokens[-1] + 1) * int(powers[len(prompt) + index])) % 2**64
    return tokens


@dataclasses.dataclass(slots=True)
class FakeHandle:
    """A finished fake step: its output, or the failure that ``result`` raises."""

    output: StepOutput | None
    failure: Exception | None = None

    def result(self) -> StepOutput:
        """The output, once; raises the injected failure."""
        if self.failure is not None:
            raise self.failure
        if self.output is None:
            raise InternalError("the result of a step was read twice")
        output, self.output = self.output, None
        return output


@dataclasses.dataclass(slots=True)
class _Pool:
    """One life cycle's pages: content, who wrote them, and what every row believes it holds."""

    prefix: UInt64Array
    """[pages, page_size] hash of the sequence up to the slot's token."""
    token: Int64Array
    """[pages, page_size] token id, -1 where nothing was ever written."""
    spoiled: BoolArray
    """[pages, page_size] whether the slot holds NaN."""
    writer: Int64Array
    """[pages] uid of the request that wrote the page last."""
    written_at: Int64Array
    """[pages] event number of that write."""
    table: Int64Array
    """[rows, columns]"""
    acquired_at: Int64Array
    """[rows, columns] event number of the table entry."""


class FakeModelEngine:
    """Implements ``StepRunner``. ``num_pages`` counts the trash page, one entry a life cycle.

    ``fail_at`` may be set at any time: the step with that number raises RuntimeError, on ``submit`` or, with
    ``fail_on_result``, from its handle. ``poison_rows`` holds rows whose next sample reports ``finite=False``.
    ``spoiling_token`` is an id whose row writes NaN from then on, and in the whole chunk that holds it; who reads
    NaN writes and samples NaN.
    """

    def __init__(self, *, num_pages: tuple[int, ...], page_size: int, num_rows: int, max_seq_len: int,
                 vocab_size: int, max_num_tokens: int = 1 << 30) -> None:
        self.page_size = page_size
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.max_num_tokens = max_num_tokens
        self.fail_at: int | None = None
        self.fail_on_result = False
        self.poison_rows: set[int] = set()
        self.spoiling_token: int | None = None
        self.violations: list[str] = []
        self.plans: int = 0
        """Steps that ran."""
        columns = -(-max_seq_len // page_size)
        self._pools = [_Pool(np.zeros((pages, page_size), np.uint64), np.full((pages, page_size), -1),
                             np.zeros((pages, page_size), np.bool_), np.full(pages, -1), np.full(pages, -1),
                             np.full((num_rows, columns), _NO_PAGE), np.full((num_rows, columns), -1))
                       for pages in num_pages]
        self._powers = _powers(max_seq_len)
        self._uid = np.full(num_rows, -1)
        self._epoch = np.full(num_rows, -1)
        self._length = np.full(num_rows, -1)
        self._num_output = np.zeros(num_rows, np.int64)
        self._last_token = np.full(num_rows, -1)
        self._history = np.zeros((num_rows, max_seq_len), np.uint64)
        self._sampling: list[RowSampling | None] = [None] * num_rows
        self._arrivals = 0
        self._events = 0
        self._last_step = -1

    def submit(self, plan: StepPlan) -> FakeHandle:
        """Check and run a step at once. Raises InternalError for a plan that breaks a rule."""
        failure = RuntimeError(f"injected failure of step {plan.step}") if plan.step == self.fail_at else None
        if failure is not None and not self.fail_on_result:
            raise failure
        try:
            output = self._run(plan)
        except InternalError as error:
            self.violations.append(str(error))
            raise
        self.plans += 1
        return FakeHandle(output, failure)

    def _run(self, plan: StepPlan) -> StepOutput:
        self._require(plan.step > self._last_step, f"step {plan.step} after step {self._last_step}")
        self._last_step = plan.step
        self._require(len(plan.page_updates) == len(self._pools), "one page update a life cycle is needed")
        for arrival in plan.arrivals:
            self._arrive(arrival)
        self._events += 1
        for pool, updates in zip(self._pools, plan.page_updates, strict=True):
            self._update_pages(pool, updates)
        self._check_rows(plan)
        rows, starts, lens = (array.astype(np.int64) for array in (plan.rows, plan.start_positions, plan.query_lens))
        for row, start in zip(rows[self._length[rows] < 0], starts[self._length[rows] < 0], strict=True):
            self._adopt_prefix(int(row), int(start))
        self._require(bool((self._length[rows] == starts).all()),
                      f"rows {rows[self._length[rows] != starts]} do not continue where they stopped")
        tokens = np.concatenate([self._last_token[rows[:plan.num_generation]],
                                 plan.context_token_ids.astype(np.int64)])
        self._require(bool(((tokens >= 0) & (tokens < self.vocab_size)).all()), "a token id is out of range")
        self._events += 1
        self._write(rows, starts, lens, tokens)
        for pool in self._pools:
            self._check_reads(pool, rows, starts + lens)
        return self._sample(plan, rows)

    def _require(self, holds: bool, rule: str) -> None:
        if not holds:
            raise InternalError(f"fake engine: {rule}")

    def _arrive(self, arrival: RowArrival) -> None:
        row = arrival.row
        self._require(0 <= row < len(self._uid), f"row {row} does not exist")
        self._require(arrival.epoch > self._epoch[row], f"row {row} arrives with old epoch {arrival.epoch}")
        self._arrivals += 1
        self._uid[row], self._epoch[row], self._length[row] = self._arrivals, arrival.epoch, -1
        self._num_output[row], self._last_token[row] = 0, -1
        self._sampling[row] = arrival.sampling
        for pool in self._pools:
            pool.table[row] = _NO_PAGE

    def _update_pages(self, pool: _Pool, updates: PageUpdates) -> None:
        rows, columns, pages = updates.rows, updates.columns, updates.pages
        self._require(bool(((pages > 0) & (pages < len(pool.writer))).all()), f"pages {pages} out of range")
        self._require(bool((self._uid[rows] >= 0).all()), f"rows {rows} get pages before they arrive")
        pool.table[rows, columns] = pages
        pool.acquired_at[rows, columns] = self._events
        sources, targets = updates.copy_from, updates.copy_to
        self._require(len(set(targets.tolist())) == len(targets), "a page is the target of two copies")
        self._require(not set(targets.tolist()) & set(sources.tolist()), "a copy reads a page that a copy overwrites")
        holders = {int(page): int(row) for row, page in zip(rows, pages, strict=True)}
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._require(0 < source < len(pool.writer) and pool.token[source, 0] >= 0,
                          f"copy from page {source}, which holds nothing")
            self._require(target in holders and pages.tolist().count(target) == 1,
                          f"copy to page {target}, which no single row takes in this step")
            pool.prefix[target], pool.token[target] = pool.prefix[source], pool.token[source]
            pool.spoiled[target] = pool.spoiled[source]
            pool.writer[target], pool.written_at[target] = self._uid[holders[target]], self._events

    def _check_rows(self, plan: StepPlan) -> None:
        rows, lens = plan.rows, plan.query_lens
        generation = np.arange(len(rows)) < plan.num_generation
        sized = (plan.epochs, lens, plan.start_positions, plan.samples, plan.output_indices)
        self._require(all(len(array) == len(rows) for array in sized), "arrays of different lengths")
        self._require(len(np.unique(rows)) == len(rows) > 0, f"rows {rows} are empty or repeated")
        self._require(bool(((rows >= 0) & (rows < len(self._uid))).all()), f"rows {rows} out of range")
        self._require(bool((self._epoch[rows] == plan.epochs).all()), "a row is scheduled with another epoch")
        self._require(bool((lens > 0).all()) and bool((lens[generation] == 1).all()), f"query_lens {lens}")
        self._require(int(lens[~generation].sum()) == len(plan.context_token_ids), "context tokens do not add up")
        self._require(plan.num_tokens <= self.max_num_tokens, f"{plan.num_tokens} tokens in a step")
        self._require(bool((plan.start_positions + lens <= self.max_seq_len).all()), "a row outgrows max_seq_len")
        self._require(bool(plan.samples[generation].all()), "a generation row samples nothing")
        fed = self._last_token[rows] >= 0
        self._require(bool((fed == generation).all()), "generation rows are those that sampled before, and only those")
        expected = self._num_output[rows][plan.samples]
        self._require(bool((plan.output_indices[plan.samples] == expected).all()), "output indices are off")

    def _adopt_prefix(self, row: int, start: int) -> None:
        """Take over what the row's shared or copied pages hold; it must be one coherent sequence."""
        positions = np.arange(start)
        for pool in self._pools:
            pages = pool.table[row, positions // self.page_size]
            self._require(bool((pages > 0).all()), f"row {row} starts at {start} without pages for its prefix")
            slots = positions % self.page_size
            tokens, prefix = pool.token[pages, slots], pool.prefix[pages, slots]
            self._require(bool((tokens >= 0).all()), f"row {row} shares a slot that was never written")
            steps = np.cumsum((tokens.astype(np.uint64) + np.uint64(1)) * self._powers[:start], dtype=np.uint64)
            self._require(bool((steps == prefix).all()), f"row {row} shares pages of different sequences")
            self._history[row, :start] = prefix
        self._length[row] = start

    def _write(self, rows: Int64Array, starts: Int64Array, lens: Int64Array, tokens: Int64Array) -> None:
        row_of = np.repeat(rows, lens)
        firsts = np.cumsum(lens) - lens
        positions = np.arange(len(tokens)) - np.repeat(firsts - starts, lens)
        steps = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[positions]
        sums = np.cumsum(steps, dtype=np.uint64)
        before = np.where(starts > 0, self._history[rows, np.maximum(starts - 1, 0)], np.uint64(0))
        prefix = sums + np.repeat(before - (sums[firsts] - steps[firsts]), lens)
        self._history[row_of, positions] = prefix
        self._length[rows] += lens
        slots = positions % self.page_size
        spoiling = np.concatenate([row_of[tokens == self.spoiling_token], self._reads_spoiled(rows, starts)])
        spoiled = np.isin(row_of, spoiling)
        for pool in self._pools:
            pages = pool.table[row_of, positions // self.page_size]
            self._require(bool((pages > 0).all()), f"rows {np.unique(row_of[pages <= 0])} write without a page")
            touched, first, owner = np.unique(pages, return_index=True, return_inverse=True)
            self._require(bool((row_of[first][owner] == row_of).all()), "two rows write one page in a step")
            inside = slots[first] > 0
            self._require(bool((pool.writer[touched] == self._uid[row_of[first]])[inside].all()),
                          f"pages {touched[inside]} are continued by rows that did not begin them")
            pool.prefix[pages, slots], pool.token[pages, slots] = prefix, tokens
            pool.spoiled[pages, slots] = spoiled
            pool.writer[touched], pool.written_at[touched] = self._uid[row_of[first]], self._events

    def _reads_spoiled(self, rows: Int64Array, lengths: Int64Array) -> Int64Array:
        """Those of ``rows`` with NaN among their first ``lengths`` tokens."""
        positions = np.arange(int(lengths.max()))
        found = np.zeros(len(rows), np.bool_)
        for pool in self._pools if self.spoiling_token is not None else ():
            pages = pool.table[rows][:, positions // self.page_size]
            found |= (pool.spoiled[pages, positions % self.page_size] & (positions < lengths[:, None])).any(axis=1)
        return rows[found]

    def _check_reads(self, pool: _Pool, rows: Int64Array, lengths: Int64Array) -> None:
        positions = np.arange(int(lengths.max()))
        mask = positions < lengths[:, None]
        columns = positions // self.page_size
        pages = pool.table[rows][:, columns]
        self._require(bool((pages[mask] > 0).all()), "a row reads a page it does not hold")
        same = pool.prefix[pages, positions % self.page_size] == self._history[rows][:, positions]
        self._require(bool((same | ~mask).all()),
                      f"rows {rows[(~same & mask).any(axis=1)]} read what their requests did not write")
        foreign = ((pool.written_at[pages] > pool.acquired_at[rows][:, columns])
                   & (pool.writer[pages] != self._uid[rows][:, None]))
        self._require(not (foreign & mask).any(), "a page was written by another row while this one held it")

    def _sample(self, plan: StepPlan, rows: Int64Array) -> StepOutput:
        sampled = rows[plan.samples]
        tokens = np.zeros(len(sampled), np.int32)
        finite = ~np.isin(sampled, self._reads_spoiled(rows, self._length[rows]))
        for place, (row, index) in enumerate(zip(sampled.tolist(), plan.output_indices[plan.samples].tolist(),
                                                 strict=True)):
            sampling = self._sampling[row]
            assert sampling is not None
            prefix = int(self._history[row, self._length[row] - 1])
            tokens[place] = _sampled_token(prefix, index, sampling, self.vocab_size)
            if row in self.poison_rows:
                self.poison_rows.discard(row)
                finite[place] = False
        self._last_token[sampled] = tokens
        self._num_output[sampled] += 1
        return StepOutput(step=plan.step, rows=plan.rows[plan.samples], epochs=plan.epochs[plan.samples],
                          token_ids=tokens, finite=finite)
