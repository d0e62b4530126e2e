"""Prompts one after the other."""

from __future__ import annotations

import numpy as np

from camshaft.executor.policies.base import CHUNKING_POLICIES, ChunkingPolicy
from camshaft.runtime.step import Int32Array


@CHUNKING_POLICIES.register("first_come_first_served")
class FirstComeFirstServedChunks(ChunkingPolicy):
    """Every prompt takes what it can; those after it share the rest: the soonest first token for who is first."""

    def takes_more(self, left: Int32Array, budget: int) -> bool:
        """While tokens would be left over."""
        return int(np.minimum(left, self.chunk_tokens).sum(dtype=np.int64)) < budget

    def shares(self, left: Int32Array, budget: int) -> Int32Array:
        """Greedy, in order."""
        wanted = np.minimum(left, self.chunk_tokens).astype(np.int64)
        before = np.cumsum(wanted) - wanted
        shares: Int32Array = np.clip(budget - before, 0, wanted).astype(np.int32)
        return shares
