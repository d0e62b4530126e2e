"""KVCacheManager: the only door to KV pages.

Owns who holds which page of which life cycle, what stays cached after its request, and what a row's page
table must learn. Knows pages by number only: the tensors are the runtime's, the policy is the scheduler's.

Order of calls. ``start`` once; then, for each step that feeds the request, ``reserve`` while the step is
planned, its reservation carried out by that very step, and ``commit`` after the step was submitted;
``release`` once, between steps, when no submitted step that names the request is still to run.
Single-threaded.

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
from camshaft.executor.kv.prefix import TOKEN_BYTES, Node
from camshaft.executor.kv.sequence import PageCopy, Sequence
from camshaft.executor.messages import PrefixScope
from camshaft.runtime.step import Int32Array

_NO_PAGES: Int32Array = np.zeros(0, np.int32)
_NO_PAGES.setflags(write=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What ``start`` would find in the cache. Pages are counted in the life cycle with most of them."""

    num_tokens: int
    """Tokens that need not be computed; at most one less than the prompt has."""
    num_pages: int
    """Pages shared whole."""
    num_pages_unreferenced: int
    """Those of ``num_pages`` that no request holds: taking them makes that many fewer available."""
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
        self._page_bytes = self.page_size * TOKEN_BYTES
        self._cycles = tuple(make_life_cycle(spec) for spec in life_cycles)
        self._windowed = tuple(c for c, cycle in enumerate(self._cycles) if not cycle.whole_prefix)
        self._ledger = PageLedger(self._cycles, num_pages)
        self._tree = self._ledger.tree
        self._partial_reuse = enable_block_reuse and enable_partial_reuse
        self._sequences: dict[RequestId, Sequence] = {}
        self._hits = self._tokens_reused = 0
        nothing = PageChange(columns=_NO_PAGES, pages=_NO_PAGES, copy_from=_NO_PAGES, copy_to=_NO_PAGES)
        self._no_change = Reservation(updates=(nothing,) * len(self._cycles))

    # Room

    def pages_for(self, num_tokens: int) -> int:
        """Pages that ``num_tokens`` tokens take in a life cycle that keeps them all."""
        return -(-num_tokens // self.page_size)

    def usable_pages(self) -> int:
        """Most pages one request could ever hold: those of the life cycle with the least room."""
        return min(pool.num_usable for pool in self._ledger.pools)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` fits an otherwise empty cache."""
        return all(cycle.max_pages(num_tokens) <= pool.num_usable
                   for cycle, pool in zip(self._cycles, self._ledger.pools, strict=True))

    def available_pages(self) -> int:
        """Pages that could be reserved now, free or by eviction, in the life cycle with the least of them."""
        return min(self._ledger.room(c) for c in range(len(self._cycles)))

    def held_pages(self, request_id: RequestId) -> int:
        """Page columns the request has room for now, shared ones and the target of a copy included."""
        return self._sequence(request_id).num_columns

    # A request's life

    def match(self, tokens: npt.NDArray[np.int32], scope: PrefixScope) -> PrefixMatch:
        """What a request with this prompt could reuse now. Changes nothing.

        ``start`` reuses exactly this, less the partial tokens where no page for the copy can be had.
        """
        path, _, partial = self._find(_content(tokens), scope)
        num_tokens = len(path) * self.page_size + partial
        unreferenced = 0
        for c, cycle in enumerate(self._cycles):
            gone = cycle.out_of_reach(num_tokens)
            count = sum(node.refs[c] == 0 for column, node in enumerate(path) if column not in gone)
            unreferenced = max(unreferenced, count)
        return PrefixMatch(num_tokens=num_tokens, num_pages=len(path), num_pages_unreferenced=unreferenced,
                           num_partial_tokens=partial)

    def start(self, request_id: RequestId, tokens: npt.NDArray[np.int32], scope: PrefixScope, reuse: bool) -> int:
        """Open the books of a request and take what it can reuse; returns how many of its tokens are cached.

        ``reuse`` false: it neither reads nor leaves shared pages. At least one token is left to compute.
        """
        if request_id in self._sequences:
            raise InternalError(f"request {request_id} was started twice")
        sequence = Sequence(scope=scope, shares=reuse and self.block_reuse, num_cycles=len(self._cycles))
        self._sequences[request_id] = sequence
        if not sequence.shares:
            return 0
        path, source, partial = self._find(_content(tokens), scope)
        num_tokens = len(path) * self.page_size + partial
        for c, cycle in enumerate(self._cycles):
            gone = cycle.out_of_reach(num_tokens)
            for column, node in enumerate(path):
                if column not in gone:
                    self._ledger.pin(node, c)
                sequence.pages[c].append(0 if column in gone else node.pages[c])
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
                for pages, target in zip(sequence.pages, sequence.copy.targets, strict=True):
                    pages.append(target)
                sequence.nodes.append(None)
        sequence.num_computed = num_tokens
        self._hits += num_tokens > 0
        self._tokens_reused += num_tokens
        return num_tokens

    def reserve(self, request_id: RequestId, num_tokens: int) -> Reservation | None:
        """Give every position below ``num_tokens`` a page, evicting as needed; None: no room, nothing changed.

        The first reservation after ``start`` also names the shared pages and the copy.
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
        sequence.nodes.extend([None] * need)
        told = sequence.num_told
        sequence.num_told = sequence.num_columns
        columns = np.arange(told, sequence.num_columns, dtype=np.int32)
        return Reservation(updates=tuple(
            PageChange(columns=columns, pages=np.array(pages[told:], np.int32),
                       copy_from=np.array([copy.sources[c] for copy in copies], np.int32) if copies else _NO_PAGES,
                       copy_to=np.array([copy.targets[c] for copy in copies], np.int32) if copies else _NO_PAGES)
            for c, pages in enumerate(sequence.pages)))

    def commit(self, request_id: RequestId, tokens: npt.NDArray[np.int32], num_computed: int) -> None:
        """Note that ``tokens[:num_computed]`` are in the cache, or will be before any step planned from now on reads.

        Pages that became full enter the prefix tree; what lies out of reach is given back.
        """
        sequence = self._sequence(request_id)
        if num_computed == sequence.num_computed:
            return
        if not sequence.num_computed < num_computed <= min(sequence.num_told * self.page_size, len(tokens)):
            raise InternalError(f"request {request_id} cannot have {num_computed} computed tokens: it had "
                                f"{sequence.num_computed}, {len(tokens)} tokens and {sequence.num_told} pages")
        sequence.num_computed = num_computed
        if sequence.shares:
            self._chain(sequence, _content(tokens[sequence.num_chained * self.page_size:num_computed]))
        for c in self._windowed:
            gone = self._cycles[c].out_of_reach(num_computed)
            for column in range(max(gone.start, sequence.dropped[c]), gone.stop):
                self._let_go(sequence, c, column)
            sequence.dropped[c] = max(gone.stop, sequence.dropped[c])

    def release(self, request_id: RequestId) -> None:
        """Close the books of a request, exactly once. What it shares stays cached; the rest is free.

        With partial reuse its last page stays too, up to the tokens of its last ``commit``.
        """
        sequence = self._sequence(request_id)
        self._ledger.tick()
        if sequence.late or sequence.tail:
            self._publish_late(sequence)
        for c in range(len(self._cycles)):
            for column in range(sequence.num_columns):
                self._let_go(sequence, c, column)
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

    def _find(self, content: bytes, scope: PrefixScope) -> tuple[list[Node], Node | None, int]:
        """Nodes to share, then the node to copy from and how many of its tokens (None, 0: no copy)."""
        root = self._tree.root(scope) if self.block_reuse else None
        if root is None:
            return [], None, 0
        usable = content[:-TOKEN_BYTES]
        path = self._tree.walk(root, usable)
        if self._partial_reuse:
            rest = usable[len(path) * self._page_bytes:]
            source, shared = self._tree.closest_child(path[-1] if path else root, rest)
            if (source is not None and all(source.pages)
                    and self._can_resume(path, len(path) * self.page_size + shared)):
                return path, source, shared
        while not self._can_resume(path, len(path) * self.page_size):
            path.pop()
        return path, None, 0

    def _can_resume(self, path: list[Node], num_tokens: int) -> bool:
        """Whether every life cycle still has what a token at ``num_tokens`` reads of ``path``."""
        for c in self._windowed:
            gone = self._cycles[c].out_of_reach(num_tokens)
            if any(node.pages[c] == 0 for column, node in enumerate(path) if column not in gone):
                return False
        return True

    def _chain(self, sequence: Sequence, content: bytes) -> None:
        """Publish the full pages at the front of ``content``; keep the rest as the tail."""
        at = 0
        for at in range(self._page_bytes, len(content) + 1, self._page_bytes):
            page = content[at - self._page_bytes:at]
            if sequence.late or not self._publish(sequence, sequence.num_chained, page):
                sequence.late.append(page)
            sequence.num_chained += 1
        sequence.tail = content[at:]

    def _publish(self, sequence: Sequence, column: int, content: bytes) -> bool:
        """Put a private column into the tree below the sequence's last node; False where that cannot be."""
        pages = [pages[column] for pages in sequence.pages]
        if not any(pages):
            return False
        parent = sequence.last_node or self._tree.open_root(sequence.scope)
        node = self._ledger.publish(parent, content, pages)
        if node is None:
            return False
        sequence.last_node = sequence.nodes[column] = node
        return True

    def _publish_late(self, sequence: Sequence) -> None:
        """At release: give the tree what it lacks of the pages set aside, and the unfinished last page."""
        column = sequence.num_chained - len(sequence.late)
        for content in sequence.late:
            if not self._publish(sequence, column, content):
                parent = sequence.last_node or self._tree.root(sequence.scope)
                found = None if parent is None else self._tree.child(parent, content)
                if found is None:
                    return
                sequence.last_node = found
            column += 1
        if not self._partial_reuse or not sequence.tail or not all(pages[column] for pages in sequence.pages):
            return
        parent = sequence.last_node or self._tree.root(sequence.scope)
        if parent is None or self._tree.closest_child(parent, sequence.tail)[1] * TOKEN_BYTES < len(sequence.tail):
            self._publish(sequence, column, sequence.tail)

    def _let_go(self, sequence: Sequence, c: int, column: int) -> None:
        """End the sequence's hold on one page: shared, it stays cached; private, it is free."""
        page, node = sequence.pages[c][column], sequence.nodes[column]
        if page == 0:
            return
        sequence.pages[c][column] = 0
        if node is None:
            self._ledger.pools[c].give(page)
        else:
            self._ledger.unpin(node, c)


def _content(tokens: npt.NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
