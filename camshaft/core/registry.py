"""The one registry type: a named table filled by a decorator on the thing itself.

Owns duplicate and unknown-name errors; what is registered is the user's business.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from camshaft.core.errors import InternalError, UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Name → thing. Registering a name twice raises InternalError; looking up an unknown one, UserError."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def add(self, name: str, thing: T) -> T:
        """Register ``thing`` under ``name`` and return it."""
        if name in self._entries:
            raise InternalError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = thing
        return thing

    def register(self, *names: str) -> Callable[[T], T]:
        """Decorator form of :meth:`add`, for one or several names."""

        def decorate(thing: T) -> T:
            for name in names:
                self.add(name, thing)
            return thing

        return decorate

    def get(self, name: str) -> T:
        """Return the thing called ``name`` or raise UserError naming the nearest known names."""
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise UserError(self.kind, name, f"one of those known: {', '.join(self.names()) or 'none'}", hint)

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[T]:
        return (self._entries[name] for name in self.names())

    def __len__(self) -> int:
        return len(self._entries)
