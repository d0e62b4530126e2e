"""Command-line options generated from config dataclasses, so that help, docs and checks have one source.

Owns the mapping field ↔ flag; the commands own what they do.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from camshaft.config.doc import FieldDoc, field_docs
from camshaft.config.parse import config_from

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., None])


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parameter(field: FieldDoc, panel: str) -> inspect.Parameter:
    kind, flags = field.type, [_flag(field.name)]
    if isinstance(kind, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        kind = tuple[str, ...] if tuple[str, ...] in members else members[0]
    if typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    elif kind is bool:
        flags = [f"{_flag(field.name)}/--no-{field.name.replace('_', '-')}"]
    shown = "" if field.default in (None, ()) else f" [default: {field.default}]"
    option = typer.Option(*flags, help=field.doc + shown, rich_help_panel=panel, show_default=False)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None,
                             annotation=Annotated[kind | None, option])


def with_options(**panels: type) -> Callable[[F], F]:
    """Decorate a command: its ``**given`` grows one option a field of each config class.

    ``panels`` maps a help-panel title to its config class; field names must differ between them.
    Options that were not typed stay out of ``given``.
    """

    def decorate(command: F) -> F:
        extra = [_parameter(field, title.replace("_", " "))
                 for title, config in panels.items() for field in field_docs(config)]

        def run(**arguments: Any) -> None:
            names = {parameter.name for parameter in extra}
            typed = {name: value for name, value in arguments.items() if name not in names or value not in (None, [])}
            command(**typed)

        own = [parameter for parameter in inspect.signature(command, eval_str=True).parameters.values()
               if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        signature = inspect.Signature([p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + extra)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return typing.cast("F", run)

    return decorate


def pick(config: type[C], given: Mapping[str, Any]) -> C:
    """The config made of those options in ``given`` that are its fields."""
    names = {field.name for field in field_docs(config)}  # type: ignore[arg-type]
    return config_from(config, {name: value for name, value in given.items() if name in names},
                       where=config.__name__)
