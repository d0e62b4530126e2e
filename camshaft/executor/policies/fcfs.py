"""First come, first served."""

from __future__ import annotations

from camshaft.executor.messages import GenerationRequest
from camshaft.executor.policies.base import QUEUE_POLICIES, QueuePolicy


@QUEUE_POLICIES.register("fcfs")
class FirstComeFirstServed(QueuePolicy):
    """Requests go in order of arrival, whatever their priority."""

    def precedence(self, request: GenerationRequest) -> int:
        """All the same."""
        return 0
