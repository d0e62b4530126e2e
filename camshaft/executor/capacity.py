"""Who enters: admission of the waiting request that is next, when the capacity policy says there is room.

Owns what an admission would take, the hand-over (prefix taken from the cache, a row in the table), and the wait
for a prefix that another request is computing. The policy decides; order is the queue's; tokens are chosen by
``microbatch.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from camshaft.core.ids import RequestId
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.pages import RowPages
from camshaft.executor.policies.base import CapacityPolicy, Demand, Load
from camshaft.executor.request import ExecutorLimits, RequestSize
from camshaft.executor.table import FREE, RequestTable, RowNeeds
from camshaft.executor.waiting import WaitingQueue, WaitingRequest
from camshaft.runtime.step import Int32Array


@dataclasses.dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the next request was not admitted; it is looked at again when one of these changes for the better."""

    id: RequestId
    load: Load
    num_context_landings: int


@dataclasses.dataclass(frozen=True, slots=True)
class _PrefixWait:
    """The next request waits until ``row`` has computed ``num_tokens``, which both begin with."""

    id: RequestId
    row: int
    epoch: int
    num_tokens: int


class CapacityScheduler:
    """Admits the next waiting request when ``policy`` says there is room for it."""

    def __init__(self, kv: KVCacheManager, limits: ExecutorLimits, policy: CapacityPolicy, pages: RowPages) -> None:
        self._kv = kv
        self._limits = limits
        self._policy = policy
        self._pages = pages
        self._refusal: _Refusal | None = None
        self._prefix_wait: _PrefixWait | None = None

    def admit(self, waiting: WaitingQueue, running: RequestTable) -> int | None:
        """Admit who is next, or nobody: nobody overtakes them. Returns the row.

        On success the request has left the queue, holds its shared pages and owns a row. One whose next page of
        prompt is being computed by a running request waits for that page instead of computing it again; the wait
        ends with that request at the latest.
        """
        record = waiting.first()
        if record is None or not running.num_free:
            self._policy.admission_ended(running.num_used)
            return None
        if self._is_prefix_pending(record, running):
            return None
        load = self._pages.load()
        if self._is_refused(record, load, running):
            return None
        needs = self._needs(record)
        demand, num_matched = self._demand(record, needs)
        if self._begin_prefix_wait(record, num_matched, running):
            return None
        if not self._policy.admits(demand, load):
            self._refusal = _Refusal(record.request.id, load, running.num_context_landings)
            self._policy.admission_ended(running.num_used)
            return None
        self._refusal = None
        waiting.remove(record.request.id)
        return self._enter(record, needs, running)

    def _enter(self, record: WaitingRequest, needs: RowNeeds, running: RequestTable) -> int:
        request, readable = record.request, _readable(record)
        num_cached = self._kv.start(request.id, readable, request.scope, reads=request.reuse and len(readable) > 1,
                                    leaves=request.reuse)
        row = running.occupy(record, needs, num_cached=num_cached)
        self._pages.count(row)
        return row

    def _needs(self, record: WaitingRequest) -> RowNeeds:
        size = RequestSize.of(record.request)
        return self._pages.needs(record, output_limit=size.output_limit(self._limits),
                                 worst_tokens=size.worst_case_tokens(self._limits))

    def _demand(self, record: WaitingRequest, needs: RowNeeds) -> tuple[Demand, int]:
        """What admitting it would take, and how many tokens it would find in the cache.

        Pages that others hold already are not taken, those cached for nobody are.
        """
        readable = _readable(record)
        if not record.request.reuse or len(readable) == 1:
            return Demand(longest=needs.worst_pages, soon=needs.soon_pages), 0
        match = self._kv.match(readable, record.request.scope)
        shared = match.num_pages - match.num_pages_unreferenced
        return Demand(longest=needs.worst_pages - shared, soon=needs.soon_pages - shared), match.num_tokens

    def _is_refused(self, record: WaitingRequest, load: Load, running: RequestTable) -> bool:
        """Whether nothing changed that could turn the last refusal around: saves a match of the prompt each step."""
        refusal = self._refusal
        if (refusal is None or refusal.id != record.request.id or load.num_rows < refusal.load.num_rows
                or refusal.num_context_landings != running.num_context_landings):
            return False
        then = refusal.load
        return not ((load.available - load.longest > then.available - then.longest).any()
                    or (load.available - load.soon > then.available - then.soon).any())

    def _is_prefix_pending(self, record: WaitingRequest, running: RequestTable) -> bool:
        wait = self._prefix_wait
        if wait is None or wait.id != record.request.id:
            return False
        row = wait.row
        return (running.epoch[row] == wait.epoch and running.is_running(row)
                and bool(running.num_landed[row] < wait.num_tokens))

    def _begin_prefix_wait(self, record: WaitingRequest, num_matched: int, running: RequestTable) -> bool:
        """Start to wait if a running request is about to cache at least one more page of these tokens."""
        self._prefix_wait = None
        request, tokens = record.request, _readable(record)
        wanted = (num_matched // self._kv.page_size + 1) * self._kv.page_size
        if not request.reuse or not self._kv.block_reuse or wanted >= len(tokens):
            return False
        computing = (running.shares & (running.state != FREE) & (running.context_len >= wanted)
                     & (running.num_landed < wanted))
        for row in np.flatnonzero(computing).tolist():
            other = running.requests[row]
            if (other is not None and running.is_running(row) and other.scope == request.scope
                    and np.array_equal(running.tokens[row, :wanted], tokens[:wanted])):
                self._prefix_wait = _PrefixWait(request.id, row, int(running.epoch[row]), wanted)
                return True
        return False


def _readable(record: WaitingRequest) -> Int32Array:
    """The tokens whose cached pages it may use, and one more: a prompt token still to be scored is computed."""
    return record.token_ids[:record.num_scored + 1] if record.is_to_be_scored else record.token_ids
