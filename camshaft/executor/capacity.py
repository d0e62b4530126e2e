"""Who may hold KV pages: admission of waiting requests, first come, first served.

Owns the decision and the hand-over (prefix taken from the cache, a row in the table). Chooses no tokens:
that is ``microbatch.py``. A policy is a subclass of ``CapacityScheduler`` under a name of its own.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import OrderedDict

import numpy as np

from camshaft.core.ids import RequestId
from camshaft.core.registry import Registry
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import GenerationRequest
from camshaft.executor.request import ExecutorLimits, RequestSize
from camshaft.executor.table import FREE, RequestTable

WaitingQueue = OrderedDict[RequestId, GenerationRequest]
"""Waiting requests, oldest first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What admitting a request would do to the pool, in pages."""

    new_pages: int
    """Pages beyond the shared ones that its longest outcome takes."""
    pinned_pages: int
    """Cached pages that could be evicted now and could not once they are taken."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that got a row."""

    row: int
    num_cached: int
    """Prompt tokens it found in the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Refusal:
    """Why the head of the queue was not admitted; it is looked at again when one of these changes."""

    id: RequestId
    slack_pages: int
    num_context_landings: int


@dataclasses.dataclass(frozen=True, slots=True)
class _PrefixWait:
    """The head of the queue waits until ``row`` has computed ``num_tokens``, which both begin with."""

    id: RequestId
    row: int
    epoch: int
    num_tokens: int


class CapacityScheduler(abc.ABC):
    """Admits the oldest waiting request when the policy says there is room for it."""

    def __init__(self, kv: KVCacheManager, limits: ExecutorLimits) -> None:
        self._kv = kv
        self._limits = limits
        self._refusal: _Refusal | None = None
        self._prefix_wait: _PrefixWait | None = None

    @abc.abstractmethod
    def has_room(self, demand: Demand, running: RequestTable) -> bool:
        """Whether a request of this demand may join the running ones. Changes nothing.

        Must be true when nothing runs and ``new_pages + pinned_pages`` fit the pool: the queue stops otherwise.
        """

    def admit(self, waiting: WaitingQueue, running: RequestTable) -> Admission | None:
        """Admit the head of ``waiting`` or nobody: nothing overtakes it.

        On success the request has left the queue, holds its shared pages and owns a row. A head whose next
        page of prompt is being computed by a running request waits for that page instead of computing it
        again; the wait ends with that request at the latest.
        """
        if not waiting or not running.num_free:
            return None
        request = next(iter(waiting.values()))
        if self._is_prefix_pending(request, running) or self._is_refused(request, running):
            return None
        worst_pages = self._kv.pages_for(RequestSize.of(request).worst_case_tokens(self._limits))
        demand, num_matched = self._demand(request, worst_pages)
        if self._begin_prefix_wait(request, num_matched, running):
            return None
        if not self.has_room(demand, running):
            self._refuse(request, running)
            return None
        waiting.popitem(last=False)
        self._refusal = None
        num_cached = self._kv.start(request.id, request.prompt_token_ids, request.scope, request.reuse)
        row = running.occupy(request, output_limit=RequestSize.of(request).output_limit(self._limits),
                             num_cached=num_cached, held_pages=self._kv.held_pages(request.id), worst_pages=worst_pages)
        return Admission(row=row, num_cached=num_cached)

    def slack_pages(self, running: RequestTable) -> int:
        """Pages that are left when every running request has its longest outcome."""
        return self._kv.available_pages() - running.outstanding_pages()

    def _demand(self, request: GenerationRequest, worst_pages: int) -> tuple[Demand, int]:
        if not request.reuse:
            return Demand(new_pages=worst_pages, pinned_pages=0), 0
        match = self._kv.match(request.prompt_token_ids, request.scope)
        return Demand(new_pages=worst_pages - match.num_pages,
                      pinned_pages=match.num_pages_unreferenced), match.num_tokens

    def _refuse(self, request: GenerationRequest, running: RequestTable) -> None:
        self._refusal = _Refusal(request.id, self.slack_pages(running), running.num_context_landings)

    def _is_refused(self, request: GenerationRequest, running: RequestTable) -> bool:
        """Whether nothing changed that could turn the last refusal around: saves a match of the prompt each step."""
        refusal = self._refusal
        return (refusal is not None and refusal.id == request.id
                and refusal.num_context_landings == running.num_context_landings
                and self.slack_pages(running) <= refusal.slack_pages)

    def _is_prefix_pending(self, request: GenerationRequest, running: RequestTable) -> bool:
        wait = self._prefix_wait
        if wait is None or wait.id != request.id:
            return False
        row = wait.row
        return (running.epoch[row] == wait.epoch and running.is_running(row)
                and bool(running.num_landed[row] < wait.num_tokens))

    def _begin_prefix_wait(self, request: GenerationRequest, num_matched: int, running: RequestTable) -> bool:
        """Start to wait if a running request is about to cache at least one more page of this prompt."""
        self._prefix_wait = None
        prompt = request.prompt_token_ids
        wanted = (num_matched // self._kv.page_size + 1) * self._kv.page_size
        if not request.reuse or not self._kv.block_reuse or wanted >= len(prompt):
            return False
        computing = (running.shares & (running.state != FREE) & (running.prompt_len >= wanted)
                     & (running.num_landed < wanted))
        for row in np.flatnonzero(computing).tolist():
            other = running.requests[row]
            if (other is not None and running.is_running(row) and other.scope == request.scope
                    and np.array_equal(running.tokens[row, :wanted], prompt[:wanted])):
                self._prefix_wait = _PrefixWait(request.id, row, int(running.epoch[row]), wanted)
                return True
        return False


CAPACITY_POLICIES: Registry[type[CapacityScheduler]] = Registry("scheduler.capacity_policy")


@CAPACITY_POLICIES.register("guaranteed_no_evict")
class GuaranteedNoEvict(CapacityScheduler):
    """Admits a request only when its longest outcome fits beside the longest outcomes of all that run.

    A running request therefore never lacks a page and never loses one.
    """

    def has_room(self, demand: Demand, running: RequestTable) -> bool:
        """Exact: shared pages count once, pages the request would pin count as taken."""
        return demand.new_pages + demand.pinned_pages <= self.slack_pages(running)
