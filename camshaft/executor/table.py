"""The request table: every running request is a row of arrays, never an object walked each step.

Owns rows (who has one, its epoch, its counters) and the token store. Holds no pages and decides nothing.

Life of a row: FREE → CONTEXT (its prompt is being fed) → GENERATION → DRAINING (ended, but a step that
names it is still in flight) → FREE. Counters named ``scheduled`` run ahead of those named ``landed`` by
the steps in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor.messages import GenerationRequest
from camshaft.runtime.step import Int32Array

FREE, CONTEXT, GENERATION, DRAINING = 0, 1, 2, 3
"""States of a row."""


class RequestTable:
    """Structure of arrays over ``num_rows`` rows, indexed by row."""

    def __init__(self, *, num_rows: int, max_seq_len: int) -> None:
        def counters() -> Int32Array:
            return np.zeros(num_rows, np.int32)

        self.num_rows = num_rows
        self.state: npt.NDArray[np.int8] = np.zeros(num_rows, np.int8)
        self.epoch = counters()
        """How often the row has been handed out."""
        self.serial: npt.NDArray[np.int64] = np.zeros(num_rows, np.int64)
        """Order of admission."""
        self.prompt_len = counters()
        self.num_scheduled = counters()
        """Tokens in the cache once every submitted step has run."""
        self.num_landed = counters()
        """Tokens in the cache that finite logits, read by now, were computed from; only these may be shared."""
        self.num_scheduled_outputs = counters()
        self.num_outputs = counters()
        self.num_cached = counters()
        """Prompt tokens that came from shared pages."""
        self.output_limit = counters()
        self.held_pages = counters()
        self.worst_pages = counters()
        """Pages it holds in its longest possible outcome."""
        self.in_flight = counters()
        """Submitted steps that name the row and have not been read."""
        self.shares: npt.NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        """Whether its pages may enter the prefix cache."""
        self.ids: npt.NDArray[np.object_] = np.full(num_rows, None, np.object_)
        self.requests: list[GenerationRequest | None] = [None] * num_rows
        self.tokens: Int32Array = np.empty((num_rows, max_seq_len), np.int32)
        """Prompt and output of every row; memory is touched as it fills."""
        self._rows: dict[RequestId, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._num_admitted = 0
        self.num_context_landings = 0
        """Steps read so far that fed prompt tokens."""

    @property
    def num_free(self) -> int:
        """Rows that a request could take."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows that are taken, draining ones included."""
        return self.num_rows - len(self._free)

    def occupy(self, request: GenerationRequest, *, output_limit: int, num_cached: int, held_pages: int,
               worst_pages: int) -> int:
        """Give ``request`` a row in state CONTEXT whose first ``num_cached`` tokens are in the cache."""
        row = self._free.pop()
        self._num_admitted += 1
        prompt = request.prompt_token_ids
        self.state[row] = CONTEXT
        self.epoch[row] += 1
        self.serial[row] = self._num_admitted
        self.prompt_len[row] = len(prompt)
        self.num_scheduled[row] = self.num_landed[row] = self.num_cached[row] = num_cached
        self.num_scheduled_outputs[row] = self.num_outputs[row] = 0
        self.output_limit[row] = output_limit
        self.held_pages[row], self.worst_pages[row] = held_pages, worst_pages
        self.shares[row] = request.reuse
        self.ids[row], self.requests[row], self._rows[request.id] = request.id, request, row
        self.tokens[row, :len(prompt)] = prompt
        return row

    def drain(self, row: int) -> None:
        """End the row's request: nothing more is scheduled or delivered for it."""
        self.state[row] = DRAINING
        del self._rows[self.ids[row]]

    def free(self, row: int) -> None:
        """Give a draining row back. Raises InternalError while a step in flight names it."""
        if self.state[row] != DRAINING or self.in_flight[row]:
            raise InternalError(f"row {row} is freed in state {self.state[row]}, {self.in_flight[row]} steps in flight")
        self.state[row] = FREE
        self.ids[row] = self.requests[row] = None
        self._free.append(row)

    def row_of(self, request_id: RequestId) -> int | None:
        """The row of a request that runs; None for one that has ended or never ran."""
        return self._rows.get(request_id)

    def is_running(self, row: int) -> bool:
        """Whether the row's request goes on: admitted and not ended."""
        return bool(self.state[row] in (CONTEXT, GENERATION))

    def request_at(self, row: int) -> GenerationRequest:
        """The request that holds ``row``."""
        request = self.requests[row]
        if request is None:
            raise InternalError(f"row {row} holds no request")
        return request

    def live_ids(self) -> list[RequestId]:
        """Ids of the requests that run, ended ones excluded."""
        return list(self._rows)

    def generation_rows(self) -> Int32Array:
        """Rows that a generation step can serve: those whose limit is not reached by tokens in flight."""
        ready = (self.state == GENERATION) & (self.num_scheduled_outputs < self.output_limit)
        return np.flatnonzero(ready).astype(np.int32)

    def context_rows(self) -> list[int]:
        """Rows with prompt tokens left to feed, in order of admission."""
        rows = np.flatnonzero(self.state == CONTEXT)
        found: list[int] = rows[np.argsort(self.serial[rows])].tolist()
        return found

    def outstanding_pages(self) -> int:
        """Pages that running requests do not hold yet but may come to need."""
        running = (self.state == CONTEXT) | (self.state == GENERATION)
        return int((self.worst_pages - self.held_pages)[running].sum())
