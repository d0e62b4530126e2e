"""The state of every page: free, private, or in the prefix tree, there held or merely cached.

Owns each transition between those states, so that the counts always add up. Which request does what, and
in which order, is the manager's business.
"""

from __future__ import annotations

from camshaft.core.errors import InternalError
from camshaft.executor.kv.evict import EvictionQueue
from camshaft.executor.kv.lifecycle import LifeCycle
from camshaft.executor.kv.pool import TRASH_PAGE, PagePool
from camshaft.executor.kv.prefix import Node, PrefixTree
from camshaft.executor.kv.sequence import PageCopy


class PageLedger:
    """Pools, eviction queues and prefix tree of all life cycles; ``c`` is always a life cycle's index."""

    __slots__ = ("_clock", "cycles", "num_evictions", "pools", "queues", "sources", "tree")

    def __init__(self, cycles: tuple[LifeCycle, ...], num_pages: tuple[int, ...]) -> None:
        self.cycles = cycles
        self.pools = tuple(PagePool(count) for count in num_pages)
        self.queues = tuple(EvictionQueue(c, leaves_only=cycle.whole_prefix) for c, cycle in enumerate(cycles))
        self.tree = PrefixTree(cycles[0].page_size)
        self.sources: dict[Node, list[PageCopy]] = {}
        """Nodes that live requests copy from, oldest first, each with all its copies."""
        self.num_evictions = 0
        self._clock = 0

    def room(self, c: int) -> int:
        """Pages that ``take`` can provide: free ones and those cached for nobody."""
        return self.pools[c].num_free + self.queues[c].num_cached

    def tick(self) -> None:
        """Pages let go from now on count as used later than those before."""
        self._clock += 1

    def pin(self, node: Node, c: int) -> None:
        """One more request holds the node's page."""
        if node.refs[c] == 0:
            self.queues[c].num_cached -= 1
        node.refs[c] += 1

    def unpin(self, node: Node, c: int, *, passed: bool) -> None:
        """One request fewer holds the node's page; without any it is merely cached.

        ``passed``: the request goes on beyond the page's reach.
        """
        node.refs[c] -= 1
        if node.refs[c] == 0:
            self.queues[c].num_cached += 1
            node.spent[c] = passed and not node.resumed
            self._touch(node)

    def keep(self, node: Node, c: int) -> None:
        """A page that its request had passed was within reach of where it ended, after all."""
        if node.spent[c]:
            node.spent[c] = False
            self._touch(node)

    def adopt(self, node: Node, c: int, page: int, *, passed: bool) -> None:
        """Give a node that lacks it in life cycle c a private page of the same content; it is merely cached."""
        node.pages[c] = page
        self.queues[c].num_cached += 1
        node.spent[c] = passed
        self._touch(node)

    def publish(self, parent: Node, content: bytes, pages: list[int]) -> Node | None:
        """Put private pages into the tree, where the request that had them holds them; None as ``insert``."""
        node = self.tree.insert(parent, content, pages)
        if node is not None:
            node.refs = [int(page != 0) for page in pages]
        return node

    def hang(self, parent: Node, content: bytes) -> Node:
        """A node without pages below ``parent``, which lacks it; the caller publishes below it at once."""
        node = self.tree.insert(parent, content, [TRASH_PAGE] * len(self.pools))
        if node is None:
            raise InternalError("a page without memory was put where the prefix tree has one, or has no place")
        return node

    def take(self, c: int, copies: list[PageCopy]) -> int:
        """A page to be written by the forward pass; the caller has checked ``room``.

        Evicts if need be. As a last resort that is a page which live requests copy from; copies from it that
        no reservation carried yet are added to ``copies``, for the step that will overwrite it.
        """
        pool, queue = self.pools[c], self.queues[c]
        if pool.num_free == 0:
            node = queue.pop()
            if node is None:
                node = next((node for node in self.sources if queue.is_idle(node)), None)
                if node is None:
                    raise InternalError(f"{queue.num_cached} cached KV pages are counted, none can be evicted")
                for copy in self.sources[node]:
                    if copy.due:
                        copies.append(copy)
                        copy.due = False
            self._evict(node, c)
        return pool.take()

    def copy_on_write(self, node: Node) -> PageCopy | None:
        """Copy the node's pages to private ones, evicting if need be; None when no page can be had.

        The targets are never pages that a live request copies from.
        """
        copies = self.sources.setdefault(node, [])
        node.num_copies += 1
        targets: list[int] = []
        for c, (pool, queue) in enumerate(zip(self.pools, self.queues, strict=True)):
            if pool.num_free == 0:
                victim = queue.pop()
                if victim is None:
                    break
                self._evict(victim, c)
            targets.append(pool.take())
        copy = PageCopy(node, targets)
        copies.append(copy)
        if len(targets) == len(self.pools):
            return copy
        for pool, page in zip(self.pools, targets, strict=False):
            pool.give(page)
        self.end_copy(copy)
        return None

    def end_copy(self, copy: PageCopy) -> None:
        """The copying request is released or gave the copy up; its source is an ordinary cached page again."""
        node = copy.node
        node.num_copies -= 1
        copies = self.sources.get(node)
        if copies is not None:
            copies.remove(copy)
            if not copies:
                del self.sources[node]
        self._touch(node)

    def drop(self, node: Node, c: int) -> None:
        """Free an idle node's page, in every life cycle where later pages are useless without it; prune the tree."""
        whole = self.queues[c].leaves_only
        for k, page in enumerate(node.pages):
            if page != 0 and (whole or k == c):
                node.pages[k] = 0
                self.pools[k].give(page)
                self.queues[k].num_cached -= 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Take the node out of the tree if it is a leaf without a page, and what above it then is one."""
        left: Node | None = node
        while left is not None and not left.children and not any(left.pages):
            self.sources.pop(left, None)
            left = self.tree.remove(left)
        if left is not None:
            self._offer(left)

    def _evict(self, node: Node, c: int) -> None:
        self.num_evictions += 1
        self.drop(node, c)

    def _touch(self, node: Node) -> None:
        node.last_used = self._clock
        self._offer(node)

    def _offer(self, node: Node) -> None:
        for queue in self.queues:
            queue.offer(node)
