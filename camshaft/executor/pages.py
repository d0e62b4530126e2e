"""The pages of the table's rows: taken as rows grow, given back as they slide on or leave, and what they may need.

Owns the calls to the cache that change a row's pages, the row's page counters, and the page updates of the step
being planned. Who may have pages is ``capacity.py``'s to say.

Order. Everything here happens while a step is planned or read, and steps run in the order they were submitted. A
page given back may therefore go to another row at once: steps in flight that still read or write it run before
the step being planned writes it.
"""

from __future__ import annotations

import numpy as np

from camshaft.config.kv import PAGES_AHEAD, reserved_ahead
from camshaft.core.errors import InternalError
from camshaft.executor.kv.manager import KVCacheManager, Reservation
from camshaft.executor.policies.base import Load
from camshaft.executor.table import CONTEXT, GENERATION, RequestTable, RowNeeds
from camshaft.executor.waiting import WaitingRequest
from camshaft.runtime.step import PageUpdates

_NONE = np.zeros(0, np.int32)
_NO_UPDATES = PageUpdates(rows=_NONE, columns=_NONE, pages=_NONE, copy_from=_NONE, copy_to=_NONE)


class RowPages:
    """Pages of ``table``'s rows in ``kv``. ``is_promised``: no reservation may ever fail, as admission saw to it."""

    def __init__(self, kv: KVCacheManager, table: RequestTable, *, chunk_tokens: int, is_promised: bool) -> None:
        self._kv = kv
        self._table = table
        self._step_tokens = reserved_ahead(chunk_tokens, kv.page_size)
        self._is_promised = is_promised
        longest = 2**30
        self._slides = bool(kv.worst_pages(longest, self._step_tokens).min() < kv.pages_for(longest))
        """Whether rows give pages back while they run."""
        self._reserved: list[tuple[int, Reservation]] = []
        self.page_size = kv.page_size

    def needs(self, record: WaitingRequest, *, output_limit: int, worst_tokens: int) -> RowNeeds:
        """What ``record`` will want of a row, in tokens and in pages."""
        soon_tokens = min(len(record.token_ids) + self.page_size, worst_tokens)
        return RowNeeds(output_limit=output_limit, worst_tokens=worst_tokens,
                        worst_pages=self._kv.worst_pages(worst_tokens, self._step_tokens),
                        soon_pages=self._kv.worst_pages(soon_tokens, self._step_tokens))

    def load(self) -> Load:
        """What the cache has left, and what running rows will still want of it."""
        table = self._table
        in_context, generating = table.state == CONTEXT, table.state == GENERATION
        unheld = table.worst_pages - table.held_pages
        longest = unheld[in_context | generating].sum(axis=0, dtype=np.int32)
        soon = (np.maximum(table.soon_pages - table.held_pages, 0)[in_context].sum(axis=0, dtype=np.int32)
                + np.clip(unheld[generating], 0, 1).sum(axis=0, dtype=np.int32))
        return Load(available=self._kv.available_pages(), longest=longest, soon=soon, num_rows=table.num_used)

    def count(self, row: int) -> None:
        """Take over what the cache says the row holds."""
        request_id = self._table.ids[row]
        self._table.columns[row] = self._kv.columns(request_id)
        self._table.held_pages[row] = self._kv.held_pages(request_id)

    def reserve(self, row: int, num_tokens: int) -> bool:
        """Room for the row's first ``num_tokens`` tokens in the step being planned; False: there are no pages.

        Called before the row's own counters move on to that step.
        """
        request_id = self._table.ids[row]
        self._kv.advance(request_id, int(self._table.num_scheduled[row]))
        reservation = self._kv.reserve(request_id, num_tokens)
        self.count(row)
        if reservation is not None:
            self._reserved.append((row, reservation))
            return True
        if self._is_promised:
            raise InternalError(f"no page for token {num_tokens} of request {request_id}, which was promised one")
        return False

    def reserve_ahead(self, row: int) -> bool:
        """Room for a generating row's next token, and for those after it: where nothing is promised, only while there
        are pages enough for all to do so.
        """
        table, columns, page_size = self._table, int(self._table.columns[row]), self.page_size
        if not self._is_promised and self._kv.available_pages().min() < PAGES_AHEAD * table.num_used:
            return self.reserve(row, (columns + 1) * page_size)
        return self.reserve(row, min((columns + PAGES_AHEAD) * page_size, int(table.worst_tokens[row])))

    def reserve_up_to(self, row: int, num_tokens: int) -> int:
        """Room for the row's first ``num_tokens`` tokens, or as many as there are pages for; how many that is."""
        if self.reserve(row, num_tokens):
            return num_tokens
        columns = int(self._table.columns[row]) + int(self._kv.available_pages().min())
        fewer = min(num_tokens, columns * self.page_size)
        if fewer <= self._table.num_scheduled[row] or not self.reserve(row, fewer):
            return int(self._table.num_scheduled[row])
        return fewer

    def is_reserved(self, row: int) -> bool:
        """Whether the step being planned gives the row pages."""
        return any(reserved == row for reserved, _ in self._reserved)

    def commit(self, row: int) -> None:
        """Share the full pages of what is known to be sound."""
        known = int(self._table.num_landed[row])
        self._kv.commit(self._table.ids[row], self._table.tokens[row, :known], known)
        if self._slides:
            self.count(row)

    def release(self, row: int) -> None:
        """Give the row's pages back, once; what may be shared stays cached."""
        table = self._table
        if not table.has_pages[row]:
            return
        if table.shares[row]:
            known = int(table.num_landed[row])
            self._kv.commit(table.ids[row], table.tokens[row, :known], known)
        self._kv.release(table.ids[row])
        table.has_pages[row] = False
        table.held_pages[row] = table.columns[row] = 0

    def take_updates(self) -> tuple[PageUpdates, ...]:
        """What the step being planned must tell the runtime, one entry a life cycle; the next one starts empty."""
        reserved, self._reserved = self._reserved, []
        if not reserved:
            return (_NO_UPDATES,) * self._kv.num_life_cycles
        rows = np.array([row for row, _ in reserved], np.int32)
        return tuple(
            PageUpdates(rows=np.repeat(rows, [len(change.columns) for change in changes]),
                        columns=np.concatenate([change.columns for change in changes]),
                        pages=np.concatenate([change.pages for change in changes]),
                        copy_from=np.concatenate([change.copy_from for change in changes]),
                        copy_to=np.concatenate([change.copy_to for change in changes]))
            for changes in zip(*(reservation.updates for _, reservation in reserved), strict=True))

    def forget_updates(self) -> None:
        """The step being planned will not be."""
        self._reserved.clear()

