"""The front: hands requests to the executor and its increments to their results, on one thread beside it.

Owns live requests and their aborts. What a request asks for is ``resolve``, what its increments become is
``live``. Knows nothing of pages or steps.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from camshaft.api.live import LiveRequest
from camshaft.api.resolve import PreparedRequest
from camshaft.api.result import GenerationResult
from camshaft.api.tokenizer import Tokenizer
from camshaft.core.errors import CamshaftError, EngineDeadError, InternalError
from camshaft.core.ids import RequestId
from camshaft.core.log import logger
from camshaft.executor.messages import GenerationRequest, Increment


class Submit(Protocol):
    """The executor's way in: takes all of ``requests`` or raises and takes none."""

    def __call__(self, *requests: GenerationRequest) -> None:
        """Accept them."""
        ...


Abort = Callable[[RequestId], None]
CheckMayWait = Callable[[], None]
"""Raises on a thread that would wait for a result for ever."""


class Front:
    """Between callers and the executor. ``sink`` is what the executor calls with each step's increments.

    A request of several sequences is as many requests to the executor. When one of them fails, all end and the
    request fails with its error; an abort reaches all.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._ids = itertools.count(1)
        self._live: dict[RequestId, LiveRequest] = {}
        self._lock = threading.Lock()
        self._news: queue.SimpleQueue[list[Increment] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="camshaft-front", daemon=True)
        self._submit: Submit | None = None
        self._abort: Abort | None = None
        self._check_may_wait: CheckMayWait | None = None

    def start(self, submit: Submit, abort: Abort, check_may_wait: CheckMayWait | None = None) -> None:
        """Begin to serve; ``submit``, ``abort`` and ``check_may_wait`` are the executor's."""
        self._submit, self._abort, self._check_may_wait = submit, abort, check_may_wait
        self._thread.start()

    def sink(self, increments: list[Increment]) -> None:
        """Take a step's increments; returns at once."""
        self._news.put(increments)

    def stop(self) -> None:
        """Serve what has arrived, then end the thread. Requests still live fail."""
        self._news.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        # the executor holds this object's sink: without this, neither they nor the engine's memory would be freed
        self._submit = self._abort = self._check_may_wait = None

    def submit(self, prepared: PreparedRequest) -> GenerationResult:
        """Send one request on its way, all its sequences or none. Raises what the executor refuses it with."""
        submit = self._submit
        if submit is None:
            raise EngineDeadError("the engine is shut down, or was never started")
        ids = [RequestId(next(self._ids)) for _ in range(prepared.params.num_sequences)]
        live = LiveRequest(prepared, ids, self._tokenizer, lambda: self._abort_all(ids), self._check_wait)
        with self._lock:
            self._live.update(dict.fromkeys(ids, live))
        try:
            submit(*prepared.sequences(ids))
        except BaseException:  # Ctrl-C may come after the executor took the request: nobody would wait for it
            self._forget(ids)
            self._abort_all(ids)
            raise
        return live.result

    def _check_wait(self) -> None:
        check = self._check_may_wait
        if check is not None:
            check()

    def _abort_all(self, ids: list[RequestId]) -> None:
        """Ask the executor to end sequences; their final increments end the result."""
        abort = self._abort
        if abort is not None:
            for request_id in ids:
                abort(request_id)

    def _forget(self, ids: list[RequestId]) -> None:
        with self._lock:
            for request_id in ids:
                self._live.pop(request_id, None)

    def _run(self) -> None:
        while (increments := self._news.get()) is not None:
            for increment in increments:
                self._deliver(increment)
        with self._lock:
            left = dict.fromkeys(self._live.values())
            self._live.clear()
        for live in left:
            live.fail(InternalError("the engine was shut down before this request finished"))

    def _deliver(self, increment: Increment) -> None:
        live = self._live.get(increment.id)
        if live is None:  # already ended by a stop string, or with a sequence beside it that failed
            return
        try:
            over = live.take(increment)
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises ends this request and no other
            logger.exception("request %d failed while its tokens were turned into text", increment.id)
            over = live.fail(error if isinstance(error, CamshaftError) else InternalError(repr(error)))
            self._forget([increment.id])
        if not over:
            return
        self._forget(over)
        heard = increment.finish_reason is not None or increment.error is not None
        self._abort_all([request_id for request_id in over if not (heard and request_id == increment.id)])
