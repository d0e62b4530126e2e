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

    __slots__ = ("blanks", "borrowed", "copy", "credit", "dropped", "last_node", "late", "leaves", "nodes",
                 "num_chained", "num_computed", "num_proven", "num_told", "pages", "scope", "tail", "twins")

    def __init__(self, *, scope: PrefixScope, leaves: bool, num_cycles: int) -> None:
        self.scope = scope
        self.leaves = leaves
        """Whether its pages may enter the prefix tree."""
        self.pages: list[list[int]] = [[] for _ in range(num_cycles)]
        """[life cycle][column]; 0 where the column is out of reach."""
        self.nodes: list[Node | None] = []
        self.credit = [0] * num_cycles
        """Pages held, less those in ``borrowed``, a life cycle."""
        self.borrowed: list[set[int]] = [set() for _ in range(num_cycles)]
        """Columns that another request held when this one took them, where a life cycle gives pages back."""
        self.dropped = [0] * num_cycles
        """Columns below this that are out of reach were given back, a life cycle."""
        self.copy: PageCopy | None = None
        self.num_told = 0
        """Columns that reservations have named."""
        self.num_computed = 0
        """Tokens in the cache."""
        self.num_proven = 0
        """Those of them that may be shared."""
        self.num_chained = 0
        """Full pages matched, published, blank or late."""
        self.last_node: Node | None = None
        """Node of the last matched or published page; None: the next one comes under the scope's root."""
        self.blanks: list[bytes] = []
        """Contents of the full pages since then that were given back before they were proven, in every life cycle."""
        self.late: list[bytes] = []
        """Contents of the full pages since another request was found to have published one of them first.
        They stay private while the request runs; at release the tree takes those it lacks."""
        self.twins: dict[int, Node] = {}
        """Nodes that other requests published, by the private column of this one with the same content."""
        self.tail = b""
        """Content of the last page while it is not full."""

    @property
    def num_columns(self) -> int:
        """Columns with pages."""
        return len(self.nodes)
