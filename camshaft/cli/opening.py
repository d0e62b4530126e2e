"""Opening a model from what was typed: the same arguments and groups of options in every command that runs one.

Owns the way from options to an ``LLM``; what is done with it is the command's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from camshaft.cli.options import pick
from camshaft.config.build import BuildConfig
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig

if TYPE_CHECKING:
    from camshaft.api.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Which model, and how it is opened. Making one checks every option; nothing is loaded before :meth:`open`."""

    model: str | None
    revision: str | None
    use_cache: bool
    trace: Path | None
    build: BuildConfig
    kv_cache: KvCacheConfig
    scheduler: SchedulerConfig

    @classmethod
    def of(cls, given: Mapping[str, Any], *, model: str | None, revision: str | None, no_cache: bool,
           trace: Path | None) -> Opening:
        """From a command's arguments and the options in ``given`` (see ``with_options``). Raises UserError."""
        return cls(model=model, revision=revision, use_cache=not no_cache, trace=trace, build=pick(BuildConfig, given),
                   kv_cache=pick(KvCacheConfig, given, "kv_"), scheduler=pick(SchedulerConfig, given, "scheduler_"))

    def open(self) -> LLM:
        """Build or load it, with progress on standard error; says which model that is where none was named."""
        if self.model is None:
            typer.echo("No model given: using the default, SmolLM2-135M-Instruct (Apache-2.0).", err=True)
        from camshaft.api.llm import LLM

        return LLM(self.model, revision=self.revision, use_cache=self.use_cache, trace=self.trace, show_progress=True,
                   build=self.build, kv_cache=self.kv_cache, scheduler=self.scheduler)
