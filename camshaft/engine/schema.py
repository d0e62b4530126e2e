"""Holds data that was read from JSON to the annotations of the dataclasses it was put into.

Owns the types only: what a number may be is each dataclass's own to check.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable
from typing import Any, Union, get_args, get_origin, get_type_hints


def check_types(value: object, hint: Any, where: str) -> None:
    """Raise TypeError, naming the field, where ``value`` or anything inside it is not of its annotated type.

    An int is a float too; a bool is neither. Tuples are of one type throughout (``tuple[X, ...]``).
    """
    origin = get_origin(hint)
    if hint is Any:
        return
    if origin in (Union, types.UnionType):
        _check_union(value, get_args(hint), where)
    elif origin is tuple:
        _check_kind(value, tuple, where)
        _check_items(((f"{where}[{place}]", item) for place, item in enumerate(_iterate(value))), get_args(hint)[0])
    elif origin is dict:
        _check_kind(value, dict, where)
        items = dict(value) if isinstance(value, dict) else {}
        for key in items:
            check_types(key, get_args(hint)[0], f"a key of {where}")
        _check_items(((f"{where}[{key!r}]", item) for key, item in items.items()), get_args(hint)[1])
    elif dataclasses.is_dataclass(hint):
        _check_kind(value, hint, where)
        hints = get_type_hints(hint)
        for field in dataclasses.fields(hint):
            check_types(getattr(value, field.name), hints[field.name], f"{where}.{field.name}")
    elif hint is float:
        _check_kind(value, (int, float), where)
    else:
        _check_kind(value, hint, where)


def _check_items(items: Iterable[tuple[str, object]], hint: Any) -> None:
    for where, item in items:
        check_types(item, hint, where)


def _iterate(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else ()


def _check_union(value: object, hints: tuple[Any, ...], where: str) -> None:
    if value is None and type(None) in hints:
        return
    problems = []
    for hint in hints:
        if hint is not type(None):
            try:
                check_types(value, hint, where)
                return
            except TypeError as error:
                problems.append(str(error))
    raise TypeError("; ".join(problems))


def _check_kind(value: object, kind: Any, where: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{where} is {type(value).__name__} {str(value)[:60]!r}")
