"""Putting an LLM together from its parts, and taking it apart again.

Owns the order of things (resolve, build or load, size the KV cache, start threads) and the description of
what was decided. Used by ``llm.py`` alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from camshaft.api.chat_template import ChatTemplate
from camshaft.api.front import Front
from camshaft.api.resolve import PreparedRequest, RequestResolver
from camshaft.api.tokenizer import Tokenizer
from camshaft.api.tracing import TraceTarget, recordable
from camshaft.builder.cache import cached_engine
from camshaft.config.build import BuildConfig
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig, resolve_scheduler
from camshaft.core.errors import UserError
from camshaft.core.log import logger
from camshaft.engine.artifact import Engine
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.loop import Executor
from camshaft.executor.messages import PrefixScope
from camshaft.executor.policies.base import QUEUE_POLICIES, check_policies
from camshaft.executor.request import ExecutorLimits
from camshaft.executor.trace import RecordingRunner, TraceWriter, check_target
from camshaft.frontend.hub import resolve_model
from camshaft.runtime.buffers import describe_kv, kv_pages_for
from camshaft.runtime.model_engine import ModelEngine


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Which model, and how it may be fetched."""

    model: str | Path | None
    revision: str | None
    token: str | None
    use_cache: bool
    show_progress: bool

    def resolve(self) -> tuple[Path, str]:
        """The path of the model, and what it is in words. UserError for a revision of the default model."""
        if self.model is not None:
            path = resolve_model(self.model, revision=self.revision, token=self.token,
                                 show_progress=self.show_progress)
            return path, str(self.model)
        if self.revision is not None:
            raise UserError("revision", self.revision, "left out, as the default model is one fixed version",
                            "Give the model's hub id too")
        from camshaft.frontend.default_model import default_model

        found = default_model(self.show_progress)
        return found.path, found.description


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assembly:
    """A running engine and what stands in front of it."""

    resolver: RequestResolver
    front: Front
    executor: Executor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    description: dict[str, Any]
    summary: str
    trace: TraceWriter | None = None

    def check_fits(self, prepared: PreparedRequest) -> None:
        """Raise RequestTooLargeError, with the numbers, for a request that could never run."""
        self.executor.check_fits(num_prompt_tokens=len(prepared.token_ids), max_tokens=prepared.params.max_tokens,
                                 min_tokens=prepared.params.min_tokens)

    def stats(self) -> dict[str, Any]:
        """The executor's snapshot as plain data."""
        return dataclasses.asdict(self.executor.stats())

    def close(self) -> None:
        """Stop the executor, then the front: every request hears its end."""
        self.executor.shutdown()
        self.front.stop()
        if self.trace is not None:
            self.trace.close()


def assemble(source: Source, *, build: BuildConfig, kv_cache: KvCacheConfig, scheduler: SchedulerConfig,
             skip_tokenizer: bool, trace: TraceTarget | None = None) -> Assembly:
    """Build or load the engine of ``source`` and start it; its steps are recorded where ``trace`` says."""
    if trace is not None:
        check_target(trace.path)
    check_policies(scheduler)  # an unknown name is refused before anything is built
    path, name = source.resolve()
    engine = cached_engine(path, None if build == BuildConfig() else build, use_cache=source.use_cache,
                           show_progress=source.show_progress)
    manifest = engine.manifest
    if manifest.native is None and manifest.device.kind == "cpu":
        logger.warning("this engine was built without a C compiler, so its kernels are torch's, which decode slower; "
                       "install gcc or clang and it is built anew")
    device = torch.device(manifest.device.kind)
    scheduler = resolve_scheduler(scheduler, manifest.build)
    num_pages = kv_pages_for(engine, kv_cache, device)
    runner = ModelEngine(engine, num_pages=num_pages)
    kv = KVCacheManager(manifest.life_cycles, num_pages, enable_block_reuse=kv_cache.enable_block_reuse,
                        enable_partial_reuse=kv_cache.enable_partial_reuse)
    files = {} if skip_tokenizer else engine.tokenizer_files()
    tokenizer = Tokenizer.from_files(files) if "tokenizer.json" in files else None
    resolver = RequestResolver(tokenizer, manifest.generation, vocab_size=manifest.model.vocab_size,
                               scope=PrefixScope(model=manifest.weights_id),
                               reads_priority=QUEUE_POLICIES.get(scheduler.queue_policy).reads_priority)
    front = Front(tokenizer)
    limits = ExecutorLimits(max_seq_len=manifest.build.longest_sequence, vocab_size=manifest.model.vocab_size,
                            max_logits_rows=manifest.build.max_logits_rows)
    template = _template(files)
    description = _describe(engine, name, kv_cache, scheduler, num_pages)
    runner.warm_up()
    writer = None if trace is None else trace.open(manifest, num_pages, kv_cache, scheduler)
    executor = Executor(runner if writer is None else RecordingRunner(runner, writer), kv, limits=limits,
                        scheduler=scheduler, sink=front.sink)
    # nothing below may fail: nobody would end the threads
    front.start(executor.submit if writer is None else recordable(executor.submit), executor.abort,
                executor.check_may_wait)
    executor.start()
    logger.info("resolved configuration: %s", description)
    return Assembly(resolver=resolver, front=front, executor=executor, tokenizer=tokenizer, chat_template=template,
                    description=description, summary=_summary(engine, name, kv_cache, num_pages), trace=writer)


def _template(files: dict[str, bytes]) -> ChatTemplate | None:
    from camshaft.api.tokenizer import read_settings

    if not read_settings(files).get("chat_template"):
        return None
    try:
        return ChatTemplate.from_files(files)
    except UserError as error:
        logger.warning("this model's chat template cannot be used, only plain prompts: %s", error)
        return None


def _describe(engine: Engine, name: str, kv_cache: KvCacheConfig, scheduler: SchedulerConfig,
              num_pages: tuple[int, ...]) -> dict[str, Any]:
    manifest = engine.manifest
    return {"model": name, "engine": None if engine.folder is None else str(engine.folder),
            "weights_id": manifest.weights_id, "model_config": manifest.model.to_dict(),
            "build": manifest.build.to_dict(), "generation": dataclasses.asdict(manifest.generation),
            "kv_cache": dataclasses.asdict(kv_cache), "kv_pages": list(num_pages),
            "scheduler": dataclasses.asdict(scheduler)}


def _summary(engine: Engine, name: str, kv_cache: KvCacheConfig, num_pages: tuple[int, ...]) -> str:
    manifest = engine.manifest
    share = (f"capped by max_bytes={kv_cache.max_bytes}" if kv_cache.max_bytes is not None
             else f"{kv_cache.memory_fraction:.0%} of free memory")
    return (f"{name} · {manifest.build.dtype} on {manifest.device.kind}, {torch.get_num_threads()} threads · "
            f"{describe_kv(engine, num_pages)} ({share})")
