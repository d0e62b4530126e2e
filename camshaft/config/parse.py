"""Mappings → config dataclasses. Unknown names are errors that suggest the nearest known one.

Owns construction from loose data; each config's own bounds stay with the config.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from camshaft.core.errors import UserError

C = TypeVar("C")


def reject_unknown(given: Mapping[str, Any], known: tuple[str, ...], *, where: str) -> None:
    """Raise UserError for the first name in ``given`` that is not in ``known``."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(known))}"
            raise UserError(name, given[name], f"an option of {where}", hint)


def config_from(cls: type[C], given: C | Mapping[str, Any] | None, *, where: str) -> C:
    """``given`` as a ``cls``: itself, built from a mapping, or the defaults for None."""
    if given is None:
        return cls()
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise UserError(where, given, f"a {cls.__name__} or a dict of its fields")
    known = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    reject_unknown(given, known, where=where)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
