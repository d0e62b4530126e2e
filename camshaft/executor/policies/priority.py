"""Larger priorities first."""

from __future__ import annotations

from camshaft.executor.messages import GenerationRequest
from camshaft.executor.policies.base import QUEUE_POLICIES, QueuePolicy


@QUEUE_POLICIES.register("priority")
class Priority(QueuePolicy):
    """Requests go by ``GenerationRequest.priority``, and in order of arrival where it is the same.

    Nothing ages: while more important requests keep coming, others wait.
    """

    reads_priority = True

    def precedence(self, request: GenerationRequest) -> int:
        """The larger the priority, the earlier."""
        return -request.priority
