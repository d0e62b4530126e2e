"""The request table: every running request is a row of arrays, never an object walked each step.

Owns rows (who has one, its epoch, its counters) and the token store. Holds no pages and decides nothing.

Life of a row: FREE → CONTEXT (its context is being fed: the prompt, and after a preemption the output so far)
→ GENERATION → DRAINING (ended or preempted, but a step that names it is still in flight) → FREE. Counters named
``scheduled`` run ahead of those named ``landed`` by the steps in flight.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor.messages import GenerationRequest
from camshaft.executor.waiting import WaitingRequest
from camshaft.runtime.step import BoolArray, Int32Array, Int64Array

FREE, CONTEXT, GENERATION, DRAINING = 0, 1, 2, 3
"""States of a row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowNeeds:
    """What a request will want of its row and of the cache."""

    output_limit: int
    worst_tokens: int
    """Most positions it can ever hold in the cache."""
    worst_pages: Int32Array
    """[C] pages of its longest outcome."""
    soon_pages: Int32Array
    """[C] pages of its context and what follows at once."""


class RequestTable:
    """Structure of arrays over ``num_rows`` rows, indexed by row; C life cycles of the KV cache."""

    def __init__(self, *, num_rows: int, max_seq_len: int, num_life_cycles: int = 1) -> None:
        def counters() -> Int32Array:
            return np.zeros(num_rows, np.int32)

        def flags() -> BoolArray:
            return np.zeros(num_rows, np.bool_)

        self.num_rows = num_rows
        self.state: npt.NDArray[np.int8] = np.zeros(num_rows, np.int8)
        self.epoch = counters()
        """How often the row has been handed out."""
        self.precedence: Int64Array = np.zeros(num_rows, np.int64)
        self.arrival: Int64Array = np.zeros(num_rows, np.int64)
        """Order among equal ``precedence``."""
        self.prompt_len = counters()
        self.context_len = counters()
        """Tokens that are known before the row picks its first: the prompt, and the output before a preemption."""
        self.num_scheduled = counters()
        """Tokens in the cache once every submitted step has run."""
        self.num_landed = counters()
        """Tokens in the cache that finite logits, read by now, were computed from; only these may be shared."""
        self.num_scheduled_outputs = counters()
        self.num_outputs = counters()
        self.num_cached = counters()
        """Context tokens that came from shared pages."""
        self.score_start = counters()
        """Fed tokens from here up to the prompt's last but one are scored; ``prompt_len`` where none is."""
        self.num_scored = counters()
        """Prompt tokens after which log-probabilities were delivered."""
        self.output_limit = counters()
        self.worst_tokens = counters()
        self.columns = counters()
        """Page columns there is room in."""
        self.held_pages: Int32Array = np.zeros((num_rows, num_life_cycles), np.int32)
        self.worst_pages: Int32Array = np.zeros((num_rows, num_life_cycles), np.int32)
        self.soon_pages: Int32Array = np.zeros((num_rows, num_life_cycles), np.int32)
        self.in_flight = counters()
        """Submitted steps that name the row and have not been read."""
        self.shares = flags()
        """Whether its pages may enter the prefix cache."""
        self.wants_logprobs = flags()
        """Whether its output tokens come with log-probabilities."""
        self.is_told = flags()
        """Whether its request had an increment."""
        self.has_pages = flags()
        self.ids: npt.NDArray[np.object_] = np.full(num_rows, None, np.object_)
        self.requests: list[GenerationRequest | None] = [None] * num_rows
        self.tokens: Int32Array = np.empty((num_rows, max_seq_len), np.int32)
        """Prompt and output of every row; memory is touched as it fills."""
        self._rows: dict[RequestId, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self.num_context_landings = 0
        """Steps read so far that fed context."""

    @property
    def num_free(self) -> int:
        """Rows that a request could take."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Rows that are taken, draining ones included."""
        return self.num_rows - len(self._free)

    def occupy(self, record: WaitingRequest, needs: RowNeeds, *, num_cached: int) -> int:
        """Give a request a row in state CONTEXT whose first ``num_cached`` tokens are in the cache."""
        row, request = self._free.pop(), record.request
        self.state[row] = CONTEXT
        self.epoch[row] += 1
        self.precedence[row], self.arrival[row] = record.precedence, record.arrival
        self.prompt_len[row] = prompt_len = len(request.prompt_token_ids)
        self.context_len[row] = len(record.token_ids)
        self.num_scheduled[row] = self.num_landed[row] = self.num_cached[row] = num_cached
        self.num_scheduled_outputs[row] = self.num_outputs[row] = record.num_outputs
        self.num_scored[row] = record.num_scored
        self.score_start[row] = record.num_scored if record.is_to_be_scored else prompt_len
        self.output_limit[row], self.worst_tokens[row] = needs.output_limit, needs.worst_tokens
        self.worst_pages[row], self.soon_pages[row] = needs.worst_pages, needs.soon_pages
        self.shares[row] = request.reuse
        self.wants_logprobs[row] = request.sampling.num_logprobs is not None
        self.is_told[row], self.has_pages[row] = record.is_told, True
        self.ids[row], self.requests[row], self._rows[request.id] = request.id, request, row
        self.tokens[row, :len(record.token_ids)] = record.token_ids
        return row

    def record(self, row: int) -> WaitingRequest:
        """What is to be kept of a running request that loses its row."""
        length = int(self.prompt_len[row] + self.num_outputs[row])
        return WaitingRequest(request=self.request_at(row), precedence=int(self.precedence[row]),
                              arrival=int(self.arrival[row]), token_ids=self.tokens[row, :length].copy(),
                              num_scored=int(self.num_scored[row]), is_told=bool(self.is_told[row]))

    def drain(self, row: int) -> None:
        """End the request's time on the row: nothing more is scheduled or delivered for it from there."""
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
        """The row of a request that runs; None for one that has ended, waits or never ran."""
        return self._rows.get(request_id)

    def is_running(self, row: int) -> bool:
        """Whether the row's request goes on: admitted and neither ended nor preempted."""
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

    def context_rows(self) -> Int32Array:
        """Rows with context left to feed, first in precedence first."""
        return self.in_order(np.flatnonzero(self.state == CONTEXT).astype(np.int32))

    def running_rows(self) -> Int32Array:
        """Rows whose requests go on, first in precedence first."""
        running = (self.state == CONTEXT) | (self.state == GENERATION)
        return self.in_order(np.flatnonzero(running).astype(np.int32))

    def in_order(self, rows: Int32Array) -> Int32Array:
        """``rows``, first in precedence first."""
        return rows if len(rows) < 2 else rows[np.lexsort((self.arrival[rows], self.precedence[rows]))]
