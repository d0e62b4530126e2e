"""Field documentation: ``Annotated[int, Doc("…")]`` feeds ``--help`` and the reference pages.

Owns reading that documentation back from a config class, and the bound checks all configs share.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from camshaft.core.errors import UserError

INT32_MAX = 2**31 - 1
"""Largest number that step plans and kernels take."""


@dataclasses.dataclass(frozen=True, slots=True)
class Doc:
    """One field's documentation: what it does and, where it has one, its unit."""

    text: str
    flag: bool = True
    """Whether commands have an option for it; not for what only code can give or read."""


@dataclasses.dataclass(frozen=True, slots=True)
class FieldDoc:
    """A config field as the command line and the reference pages show it."""

    name: str
    type: Any
    default: Any
    doc: str
    flag: bool


@functools.cache
def field_docs(config: type) -> tuple[FieldDoc, ...]:
    """The documented fields of a config dataclass, in declaration order."""
    hints = get_type_hints(config, include_extras=True)
    found = []
    for field in dataclasses.fields(config):
        hint, doc = hints[field.name], Doc("")
        if get_origin(hint) is Annotated:
            hint, *extras = get_args(hint)
            doc = next((extra for extra in extras if isinstance(extra, Doc)), doc)
        default = field.default
        if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        found.append(FieldDoc(field.name, hint, default, doc.text, doc.flag))
    return tuple(found)


def check_range(field: str, value: object, low: float, high: float) -> None:
    """Raise UserError unless ``low <= value <= high``; NaN, bools and non-numbers are refused."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(field, value, f"a number from {low:g} to {high:g}")


def check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    """Raise UserError unless ``value`` is an int (not a bool) with ``low <= value <= high``."""
    # compared as whole numbers: as floats, the largest seed would round up and out of its bounds
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise UserError(field, value, f"a whole number of {low} or more" if high is None
                        else f"a whole number from {low} to {high}")


def check_bool(field: str, value: object) -> None:
    """Raise UserError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise UserError(field, value, "True or False")


def check_names(field: str, value: object) -> None:
    """Raise UserError unless ``value`` is a tuple of non-empty strings; one string alone is a common slip."""
    if not isinstance(value, tuple) or not all(isinstance(name, str) and name for name in value):
        raise UserError(field, value, "a tuple of names")


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise UserError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise UserError(field, value, "one of " + ", ".join(repr(choice) for choice in choices))
