"""Mappings → config dataclasses. Unknown names are errors that suggest the nearest known one.

Owns construction from loose data; each config's own bounds stay with the config.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, TypeVar

from camshaft.config.other_names import HINTS
from camshaft.core.errors import UserError

C = TypeVar("C")


def reject_unknown(given: Mapping[str, Any], known: tuple[str, ...], *, where: str,
                   beside: tuple[str, ...] = ()) -> None:
    """Raise UserError for the first name in ``given`` that is not in ``known``, with what it is called here.

    ``beside`` are options of ``where`` that are given in another place; an unknown name may have meant one of them.
    """
    for name in given:
        if name not in known:
            every = (*known, *beside)
            near = difflib.get_close_matches(name, every, n=1)
            hint = HINTS.get(where, {}).get(name) or (
                f"Give it as an argument of {where}" if name in beside
                else f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(every))}")
            raise UserError(name, given[name], f"an option of {where}", hint)


def config_from(cls: type[C], given: C | Mapping[str, Any] | None, *, where: str, beside: tuple[str, ...] = ()) -> C:
    """``given`` as a ``cls``: itself, built from a mapping, or the defaults for None. ``beside``: as above."""
    if given is None:
        return cls()
    if isinstance(given, cls):
        return given
    if not isinstance(given, Mapping):
        raise UserError(where, given, f"a {cls.__name__} or a dict of its fields")
    known = tuple(field.name for field in dataclasses.fields(cls))  # type: ignore[arg-type]
    reject_unknown(given, known, where=where, beside=beside)
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})
