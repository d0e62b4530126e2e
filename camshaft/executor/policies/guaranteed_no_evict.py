"""Admission that never has to be taken back."""

from __future__ import annotations

from camshaft.executor.policies.base import CAPACITY_POLICIES, CapacityPolicy, Demand, Load


@CAPACITY_POLICIES.register("guaranteed_no_evict")
class GuaranteedNoEvict(CapacityPolicy):
    """Admits a request only when its longest outcome fits beside the longest outcomes of all that run.

    A running request therefore never lacks a page and never loses one.
    """

    def admits(self, demand: Demand, load: Load) -> bool:
        """Exact, in every life cycle."""
        return bool((demand.longest <= load.available - load.longest).all())
