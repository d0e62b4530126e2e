"""Chunks of context: which prompt tokens the next step feeds, and which of them are scored.

Owns how the step's tokens and logits rows are shared among prompts, within what the chunking policy says. Who may
enter is ``capacity.py``'s.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from camshaft.core.errors import InternalError
from camshaft.executor.pages import RowPages
from camshaft.executor.policies.base import ChunkingPolicy
from camshaft.executor.table import GENERATION, RequestTable
from camshaft.runtime.step import Int32Array


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Context tokens ``start`` to ``end`` of a row; its first ``num_scores`` are scored."""

    row: int
    start: int
    end: int
    samples: bool
    num_scores: int


class ContextPlanner:
    """Plans chunks over ``table``. ``max_logits_rows`` bounds what a step samples and scores together."""

    def __init__(self, table: RequestTable, pages: RowPages, policy: ChunkingPolicy, max_logits_rows: int) -> None:
        if max_logits_rows < table.num_rows:
            raise InternalError(f"{max_logits_rows} logits rows for {table.num_rows} requests: rows could starve")
        self._table = table
        self._pages = pages
        self._policy = policy
        self._max_logits_rows = max_logits_rows

    def takes_more(self, budget: int, num_generation: int) -> bool:
        """Whether a request more would get tokens out of ``budget``, beside so many generating rows."""
        if budget <= 0:
            return False
        rows = self._table.context_rows()
        return not len(rows) or self._policy.takes_more(self._feedable(rows, num_generation), budget)

    def plan(self, budget: int, num_generation: int) -> list[Chunk]:
        """Chunks of at most ``budget`` tokens together. Moves their rows on, and reserves their pages.

        Where pages are short, the row that lacks them gets what there is and those after it nothing.
        """
        rows = self._table.context_rows()
        if not len(rows) or budget <= 0:
            return []
        chunks: list[Chunk] = []
        shares = self._policy.shares(self._feedable(rows, num_generation), budget)
        for row, share in zip(rows.tolist(), shares.tolist(), strict=True):
            if share == 0:
                continue
            start = int(self._table.num_scheduled[row])
            end = self._pages.reserve_up_to(row, start + share)
            if end > start:
                chunks.append(self._chunk(row, start, end))
            if end < start + share:
                break
        return chunks

    def _chunk(self, row: int, start: int, end: int) -> Chunk:
        table = self._table
        table.num_scheduled[row] = end
        is_last = bool(end == table.context_len[row])
        samples = is_last and bool(table.output_limit[row] > 0)
        if is_last:
            table.state[row] = GENERATION
            table.num_scheduled_outputs[row] = table.num_outputs[row] + samples
        num_scores = 0
        if start >= table.score_start[row]:
            num_scores = max(0, min(end, int(table.prompt_len[row]) - 1) - start)
        return Chunk(row, start, end, samples, num_scores)

    def _feedable(self, rows: Int32Array, num_generation: int) -> Int32Array:
        """[N] most tokens of each row that this step may feed, for the sake of its logits rows.

        Every row has one logits row for what it samples; scores take the others, and their row's own where it does
        not sample. No chunk goes on from tokens that are not scored to some that are.
        """
        table = self._table
        left = table.context_len[rows] - table.num_scheduled[rows]
        scored = np.flatnonzero(table.score_start[rows] < table.prompt_len[rows])
        spare = self._max_logits_rows - num_generation - len(rows)
        for place in scored.tolist():
            row = rows[place]
            ahead = int(table.score_start[row] - table.num_scheduled[row])
            if ahead > 0:
                left[place] = min(int(left[place]), ahead)
            else:
                left[place] = min(int(left[place]), spare + 1)
                spare -= int(left[place]) - 1
        return left
