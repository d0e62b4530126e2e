"""Command-line options generated from config dataclasses, so that help, docs and checks have one source.

Owns the mapping field ↔ flag; the commands own what they do.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from camshaft.config.doc import FieldDoc, field_docs
from camshaft.config.parse import config_from
from camshaft.core.env import VARIABLES
from camshaft.core.errors import UserError

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., None])


class GroupedCommand(TyperCommand):
    """A command whose help shows its options in groups, every name whole at any width (panels cut long names)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then the command's own options, then a group a config class."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            own = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or own, []).append(record)
        for title in sorted(groups, key=lambda title: title not in ("Arguments", "Options")):
            with formatter.section(title):
                formatter.write_dl(groups[title])


class GroupWithEnvironment(TyperGroup):
    """The root command; its help ends with the environment variables, from their one list."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write a line a variable."""
        with formatter.section("Environment variables"):
            formatter.write_dl(list(VARIABLES.items()))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_mapping(kind: Any) -> bool:
    """Whether a field holds a mapping, alone or among other things: its option is NAME=VALUE, repeated."""
    members = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    return any(typing.get_origin(member) is Mapping for member in members)


def _parameter(field: FieldDoc, prefix: str, panel: str) -> inspect.Parameter:
    kind, flags, metavar = field.type, [_flag(prefix + field.name)], None
    if _is_mapping(kind):
        kind, metavar = list[str], "ID=VALUE"
    elif isinstance(kind, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        kind = tuple[str, ...] if tuple[str, ...] in members else members[0]
    if typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    elif kind is bool:
        flags = [f"{flags[0]}/{_flag('no_' + prefix + field.name)}"]
    shown = "" if field.default in (None, ()) else f" (default: {field.default})"
    if typing.get_origin(kind) is list:
        shown = " Repeat it for more than one." + shown
    option = typer.Option(*flags, help=field.doc + shown, rich_help_panel=panel, show_default=False, metavar=metavar)
    return inspect.Parameter(prefix + field.name, inspect.Parameter.KEYWORD_ONLY, default=None,
                             annotation=Annotated[kind | None, option])


def _title(config: type) -> str:
    """A help panel's title: the config's name in words, without "Config" or "Fields"."""
    words = re.findall("[A-Z][a-z]+", config.__name__)
    return " ".join("KV" if word == "Kv" else word for word in words if word not in ("Config", "Fields"))


def with_options(*plain: type, **prefixed: type) -> Callable[[F], F]:
    """Decorate a command: its ``**given`` grows one option a field of each config class, if its ``Doc`` wants one.

    ``plain`` classes give options named as their fields; ``prefixed`` ones have their keyword and an underscore
    in front. Options that were not typed stay out of ``given``.
    """
    panels = [("", config) for config in plain] + [(f"{word}_", config) for word, config in prefixed.items()]

    def decorate(command: F) -> F:
        extra = [_parameter(field, prefix, _title(config)) for prefix, config in panels
                 for field in field_docs(config) if field.flag]

        def run(**arguments: Any) -> None:
            names = {parameter.name for parameter in extra}
            typed = {name: value for name, value in arguments.items() if name not in names or value not in (None, [])}
            command(**typed)

        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
               for parameter in inspect.signature(command, eval_str=True).parameters.values()
               if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        signature = inspect.Signature(own + extra)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return typing.cast("F", run)

    return decorate


def typed_fields(config: type, given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Those options in ``given`` that are fields of ``config``, without their prefix; ID=VALUE pairs as a dict."""
    typed = {}
    for field in field_docs(config):
        name = prefix + field.name
        if name in given:
            typed[field.name] = _pairs(name, given[name]) if _is_mapping(field.type) else given[name]
    return typed


def _pairs(name: str, words: list[str]) -> dict[int, float]:
    found = {}
    for word in words:
        key, _, value = word.partition("=")
        try:
            found[int(key)] = float(value)
        except ValueError:
            raise UserError(_flag(name), word, "ID=VALUE, a token id and a number", "Give e.g. 42=-5") from None
    return found


def pick(config: type[C], given: Mapping[str, Any], prefix: str = "") -> C:
    """The config made of those options in ``given`` that are its fields."""
    return config_from(config, typed_fields(config, given, prefix), where=config.__name__)
