"""The written public surface. A change edits the golden file and adds a changelog entry.

To rewrite the goldens: ``python tests/structure/test_public_surface.py``.
"""

import dataclasses
import json
from pathlib import Path

import pytest

import camshaft
from camshaft.api.outputs import CompletionOutput, Logprob, RequestOutput
from camshaft.config.build import BuildConfig
from camshaft.config.doc import field_docs
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import GenerationDefaults, ModelConfig, RopeConfig
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import UNSUPPORTED_DEFAULTS, SamplingFields
from camshaft.core.env import VARIABLES
from camshaft.engine.manifest import FORMAT_VERSION, DeviceRequirement, FileEntry, Manifest, TensorEntry
from camshaft.executor.kv.manager import KvStats
from camshaft.executor.stats import Counters, ExecutorStats

GOLDEN = Path(__file__).parent / "golden"
MANIFEST_PARTS = (BuildConfig, DeviceRequirement, FileEntry, GenerationDefaults, LifeCycleSpec, ModelConfig, RopeConfig,
                  TensorEntry)
"""What a manifest's fields are made of: renaming one of theirs changes the format too."""


def config_fields():
    configs = (BuildConfig, KvCacheConfig, SchedulerConfig, SamplingFields)
    return {config.__name__: {field.name: repr(field.default) for field in field_docs(config)} for config in configs}


def command_line():
    from typer.main import get_command

    from camshaft.cli.main import app

    def options(group, prefix=""):
        for name, command in sorted(group.commands.items()):
            if hasattr(command, "commands"):
                yield from options(command, f"{prefix}{name} ")
            elif not command.hidden:
                yield prefix + name, sorted(option for parameter in command.params for option in parameter.opts)

    return dict(options(get_command(app)))


SURFACES = {
    "package": lambda: sorted(camshaft.__all__),
    "config": config_fields,
    "refused_sampling_params": lambda: {name: UNSUPPORTED_DEFAULTS[name] for name in sorted(UNSUPPORTED_DEFAULTS)},
    "environment": lambda: sorted(VARIABLES),
    "manifest": lambda: {"format_version": FORMAT_VERSION,
                         "fields": [field.name for field in dataclasses.fields(Manifest)],
                         **{part.__name__: [field.name for field in dataclasses.fields(part)]
                            for part in MANIFEST_PARTS}},
    "command_line": command_line,
    "outputs": lambda: {part.__name__: [field.name for field in dataclasses.fields(part)]
                        for part in (RequestOutput, CompletionOutput, Logprob, ExecutorStats, Counters, KvStats)},
}


def rendered(surface):
    return json.dumps(SURFACES[surface](), indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("surface", sorted(SURFACES))
def test_surface_matches_its_golden(surface):
    assert rendered(surface) == (GOLDEN / f"{surface}.json").read_text(encoding="utf-8")


def test_all_is_sorted_and_resolves():
    assert camshaft.__all__ == sorted(camshaft.__all__)
    for name in camshaft.__all__:
        assert getattr(camshaft, name) is not None


@pytest.mark.parametrize("config", [BuildConfig, KvCacheConfig, SchedulerConfig, SamplingFields])
def test_every_option_is_documented(config):
    for field in field_docs(config):
        assert field.doc.endswith("."), f"{config.__name__}.{field.name} needs a documented sentence"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED_DEFAULTS))
def test_a_parameter_without_an_engine_behind_it_is_refused_by_name(name):
    default = UNSUPPORTED_DEFAULTS[name]
    asked = (not default) if isinstance(default, bool) else 2
    with pytest.raises(camshaft.UserError, match=name) as refused:
        camshaft.SamplingParams(**{name: asked})
    assert refused.value.field == name
    assert camshaft.SamplingParams(**{name: default}) == camshaft.SamplingParams()


if __name__ == "__main__":
    for each in SURFACES:
        (GOLDEN / f"{each}.json").write_text(rendered(each), encoding="utf-8")
