"""Prompts side by side."""

from __future__ import annotations

import numpy as np

from camshaft.executor.policies.base import CHUNKING_POLICIES, ChunkingPolicy
from camshaft.runtime.step import Int32Array, Int64Array


@CHUNKING_POLICIES.register("equal_progress")
class EqualProgress(ChunkingPolicy):
    """Prompts share a step's tokens equally, so that short ones need not wait for a long one.

    A share is a whole number of pages, unless it ends its prompt or a step has less than a page for each.
    """

    def takes_more(self, left: Int32Array, budget: int) -> bool:
        """While there is a page for each, or tokens would be left over."""
        wanted = int(np.minimum(left, self.chunk_tokens).sum(dtype=np.int64))
        return (len(left) + 1) * self.page_size <= budget or wanted < budget

    def shares(self, left: Int32Array, budget: int) -> Int32Array:
        """Equal parts; what some do not need goes to the others, the remainder to those in front."""
        unit = self.page_size if len(left) * self.page_size <= budget and self.chunk_tokens >= self.page_size else 1
        whole = self.chunk_tokens // unit * unit
        wanted = np.minimum(left, whole).astype(np.int64)
        level = self._level(wanted, budget) // unit * unit
        shares = np.minimum(wanted, level)
        rest = budget - int(shares.sum())
        for place in np.flatnonzero(shares < wanted).tolist():
            more = min(int(wanted[place] - shares[place]), unit)
            if more > rest:
                break
            shares[place] += more
            rest -= more
        return shares.astype(np.int32)

    def _level(self, wanted: Int64Array, budget: int) -> int:
        """Largest number of tokens that every prompt may be given, or what it wants if that is less."""
        low, high = 0, budget
        while low < high:
            middle = (low + high + 1) // 2
            if int(np.minimum(wanted, middle).sum()) <= budget:
                low = middle
            else:
                high = middle - 1
        return low
