"""Field documentation: ``Annotated[int, Doc("…")]`` feeds ``--help`` and the reference pages.

Owns reading that documentation back from a config class, and the bound checks all configs share.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from camshaft.core.errors import UserError


@dataclasses.dataclass(frozen=True, slots=True)
class Doc:
    """One field's documentation: what it does and, where it has one, its unit."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class FieldDoc:
    """A config field as the command line and the reference pages show it."""

    name: str
    type: Any
    default: Any
    doc: str


@functools.cache
def field_docs(config: type) -> tuple[FieldDoc, ...]:
    """The documented fields of a config dataclass, in declaration order."""
    hints = get_type_hints(config, include_extras=True)
    found = []
    for field in dataclasses.fields(config):
        hint, text = hints[field.name], ""
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            text = next((extra.text for extra in extras if isinstance(extra, Doc)), "")
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(FieldDoc(field.name, hint, default, text))
    return tuple(found)


def check_range(field: str, value: object, low: float, high: float = math.inf, *, what: str = "a number") -> None:
    """Raise UserError unless ``low <= value <= high``; NaN, bools and non-numbers are refused."""
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not low <= float(value) <= high:  # type: ignore[arg-type]
        bounds = f"{what} >= {low:g}" if math.isinf(high) else f"{what} from {low:g} to {high:g}"
        raise UserError(field, value, bounds)


def check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    """Raise UserError unless ``value`` is an int (not a bool) with ``low <= value <= high``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(field, value, "a whole number")
    check_range(field, value, low, math.inf if high is None else high, what="a whole number")


def check_bool(field: str, value: object) -> None:
    """Raise UserError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise UserError(field, value, "True or False")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise UserError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UserError(field, value, "one of " + ", ".join(repr(choice) for choice in choices))
