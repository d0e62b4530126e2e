"""An executor over a fake engine and the real KV cache, driven step by step: for tests of scheduling.

Owns the wiring, what each request was told, and what it should have been told. Needs numpy only. Public:
authors of capacity policies check theirs with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from camshaft.config.kv import LifeCycleSpec
from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.loop import Executor
from camshaft.executor.messages import GenerationRequest, Increment, PrefixScope, TokenLogprob
from camshaft.executor.request import ExecutorLimits, RequestSize
from camshaft.runtime.step import RowSampling
from camshaft.testing.fake_engine import FakeModelEngine
from camshaft.testing.fake_logits import expected_logprobs, expected_tokens

_SCOPE = PrefixScope(model="fake")
_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(RowSampling))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RigConfig:
    """Sizes of a rig; small enough that every limit is met often."""

    num_pages: int = 33
    """Of each life cycle, trash page included."""
    windows: tuple[tuple[int | None, int], ...] = ((None, 0),)
    """(window, sinks) of each life cycle."""
    page_size: int = 4
    max_seq_len: int = 64
    vocab_size: int = 50
    block_reuse: bool = True
    partial_reuse: bool = True
    max_logits_rows: int | None = None
    """None: one for each of the batch's requests."""
    scheduler: SchedulerConfig = SchedulerConfig(max_batch_size=4, max_num_tokens=16, overlap_depth=0)  # noqa: RUF009 - frozen


@dataclasses.dataclass(slots=True)
class Told:
    """What a request heard."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    finals: list[Increment] = dataclasses.field(default_factory=list)
    num_after_final: int = 0
    """Increments that came after the final one; must stay 0."""
    num_cached_tokens: int | None = None
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> str | None:
        """Finish reason, or the error's class name; None while it goes on."""
        if not self.finals:
            return None
        final = self.finals[0]
        return final.finish_reason if final.error is None else type(final.error).__name__


class ExecutorRig:
    """Submits requests, steps the executor, keeps the books on both sides."""

    def __init__(self, config: RigConfig | None = None) -> None:
        self.config = cfg = config or RigConfig()
        step = cfg.scheduler.step_limits()
        max_logits_rows = cfg.max_logits_rows or step.max_batch_size
        self.limits = ExecutorLimits(max_seq_len=cfg.max_seq_len, vocab_size=cfg.vocab_size,
                                     max_logits_rows=max_logits_rows)
        life_cycles = tuple(
            LifeCycleSpec(kind="full" if window is None else "window", layers=(layer,), num_kv_heads=1, head_dim=8,
                          page_size=cfg.page_size, dtype="float32", window=window, sinks=sinks)
            for layer, (window, sinks) in enumerate(cfg.windows))
        num_pages = (cfg.num_pages,) * len(life_cycles)
        self.engine = FakeModelEngine(life_cycles=life_cycles, num_pages=num_pages, num_rows=step.max_batch_size,
                                      max_seq_len=cfg.max_seq_len, vocab_size=cfg.vocab_size,
                                      max_num_tokens=step.max_num_tokens)
        self.engine.max_logits_rows = max_logits_rows
        self.kv = KVCacheManager(life_cycles, num_pages, enable_block_reuse=cfg.block_reuse,
                                 enable_partial_reuse=cfg.partial_reuse)
        self.executor = Executor(self.engine, self.kv, limits=self.limits, scheduler=cfg.scheduler, sink=self.hear)
        self.told: dict[RequestId, Told] = {}
        self.requests: dict[RequestId, GenerationRequest] = {}
        self.num_sink_calls = 0
        self._ids = itertools.count(1)

    def hear(self, increments: list[Increment]) -> None:
        """The executor's sink."""
        self.num_sink_calls += 1
        for increment in increments:
            told = self.told[increment.id]
            told.num_after_final += bool(told.finals)
            told.token_ids.extend(increment.token_ids)
            told.logprobs.extend(increment.logprobs)
            told.prompt_logprobs.extend(increment.prompt_logprobs)
            if increment.num_cached_tokens is not None:
                told.num_cached_tokens = increment.num_cached_tokens
            if increment.finish_reason is not None or increment.error is not None:
                told.finals.append(increment)

    def request(self, prompt: Sequence[int], max_tokens: int, *, stop: Iterable[int] = (), min_tokens: int = 0,
                temperature: float = 0.0, **fields: object) -> GenerationRequest:
        """A request with the next id; ``fields`` replace further fields, of it (scope, reuse) or of its sampling."""
        stops = frozenset(stop)
        request_id = RequestId(next(self._ids))
        sampling = RowSampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=request_id, choice=0,
                               min_tokens=min_tokens, suppressed_token_ids=np.array(sorted(stops), np.int32))
        edits = {name: fields.pop(name) for name in sorted(_SAMPLING_FIELDS & fields.keys())}
        sampling = dataclasses.replace(sampling, **edits)  # type: ignore[arg-type]
        request = GenerationRequest(id=request_id, prompt_token_ids=np.array(prompt, np.int32), max_tokens=max_tokens,
                                    min_tokens=min_tokens, stop_token_ids=stops, sampling=sampling, scope=_SCOPE)
        return dataclasses.replace(request, **fields)  # type: ignore[arg-type]

    def submit(self, request: GenerationRequest) -> RequestId:
        """Hand the request in; raises what the executor refuses it with."""
        self.told[request.id] = Told()
        self.requests[request.id] = request
        try:
            self.executor.submit(request)
        except Exception:
            del self.told[request.id], self.requests[request.id]
            raise
        return request.id

    def add(self, prompt: Sequence[int], max_tokens: int, **options: object) -> RequestId:
        """:meth:`submit` of :meth:`request`."""
        return self.submit(self.request(prompt, max_tokens, **options))  # type: ignore[arg-type]

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left to do; returns the steps taken. Raises InternalError beyond ``max_steps``."""
        for count in range(max_steps):
            if not self.executor.step():
                return count
        raise InternalError(f"still busy after {max_steps} steps")

    def expected(self, request_id: RequestId) -> tuple[list[int], str]:
        """Tokens and finish reason that the request would get if it ran alone and undisturbed."""
        request = self.requests[request_id]
        limit = RequestSize.of(request).output_limit(self.limits)
        tokens = expected_tokens(request.prompt_token_ids, limit, sampling=request.sampling,
                                 vocab_size=self.config.vocab_size)
        for index, token in enumerate(tokens):
            if token in request.stop_token_ids and index >= request.min_tokens:
                return tokens[:index + 1], "stop"
        return tokens, "length"

    def check_told(self) -> None:
        """Everything ended once, and was told what it would have been told alone, or a beginning of it.

        Raises InternalError naming the request.
        """
        for request_id, told in self.told.items():
            tokens, reason = self.expected(request_id)
            if len(told.finals) != 1 or told.num_after_final:
                raise InternalError(f"request {request_id} ended {len(told.finals)} times")
            whole = told.end in ("stop", "length")
            if told.token_ids != (tokens if whole else tokens[:len(told.token_ids)]) or (whole and told.end != reason):
                raise InternalError(f"request {request_id} got {told.token_ids} ({told.end}), not {tokens} ({reason})")
            self._check_logprobs(request_id, told, whole)

    def _check_logprobs(self, request_id: RequestId, told: Told, whole: bool) -> None:
        request = self.requests[request_id]
        prompt_len, sampling = len(request.prompt_token_ids), request.sampling
        tokens = np.array([*request.prompt_token_ids, *told.token_ids], np.int32)
        output: list[TokenLogprob] = []
        if sampling.num_logprobs is not None:
            output = expected_logprobs(tokens, prompt_len, sampling.num_logprobs, self.config.vocab_size)
        prompt: list[TokenLogprob] = []
        if sampling.num_prompt_logprobs is not None:
            prompt = expected_logprobs(tokens[:prompt_len], 1, sampling.num_prompt_logprobs, self.config.vocab_size)
        heard = told.prompt_logprobs
        if told.logprobs != output or heard != (prompt if whole or told.token_ids else prompt[:len(heard)]):
            wrong = [pair for pair in itertools.zip_longest([*heard, *told.logprobs], [*prompt, *output])
                     if pair[0] != pair[1]]
            raise InternalError(f"request {request_id} got {len(heard)} scores and {len(told.logprobs)} "
                                f"log-probabilities, not {len(prompt)} and {len(output)}: {wrong[:1]}")

    def check_drained(self) -> None:
        """Nothing is held any more: every page is free or cached, every row is free. Raises InternalError."""
        self.kv.check_integrity()
        stats = self.executor.stats()
        if stats.kv.num_referenced or stats.num_running or stats.num_waiting:
            raise InternalError(f"something is left: {stats}")
        if self.engine.violations:
            raise InternalError(f"the engine saw broken rules: {self.engine.violations}")
