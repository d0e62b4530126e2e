"""Index types. Owns the names only: one kind of id never passes for another under mypy."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", int)
"""Unique for the life of the process; made by the front, never by a client."""
