"""What one live request holds, as the manager books it. Owns the record only; the manager changes it."""

from __future__ import annotations

from camshaft.executor.kv.prefix import Node
from camshaft.executor.messages import PrefixScope


class PageCopy:
    """A copy on write: the first tokens of a cached page, wanted in a private one.

    ``sources[c]`` is copied to ``targets[c]`` in every life cycle c. ``due`` until a reservation carries it;
    ``node`` is the cached page, which counts the copy until the copying request is released.
    """

    __slots__ = ("due", "node", "sources", "targets")

    def __init__(self, node: Node, targets: list[int]) -> None:
        self.node = node
        self.sources = tuple(node.pages)
        self.targets = tuple(targets)
        self.due = True


class Sequence:
    """Books of one request. Column i is the page of positions ``i * page_size`` onward.

    ``nodes[i]`` is the shared node behind column i, None while its pages are private.
    """

    __slots__ = ("copy", "dropped", "last_node", "late", "nodes", "num_chained", "num_computed", "num_told", "pages",
                 "scope", "shares", "tail")

    def __init__(self, *, scope: PrefixScope, shares: bool, num_cycles: int) -> None:
        self.scope = scope
        self.shares = shares
        self.pages: list[list[int]] = [[] for _ in range(num_cycles)]
        """[life cycle][column]; 0 where the column is out of reach."""
        self.nodes: list[Node | None] = []
        self.dropped = [0] * num_cycles
        """Columns below this that are out of reach were given back, a life cycle."""
        self.copy: PageCopy | None = None
        self.num_told = 0
        """Columns that reservations have named."""
        self.num_computed = 0
        """Tokens in the cache."""
        self.num_chained = 0
        """Full pages matched, published or set aside in ``late``."""
        self.last_node: Node | None = None
        """Node of the last matched or published page; None: the next one comes under the scope's root."""
        self.late: list[bytes] = []
        """Contents of the full pages since another request was found to have published one of them first.
        They stay private while the request runs; at release the tree takes those it lacks."""
        self.tail = b""
        """Content of the last page while it is not full."""

    @property
    def num_columns(self) -> int:
        """Columns with pages."""
        return len(self.nodes)
