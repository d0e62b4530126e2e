"""Sampling settings as they are typed in a chat: ``NAME=VALUE`` words, checked by the field they name.

Owns reading values by a field's type. Bounds are ``SamplingParams``' own.
"""

from __future__ import annotations

import shlex
import types
import typing
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from camshaft.config.doc import field_docs
from camshaft.config.parse import reject_unknown
from camshaft.config.sampling import SamplingFields
from camshaft.core.errors import UserError

FIXED_IN_A_CHAT = ("best_of", "detokenize", "logprobs", "n", "prompt_logprobs")
"""A chat shows one answer as text, so these stay as they are."""
_SWITCH = MappingProxyType({"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False})


def settable() -> dict[str, Any]:
    """Name → type of the settings that can be typed: numbers, switches and texts."""
    found = {}
    for field in field_docs(SamplingFields):
        kinds = _members(field.type)
        if field.name not in FIXED_IN_A_CHAT and any(kind in (int, float, bool, str) for kind in kinds):
            found[field.name] = next(kind for kind in kinds if kind in (int, float, bool, str))
    return found


def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def refuse_fixed(given: dict[str, Any]) -> None:
    """Raise UserError for a setting that a chat could not follow."""
    for field in field_docs(SamplingFields):
        if field.name in FIXED_IN_A_CHAT and given.get(field.name, field.default) != field.default:
            raise UserError(field.name, given[field.name], f"{field.default!r} in a chat, which shows one answer as "
                            "text", "Leave it out, or use the Python API")


def parse_assignments(text: str) -> Iterator[tuple[str, str]]:
    """(name, value) of each word ``NAME=VALUE``; quotes hold spaces together."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError("/set", text, f"words of the form NAME=VALUE ({error})") from error
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError("/set", word, "NAME=VALUE", "Say e.g. /set temperature=0.7")
        yield name, value


def assign(settings: dict[str, Any], name: str, value: str) -> None:
    """Put ``value``, read as the type of the field ``name``, into ``settings``; "none" takes the setting out."""
    known = settable()
    reject_unknown({name: value}, tuple(known), where="a chat")
    if value.lower() == "none":
        settings.pop(name, None)
        return
    settings[name] = _read(name, value, known[name])


def _read(name: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value.lower() not in _SWITCH:
            raise UserError(name, value, "true or false")
        return _SWITCH[value.lower()]
    try:
        return kind(value)
    except ValueError as error:
        raise UserError(name, value, "a whole number" if kind is int else "a number") from error
