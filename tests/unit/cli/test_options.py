"""Options generated from config classes: their names, what was typed, and what becomes of it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from camshaft.cli.main import app
from camshaft.cli.options import GroupedCommand, _title, pick, with_options
from camshaft.cli.run import DEFAULT_MAX_TOKENS
from camshaft.config.doc import Doc
from camshaft.config.runtime import KvCacheConfig
from camshaft.config.sampling import SamplingFields
from camshaft.core.env import VARIABLES
from camshaft.core.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    max_rows: Annotated[int, Doc("Most rows.")] = 4
    names: Annotated[tuple[str, ...], Doc("Some names.")] = ()
    stop: Annotated[str | tuple[str, ...] | None, Doc("Strings.")] = None
    fast: Annotated[bool, Doc("Whether to hurry.")] = True
    bias: Annotated[Mapping[int, float] | None, Doc("Numbers by id.")] = None
    code: Annotated[Callable[..., object] | None, Doc("Only code can give it.", flag=False)] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    max_rows: Annotated[int | None, Doc("Most rows kept.")] = None
    keep_the_pages_of_whatever_has_finished: Annotated[bool, Doc("Keep them.")] = True


@pytest.fixture
def command():
    """An app whose one command keeps what it was given in ``heard``."""
    app, heard = typer.Typer(rich_markup_mode=None), {}

    @app.command(cls=GroupedCommand)
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


def test_pairs_are_typed_one_by_one_and_become_a_mapping(command):
    _, heard = command("--bias", "3=-1.5", "--bias", "7=2")
    assert heard["engine"].bias == {3: -1.5, 7: 2.0}
    for word in ("3", "x=1", "3=x", "=1"):
        with pytest.raises(UserError, match="ID=VALUE") as refused:
            command("--bias", word)
        assert (refused.value.field, refused.value.value) == ("--bias", word)


def test_a_field_that_only_code_can_give_has_no_option(command):
    shown, _ = command("--help")
    assert "--bias ID=VALUE" in shown.output
    assert "--code" not in shown.output


def test_help_holds_the_documentation_and_the_default(command):
    shown, _ = command("--help")
    assert "Most rows. (default: 4)" in shown.output
    assert "Most rows kept." in shown.output
    assert "Some names. Repeat it for more than one." in shown.output


def test_help_writes_every_name_in_full_and_in_groups_on_a_narrow_terminal(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    shown = command("--help")[0].output
    assert "…" not in shown
    assert "--memory-keep-the-pages-of-whatever-has-finished" in shown
    assert "--no-memory-keep-the-pages-of-whatever-has-finished" in shown
    assert [line for line in shown.splitlines() if line.endswith(":")] == ["Options:", "Engine:", "Memory:"]


def test_a_panel_is_titled_as_its_class_is_called():
    assert [_title(config) for config in (KvCacheConfig, SamplingFields, Memory)] == ["KV Cache", "Sampling", "Memory"]


def test_the_commands_help_documents_every_environment_variable():
    shown = " ".join(CliRunner().invoke(app, ["--help"], catch_exceptions=False).output.split())
    for name, text in VARIABLES.items():
        assert f"{name} {text}" in shown


def test_the_help_of_run_tells_the_limit_that_run_uses():
    shown = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}, catch_exceptions=False).output
    assert f"sooner. (default: {DEFAULT_MAX_TOKENS})" in " ".join(shown.split())


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
