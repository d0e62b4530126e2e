"""What runs in the next step, and what its results mean.

Owns plans: generation rows first, one token each, then prompt chunks in order of admission within
``max_num_tokens``. Owns the landing of results: tokens, stops, commits to the prefix cache, release of
rows and pages once their last step has been read. Does not talk to threads or runners (``loop.py``) and
does not decide who may enter (``capacity.py``).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque

import numpy as np

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor import output
from camshaft.executor.capacity import CAPACITY_POLICIES, WaitingQueue
from camshaft.executor.decoder.stop import CONTINUE, StopTable
from camshaft.executor.kv.manager import KVCacheManager, Reservation
from camshaft.executor.messages import GenerationRequest, Increment
from camshaft.executor.request import ExecutorLimits
from camshaft.executor.stats import Counters
from camshaft.executor.table import CONTEXT, DRAINING, GENERATION, RequestTable
from camshaft.runtime.step import BoolArray, Int32Array, PageUpdates, RowArrival, StepOutput, StepPlan

_PAGES_AT_ONCE = 4
"""A generating row takes its pages a few at a time: asking for one costs several times the row's share of a
step. They come out of what the row was promised, so they keep nobody out."""
_NONE = np.zeros(0, np.int32)
_NO_UPDATES = PageUpdates(rows=_NONE, columns=_NONE, pages=_NONE, copy_from=_NONE, copy_to=_NONE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """Prompt tokens ``start`` to ``end`` of a row."""

    row: int
    start: int
    end: int
    is_last: bool


class MicroBatchScheduler:
    """Plans steps over one request table and one cache. Not thread-safe: one thread drives it."""

    def __init__(self, kv: KVCacheManager, limits: ExecutorLimits, config: SchedulerConfig) -> None:
        if config.max_batch_size is None or config.max_num_tokens is None:
            raise InternalError("the scheduler configuration is not resolved")
        if config.max_num_tokens < config.max_batch_size:
            raise InternalError("max_num_tokens below max_batch_size: running rows could starve")
        self._kv = kv
        self._max_num_tokens = config.max_num_tokens
        self._chunk_tokens = config.context_chunk_tokens or config.max_num_tokens
        self._capacity = CAPACITY_POLICIES.get(config.capacity_policy)(kv, limits)
        self._stops = StopTable(config.max_batch_size)
        self._frames: deque[StepPlan] = deque()
        self._next_step = 0
        self._arrivals: list[RowArrival] = []
        self._reserved: list[tuple[int, Reservation]] = []
        self.waiting: WaitingQueue = OrderedDict()
        self.table = RequestTable(num_rows=config.max_batch_size, max_seq_len=limits.max_seq_len)
        self.counters = Counters()

    def enqueue(self, request: GenerationRequest) -> None:
        """Append a checked request to the waiting ones."""
        self.waiting[request.id] = request

    def cancel(self, request_id: RequestId) -> Increment | None:
        """End a request in any state; its last increment, or None when it is not live."""
        if self.waiting.pop(request_id, None) is None:
            row = self.table.row_of(request_id)
            if row is None:
                return None
            self._end(row)
        self.counters.num_cancelled += 1
        return output.cancelled(request_id)

    def cancel_all(self) -> list[Increment]:
        """:meth:`cancel` for everything that is live."""
        ended = (self.cancel(request_id) for request_id in [*self.waiting, *self.table.live_ids()])
        return [increment for increment in ended if increment is not None]

    def next_plan(self) -> StepPlan | None:
        """The next step, or None when no row can use one. Counts as submitted."""
        table = self.table
        rows = table.generation_rows()
        starts = table.num_scheduled[rows]
        for row in rows[starts >= table.held_pages[rows] * self._kv.page_size].tolist():
            self._reserve_ahead(row)
        output_indices = table.num_scheduled_outputs[rows]
        table.num_scheduled[rows] += 1
        table.num_scheduled_outputs[rows] += 1
        chunks = self._plan_chunks(self._max_num_tokens - len(rows))
        if not chunks and not len(rows):
            return None
        plan = self._packed(rows, starts, output_indices, chunks)
        table.in_flight[plan.rows] += 1
        self._frames.append(plan)
        return plan

    def apply(self, out: StepOutput) -> list[Increment]:
        """Land the results of the oldest submitted step: at most one increment a request."""
        if not self._frames:
            raise InternalError(f"results of step {out.step}, but no step is in flight")
        plan = self._frames.popleft()
        sampled = plan.rows[plan.samples]
        if out.step != plan.step or not np.array_equal(out.rows, sampled) or len(out.token_ids) != len(sampled):
            raise InternalError(f"results of step {out.step} do not answer step {plan.step}")
        table, rows = self.table, plan.rows
        table.in_flight[rows] -= 1
        state = table.state[rows]
        live = ((state == CONTEXT) | (state == GENERATION)) & (table.epoch[rows] == plan.epochs)
        self._land_positions(plan, live, out.finite)
        increments = self._land_tokens(out, live[plan.samples])
        for row in rows[(table.state[rows] == DRAINING) & (table.in_flight[rows] == 0)].tolist():
            self._release(row)
        return increments

    def drop_all(self) -> None:
        """After a failure: forget every request and step, give back every row and page."""
        self._frames.clear()
        self._reserved.clear()
        self._arrivals.clear()
        self.waiting.clear()
        table = self.table
        table.in_flight[:] = 0
        table.shares[:] = False  # nothing will be reused, and the cache may be what failed
        for request_id in table.live_ids():
            row = table.row_of(request_id)
            if row is not None:
                self._end(row)
        for row in np.flatnonzero(table.state == DRAINING).tolist():
            self._release(row)

    def _plan_chunks(self, budget: int) -> list[_Chunk]:
        """Chunks of at most ``budget`` tokens together: admitted rows first, then new ones while tokens are left."""
        chunks: list[_Chunk] = []
        for row in self.table.context_rows():
            if budget <= 0:
                return chunks
            chunks.append(self._plan_chunk(row, budget))
            budget -= chunks[-1].end - chunks[-1].start
        while budget > 0 and (admission := self._capacity.admit(self.waiting, self.table)) is not None:
            self._arrive(admission.row)
            chunks.append(self._plan_chunk(admission.row, budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _arrive(self, row: int) -> None:
        request = self.table.request_at(row)
        self._stops.set_row(row, request.stop_token_ids, request.min_tokens)
        self._arrivals.append(RowArrival(row=row, epoch=int(self.table.epoch[row]), sampling=request.sampling))
        self.counters.num_cached_tokens += int(self.table.num_cached[row])

    def _plan_chunk(self, row: int, budget: int) -> _Chunk:
        table = self.table
        start, prompt_len = int(table.num_scheduled[row]), int(table.prompt_len[row])
        end = min(prompt_len, start + min(budget, self._chunk_tokens))
        self._reserve(row, end)
        table.num_scheduled[row] = end
        if end == prompt_len:
            table.state[row] = GENERATION
            table.num_scheduled_outputs[row] = 1
        return _Chunk(row, start, end, end == prompt_len)

    def _reserve_ahead(self, row: int) -> None:
        table = self.table
        num_pages = min(int(table.held_pages[row]) + _PAGES_AT_ONCE, int(table.worst_pages[row]))
        self._reserve(row, num_pages * self._kv.page_size)

    def _reserve(self, row: int, num_tokens: int) -> None:
        request_id = self.table.ids[row]
        reservation = self._kv.reserve(request_id, num_tokens)
        if reservation is None:
            raise InternalError(f"no page for token {num_tokens} of request {request_id}, which was promised one")
        self.table.held_pages[row] = max(int(self.table.held_pages[row]), self._kv.pages_for(num_tokens))
        self._reserved.append((row, reservation))

    def _packed(self, rows: Int32Array, starts: Int32Array, output_indices: Int32Array,
                chunks: list[_Chunk]) -> StepPlan:
        """The plan: generation ``rows``, then ``chunks``; takes the arrivals and pages gathered on the way."""
        table, num_generation = self.table, len(rows)
        lens = np.ones(num_generation + len(chunks), np.int32)
        samples = np.ones(num_generation + len(chunks), np.bool_)
        tokens = _NONE
        if chunks:
            rows = np.concatenate([rows, np.array([chunk.row for chunk in chunks], np.int32)])
            starts = np.concatenate([starts, np.array([chunk.start for chunk in chunks], np.int32)])
            output_indices = np.concatenate([output_indices, np.zeros(len(chunks), np.int32)])
            lens[num_generation:] = [chunk.end - chunk.start for chunk in chunks]
            samples[num_generation:] = [chunk.is_last for chunk in chunks]
            tokens = np.concatenate([table.tokens[chunk.row, chunk.start:chunk.end] for chunk in chunks])
        plan = StepPlan(step=self._next_step, arrivals=tuple(self._arrivals), page_updates=self._page_updates(),
                        rows=rows, epochs=table.epoch[rows], num_generation=num_generation, query_lens=lens,
                        start_positions=starts, context_token_ids=tokens, samples=samples,
                        output_indices=output_indices)
        self._next_step += 1
        self._arrivals.clear()
        self._reserved.clear()
        self.counters.num_steps += 1
        self.counters.num_context_tokens += len(tokens)
        return plan

    def _page_updates(self) -> tuple[PageUpdates, ...]:
        reserved = self._reserved
        if not reserved:
            return (_NO_UPDATES,) * self._kv.num_life_cycles
        rows = np.array([row for row, _ in reserved], np.int32)
        merged = []
        for changes in zip(*(reservation.updates for _, reservation in reserved), strict=True):
            counts = [len(change.columns) for change in changes]
            merged.append(PageUpdates(
                rows=np.repeat(rows, counts), columns=np.concatenate([change.columns for change in changes]),
                pages=np.concatenate([change.pages for change in changes]),
                copy_from=np.concatenate([change.copy_from for change in changes]),
                copy_to=np.concatenate([change.copy_to for change in changes])))
        return tuple(merged)

    def _land_positions(self, plan: StepPlan, live: BoolArray, finite: BoolArray) -> None:
        """Advance what is known to be sound in the cache, and share the pages that have become full.

        Only finite logits prove what was fed before them. A chunk without logits may hold NaN, even at positions
        ahead of its cause, which a kernel multiplied by zero: whoever shared such a page would fail too.
        """
        table, page_size = self.table, self._kv.page_size
        proven = live & plan.samples
        proven[plan.samples] &= finite
        rows, ends = plan.rows[proven], (plan.start_positions + plan.query_lens)[proven]
        filled = table.shares[rows] & (table.num_landed[rows] // page_size != ends // page_size)
        table.num_landed[rows] = ends
        table.num_context_landings += plan.num_rows > plan.num_generation
        for row in rows[filled].tolist():
            self._commit(row)

    def _commit(self, row: int) -> None:
        known = int(self.table.num_landed[row])
        self._kv.commit(self.table.ids[row], self.table.tokens[row, :known], known)

    def _land_tokens(self, out: StepOutput, live: BoolArray) -> list[Increment]:
        table = self.table
        broken = out.rows[live & ~out.finite]
        increments = [self._fail_row(row) for row in broken.tolist()]
        chosen = live & out.finite
        rows, tokens = out.rows, out.token_ids
        if not chosen.all():
            rows, tokens = rows[chosen], tokens[chosen]
        counts = table.num_outputs[rows]
        table.tokens[rows, table.prompt_len[rows] + counts] = tokens
        counts = counts + np.int32(1)
        table.num_outputs[rows] = counts
        self.counters.num_generated_tokens += len(rows)
        verdicts = self._stops.verdicts(rows, tokens, counts, table.output_limit[rows])
        special = (verdicts != CONTINUE) | (counts == 1)
        for place in np.flatnonzero(special).tolist():
            row, verdict = int(rows[place]), int(verdicts[place])
            num_cached = int(table.num_cached[row]) if counts[place] == 1 else None
            increments.append(output.landed(table.ids[row], int(tokens[place]), verdict, num_cached))
            if verdict != CONTINUE:
                self.counters.num_finished += 1
                self._end(row, release=False)
        plain = rows[~special]
        increments += output.plain_increments(table.ids[plain].tolist(), tokens[~special].tolist())
        return increments

    def _fail_row(self, row: int) -> Increment:
        table = self.table
        increment = output.non_finite(table.ids[row], int(table.num_outputs[row]))
        self.counters.num_failed += 1
        self._end(row, release=False)
        return increment

    def _end(self, row: int, *, release: bool = True) -> None:
        """End the row's request; give the row back unless a step in flight names it or the caller does so later."""
        self.table.drain(row)
        if release and not self.table.in_flight[row]:
            self._release(row)

    def _release(self, row: int) -> None:
        if self.table.shares[row]:
            self._commit(row)
        self._kv.release(self.table.ids[row])
        self.table.free(row)
