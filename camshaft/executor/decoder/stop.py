"""Stops by token id and by length, for many rows at once.

Owns each row's stop ids and minimum. String stops are the front's. A row's verdict falls on its newest
token; no stop id counts before ``min_tokens`` tokens came before it, which is also how long the runtime
keeps those ids from being sampled.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from camshaft.runtime.step import BoolArray, Int32Array

CONTINUE, STOP, LENGTH = 0, 1, 2
"""Verdicts."""
Verdicts = npt.NDArray[np.int8]
_WIDTH = 8


class StopTable:
    """Stop ids of every row: up to eight in a matrix, larger sets beside it."""

    def __init__(self, num_rows: int) -> None:
        self._ids = np.zeros((num_rows, _WIDTH), np.int32)
        self._has_ids = np.zeros(num_rows, np.bool_)
        self._min_tokens = np.zeros(num_rows, np.int32)
        self._large: dict[int, frozenset[int]] = {}

    def set_row(self, row: int, stop_token_ids: frozenset[int], min_tokens: int) -> None:
        """Give ``row`` its stop ids."""
        self._large.pop(row, None)
        self._min_tokens[row] = min_tokens
        self._has_ids[row] = 0 < len(stop_token_ids) <= _WIDTH
        if self._has_ids[row]:
            ids = sorted(stop_token_ids)
            self._ids[row] = ids + ids[:1] * (_WIDTH - len(ids))
        elif stop_token_ids:
            self._large[row] = stop_token_ids

    def verdicts(self, rows: Int32Array, token_ids: Int32Array, num_outputs: Int32Array,
                 output_limits: Int32Array) -> Verdicts:
        """[S] CONTINUE, STOP or LENGTH for each row's newest token.

        ``num_outputs`` counts the output with that token, ``output_limits`` is the most there may be.
        """
        found: Verdicts = np.multiply(num_outputs >= output_limits, LENGTH, dtype=np.int8)
        flagged = np.flatnonzero(self._has_ids[rows])
        if len(flagged):
            candidates = rows[flagged]
            hits: BoolArray = (self._ids[candidates] == token_ids[flagged, None]).any(axis=1)
            hits &= num_outputs[flagged] > self._min_tokens[candidates]
            found[flagged[hits]] = STOP
        if self._large:
            for place, row in enumerate(rows.tolist()):
                ids = self._large.get(row)
                if ids is not None and int(token_ids[place]) in ids and num_outputs[place] > self._min_tokens[row]:
                    found[place] = STOP
        return found
