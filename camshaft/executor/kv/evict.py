"""Which cached page of a life cycle goes next when room is needed: one out of reach of all that was useful so far
(``Node.spent``) before others, and then the least recently used one.

Owns the order and the count of unreferenced pages of the prefix tree; removing a page is the manager's.
"""

from __future__ import annotations

import heapq

from camshaft.executor.kv.prefix import Node

_SLACK = 64


class EvictionQueue:
    """Cached pages of life cycle ``cycle`` by last use; offering and popping are O(log n) amortised.

    A heap whose entries go stale rather than being searched: a node used, removed or given a child since it
    was offered is skipped when it surfaces, and the heap is rebuilt when stale entries outnumber the rest.
    """

    __slots__ = ("_cycle", "_heap", "_num_offered", "leaves_only", "num_cached")

    def __init__(self, cycle: int, *, leaves_only: bool) -> None:
        self._cycle = cycle
        self.leaves_only = leaves_only
        """Whether descendants are useless without the page, so that only leaves may go."""
        self._heap: list[tuple[bool, int, int, Node]] = []
        self._num_offered = 0
        self.num_cached = 0
        """Pages of the tree that no request holds, whether they may go at once or after their descendants."""

    def is_idle(self, node: Node) -> bool:
        """Whether the node's page is there, held by nobody, and a leaf where that matters."""
        return (node.pages[self._cycle] != 0 and node.refs[self._cycle] == 0
                and not (self.leaves_only and node.children))

    def is_ready(self, node: Node) -> bool:
        """Whether the node's page may go now: idle, and no live request copies from it."""
        return node.num_copies == 0 and self.is_idle(node)

    def offer(self, node: Node) -> None:
        """Take note that the node may have become ready."""
        if not self.is_ready(node):
            return
        self._num_offered += 1
        heapq.heappush(self._heap, self._entry(node, self._num_offered))
        if len(self._heap) > 2 * self.num_cached + _SLACK:
            self._heap = [self._entry(node, order) for order, node in self._ready().items()]
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        """The ready node to go first, which the caller evicts now; None when no node is ready."""
        while self._heap:
            kept, last_used, _, node = heapq.heappop(self._heap)
            if self._is_current(kept, last_used, node):
                return node
        return None

    def ready_nodes(self) -> set[Node]:
        """Every node that ``pop`` would return in turn if nothing changed; O(n)."""
        return set(self._ready().values())

    def _entry(self, node: Node, order: int) -> tuple[bool, int, int, Node]:
        return not node.spent[self._cycle], node.last_used, order, node

    def _is_current(self, kept: bool, last_used: int, node: Node) -> bool:
        return last_used == node.last_used and kept != node.spent[self._cycle] and self.is_ready(node)

    def _ready(self) -> dict[int, Node]:
        latest: dict[Node, int] = {}
        for kept, last_used, order, node in self._heap:
            if self._is_current(kept, last_used, node):
                latest[node] = max(order, latest.get(node, 0))
        return {order: node for node, order in latest.items()}
