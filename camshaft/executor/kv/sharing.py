"""Which cached pages a prompt can go on from, and which pages of a sequence enter the prefix tree.

Owns the search and the order of publishing. Pages change hands in the ledger; who holds what is the manager's.

Where some life cycle keeps whole prefixes, a request that finds its next page published by another keeps its own
copy and all that follows private until its release (``Sequence.late``): a child of a node it does not hold could
outlive its parent. Where all life cycles give pages back, it goes on below the other's node, and a page it gave back
before it was proven becomes a node without pages once a later page has one.
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from camshaft.executor.kv.ledger import PageLedger
from camshaft.executor.kv.lifecycle import LifeCycle
from camshaft.executor.kv.pool import TRASH_PAGE
from camshaft.executor.kv.prefix import TOKEN_BYTES, Node
from camshaft.executor.kv.sequence import Sequence
from camshaft.executor.messages import PrefixScope


class PrefixSharing:
    """Reads and extends the ledger's tree. ``partial``: the beginning of a page may be shared too, by copy."""

    __slots__ = ("_cycles", "_keeps_prefixes", "_ledger", "_page_size", "_partial", "_tree")

    def __init__(self, ledger: PageLedger, cycles: tuple[LifeCycle, ...], *, partial: bool) -> None:
        self._ledger = ledger
        self._tree = ledger.tree
        self._cycles = tuple((c, cycle) for c, cycle in enumerate(cycles) if not cycle.whole_prefix)
        self._keeps_prefixes = len(self._cycles) < len(cycles)
        self._page_size = cycles[0].page_size
        self._partial = partial

    def find(self, tokens: npt.NDArray[np.int32], scope: PrefixScope) -> tuple[list[Node], Node | None, int]:
        """Nodes to share, then the node to copy from and how many of its tokens (None, 0: no copy).

        At least one token is left; every life cycle has what the next one reads.
        """
        root = self._tree.root(scope)
        if root is None:
            return [], None, 0
        usable = _content(tokens[:-1])
        path = self._tree.walk(root, usable)
        if self._partial:
            rest = usable[len(path) * self._page_size * TOKEN_BYTES:]
            source, shared = self._tree.closest_child(path[-1] if path else root, rest)
            if (source is not None and all(source.pages)
                    and self._gap(path, len(path) * self._page_size + shared) is None):
                return path, source, shared
        while (gap := self._gap(path, len(path) * self._page_size)) is not None:
            del path[gap:]
        return path, None, 0

    def _gap(self, path: list[Node], num_tokens: int) -> int | None:
        """A column of ``path`` without the page that a token at ``num_tokens`` reads there; None: it can go on.

        No number of columns between the one returned and all of ``path`` is enough to go on from.
        """
        for c, cycle in self._cycles:
            gone = cycle.out_of_reach(num_tokens)
            behind, before = range(gone.stop, len(path)), range(min(gone.start, len(path)))
            for column in itertools.chain(reversed(behind), reversed(before)):
                if path[column].pages[c] == TRASH_PAGE:
                    return column
        return None

    def chain(self, sequence: Sequence, tokens: npt.NDArray[np.int32]) -> None:
        """Publish what became full of the sequence, whose proven ``tokens`` these are; note the rest as its tail."""
        size, at = self._page_size * TOKEN_BYTES, 0
        content = _content(tokens[sequence.num_chained * self._page_size:])
        while len(content) - at >= size:
            self._chain_page(sequence, sequence.num_chained, content[at:at + size])
            sequence.num_chained += 1
            at += size
        sequence.tail = content[at:]

    def _chain_page(self, sequence: Sequence, column: int, content: bytes) -> None:
        if not sequence.leaves:
            return
        if not self._keeps_prefixes and not any(pages[column] for pages in sequence.pages):
            sequence.blanks.append(content)
        elif sequence.late:
            sequence.late.append(content)
            above = sequence.twins.get(column - 1)
            if above is not None and self._tree.holds(above):
                twin = self._tree.child(above, content)
                if twin is not None:
                    sequence.twins[column] = twin
        else:
            node = self._publish(sequence, column, content)
            if node is None:
                sequence.leaves = False  # its prefix has left the tree
            elif node is sequence.nodes[column] or not self._keeps_prefixes:
                sequence.last_node = node
            else:
                sequence.late.append(content)

    def close(self, sequence: Sequence) -> None:
        """At release: give the tree what it lacks of the late pages, and the unfinished last page."""
        if not sequence.leaves:
            return
        column = sequence.num_chained - len(sequence.late)
        for content in sequence.late:
            node = self._publish(sequence, column, content)
            if node is None:
                return
            sequence.last_node = node
            column += 1
        if (self._partial and sequence.tail and all(pages[column] for pages in sequence.pages)
                and not self._holds_tail(sequence)):
            self._publish(sequence, column, sequence.tail)

    def _holds_tail(self, sequence: Sequence) -> bool:
        """Whether a cached page begins with the sequence's last tokens."""
        parent = sequence.last_node or self._tree.root(sequence.scope)
        for content in sequence.blanks:
            if parent is not None and self._tree.holds(parent):
                parent = self._tree.child(parent, content)
        return (parent is not None and self._tree.holds(parent)
                and self._tree.closest_child(parent, sequence.tail)[1] * TOKEN_BYTES == len(sequence.tail))

    def _publish(self, sequence: Sequence, column: int, content: bytes) -> Node | None:
        """Put a private column into the tree below the sequence's last node and its blank pages.

        Returns the node with this content, perhaps another request's; None where the prefix has left the tree.
        """
        parent = sequence.last_node or self._tree.open_root(sequence.scope)
        if not self._tree.holds(parent):
            return None
        for blank in sequence.blanks:
            parent = self._tree.child(parent, blank) or self._ledger.hang(parent, blank)
        sequence.blanks.clear()
        node = self._ledger.publish(parent, content, [pages[column] for pages in sequence.pages])
        if node is not None:
            sequence.nodes[column] = node
            return node
        twin = self._tree.child(parent, content)
        if twin is not None:
            sequence.twins[column] = twin
        return twin


def _content(tokens: npt.NDArray[np.int32]) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()
