"""Index types. Owns the names only: a RowId never passes for a PageId under mypy."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", int)
"""Unique for the life of the process; made by the front, never by a client."""
RowId = NewType("RowId", int)
"""A request's slot in the request table and in the runtime's row state."""
Epoch = NewType("Epoch", int)
"""How often a row has been handed out; a stale step result carries an old one."""
PageId = NewType("PageId", int)
"""A page of one life cycle's KV pool. Page 0 is the trash page and is never handed out."""
LifeCycleId = NewType("LifeCycleId", int)
"""Index of a life cycle (layers whose cached tokens live and die together)."""
StepId = NewType("StepId", int)
"""Number of a step since the executor started."""
