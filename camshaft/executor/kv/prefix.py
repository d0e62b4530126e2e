"""The radix tree of cached pages: which token prefixes are in the cache, under which scope.

Owns nodes, their keys and their order under a parent. A node is one page of tokens in every life cycle;
what it may cost to keep (references, eviction) is decided by the manager and ``evict.py``.

Keys are a SHA-256 chain: ``key = SHA-256(parent key ‖ token ids as little-endian int32)``, started by the
scope with typed, length-prefixed fields. A key finds a node; equality decides. Every hit compares the
parent node and the token ids, and scopes by their fields, so a hit is never a mere equality of hashes.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left

from camshaft.core.errors import InternalError
from camshaft.executor.messages import PrefixScope

TOKEN_BYTES = 4
_DOMAIN = b"camshaft.kv.prefix.1"


class Node:
    """One cached page: the tokens after those of its parent, and where they lie.

    ``content`` is the page's token ids as little-endian int32 bytes: a full page, or fewer tokens in a leaf
    left by a finished request. ``pages[c]`` is the page in life cycle c, 0 where it was dropped or never came;
    ``refs[c]`` counts the requests holding it. What is in the tree is never written again.
    """

    __slots__ = ("children", "content", "key", "labels", "last_used", "num_copies", "pages", "parent", "refs",
                 "resumed", "scope", "spent")

    def __init__(self, parent: Node | None, key: bytes, content: bytes, pages: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.content = content
        self.pages = pages
        self.refs = [0] * len(pages)
        self.spent = [False] * len(pages)
        """Whether the page was let go by a request that had passed it, and none ever resumed there."""
        self.resumed = False
        """Whether a request started from a prefix that reaches the page."""
        self.num_copies = 0
        """Live requests that copied, or are to copy, from this page; it is evicted only where nothing else can be."""
        self.last_used = 0
        self.scope: PrefixScope | None = None
        """Set on roots only."""
        self.children: list[Node] = []
        """Sorted by ``content``."""
        self.labels: list[bytes] = []
        """``content`` of each child: what bisection compares."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the page."""
        return len(self.content) // TOKEN_BYTES


def scope_key(scope: PrefixScope) -> bytes:
    """First key of a scope's chains: no two different scopes encode to the same bytes."""
    digest = hashlib.sha256(_DOMAIN)
    fields = ((b"s", scope.model), (b"i", str(scope.adapter)), (b"s", scope.salt))
    for tag, text in fields:
        field = text.encode("utf-8", "surrogatepass")
        digest.update(tag + len(field).to_bytes(8, "little") + field)
    return digest.digest()


def chain_key(parent_key: bytes, content: bytes) -> bytes:
    """Key of the page with ``content`` after the prefix that ``parent_key`` stands for."""
    return hashlib.sha256(parent_key + content).digest()


def shared_tokens(left: bytes, right: bytes) -> int:
    """How many leading tokens two contents share."""
    most = min(len(left), len(right))
    if left[:most] == right[:most]:
        return most // TOKEN_BYTES
    return next(at for at in range(0, most, TOKEN_BYTES)
                if left[at:at + TOKEN_BYTES] != right[at:at + TOKEN_BYTES]) // TOKEN_BYTES


class PrefixTree:
    """All cached prefixes. A scope's root is a pageless node that exists while it has children."""

    __slots__ = ("_nodes", "_page_bytes", "_roots")

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[PrefixScope, Node] = {}
        self._nodes: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def root(self, scope: PrefixScope) -> Node | None:
        """The scope's root; None while nothing is cached under it."""
        return self._roots.get(scope)

    def open_root(self, scope: PrefixScope) -> Node:
        """The scope's root, made if need be; the caller inserts below it at once."""
        root = self._roots.get(scope)
        if root is None:
            root = self._roots[scope] = Node(None, scope_key(scope), b"", [])
            root.scope = scope
        return root

    def child(self, parent: Node, content: bytes) -> Node | None:
        """The child of ``parent`` holding exactly ``content``."""
        return self._lookup(parent, chain_key(parent.key, content), content)

    def _lookup(self, parent: Node, key: bytes, content: bytes) -> Node | None:
        found = self._nodes.get(key)
        if found is not None and (found.parent is not parent or found.content != content):
            raise InternalError("two cached prefixes have the same SHA-256 key")
        return found

    def walk(self, root: Node, content: bytes) -> list[Node]:
        """Nodes of the longest cached prefix of ``content`` in whole pages."""
        path: list[Node] = []
        node = root
        for stop in range(self._page_bytes, len(content) + 1, self._page_bytes):
            found = self.child(node, content[stop - self._page_bytes:stop])
            if found is None:
                break
            path.append(found)
            node = found
        return path

    def closest_child(self, parent: Node, content: bytes) -> tuple[Node | None, int]:
        """The child sharing the most leading tokens with ``content``, and how many; (None, 0) if none shares any."""
        # in byte order, the longest common prefix is always with a neighbour of the place content would take
        at = bisect_left(parent.labels, content)
        best: Node | None = None
        most = 0
        for node in parent.children[max(at - 1, 0):at + 1]:
            shared = shared_tokens(node.content, content)
            if shared > most:
                best, most = node, shared
        return best, most

    def insert(self, parent: Node, content: bytes, pages: list[int]) -> Node | None:
        """Add a page below ``parent``, whose own page is full; None where it is already, or ``parent`` is gone."""
        key = chain_key(parent.key, content)
        if not self.holds(parent) or self._lookup(parent, key, content) is not None:
            return None
        node = Node(parent, key, content, pages)
        at = bisect_left(parent.labels, content)
        parent.labels.insert(at, content)
        parent.children.insert(at, node)
        self._nodes[key] = node
        return node

    def remove(self, leaf: Node) -> Node | None:
        """Take a leaf out; returns its parent, or None where that was a root."""
        parent = leaf.parent
        if leaf.children or parent is None or self._nodes.pop(leaf.key, None) is not leaf:
            raise InternalError("a page that is no leaf of the prefix tree was removed")
        at = bisect_left(parent.labels, leaf.content)
        del parent.labels[at], parent.children[at]
        if parent.scope is None:
            return parent
        if not parent.children:
            del self._roots[parent.scope]
        return None

    def holds(self, node: Node) -> bool:
        """Whether the node is in the tree now."""
        found = self._nodes.get(node.key) if node.scope is None else self._roots.get(node.scope)
        return found is node

    def nodes(self) -> list[Node]:
        """Every node but the roots, in no particular order; O(n)."""
        return list(self._nodes.values())
