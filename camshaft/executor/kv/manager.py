"""KVCacheManager: the only door to KV pages.

Owns who holds which page of which life cycle, what stays cached after its request, and what a row's page
table must learn. Knows pages by number only: the tensors are the runtime's, the policy is the scheduler's.

Order of calls. ``start`` once; then, for each step that feeds the request, ``reserve`` while the step is
planned, its reservation carried out by that very step; ``advance`` once nothing more is reserved for that
step, at the latest when it has run; ``commit`` when its logits proved what it fed; ``release`` once, while no
step being planned carries a reservation of the request. Single-threaded.

A page that ``advance`` or ``release`` gave back may be handed out by the next ``reserve``, while the last step
that reads or writes it is still in flight: whoever gets it writes in a later step, and steps run in the order of
their submission.

Invariants.
- A page is free, private to one request, or in the prefix tree; only private pages are written.
- A request that holds a node of the tree in a whole-prefix life cycle holds all its ancestors there.
- free + referenced + cached == total, and all of free + cached can be had by ``reserve``.
- The source of a copy is never the target of another copy before the copying request is released: targets
  come from ``start``, which takes free pages and evicts, but never a page that a live request copies from.
  ``reserve`` may take such a source when nothing else is left, and then its own reservation carries the
  copies still due; what it takes is written by the forward pass, which runs after a step's copies.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor.kv.integrity import check_books
from camshaft.executor.kv.ledger import PageLedger
from camshaft.executor.kv.lifecycle import make_life_cycle
from camshaft.executor.kv.pool import TRASH_PAGE
from camshaft.executor.kv.prefix import Node
from camshaft.executor.kv.sequence import PageCopy, Sequence
from camshaft.executor.kv.sharing import PrefixSharing
from camshaft.executor.messages import PrefixScope
from camshaft.runtime.step import Int32Array

_NO_PAGES: Int32Array = np.zeros(0, np.int32)
_NO_PAGES.setflags(write=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What ``start`` would find in the cache; C life cycles."""

    num_tokens: int
    """Tokens that need not be computed; at most one less than the prompt has."""
    num_pages: Int32Array
    """[C] pages shared whole until the request ends: so many fewer of its worst case are new. None in a life cycle
    that gives pages back, where sharing ends as soon as one of the sharers moves on."""
    num_pages_unreferenced: Int32Array
    """[C] those of ``num_pages`` that no request holds: taking them makes that many fewer available."""
    num_partial_tokens: int
    """Tokens of ``num_tokens`` that come from the beginning of a further page, by copy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageChange:
    """News for one life cycle: ``page_table[row, columns[i]] = pages[i]``; ``copy_from[j]`` goes to ``copy_to[j]``.

    A page of 0 stands for tokens out of reach, which nothing reads.
    """

    columns: Int32Array
    pages: Int32Array
    copy_from: Int32Array
    copy_to: Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Receipt of ``reserve``: what the next step must carry out. One change a life cycle, in engine order."""

    updates: tuple[PageChange, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvStats:
    """Pages summed over the life cycles, trash pages left out: num_pages = num_free + num_referenced + num_cached."""

    num_pages: int
    num_free: int
    num_referenced: int
    """Pages held by at least one request."""
    num_cached: int
    """Pages held by none, kept for reuse, evictable."""
    num_hits: int
    """Requests that started with at least one cached token."""
    num_reused_tokens: int
    """Prompt tokens that requests found in the cache."""
    num_evictions: int
    """Cached pages dropped to make room."""


class KVCacheManager:
    """Pages of every life cycle. ``num_pages[c]`` counts life cycle c's trash page 0, which is never handed out.

    A violated call order or a broken invariant raises InternalError; lack of room is a None, never an error.
    """

    def __init__(self, life_cycles: tuple[LifeCycleSpec, ...], num_pages: tuple[int, ...], *,
                 enable_block_reuse: bool, enable_partial_reuse: bool) -> None:
        sizes = {spec.page_size for spec in life_cycles}
        if len(sizes) != 1 or len(num_pages) != len(life_cycles):
            raise InternalError(f"life cycles with page sizes {sorted(sizes)} and {len(num_pages)} pools do not fit")
        self.page_size = sizes.pop()
        self.num_life_cycles = len(life_cycles)
        self.block_reuse = enable_block_reuse
        self._specs = life_cycles
        self._cycles = tuple(make_life_cycle(spec) for spec in life_cycles)
        self._windowed = tuple(c for c, cycle in enumerate(self._cycles) if not cycle.whole_prefix)
        self._ledger = PageLedger(self._cycles, num_pages)
        self._sharing = PrefixSharing(self._ledger, self._cycles, partial=enable_partial_reuse)
        self._sequences: dict[RequestId, Sequence] = {}
        self._hits = self._tokens_reused = 0
        nothing = PageChange(columns=_NO_PAGES, pages=_NO_PAGES, copy_from=_NO_PAGES, copy_to=_NO_PAGES)
        self._no_change = Reservation(updates=(nothing,) * len(self._cycles))

    # Room

    def pages_for(self, num_tokens: int) -> int:
        """Columns, and pages in a life cycle that keeps them all, that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.page_size)

    def worst_pages(self, num_tokens: int, step_tokens: int) -> Int32Array:
        """[C] most pages a sequence that grows to ``num_tokens`` holds at any time.

        At most ``step_tokens`` positions are reserved and not yet noted as computed by ``advance``: a chunk, the
        steps in flight and all that is reserved ahead.
        """
        return np.array([spec.worst_pages(num_tokens, step_tokens) for spec in self._specs], np.int32)

    def usable_pages(self) -> Int32Array:
        """[C] pages that can be handed out at all."""
        return np.array([pool.num_usable for pool in self._ledger.pools], np.int32)

    def can_ever_hold(self, num_tokens: int, step_tokens: int) -> bool:
        """Whether a sequence as of ``worst_pages`` fits an otherwise empty cache."""
        return bool((self.worst_pages(num_tokens, step_tokens) <= self.usable_pages()).all())

    def available_pages(self) -> Int32Array:
        """[C] pages that could be reserved now, free or by eviction."""
        return np.array([self._ledger.room(c) for c in range(len(self._cycles))], np.int32)

    def held_pages(self, request_id: RequestId) -> Int32Array:
        """[C] pages the request holds now, as they count towards its worst case.

        Shared ones and the target of a copy included, but in a life cycle that gives pages back only those that
        were not held by another request when this one took them: summed over all requests no page counts twice
        there, so ``available - sum(worst - held)`` is never more than what is left at worst.
        """
        return np.array(self._sequence(request_id).credit, np.int32)

    def columns(self, request_id: RequestId) -> int:
        """Page columns the request has been given, those out of reach by now included: it has room up to here."""
        return self._sequence(request_id).num_columns

    # A request's life

    def match(self, tokens: npt.NDArray[np.int32], scope: PrefixScope) -> PrefixMatch:
        """What a request with this prompt could reuse now. Changes nothing.

        ``start`` reuses exactly this, less the partial tokens where no page for the copy can be had.
        """
        path, _, partial = self._sharing.find(tokens, scope) if self.block_reuse else ([], None, 0)
        kept = [(c, path if cycle.whole_prefix else []) for c, cycle in enumerate(self._cycles)]
        return PrefixMatch(
            num_tokens=len(path) * self.page_size + partial, num_partial_tokens=partial,
            num_pages=np.array([len(nodes) for _, nodes in kept], np.int32),
            num_pages_unreferenced=np.array([sum(node.refs[c] == 0 for node in nodes) for c, nodes in kept], np.int32))

    def start(self, request_id: RequestId, tokens: npt.NDArray[np.int32], scope: PrefixScope, *, reads: bool,
              leaves: bool) -> int:
        """Open the books of a request and take what it can reuse; returns how many of its tokens are cached.

        ``reads``: it may use cached pages; ``leaves``: its own may be cached. At least one token is left to compute.
        """
        if request_id in self._sequences:
            raise InternalError(f"request {request_id} was started twice")
        sequence = Sequence(scope=scope, leaves=leaves and self.block_reuse, num_cycles=len(self._cycles))
        self._sequences[request_id] = sequence
        if not reads or not self.block_reuse:
            return 0
        path, source, partial = self._sharing.find(tokens, scope)
        num_tokens = len(path) * self.page_size + partial
        for c, cycle in enumerate(self._cycles):
            gone = cycle.out_of_reach(num_tokens)
            for column, node in enumerate(path):
                self._share(sequence, c, None if column in gone else node)
            sequence.dropped[c] = gone.stop
        if path:
            sequence.nodes.extend(path)
            sequence.num_chained = len(path)
            sequence.last_node = path[-1]
        if source is not None:
            sequence.copy = self._ledger.copy_on_write(source)
            if sequence.copy is None:
                num_tokens -= partial
            else:
                for c, target in enumerate(sequence.copy.targets):
                    sequence.pages[c].append(target)
                    sequence.credit[c] += 1
                sequence.nodes.append(None)
        sequence.num_computed = sequence.num_proven = num_tokens
        self._hits += num_tokens > 0
        self._tokens_reused += num_tokens
        return num_tokens

    def reserve(self, request_id: RequestId, num_tokens: int) -> Reservation | None:
        """Give every position below ``num_tokens`` a page, evicting as needed; None: no room, nothing changed.

        The first reservation after ``start`` also names the shared pages within reach, and the copy.
        """
        sequence = self._sequence(request_id)
        need = max(self.pages_for(num_tokens) - sequence.num_columns, 0)
        if need == 0 and sequence.num_told == sequence.num_columns:
            return self._no_change
        if any(self._ledger.room(c) < need for c in range(len(self._cycles))):
            return None
        copies: list[PageCopy] = []
        if sequence.copy is not None and sequence.copy.due:
            copies.append(sequence.copy)
            sequence.copy.due = False
        for c, pages in enumerate(sequence.pages):
            pages.extend([self._ledger.take(c, copies) for _ in range(need)])
            sequence.credit[c] += need
        sequence.nodes.extend([None] * need)
        told, sequence.num_told = sequence.num_told, sequence.num_columns
        return Reservation(updates=tuple(self._change(c, pages, told, copies)
                                         for c, pages in enumerate(sequence.pages)))

    def advance(self, request_id: RequestId, num_computed: int) -> None:
        """Note that ``num_computed`` tokens are in the cache, or will be before any step planned from now on reads.

        Gives back what no later token reaches, and shares nothing: what is not proven by then never will be.
        Less than was noted before changes nothing.
        """
        sequence = self._sequence(request_id)
        if num_computed <= sequence.num_computed:
            return
        if num_computed > sequence.num_told * self.page_size:
            raise InternalError(f"request {request_id} cannot have {num_computed} computed tokens on "
                                f"{sequence.num_told} pages")
        sequence.num_computed = num_computed
        for c in self._windowed:
            gone = self._cycles[c].out_of_reach(num_computed)
            for column in range(max(gone.start, sequence.dropped[c]), gone.stop):
                self._let_go(sequence, c, column, passed=True)
            sequence.dropped[c] = max(gone.stop, sequence.dropped[c])

    def commit(self, request_id: RequestId, tokens: npt.NDArray[np.int32], num_proven: int) -> None:
        """Note that ``tokens[:num_proven]`` are in the cache, and sound.

        Pages that became full enter the prefix tree; what lies out of reach is given back.
        """
        sequence = self._sequence(request_id)
        if num_proven == sequence.num_proven:
            return
        if not sequence.num_proven < num_proven <= min(sequence.num_told * self.page_size, len(tokens)):
            raise InternalError(f"request {request_id} cannot have {num_proven} proven tokens: it had "
                                f"{sequence.num_proven}, {len(tokens)} tokens and {sequence.num_told} pages")
        sequence.num_proven = num_proven
        if sequence.leaves:
            self._sharing.chain(sequence, tokens[:num_proven])
        self.advance(request_id, num_proven)

    def release(self, request_id: RequestId) -> None:
        """Close the books of a request, exactly once. What it shares stays cached; the rest is free.

        With partial reuse its last page stays too, up to the tokens of its last ``commit``.
        """
        sequence = self._sequence(request_id)
        self._ledger.tick()
        self._sharing.close(sequence)
        for c, cycle in enumerate(self._cycles):
            for column in range(sequence.num_columns):
                self._let_go(sequence, c, column, passed=False)
            # the next request may go on from the last full page, which reaches further back than the end
            gone = cycle.out_of_reach(sequence.num_proven // self.page_size * self.page_size)
            for column in range(gone.stop, min(sequence.dropped[c], sequence.num_columns)):
                if (node := sequence.nodes[column]) is not None:
                    self._ledger.keep(node, c)
        if sequence.copy is not None:
            self._ledger.end_copy(sequence.copy)
        del self._sequences[request_id]

    # Books as a whole

    def stats(self) -> KvStats:
        """Counts now, and since the manager was made."""
        total = sum(pool.num_usable for pool in self._ledger.pools)
        free = sum(pool.num_free for pool in self._ledger.pools)
        cached = sum(queue.num_cached for queue in self._ledger.queues)
        return KvStats(num_pages=total, num_free=free, num_referenced=total - free - cached, num_cached=cached,
                       num_hits=self._hits, num_reused_tokens=self._tokens_reused,
                       num_evictions=self._ledger.num_evictions)

    def clear_cache(self) -> None:
        """Drop every cached page that no request holds or copies from. These do not count as evictions."""
        for c, queue in enumerate(self._ledger.queues):
            while (node := queue.pop()) is not None:
                self._ledger.drop(node, c)

    def check_integrity(self) -> None:
        """Prove the books from scratch; raises InternalError naming the broken invariant. O(pages)."""
        check_books(self._ledger, tuple(self._sequences.values()), self.page_size)

    # Inside

    def _sequence(self, request_id: RequestId) -> Sequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise InternalError(f"request {request_id} holds no KV cache: not started, or released") from None

    def _share(self, sequence: Sequence, c: int, node: Node | None) -> None:
        """Hold the node's page as the next column; None: that column is out of reach."""
        if node is None:
            sequence.pages[c].append(0)
            return
        if node.refs[c] and not self._cycles[c].whole_prefix:
            sequence.borrowed[c].add(len(sequence.pages[c]))
        else:
            sequence.credit[c] += 1
        node.resumed = True
        self._ledger.pin(node, c)
        sequence.pages[c].append(node.pages[c])

    def _change(self, c: int, pages: list[int], told: int, copies: list[PageCopy]) -> PageChange:
        """News of the columns from ``told``, those out of reach left out, and of ``copies``, for one life cycle."""
        columns = np.arange(told, len(pages), dtype=np.int32)
        numbers = np.array(pages[told:], np.int32)
        if c in self._windowed:
            columns, numbers = columns[numbers != TRASH_PAGE], numbers[numbers != TRASH_PAGE]
        if not copies:
            return PageChange(columns=columns, pages=numbers, copy_from=_NO_PAGES, copy_to=_NO_PAGES)
        return PageChange(columns=columns, pages=numbers,
                          copy_from=np.array([copy.sources[c] for copy in copies], np.int32),
                          copy_to=np.array([copy.targets[c] for copy in copies], np.int32))

    def _let_go(self, sequence: Sequence, c: int, column: int, *, passed: bool) -> None:
        """End the sequence's hold on one page: shared, or lacking in the tree, it stays cached; else it is free."""
        page, node = sequence.pages[c][column], sequence.nodes[column]
        if page == TRASH_PAGE:
            return
        sequence.pages[c][column] = TRASH_PAGE
        if column in sequence.borrowed[c]:
            sequence.borrowed[c].remove(column)
        else:
            sequence.credit[c] -= 1
        twin = sequence.twins.get(column)
        if node is not None:
            self._ledger.unpin(node, c, passed=passed)
        elif twin is not None and twin.pages[c] == TRASH_PAGE and self._ledger.tree.holds(twin):
            self._ledger.adopt(twin, c, page, passed=passed)
        else:
            self._ledger.pools[c].give(page)
