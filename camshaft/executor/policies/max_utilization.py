"""Admission by what is needed next; who came last makes room when that was too much."""

from __future__ import annotations

from camshaft.executor.policies.base import CAPACITY_POLICIES, CapacityPolicy, Demand, Load
from camshaft.runtime.step import Int32Array


@CAPACITY_POLICIES.register("max_utilization")
class MaxUtilization(CapacityPolicy):
    """Admits a request when its prompt fits beside what the running ones need next.

    Fuller batches than with a guarantee where outputs end early; where they do not, the last in precedence gives
    its pages back and is computed again. The first in precedence always goes on, so that everything ends.
    """

    preempts = True

    def admits(self, demand: Demand, load: Load) -> bool:
        """By what is needed soon."""
        return bool((demand.soon <= load.available - load.soon).all())

    def victim(self, rows: Int32Array) -> int | None:
        """The last in precedence; never the only one."""
        return int(rows[-1]) if len(rows) > 1 else None
