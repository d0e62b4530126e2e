"""The free pages of one life cycle's pool.

Owns which page numbers are free; knows neither tensors nor who holds the pages it handed out.
"""

from __future__ import annotations

from array import array

from camshaft.core.errors import InternalError

TRASH_PAGE = 0
"""Padding writes here and nothing reads it; never handed out."""

_TAKEN = -1


class PagePool:
    """Free list threaded through an array, last in first out: taking and giving a page are O(1).

    ``num_pages`` counts the trash page; pages 1 to ``num_pages - 1`` can be handed out.
    """

    __slots__ = ("_head", "_next", "num_free", "num_usable")

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise InternalError(f"a KV pool of {num_pages} pages has no trash page")
        # entry p: the free page after p (the trash page ends the list), or _TAKEN
        self._next = array("i", (*range(1, num_pages), TRASH_PAGE))
        self._next[TRASH_PAGE] = _TAKEN
        self._head = 1 if num_pages > 1 else TRASH_PAGE
        self.num_usable = num_pages - 1
        self.num_free = self.num_usable

    def take(self) -> int:
        """A free page, now taken. Raises InternalError when there is none: callers count first."""
        page = self._head
        if page == TRASH_PAGE:
            raise InternalError("a KV page was taken from an empty pool")
        self._head = self._next[page]
        self._next[page] = _TAKEN
        self.num_free -= 1
        return page

    def give(self, page: int) -> None:
        """Return a taken page. Raises InternalError on the trash page, a foreign number or a page already free."""
        if not TRASH_PAGE < page <= self.num_usable or self._next[page] != _TAKEN:
            raise InternalError(f"KV page {page} was returned but is not out")
        self._next[page] = self._head
        self._head = page
        self.num_free += 1

    def free_pages(self) -> list[int]:
        """All free pages, next to be taken first. Raises InternalError if the list is torn; O(free)."""
        found: list[int] = []
        page = self._head
        while page != TRASH_PAGE:
            if page == _TAKEN or len(found) > self.num_usable:
                raise InternalError("the free list of a KV pool is torn")
            found.append(page)
            page = self._next[page]
        if len(found) != self.num_free:
            raise InternalError(f"a KV pool counts {self.num_free} free pages and lists {len(found)}")
        return found
