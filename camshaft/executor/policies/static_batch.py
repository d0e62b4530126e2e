"""One batch after the other."""

from __future__ import annotations

from camshaft.executor.policies.base import CAPACITY_POLICIES, CapacityPolicy, Demand, Load


@CAPACITY_POLICIES.register("static_batch")
class StaticBatch(CapacityPolicy):
    """Admits as many requests as wait and fit, with their longest outcomes, and nobody else until all have ended.

    A batch whose prompts take several steps is gathered over these steps.
    """

    def __init__(self) -> None:
        self._is_open = True

    def admits(self, demand: Demand, load: Load) -> bool:
        """While the batch is gathered."""
        self._is_open = self._is_open or load.num_rows == 0
        return self._is_open and bool((demand.longest <= load.available - load.longest).all())

    def admission_ended(self, num_rows: int) -> None:
        """The batch is complete."""
        self._is_open = num_rows == 0
