"""What runs in the next step.

Owns plans: generation rows first, one token each, then chunks of context within ``max_num_tokens``; and requests'
ways between queue, rows and their end, preemption included. Tokens and logits rows are shared out in
``context.py``, pages are taken in ``pages.py``, results are read in ``landing.py``, who may enter is
``capacity.py``'s. Does not talk to threads or runners (``loop.py``).
"""

from __future__ import annotations

from collections import deque

import numpy as np

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor import output
from camshaft.executor.capacity import CapacityScheduler
from camshaft.executor.context import Chunk, ContextPlanner
from camshaft.executor.decoder.stop import StopTable
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.landing import Landing
from camshaft.executor.messages import GenerationRequest, Increment
from camshaft.executor.pages import RowPages
from camshaft.executor.policies.base import CAPACITY_POLICIES, CHUNKING_POLICIES, QUEUE_POLICIES, check_policies
from camshaft.executor.request import ExecutorLimits
from camshaft.executor.stats import Counters
from camshaft.executor.table import DRAINING, GENERATION, RequestTable
from camshaft.executor.waiting import WaitingQueue
from camshaft.runtime.step import Int32Array, RowArrival, StepOutput, StepPlan

_NONE = np.zeros(0, np.int32)


class MicroBatchScheduler:
    """Plans steps over one request table and one cache. Not thread-safe: one thread drives it."""

    def __init__(self, kv: KVCacheManager, limits: ExecutorLimits, config: SchedulerConfig) -> None:
        check_policies(config)
        step = config.step_limits()
        self._max_num_tokens = step.max_num_tokens
        self._policy = CAPACITY_POLICIES.get(config.capacity_policy)()
        self.table = RequestTable(num_rows=step.max_batch_size, max_seq_len=limits.max_seq_len,
                                  num_life_cycles=kv.num_life_cycles)
        self.counters = Counters()
        self.waiting = WaitingQueue(QUEUE_POLICIES.get(config.queue_policy)())
        self._pages = RowPages(kv, self.table, chunk_tokens=step.context_chunk_tokens,
                               is_promised=not self._policy.preempts)
        self._capacity = CapacityScheduler(kv, limits, self._policy, self._pages)
        chunking = CHUNKING_POLICIES.get(config.context_chunking_policy)(
            chunk_tokens=step.context_chunk_tokens, page_size=kv.page_size)
        self._context = ContextPlanner(self.table, self._pages, chunking, limits.max_logits_rows)
        self._stops = StopTable(step.max_batch_size)
        self._landing = Landing(self.table, self._pages, self._stops, self.counters)
        self._frames: deque[StepPlan] = deque()
        self._next_step = 0
        self._arrivals: list[RowArrival] = []
        self._is_short = False
        """Whether pages ran out in the step being planned: nobody enters while somebody has to leave or wait."""

    def enqueue(self, request: GenerationRequest) -> None:
        """Add a checked request to the waiting ones."""
        self.waiting.add(request)

    def cancel(self, request_id: RequestId) -> Increment | None:
        """End a request in any state; its last increment, or None when it is not live."""
        if not self.waiting.remove(request_id):
            row = self.table.row_of(request_id)
            if row is None:
                return None
            self.table.drain(row)
            self._retire(row)
        self.counters.num_cancelled += 1
        return output.cancelled(request_id)

    def cancel_all(self) -> list[Increment]:
        """:meth:`cancel` for everything that is live."""
        ended = (self.cancel(request_id) for request_id in [*self.waiting, *self.table.live_ids()])
        return [increment for increment in ended if increment is not None]

    def next_plan(self) -> StepPlan | None:
        """The next step, or None when no row can use one. Counts as submitted."""
        table = self.table
        self._is_short = False
        rows = self._with_pages(table.generation_rows())
        starts, output_indices = table.num_scheduled[rows], table.num_scheduled_outputs[rows]
        table.num_scheduled[rows] += 1
        table.num_scheduled_outputs[rows] += 1
        chunks = self._plan_context(len(rows))
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
        increments = self._landing.land(plan, out)
        for row in self._landing.drained(plan):
            self._retire(row)
        return increments

    def drop_all(self) -> None:
        """After a failure: forget every request and step, give back every row and page."""
        self._frames.clear()
        self._pages.forget_updates()
        self._arrivals.clear()
        self.waiting.clear()
        table = self.table
        table.in_flight[:] = 0
        table.shares[:] = False  # nothing will be reused, and the cache may be what failed
        for request_id in table.live_ids():
            row = table.row_of(request_id)
            if row is not None:
                table.drain(row)
        for row in np.flatnonzero(table.state == DRAINING).tolist():
            self._retire(row)

    def _with_pages(self, rows: Int32Array) -> Int32Array:
        """Those of the generating ``rows`` that have a page for their next token, taken from others if need be."""
        table = self.table
        lacking = rows[table.num_scheduled[rows] >= table.columns[rows] * self._pages.page_size]
        if not self._policy.preempts:
            for row in lacking.tolist():
                self._pages.reserve_ahead(row)
            return rows
        short = [row for row in table.in_order(lacking).tolist() if not self._make_room(row)]
        if not self._is_short:
            return rows
        served: Int32Array = rows[(table.state[rows] == GENERATION) & ~np.isin(rows, short)]
        return served

    def _make_room(self, row: int) -> bool:
        """A page for the row's next token; preempts as the policy says until there is one, or the row is gone."""
        while self.table.is_running(row):
            if self._pages.reserve_ahead(row):
                return True
            self._is_short = True
            if not self._preempt_one():
                return False
        return False

    def _preempt_one(self) -> bool:
        """Send the row that the policy names back to the queue; False where it names none."""
        rows = self.table.running_rows()
        row = self._policy.victim(rows)
        if row is None:
            return False
        if len(rows) < 2 or row not in rows or self._pages.is_reserved(row):
            raise InternalError(f"the capacity policy preempts row {row}, which must go on")
        record = self.table.record(row)
        self._pages.release(row)
        self.table.drain(row)
        self._retire(row)
        self.waiting.add_again(record)
        self.counters.num_preemptions += 1
        return True

    def _plan_context(self, num_generation: int) -> list[Chunk]:
        """Chunks of those that run, then of new ones while tokens are left.

        Where prompts alone hold all the pages and none has enough, the last of them gives way.
        """
        budget = self._max_num_tokens - num_generation
        while True:
            while (not self._is_short and self._context.takes_more(budget, num_generation)
                    and (row := self._capacity.admit(self.waiting, self.table)) is not None):
                self._arrive(row)
            chunks = self._context.plan(budget, num_generation)
            if chunks or num_generation or self._frames or not len(self.table.context_rows()):
                return chunks
            self._is_short = True
            if not self._preempt_one():
                return chunks

    def _arrive(self, row: int) -> None:
        table, request = self.table, self.table.request_at(row)
        self._stops.set_row(row, request.stop_token_ids, request.min_tokens)
        arrival = RowArrival(row=row, epoch=int(table.epoch[row]), sampling=request.sampling)
        if request.sampling.needs_history:
            arrival = RowArrival(row=row, epoch=arrival.epoch, sampling=request.sampling,
                                 history=table.tokens[row, :table.context_len[row]].copy(),
                                 num_prompt_tokens=int(table.prompt_len[row]))
        self._arrivals.append(arrival)
        self.counters.num_cached_tokens += int(table.num_cached[row])

    def _retire(self, row: int) -> None:
        """Give a draining row and its pages back, unless a step in flight names it: then its landing does so."""
        if self.table.in_flight[row]:
            return
        self._arrivals = [arrival for arrival in self._arrivals if arrival.row != row]
        self._pages.release(row)
        self.table.free(row)

    def _packed(self, rows: Int32Array, starts: Int32Array, output_indices: Int32Array,
                chunks: list[Chunk]) -> StepPlan:
        """The plan: generation ``rows``, then ``chunks``; takes the arrivals and pages gathered on the way."""
        table, num_generation = self.table, len(rows)
        lens = np.ones(num_generation + len(chunks), np.int32)
        samples = np.ones(num_generation + len(chunks), np.bool_)
        tokens, score_lens, score_targets = _NONE, None, None
        if chunks:
            added = np.array([chunk.row for chunk in chunks], np.int32)
            rows = np.concatenate([rows, added])
            starts = np.concatenate([starts, np.array([chunk.start for chunk in chunks], np.int32)])
            output_indices = np.concatenate([output_indices, table.num_outputs[added]])
            lens[num_generation:] = [chunk.end - chunk.start for chunk in chunks]
            samples[num_generation:] = [chunk.samples for chunk in chunks]
            tokens = np.concatenate([table.tokens[chunk.row, chunk.start:chunk.end] for chunk in chunks])
            if any(chunk.num_scores for chunk in chunks):
                score_lens = np.zeros(len(rows), np.int32)
                score_lens[num_generation:] = [chunk.num_scores for chunk in chunks]
                score_targets = np.concatenate([
                    table.tokens[chunk.row, chunk.start + 1:chunk.start + 1 + chunk.num_scores] for chunk in chunks])
        plan = StepPlan(step=self._next_step, arrivals=tuple(self._arrivals), page_updates=self._pages.take_updates(),
                        rows=rows, epochs=table.epoch[rows], num_generation=num_generation, query_lens=lens,
                        start_positions=starts, context_token_ids=tokens, samples=samples,
                        output_indices=output_indices, score_lens=score_lens, score_targets=score_targets)
        self._next_step += 1
        self._arrivals.clear()
        self.counters.num_steps += 1
        self.counters.num_context_tokens += len(tokens)
        return plan
