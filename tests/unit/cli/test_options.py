"""Options generated from config classes: their names, what was typed, and what becomes of it."""

import dataclasses
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from camshaft.cli.options import pick, with_options
from camshaft.config.doc import Doc
from camshaft.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    max_rows: Annotated[int, Doc("Most rows.")] = 4
    names: Annotated[tuple[str, ...], Doc("Some names.")] = ()
    stop: Annotated[str | tuple[str, ...] | None, Doc("Strings.")] = None
    fast: Annotated[bool, Doc("Whether to hurry.")] = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    max_rows: Annotated[int | None, Doc("Most rows kept.")] = None


@pytest.fixture
def command():
    """An app whose one command keeps what it was given in ``heard``."""
    app, heard = typer.Typer(), {}

    @app.command()
    @with_options(Engine, memory=Memory)
    def run(**given):
        heard.update(engine=pick(Engine, given), memory=pick(Memory, given, "memory_"), typed=sorted(given))

    return lambda *words: (CliRunner().invoke(app, list(words), catch_exceptions=False), heard)


def test_nothing_typed_leaves_every_default(command):
    _, heard = command()
    assert heard == {"engine": Engine(), "memory": Memory(), "typed": []}


def test_what_is_typed_reaches_the_class_its_prefix_names(command):
    _, heard = command("--max-rows", "8", "--memory-max-rows", "9", "--names", "a", "--names", "b", "--no-fast",
                       "--stop", "x")
    assert heard["engine"] == Engine(max_rows=8, names=("a", "b"), stop=("x",), fast=False)
    assert heard["memory"] == Memory(max_rows=9)


def test_help_holds_the_documentation_and_the_default(command):
    shown, _ = command("--help")
    assert "Most rows. (default: 4)" in shown.output
    assert "Most rows kept." in shown.output


def test_an_unknown_option_and_a_wrong_type_are_refused(command):
    assert command("--max-row", "8")[0].exit_code == 2
    assert command("--max-rows", "many")[0].exit_code == 2


def test_a_name_that_is_no_field_is_refused_with_the_nearest():
    from camshaft.config.parse import config_from

    with pytest.raises(UserError, match="max_rows"):
        config_from(Engine, {"max_row": 1}, where="engine")
    with pytest.raises(UserError, match="dict of its fields"):
        config_from(Engine, 3, where="engine")
    assert config_from(Engine, None, where="engine") == Engine()
    assert config_from(Engine, {"names": ["a"]}, where="engine") == Engine(names=("a",))
