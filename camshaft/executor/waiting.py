"""Requests that wait for a row: in which order, and what is known of those that ran before.

Owns the order and the records. Who is admitted, and when, is ``capacity.py``'s.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterator

from camshaft.core.ids import RequestId
from camshaft.executor.messages import GenerationRequest
from camshaft.executor.policies.base import QueuePolicy
from camshaft.runtime.step import Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request without a row. One that was preempted goes on where it stopped, on any row."""

    request: GenerationRequest
    precedence: int
    """Smaller goes first."""
    arrival: int
    """Order among equal ``precedence``; kept over a preemption."""
    token_ids: Int32Array
    """Prompt, and the output delivered so far: what must be in the cache before the next token is picked."""
    num_scored: int = 0
    """Prompt tokens after which log-probabilities were delivered."""
    is_told: bool = False
    """Whether an increment was delivered."""

    @property
    def is_to_be_scored(self) -> bool:
        """Whether log-probabilities of prompt tokens are still wanted."""
        wanted = self.request.sampling.num_prompt_logprobs is not None
        return wanted and self.num_scored < len(self.request.prompt_token_ids) - 1

    @property
    def num_outputs(self) -> int:
        """Output tokens delivered."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)


class WaitingQueue:
    """Waiting requests by precedence, then arrival. Adding, taking and removing are O(log n) amortised."""

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._records: dict[RequestId, WaitingRequest] = {}
        self._heap: list[tuple[int, int, RequestId]] = []
        """Entries of records that were removed stay until they surface."""
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._records)

    def add(self, request: GenerationRequest) -> None:
        """A request that has just come."""
        self._num_arrived += 1
        self.add_again(WaitingRequest(request=request, precedence=self._policy.precedence(request),
                                      arrival=self._num_arrived, token_ids=request.prompt_token_ids))

    def add_again(self, record: WaitingRequest) -> None:
        """A request that lost its row: it takes the place it would have if it had never left."""
        self._records[record.request.id] = record
        heapq.heappush(self._heap, (record.precedence, record.arrival, record.request.id))

    def first(self) -> WaitingRequest | None:
        """Who goes next; None when nobody waits."""
        while self._heap:
            record = self._records.get(self._heap[0][2])
            if record is not None and record.arrival == self._heap[0][1]:
                return record
            heapq.heappop(self._heap)
        return None

    def remove(self, request_id: RequestId) -> bool:
        """Forget a request; False when it does not wait."""
        return self._records.pop(request_id, None) is not None

    def clear(self) -> None:
        """Forget all."""
        self._records.clear()
        self._heap.clear()
