"""A StepRunner without a model: it stores prefix hashes where a real engine stores keys and values.

Owns a strict model of the world that a stream of plans must respect. Every slot of every page holds the
hash of the sequence up to that token, every row's reads are compared with the row's own history, and a
plan that breaks a rule raises InternalError naming it (also kept in ``violations``, because an executor
turns the exception into error increments). Needs numpy only. Public: policy and cache authors use it.

Rules beyond the content check: page 0 is never read or written; a page is written by one row at a time,
from its first slot or after this row's own copy; a page that a row holds is not written by another;
epochs, positions and output indices advance exactly; the history that arrives with a row is what the row feeds;
logits rows stay within their bound.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.runtime.step import (
    BoolArray,
    Int64Array,
    PageUpdates,
    RowArrival,
    StepLogprobs,
    StepOutput,
    StepPlan,
)
from camshaft.testing.fake_logits import UInt64Array, picked_token, powers, prefix_hashes, step_logprobs

_NO_PAGE = -1
_UNKNOWN = -1


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
    window: int | None
    sinks: int

    def reach(self, readers: Int64Array, stops: Int64Array) -> BoolArray:
        """[rows, positions below the last stop] what a row's tokens from position ``reader`` to ``stop`` read."""
        positions = np.arange(int(stops.max()))
        read = positions < stops[:, None]
        if self.window is not None:
            read &= (positions > readers[:, None] - self.window) | (positions < self.sinks)
        return read


class FakeModelEngine:
    """Implements ``StepRunner``. ``num_pages`` counts the trash page, one entry a life cycle, as ``life_cycles`` has.

    A row's reads are checked where its life cycles reach. One of them must reach back a token at least: that is how a
    row knows what its shared pages stand for.
    ``fail_at`` may be set at any time: the step with that number raises RuntimeError, on ``submit`` or, with
    ``fail_on_result``, from its handle. ``poison_rows`` holds rows whose next sample reports ``finite=False``,
    ``failing_processor_rows`` those whose next sample reports a failed logits processor. ``max_logits_rows`` bounds
    what a step samples and scores. ``spoiling_token`` is an id whose row writes NaN from then on, and in the whole
    chunk that holds it; who reads NaN writes and samples NaN.
    """

    def __init__(self, *, life_cycles: tuple[LifeCycleSpec, ...], num_pages: tuple[int, ...], num_rows: int,
                 max_seq_len: int, vocab_size: int, max_num_tokens: int = 1 << 30) -> None:
        page_size = self.page_size = life_cycles[0].page_size
        self._require(any(spec.window is None or spec.window > 1 for spec in life_cycles), "no token sees another")
        self.max_seq_len = max_seq_len
        self.vocab_size = vocab_size
        self.max_num_tokens = max_num_tokens
        self.max_logits_rows = 1 << 30
        self.fail_at: int | None = None
        self.fail_on_result = False
        self.poison_rows: set[int] = set()
        self.failing_processor_rows: set[int] = set()
        self.spoiling_token: int | None = None
        self.violations: list[str] = []
        self.plans: int = 0
        """Steps that ran."""
        columns = -(-max_seq_len // page_size)
        self._pools = [_Pool(np.zeros((pages, page_size), np.uint64), np.full((pages, page_size), -1),
                             np.zeros((pages, page_size), np.bool_), np.full(pages, -1), np.full(pages, -1),
                             np.full((num_rows, columns), _NO_PAGE), np.full((num_rows, columns), -1), spec.window,
                             spec.sinks)
                       for spec, pages in zip(life_cycles, num_pages, strict=True)]
        self._powers = powers(max_seq_len)
        self._uid = np.full(num_rows, -1)
        self._epoch = np.full(num_rows, -1)
        self._length = np.full(num_rows, -1)
        self._num_output = np.zeros(num_rows, np.int64)
        self._last_token = np.full(num_rows, -1)
        self._history = np.zeros((num_rows, max_seq_len), np.uint64)
        self._arrived: list[RowArrival | None] = [None] * num_rows
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
            self._check_reads(pool, rows, starts, starts + lens)
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
        self._num_output[row], self._last_token[row] = _UNKNOWN, -1
        self._arrived[row] = arrival
        if arrival.sampling.needs_history:
            self._require(0 < arrival.num_prompt_tokens <= len(arrival.history), f"row {row} arrives without history")
            self._num_output[row] = len(arrival.history) - arrival.num_prompt_tokens
        else:
            self._require(not len(arrival.history), f"row {row} brings a history that nothing asks for")
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
        expected, indices = self._num_output[rows][plan.samples], plan.output_indices[plan.samples]
        self._require(bool(((indices == expected) | (expected == _UNKNOWN) & (indices >= 0)).all()),
                      "output indices are off")
        self._check_scores(plan)

    def _adopt_prefix(self, row: int, start: int) -> None:
        """Take over what the row's shared or copied pages hold; it must be one coherent sequence."""
        known = np.zeros(start, np.bool_)
        for pool in self._pools if start else ():
            positions = np.flatnonzero(pool.reach(np.array([start]), np.array([start]))[0])
            pages, slots = pool.table[row, positions // self.page_size], positions % self.page_size
            self._require(bool((pages > 0).all()), f"row {row} starts at {start} without pages for its prefix")
            tokens, prefix = pool.token[pages, slots], pool.prefix[pages, slots]
            self._require(bool((tokens >= 0).all()), f"row {row} shares a slot that was never written")
            steps = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers[positions]
            before = np.concatenate([np.zeros(1, np.uint64), prefix[:-1]])
            after_another = np.diff(positions, prepend=-1) == 1
            self._require(bool((prefix == before + steps)[after_another].all()),
                          f"row {row} shares pages of different sequences")
            self._require(bool((self._history[row, positions] == prefix)[known[positions]].all()),
                          f"row {row} shares different sequences in its life cycles")
            self._history[row, positions], known[positions] = prefix, True
        self._require(bool(known[-1:].all()), f"row {row} does not know its last token")
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
        spoiling = np.concatenate([row_of[tokens == self.spoiling_token], self._reads_spoiled(rows, starts, starts)])
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

    def _reads_spoiled(self, rows: Int64Array, readers: Int64Array, stops: Int64Array) -> Int64Array:
        """Those of ``rows`` whose tokens from ``readers`` on read NaN below ``stops``."""
        positions = np.arange(int(stops.max()))
        found = np.zeros(len(rows), np.bool_)
        for pool in self._pools if self.spoiling_token is not None else ():
            pages = pool.table[rows][:, positions // self.page_size]
            found |= (pool.spoiled[pages, positions % self.page_size] & pool.reach(readers, stops)).any(axis=1)
        return rows[found]

    def _check_reads(self, pool: _Pool, rows: Int64Array, starts: Int64Array, lengths: Int64Array) -> None:
        mask = pool.reach(starts, lengths)
        positions = np.arange(mask.shape[1])
        columns = positions // self.page_size
        pages = pool.table[rows][:, columns]
        self._require(bool((pages[mask] > 0).all()), "a row reads a page it does not hold")
        same = pool.prefix[pages, positions % self.page_size] == self._history[rows][:, positions]
        self._require(bool((same | ~mask).all()),
                      f"rows {rows[(~same & mask).any(axis=1)]} read what their requests did not write")
        foreign = ((pool.written_at[pages] > pool.acquired_at[rows][:, columns])
                   & (pool.writer[pages] != self._uid[rows][:, None]))
        self._require(not (foreign & mask).any(), "a page was written by another row while this one held it")

    def _check_scores(self, plan: StepPlan) -> None:
        lens, targets = plan.score_lens, plan.score_targets
        num_scores = 0 if lens is None else int(lens.sum())
        self._require(num_scores + int(plan.samples.sum()) <= self.max_logits_rows, "more logits rows than there are")
        if lens is None or targets is None:
            self._require(lens is None and targets is None, "scores without lengths or without targets")
            return
        self._require(len(lens) == plan.num_rows and len(targets) == num_scores, "scores do not add up")
        self._require(bool(((lens >= 0) & (lens <= plan.query_lens - plan.samples)).all()), f"score_lens {lens}")
        firsts = np.cumsum(plan.query_lens) - plan.query_lens - plan.num_generation
        firsts_scored = np.cumsum(lens) - lens
        for place in np.flatnonzero(lens).tolist():
            fed = plan.context_token_ids[firsts[place]:firsts[place] + plan.query_lens[place]]
            wanted = targets[firsts_scored[place]:firsts_scored[place] + lens[place]]
            arrival = self._arrived[plan.rows[place]]
            self._require(arrival is not None and arrival.sampling.num_prompt_logprobs is not None,
                          f"row {plan.rows[place]} is scored and did not ask for it")
            known = min(len(fed) - 1, len(wanted))
            self._require(bool((wanted[:known] == fed[1:known + 1]).all()), "a score's target is not the next token")

    def _prefix(self, row: int, position: int) -> int:
        return int(self._history[row, position])

    def _check_history(self, row: int) -> None:
        """At a row's first sample: what it has fed is what arrived as its history."""
        arrival = self._arrived[row]
        if arrival is not None and arrival.sampling.needs_history and self._last_token[row] < 0:
            self._require(len(arrival.history) == self._length[row] and
                          int(prefix_hashes(arrival.history)[-1]) == self._prefix(row, int(self._length[row]) - 1),
                          f"the history of row {row} is not what it fed")

    def _sample(self, plan: StepPlan, rows: Int64Array) -> StepOutput:
        sampled, indices = rows[plan.samples], plan.output_indices[plan.samples]
        tokens = np.zeros(len(sampled), np.int32)
        spoiled = self._reads_spoiled(rows, self._length[rows] - 1, self._length[rows])
        finite = ~np.isin(sampled, spoiled)
        prefixes: list[int] = []
        failures: list[tuple[int, Exception]] = []
        num_top: list[int] = []
        for place, (row, index) in enumerate(zip(sampled.tolist(), indices.tolist(), strict=True)):
            arrival = self._arrived[row]
            assert arrival is not None
            self._check_history(row)
            prefixes.append(self._prefix(row, int(self._length[row]) - 1))
            tokens[place] = picked_token(prefixes[-1], index, arrival.sampling, self.vocab_size,
                                         arrival.num_prompt_tokens)
            if arrival.sampling.num_logprobs is not None:
                num_top.append(arrival.sampling.num_logprobs)
            if row in self.poison_rows:
                self.poison_rows.discard(row)
                finite[place] = False
            if row in self.failing_processor_rows:
                self.failing_processor_rows.discard(row)
                tokens[place] = 0
                failures.append((place, RuntimeError(f"injected failure of row {row}'s processor")))
        self._last_token[sampled] = tokens
        self._num_output[sampled] = indices + 1
        logprobs = step_logprobs(prefixes, tokens.tolist(), finite, max(num_top), self.vocab_size) if num_top else None
        return StepOutput(step=plan.step, rows=plan.rows[plan.samples], epochs=plan.epochs[plan.samples],
                          token_ids=tokens, finite=finite, logprobs=logprobs, scores=self._score(plan, spoiled),
                          failures=tuple(failures))

    def _score(self, plan: StepPlan, spoiled: Int64Array) -> StepLogprobs | None:
        lens, targets = plan.score_lens, plan.score_targets
        if lens is None or targets is None:
            return None
        rows = np.repeat(plan.rows, lens)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(lens) - lens - plan.start_positions, lens)
        asked = [arrival.sampling.num_prompt_logprobs or 0 for row in plan.rows[lens > 0].tolist()
                 if (arrival := self._arrived[row]) is not None]
        prefixes = self._history[rows, positions].tolist()
        return step_logprobs(prefixes, targets.tolist(), ~np.isin(rows, spoiled), max(asked), self.vocab_size)
