"""The migration tables speak of what exists: every Camshaft name is accepted, every refusal is one."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import camshaft
from camshaft import LLM, BuildConfig, KvCacheConfig, SamplingParams, SchedulerConfig
from camshaft.cli.main import app
from camshaft.config.sampling import UNSUPPORTED_DEFAULTS, SamplingFields

PAGE = (Path(__file__).parents[2] / "docs/migration.md").read_text(encoding="utf-8")
CONFIGS = {"kv_cache": KvCacheConfig, "scheduler": SchedulerConfig, "build": BuildConfig}


def rows(section):
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith("|") and not line.startswith("|---")][1:]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def names_of(config):
    return {field.name for field in dataclasses.fields(config)}


LLM_NAMES = set(inspect.signature(LLM.__init__).parameters) - {"self", "build_fields"} | names_of(BuildConfig)


def check_llm_setting(words):
    """``name``, ``name="value" …``, ``group={"field": …}`` or a call: the names exist, the values are taken."""
    if nested := re.fullmatch(r'(\w+)=\{"(\w+)": (.*)\}', words):
        group, field, values = nested.groups()
        assert field in names_of(CONFIGS[group])
        for value in re.findall(r'"(\w+)"', values):
            CONFIGS[group](**{field: value})
    elif call := re.fullmatch(r"(\w+)\(…, (\w+)=…\)", words):
        assert call[2] in inspect.signature(getattr(LLM, call[1])).parameters
    elif setting := re.fullmatch(r'(\w+)="(\w+)"', words):
        BuildConfig(**{setting[1]: setting[2]})
    else:
        assert words in LLM_NAMES


@pytest.mark.parametrize("row", rows("`LLM`"), ids=lambda row: row[0][:40])
def test_every_setting_of_an_llm_in_the_migration_table_exists(row):
    theirs, _, ours = row
    named = code(theirs) if ours == "the same" else code(ours)
    assert named or ours.startswith(("always", "refused"))
    for words in named:
        if not (words.startswith('"') and words.endswith('"')):
            check_llm_setting(words)
        else:
            BuildConfig(quantization=words.strip('"'))


@pytest.mark.parametrize("row", rows("`SamplingParams`"), ids=lambda row: row[0][:40])
def test_every_sampling_parameter_in_the_migration_table_is_accepted_or_refused_by_name(row):
    theirs, vllms, ours = row
    if ours == "refused by name":
        for name in set(re.findall(r"\w+", " ".join(code(theirs)))) or code(vllms):
            assert name in UNSUPPORTED_DEFAULTS
            with pytest.raises(camshaft.UserError, match=name):
                SamplingParams(**{name: "anything"})
        return
    named = code(theirs) if ours.startswith("the same") else [words for words in code(ours) if words.isidentifier()]
    for name in named:
        assert name in names_of(SamplingFields)


@pytest.mark.parametrize("row", rows("Imports"), ids=lambda row: row[0][:40])
def test_every_import_in_the_migration_table_works(row):
    theirs, _, ours = row
    for words in code(theirs) if ours.startswith("the same names") else code(ours):
        if imported := re.fullmatch(r"from camshaft import (.*)", words):
            assert set(imported[1].split(", ")) <= set(camshaft.__all__)
        elif command := re.fullmatch(r"camshaft (\w+)(?: (\w+))?", words):
            groups = {group.typer_instance.info.name: group.typer_instance for group in app.registered_groups}
            known = {entry.callback.__name__ for entry in app.registered_commands} | groups.keys()
            assert command[1] in known
            assert not command[2] or command[2] in {entry.callback.__name__
                                                    for entry in groups[command[1]].registered_commands}
        elif group := re.fullmatch(r"(\w+)=\{…\}", words):
            assert group[1] in LLM_NAMES
        elif call := re.match(r"llm\.(\w+)\(", words):
            assert callable(getattr(LLM, call[1]))
        elif words.isidentifier():
            assert words in camshaft.__all__
