"""The executor: takes requests from any thread, steps the engine on a thread of its own, hands out increments.

Owns the thread, the bounded intake, overlap of steps, and what happens when something inside fails. What
a step holds is ``microbatch.py``'s; what text it makes is the front's.

Every accepted request gets exactly one final increment, whatever happens: an end, a cancellation, a
failure of its own, or the failure of the whole executor.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable

from camshaft.config.kv import reserved_ahead
from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import EngineDeadError, InternalError, QueueFullError, UserError
from camshaft.core.ids import RequestId
from camshaft.core.log import logger
from camshaft.executor import output
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import GenerationRequest, Increment
from camshaft.executor.microbatch import MicroBatchScheduler
from camshaft.executor.request import ExecutorLimits, RequestSize, check_fits, check_request
from camshaft.executor.stats import ExecutorStats
from camshaft.runtime.step import StepHandle, StepPlan, StepRunner

Sink = Callable[[list[Increment]], None]
"""Takes one step's increments, at most one call a step; must return at once."""
_IDLE_BEFORE_CHECK_S = 0.1
"""How long nothing must have happened before the integrity check may take its time."""


class Executor:
    """Runs requests over ``runner`` and ``kv``. ``scheduler`` is resolved (see ``resolve_scheduler``).

    With :meth:`start` a thread repeats :meth:`step`; without it, the caller does.
    """

    def __init__(self, runner: StepRunner, kv: KVCacheManager, *, limits: ExecutorLimits,
                 scheduler: SchedulerConfig, sink: Sink) -> None:
        step = scheduler.step_limits()
        self._runner: StepRunner = runner
        self._kv = kv
        self._limits = limits
        self._sink = sink
        self._overlap_depth = step.overlap_depth
        self._step_tokens = reserved_ahead(step.context_chunk_tokens, kv.page_size)
        self._max_waiting = scheduler.max_waiting
        self._batch = MicroBatchScheduler(kv, limits, scheduler)
        self._frames: deque[StepHandle] = deque()
        self._news: list[Increment] = []
        self._last_turn_s = time.monotonic()
        self._thread: threading.Thread | None = None
        self._books = threading.Lock()
        """Held while the scheduler and the cache change, never while a step runs. Taken before ``_changed``."""
        self._changed = threading.Condition()
        """Guards everything below it, and wakes the thread."""
        self._inbox: deque[GenerationRequest | RequestId] = deque()
        self._num_arriving = 0
        """Requests in the inbox."""
        self._live: dict[RequestId, None] = {}
        """Accepted requests that have not had their final increment, oldest first."""
        self._stopping = False
        self._failure: Exception | None = None
        self._closed = False
        """Nothing is delivered any more."""

    def start(self) -> None:
        """Start the thread ``camshaft-executor``. Raises InternalError when called twice."""
        if self._thread is not None:
            raise InternalError("the executor was started before")
        self._thread = threading.Thread(target=self._run, name="camshaft-executor", daemon=True)
        self._thread.start()

    def submit(self, *requests: GenerationRequest) -> None:
        """Accept requests, from any thread: all of them, or none.

        Raises UserError or RequestTooLargeError for one that cannot run, QueueFullError where more than
        ``max_waiting`` requests would wait, EngineDeadError after a failure or shutdown.
        """
        for request in requests:
            check_request(request, self._limits, self._kv, self._step_tokens)
        with self._changed:
            self._check_alive()
            for request in requests:
                if request.id in self._live:
                    raise InternalError(f"request id {request.id} is live already")
            num_waiting = self._num_arriving + len(self._batch.waiting)
            if num_waiting + len(requests) > self._max_waiting:
                raise QueueFullError(f"{num_waiting} requests wait and {len(requests)} more come, of which "
                                     f"{self._max_waiting} are the most (scheduler.max_waiting)")
            self._live.update(dict.fromkeys(request.id for request in requests))
            self._inbox.extend(requests)
            self._num_arriving += len(requests)
            self._changed.notify_all()

    def check_fits(self, *, num_prompt_tokens: int, max_tokens: int, min_tokens: int = 0) -> None:
        """Raise RequestTooLargeError, with the numbers, for a request of this size that could never run."""
        check_fits(RequestSize(num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens, min_tokens=min_tokens),
                   self._limits, self._kv, self._step_tokens)

    def abort(self, request_id: RequestId) -> None:
        """End a request in any state, from any thread; its final increment says "cancelled". Unknown ids do nothing."""
        with self._changed:
            if request_id in self._live:
                self._inbox.append(request_id)
                self._changed.notify_all()

    def check_may_wait(self) -> None:
        """Raise UserError on the executor's own thread, where callers' logits processors run: whoever waited there for
        a request would wait for ever."""
        if threading.current_thread() is self._thread:
            raise UserError("logits_processor", "one that waits for an answer of the LLM that runs it",
                            "code that returns without one", "Use another LLM, or generate_async() and look later")

    def stats(self) -> ExecutorStats:
        """Consistent counters, from any thread; waits for bookkeeping at most, never for a step."""
        with self._books, self._changed:
            return ExecutorStats(
                alive=not self._stopping and self._failure is None,
                num_waiting=self._num_arriving + len(self._batch.waiting), num_running=self._batch.table.num_used,
                seconds_since_step=time.monotonic() - self._last_turn_s,
                counters=dataclasses.replace(self._batch.counters), kv=self._kv.stats())

    def shutdown(self, timeout: float = 10.0) -> None:
        """End every request ("cancelled") and the thread; idempotent, always returns.

        A step that does not come back within ``timeout`` seconds is left behind with the thread, and its
        requests end with EngineDeadError.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None:
            self.step()
        elif thread is not threading.current_thread():
            thread.join(timeout)
            if thread.is_alive():
                self._abandon()
                return
        else:
            return
        self._runner = _Stopped()  # the weights and the KV memory go now, however long this object is kept

    def step(self) -> bool:
        """One turn: intake, plan, submit, read the oldest step. False when there is nothing left to do.

        Never raises: a failure ends every request with it and the executor too.
        """
        if self._failure is not None:
            return False
        try:
            return self._wind_down() if self._stopping else self._turn()
        except Exception as error:  # noqa: BLE001 - whatever failed, every request must hear of it
            self._fail(error)
            return False

    def _turn(self) -> bool:
        with self._books:
            self._take_inbox()
            plan = self._batch.next_plan()
        if plan is not None:
            self._frames.append(self._runner.submit(plan))
        if self._frames and (plan is None or len(self._frames) > self._overlap_depth):
            out = self._frames.popleft().result()
            with self._books:
                self._news += self._batch.apply(out)
        elif plan is None and (self._batch.waiting or self._batch.table.num_used):
            raise InternalError(f"no step can run, yet {self._batch.table.num_used} requests have a row and "
                                f"{len(self._batch.waiting)} wait")
        self._last_turn_s = time.monotonic()
        self._deliver()
        return bool(self._frames or self._batch.waiting or self._batch.table.num_used or self._inbox)

    def _wind_down(self) -> bool:
        """End everything that is live, then read the steps in flight, so that no page is written any more."""
        with self._books:
            self._take_inbox()
            self._news += self._batch.cancel_all()
        while self._frames:
            out = self._frames.popleft().result()
            with self._books:
                self._batch.apply(out)
        self._deliver()
        return False

    def _take_inbox(self) -> None:
        with self._changed:
            orders = list(self._inbox)
            self._inbox.clear()
            self._num_arriving = 0
            for order in orders:
                if isinstance(order, GenerationRequest):
                    self._batch.enqueue(order)
        for order in orders:
            if not isinstance(order, GenerationRequest) and (increment := self._batch.cancel(order)) is not None:
                self._news.append(increment)

    def _deliver(self) -> None:
        news, self._news = self._news, []
        if not news:
            return
        ended = _ended_ids(news)
        with self._changed:
            if self._closed:
                return
            for request_id in ended:
                del self._live[request_id]
        self._sink(news)

    def _fail(self, error: Exception) -> None:
        """Stop for good: end every live request with ``error``, give back its row and pages."""
        logger.error("the executor stopped: %r", error, exc_info=error)
        with self._changed:
            self._failure = error
            self._inbox.clear()
            self._num_arriving = 0
            told = set(_ended_ids(self._news))
            left = [request_id for request_id in self._live if request_id not in told]
            self._news += [output.failed(request_id, self._dead()) for request_id in left]
        self._frames.clear()
        try:
            with self._books:
                self._batch.counters.num_failed += len(left)
                self._batch.drop_all()
        except Exception:  # noqa: BLE001 - the failure may be the cache's own; the requests must still be told
            logger.exception("rows and pages could not be given back")
        try:
            self._deliver()
        except Exception:  # noqa: BLE001 - the failure may be the sink's own; there is nobody left to tell
            logger.exception("the final increments could not be delivered")

    def _abandon(self) -> None:
        """The thread hangs in a step: end its requests from here, and let nothing it may still bring through."""
        with self._changed:
            if self._closed or not self._live:
                self._closed = True
                return
            self._closed = True
            self._failure = self._failure or InternalError("a step did not come back before the shutdown's timeout")
            news = [output.failed(request_id, self._dead()) for request_id in self._live]
            self._live.clear()
        logger.error("the executor's thread did not end; it is left behind")
        self._sink(news)

    def _dead(self) -> EngineDeadError:
        error = EngineDeadError(f"the executor stopped after a failure: {self._failure!r}")
        error.__cause__ = self._failure
        return error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._dead()
        if self._stopping:
            raise EngineDeadError("the executor has been shut down")

    def _run(self) -> None:
        try:
            while not self._stopping and self._failure is None:
                if not self.step():
                    self._sleep()
            self.step()
        finally:
            if self._live and self._failure is None:  # a BaseException ends the thread: SystemExit from a runner
                self._fail(InternalError("the executor's thread was made to end"))

    def _sleep(self) -> None:
        """Wait for work; the cache is checked once on the way, when nothing came for a while."""
        with self._changed:
            if self._changed.wait_for(self._has_work, _IDLE_BEFORE_CHECK_S):
                return
        try:
            self._kv.check_integrity()
        except InternalError as error:
            self._fail(error)
            return
        with self._changed:
            self._changed.wait_for(self._has_work)

    def _has_work(self) -> bool:
        return bool(self._inbox) or self._stopping or self._failure is not None


class _Stopped:
    """Stands where the runner was, once nothing may run any more."""

    def submit(self, plan: StepPlan) -> StepHandle:
        """Never: a stopped executor plans no step."""
        raise InternalError(f"step {plan.step} was planned after the shutdown")


def _ended_ids(news: list[Increment]) -> list[RequestId]:
    return [item.id for item in news if item.finish_reason is not None or item.error is not None]
