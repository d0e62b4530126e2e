"""Recording an LLM's steps: the header of its trace, and refusing what cannot be recorded.

Owns what a trace says about the engine it was recorded on. The file is ``executor/trace.py``'s.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

import camshaft
from camshaft.api.front import Submit
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.engine.manifest import Manifest
from camshaft.executor.messages import GenerationRequest
from camshaft.executor.trace import TraceHeader, TraceWriter, check_recordable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceTarget:
    """Where to record, and what the model was called by whoever asked for it."""

    path: Path
    model: str | None
    revision: str | None

    def open(self, manifest: Manifest, num_pages: tuple[int, ...], kv_cache: KvCacheConfig,
             scheduler: SchedulerConfig) -> TraceWriter:
        """Begin the file. UserError where something else lies at its path, OSError where the disk refuses."""
        return TraceWriter(self.path, TraceHeader(
            camshaft=camshaft.__version__, torch=torch.__version__, model=self.model, revision=self.revision,
            weights_id=manifest.weights_id, build=manifest.build.to_dict(),
            device=dataclasses.asdict(manifest.device), num_pages=num_pages, num_threads=torch.get_num_threads(),
            kv_cache=dataclasses.asdict(kv_cache), scheduler=dataclasses.asdict(scheduler)))


def recordable(submit: Submit) -> Submit:
    """``submit`` behind a check that the request's steps can be written down (UserError)."""

    def checked(*requests: GenerationRequest) -> None:
        for request in requests:
            check_recordable(request)
        submit(*requests)

    return checked
