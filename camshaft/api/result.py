"""A request in flight: the object ``generate_async`` returns.

Owns the hand-over from the front's thread to whoever waits, in a thread or in an event loop. A slow
reader never holds up the engine: it finds the news merged into the next output.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator

from camshaft.api.outputs import CompletionOutput, RequestOutput
from camshaft.core.errors import CamshaftError


class GenerationResult:
    """Awaitable (the final RequestOutput), iterable and async-iterable (RequestOutputs as they grow).

    A request whose waiter is cancelled, or whose iteration is left early, is aborted. With ``best_of`` above ``n``
    the choice is made at the end, so an iteration gives the final output alone.
    """

    def __init__(self, output: RequestOutput, abort: Callable[[], None],
                 check_may_wait: Callable[[], None] = lambda: None) -> None:
        self._output = output
        self._abort = abort
        self._check_may_wait = check_may_wait
        self._changed = threading.Condition()
        self._version = 0
        self._wakers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def request_id(self) -> int:
        """The engine's own id of the request."""
        return self._output.request_id

    @property
    def finished(self) -> bool:
        """Whether the last token, or the error, has arrived."""
        return self._output.finished

    def abort(self) -> None:
        """Stop the request; what was generated stays, the finish reason becomes "cancelled". Idempotent."""
        if not self.finished:
            self._abort()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end and return it. Raises the request's error, or TimeoutError after ``timeout`` seconds.

        Every way of waiting raises UserError in a logits processor of the same LLM, where it would never end.
        """
        if not self.finished:
            self._check_may_wait()
        with self._changed:
            if not self._changed.wait_for(lambda: self._output.finished, timeout):
                raise TimeoutError(f"request {self.request_id} is not finished after {timeout} s")
        return self._final()

    def snapshot(self) -> RequestOutput:
        """The output as it stands; an error is inside it, not raised."""
        with self._changed:
            return _Cursor().advance(self._output)

    async def aresult(self) -> RequestOutput:
        """Like :meth:`result`, in an event loop."""
        async for _ in self:
            pass
        return self._final()

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        cursor, seen = _Cursor(), 0
        try:
            self._check_may_wait()
            while True:
                with self._changed:
                    while self._version == seen and not self._output.finished:
                        self._changed.wait()
                    seen, snapshot = self._version, cursor.advance(self._output)
                yield snapshot
                if snapshot.finished:
                    break
        finally:
            self.abort()
        self._final()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        waker, cursor, seen = asyncio.Event(), _Cursor(), 0
        with self._changed:
            self._wakers[waker] = asyncio.get_running_loop()
        try:
            self._check_may_wait()
            while True:
                with self._changed:
                    waker.clear()
                    news = self._version > seen or self._output.finished
                    if news:
                        seen, snapshot = self._version, cursor.advance(self._output)
                if not news:
                    await waker.wait()
                    continue
                yield snapshot
                if snapshot.finished:
                    break
        finally:
            with self._changed:
                self._wakers.pop(waker, None)
            self.abort()
        self._final()

    def _final(self) -> RequestOutput:
        if self._output.error is not None:
            raise self._output.error
        return self.snapshot()

    def update(self, change: Callable[[RequestOutput], None], *, quiet: bool = False) -> None:
        """Apply ``change`` to the output and wake every waiter, unless ``quiet``. Called by the front's thread."""
        with self._changed:
            change(self._output)
            if quiet:
                return
            self._version += 1
            self._changed.notify_all()
            wakers = list(self._wakers.items())
        for waker, loop in wakers:
            try:
                loop.call_soon_threadsafe(waker.set)
            except RuntimeError:  # that loop is closed: nobody waits there any more
                self._wakers.pop(waker, None)

    def fail(self, error: CamshaftError) -> None:
        """End the request with ``error``."""

        def change(output: RequestOutput) -> None:
            output.error, output.finished = error, True
            for completion in output.outputs:
                completion.finish_reason = completion.finish_reason or "error"

        self.update(change)


class _Cursor:
    """Cuts snapshots with diffs out of a growing output, for one reader."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, int]] = {}

    def advance(self, output: RequestOutput) -> RequestOutput:
        snapshot = copy.copy(output)
        snapshot.outputs = [self._cut(completion) for completion in output.outputs]
        if output.prompt_logprobs is not None:
            snapshot.prompt_logprobs = list(output.prompt_logprobs)
        return snapshot

    def _cut(self, completion: CompletionOutput) -> CompletionOutput:
        num_chars, num_tokens = self._seen.get(completion.index, (0, 0))
        self._seen[completion.index] = (len(completion.text), len(completion.token_ids))
        cut = copy.copy(completion)
        cut.token_ids = list(completion.token_ids)
        cut.text_diff = completion.text[num_chars:]
        cut.token_ids_diff = cut.token_ids[num_tokens:]
        if completion.logprobs is not None:
            cut.logprobs = list(completion.logprobs)
            cut.logprobs_diff = cut.logprobs[num_tokens:]
        return cut
