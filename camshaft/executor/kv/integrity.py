"""The proof that the KV books add up, recounted from the sequences, the prefix tree and the free lists.

Owns the recount only; changes nothing, and shares no arithmetic with the code it checks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence as Items

from camshaft.core.errors import InternalError
from camshaft.executor.kv.ledger import PageLedger
from camshaft.executor.kv.pool import TRASH_PAGE
from camshaft.executor.kv.prefix import TOKEN_BYTES, Node, chain_key
from camshaft.executor.kv.sequence import Sequence


def check_books(ledger: PageLedger, sequences: Items[Sequence], page_size: int) -> None:
    """Raise InternalError naming the first broken invariant of the ledger and the sequences' records."""
    nodes = ledger.tree.nodes()
    _check_tree(ledger, nodes, page_size)
    _check_sequences(ledger, sequences)
    _check_copies(ledger, sequences)
    for c in range(len(ledger.pools)):
        _check_pages(ledger, nodes, sequences, c)
        _check_queue(ledger, nodes, c)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InternalError(f"KV cache books are wrong: {what}")


def _check_tree(ledger: PageLedger, nodes: list[Node], page_size: int) -> None:
    for node in nodes:
        parent = node.parent
        _require(parent is not None and ledger.tree.holds(parent), "a cached page has lost its parent")
        assert parent is not None
        at = bisect_left(parent.labels, node.content)
        _require(parent.children[at:at + 1] == [node], "a cached page is unknown to its parent")
        _require(node.key == chain_key(parent.key, node.content), "a cached page's key is not that of its content")
        _require(0 < len(node.content) <= page_size * TOKEN_BYTES, "a cached page has no tokens, or too many")
        _require(node.num_tokens == page_size or not node.children, "a page that is not full has descendants")
        _require(node.labels == sorted({child.content for child in node.children})
                 == [child.content for child in node.children], "children are out of order or twice the same")
        _require(bool(node.children) or any(node.pages), "a leaf of the prefix tree has no page")


def _check_sequences(ledger: PageLedger, sequences: Items[Sequence]) -> None:
    for sequence in sequences:
        _require(all(len(pages) == sequence.num_columns for pages in sequence.pages), "life cycles differ in columns")
        _require(sequence.num_told <= sequence.num_columns, "a page was announced that is not held")
        _require(sequence.num_proven <= sequence.num_computed, "tokens were shared before they were computed")
        for c, pages in enumerate(sequence.pages):
            shared = [(page, node) for page, node in zip(pages, sequence.nodes, strict=True) if page and node]
            _require(all(ledger.tree.holds(node) and node.pages[c] == page for page, node in shared),
                     "a shared page in use has left the prefix tree")
            held = {node for _, node in shared}
            gone = ledger.cycles[c].out_of_reach(sequence.num_computed)
            _require(not any(pages[gone.start:gone.stop]), "a page out of reach is still held")
            _require(all(pages[column] for column in range(len(pages)) if column not in gone),
                     "a page within reach was given back")
            borrowed = sequence.borrowed[c]
            _require(all(pages[column] and sequence.nodes[column] for column in borrowed), "a borrowed page is free")
            _require(sequence.credit[c] == sum(map(bool, pages)) - len(borrowed), "pages held are miscounted")
            if ledger.queues[c].leaves_only:
                _require(all(upper.parent is None or upper.parent.scope is not None or upper.parent in held
                             for upper in held), "a request holds a page without its prefix")


def _check_copies(ledger: PageLedger, sequences: Items[Sequence]) -> None:
    copies = [sequence.copy for sequence in sequences if sequence.copy is not None]
    booked = [copy for source in ledger.sources.values() for copy in source]
    _require(all(copy in copies for copy in booked), "a copy on write outlives its request")
    _require(all(copy in booked for copy in copies if copy.due), "a copy on write that is due has lost its source")
    _require(all(node.num_copies == len(source) and ledger.tree.holds(node)
                 for node, source in ledger.sources.items()), "the copies of a page are miscounted")


def _check_pages(ledger: PageLedger, nodes: list[Node], sequences: Items[Sequence], c: int) -> None:
    private: list[int] = []
    refs: Counter[Node] = Counter()
    for sequence in sequences:
        for page, node in zip(sequence.pages[c], sequence.nodes, strict=True):
            if page != TRASH_PAGE and node is None:
                private.append(page)
            elif page != TRASH_PAGE and node is not None:
                refs[node] += 1
    _require(all(node.refs[c] == refs[node] for node in nodes), "references are miscounted")
    credit = sum(sequence.credit[c] for sequence in sequences)
    _require(ledger.queues[c].leaves_only or credit <= len(private) + sum(map(bool, refs.values())),
             "a page counts for two requests")
    cached = [node.pages[c] for node in nodes if node.pages[c] != TRASH_PAGE]
    everything = sorted((*ledger.pools[c].free_pages(), *private, *cached))
    _require(everything == list(range(1, ledger.pools[c].num_usable + 1)), "a page is lost, or in two places")


def _check_queue(ledger: PageLedger, nodes: list[Node], c: int) -> None:
    queue = ledger.queues[c]
    idle = [node for node in nodes if node.pages[c] != TRASH_PAGE and node.refs[c] == 0]
    _require(queue.num_cached == len(idle), "cached pages are miscounted")
    _require({node for node in idle if queue.is_ready(node)} == queue.ready_nodes(),
             "a page that may be evicted is not in the queue")
