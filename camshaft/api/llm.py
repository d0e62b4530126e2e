"""``LLM``: a model by name, folder, file or engine, ready to generate.

Owns putting the parts together (build or load, runtime, cache, executor, front) and taking them apart
again. The work itself is done below.
"""

from __future__ import annotations

import contextlib
import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, overload

import numpy as np

from camshaft.api.assembly import Assembly, Source, assemble
from camshaft.api.chat_template import ChatTemplate
from camshaft.api.outputs import RequestOutput
from camshaft.api.resolve import PreparedRequest
from camshaft.api.result import GenerationResult
from camshaft.api.tokenizer import Tokenizer
from camshaft.api.tracing import TraceTarget
from camshaft.config.build import BuildConfig
from camshaft.config.parse import config_from
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import CamshaftError, QueueFullError, UserError
from camshaft.core.log import configure_logging, logger, progress

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids``."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
Priority: TypeAlias = int | Sequence[int]
"""One for all, or one a prompt."""


_OWN_OPTIONS = ("model", "revision", "token", "build", "kv_cache", "scheduler", "use_cache", "skip_tokenizer_init",
                "show_progress", "trace")
"""Arguments of an LLM that are no fields of its build."""


class LLM:
    """A model that answers.

    ``model`` is a folder with config.json and safetensors, a Hugging Face hub id, a ``.gguf`` file, an
    engine folder, or None for the default model (SmolLM2-135M-Instruct). The first start builds an
    engine and keeps it in the engine cache; the next one loads it.

    Args:
        model: what to run; see above.
        revision: branch, tag or commit of a hub model.
        token: hub access token; default: the environment's.
        build: a BuildConfig or a dict of its fields; its fields may also be given directly, e.g. ``dtype="bfloat16"``.
        kv_cache: a KvCacheConfig or a dict of its fields.
        scheduler: a SchedulerConfig or a dict of its fields.
        use_cache: whether the on-disk engine cache may be read and written.
        skip_tokenizer_init: token ids in and out only.
        show_progress: draw progress of download, build and load on stderr.
        trace: a file to record every step in, for ``camshaft replay``; it holds the token ids of prompts and answers.

    Raises UserError for anything the caller can mend, EngineError for an engine that does not fit here.
    Use it as a context manager, or call :meth:`shutdown`.
    """

    def __init__(self, model: str | Path | None = None, *, revision: str | None = None, token: str | None = None,
                 build: BuildConfig | Mapping[str, Any] | None = None,
                 kv_cache: KvCacheConfig | Mapping[str, Any] | None = None,
                 scheduler: SchedulerConfig | Mapping[str, Any] | None = None, use_cache: bool = True,
                 skip_tokenizer_init: bool = False, show_progress: bool = False, trace: str | Path | None = None,
                 **build_fields: Any) -> None:
        configure_logging()
        if build is not None and build_fields:
            raise UserError("build", sorted(build_fields), "either build=… or its fields, not both")
        self._parts: Assembly = assemble(
            Source(model=model, revision=revision, token=token, use_cache=use_cache, show_progress=show_progress),
            build=config_from(BuildConfig, build_fields or build, where="LLM", beside=_OWN_OPTIONS),
            kv_cache=config_from(KvCacheConfig, kv_cache, where="kv_cache"),
            scheduler=config_from(SchedulerConfig, scheduler, where="scheduler"), skip_tokenizer=skip_tokenizer_init,
            trace=None if trace is None else TraceTarget(
                path=Path(trace), model=None if model is None else str(model), revision=revision))
        self._closed = False
        self._home_pid = os.getpid()
        # Not __del__: at the interpreter's end the threads must have left native code before it is torn down, and
        # that is the order of exit handlers, which a finalizer is; in a forked copy the threads do not exist.
        self._finalizer = weakref.finalize(self, _close, self._parts, self._home_pid)
        # What lives as long as the engine need not be walked by every collection between steps; what is dead
        # already must go first, or it would stay for ever.
        gc.collect()
        gc.freeze()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; None with ``skip_tokenizer_init`` or when the checkpoint has none."""
        return self._parts.tokenizer

    @property
    def description(self) -> dict[str, Any]:
        """The resolved configuration as plain data: model, build, KV cache, scheduler."""
        return self._parts.description

    @property
    def summary(self) -> str:
        """One line for people: what runs, in which type, with how much KV cache and why that much."""
        return self._parts.summary

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` can be used."""
        return self._parts.chat_template is not None

    @overload
    def generate(self, inputs: str | Mapping[str, Any], sampling_params: SamplingParams | None = None, *,
                 priority: Priority | None = None, use_tqdm: bool = False) -> RequestOutput: ...

    @overload
    def generate(self, inputs: Sequence[Any], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
                 *, priority: Priority | None = None, use_tqdm: bool = False
                 ) -> RequestOutput | list[RequestOutput]: ...

    def generate(self, inputs: Any, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *,
                 priority: Priority | None = None, use_tqdm: bool = False) -> RequestOutput | list[RequestOutput]:
        """Generate for one prompt or many; the answer has the arity of ``inputs``.

        A string, a list of ints or a dict is one prompt; any other list is a batch. ``sampling_params`` is
        one for all or one a prompt, and so is ``priority``: larger goes first, which needs a queue policy that
        looks at it ("priority"). All prompts are checked before any runs. While a batch runs, a request that fails
        keeps its error in ``RequestOutput.error``; a single prompt raises it. Of a request for several sequences
        none goes on when one fails. Ctrl-C aborts what is running and leaves the LLM usable.
        """
        if _is_single(inputs):
            return self._run_all([inputs], sampling_params, names=["prompt"], show=use_tqdm,
                                 priority=priority)[0].result()
        prompts = list(inputs)
        results = self._run_all(prompts, sampling_params, names=[f"prompts[{i}]" for i in range(len(prompts))],
                                show=use_tqdm, priority=priority)
        return [_settled(result) for result in results]

    def generate_async(self, inputs: Prompt, sampling_params: SamplingParams | None = None, *,
                       priority: int | None = None) -> GenerationResult:
        """Start one request and return at once: await it, iterate it, or ``abort()`` it.

        ``priority``: larger goes first, which needs a queue policy that looks at it ("priority").
        """
        if not _is_single(inputs):
            raise UserError("inputs", inputs, "one prompt", "Call generate_async once a prompt")
        return self._submit_all([inputs], _one_each(sampling_params, 1), ["prompt"], priority)[0]

    def chat(self, messages: Messages | Sequence[Messages], sampling_params: SamplingParams | None = None, *,
             tools: Sequence[Mapping[str, Any]] | None = None, add_generation_prompt: bool = True,
             priority: Priority | None = None, **template_kwargs: Any) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation (a list of messages with role and content), or a list of conversations."""
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise UserError("messages", messages, "a list of messages, or a list of such lists",
                            "Give [{'role': 'user', 'content': '…'}]")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if single else list(messages)
        prompts = [{"prompt_token_ids": self.apply_chat_template(
            conversation, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs)}
            for conversation in conversations]
        return self.generate(prompts[0] if single else prompts, sampling_params, priority=priority)

    def apply_chat_template(self, messages: Any, *, tools: Sequence[Mapping[str, Any]] | None = None,
                            add_generation_prompt: bool = True, **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation in the model's own format; special tokens are the template's alone."""
        tokenizer, template = self._parts.tokenizer, self._parts.chat_template
        if tokenizer is None or template is None:
            raise UserError("messages", messages, "prompts, as this model has no chat template", "Use generate()")
        return tokenizer.encode(self._render(template, messages, tools, add_generation_prompt, template_kwargs),
                                add_special_tokens=False)

    @staticmethod
    def _render(template: ChatTemplate, messages: Any, tools: Any, add_generation_prompt: bool,
                extra: dict[str, Any]) -> str:
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **extra)

    def get_stats(self) -> dict[str, Any]:
        """Counters of the executor and its KV cache, as plain data."""
        self._check_process()
        return self._parts.stats()

    def shutdown(self) -> None:
        """End every request and free the engine. Idempotent; always returns.

        It also happens when the LLM is garbage-collected and when the interpreter ends.
        """
        self._closed = True
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.shutdown()

    def _check_process(self) -> None:
        if os.getpid() != self._home_pid:
            raise UserError("LLM", "a copy in a forked process, where its threads do not run",
                            "an LLM of this very process", "Make it after the fork, or start processes by spawn")

    def _run_all(self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None,
                 *, names: list[str], show: bool, priority: Priority | None) -> list[GenerationResult]:
        self._parts.executor.check_may_wait()
        chosen = _one_each(params, len(prompts))
        results = self._submit_all(prompts, chosen, names, priority)
        try:
            _wait(results, show=show)
        except BaseException:  # Ctrl-C included: nothing of this call may go on running
            for result in results:
                result.abort()
            raise
        return results

    def _submit_all(self, prompts: list[Prompt], params: list[SamplingParams], names: list[str],
                    priority: Priority | None) -> list[GenerationResult]:
        self._check_process()
        priorities = _one_priority_each(priority, len(prompts))
        if self._closed:
            raise UserError("LLM", "shut down", "an LLM that is open", "Make a new one")
        ready = []
        for prompt, chosen, name, urgency in zip(prompts, params, names, priorities, strict=True):
            prepared = self._parts.resolver.prepare(_unwrap(prompt, name), chosen, where=name, priority=urgency)
            self._parts.check_fits(prepared)
            ready.append(prepared)
        results: list[GenerationResult] = []
        try:
            for prepared in ready:
                results.append(self._submit_when_there_is_room(prepared, results))
        except BaseException:  # Ctrl-C included: a call is submitted whole or not at all
            for result in results:
                result.abort()
            raise
        return results

    def _submit_when_there_is_room(self, prepared: PreparedRequest,
                                   earlier: list[GenerationResult]) -> GenerationResult:
        """Submit; a batch larger than the intake queue waits for its own earlier requests."""
        while True:
            try:
                return self._parts.front.submit(prepared)
            except QueueFullError:
                running = next((result for result in earlier if not result.finished), None)
                if running is None:
                    raise
                with contextlib.suppress(CamshaftError):
                    running.result()


def _close(parts: Assembly, home_pid: int) -> None:
    if os.getpid() == home_pid:
        parts.close()


def _is_single(inputs: Any) -> bool:
    if isinstance(inputs, str | Mapping):
        return True
    if isinstance(inputs, bytes) or not isinstance(inputs, Sequence):
        raise UserError("inputs", inputs, "a string, a list of token ids, a dict, or a list of those")
    return bool(inputs) and isinstance(inputs[0], int | np.integer)


def _unwrap(prompt: Prompt, name: str) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, bytes) or not isinstance(prompt, str | Sequence):
            raise UserError(name, prompt, "a string, a list of token ids, or a dict")
        return prompt
    known = {"prompt", "prompt_token_ids"}
    if len(prompt.keys() & known) != 1 or prompt.keys() - known:
        raise UserError(name, dict(prompt), "a dict with either prompt or prompt_token_ids",
                        "Give messages of a conversation to chat()" if "role" in prompt else "")
    value: str | Sequence[int] = next(iter(prompt.values()))
    if ("prompt" in prompt) != isinstance(value, str):
        raise UserError(name, dict(prompt), "text under prompt, token ids under prompt_token_ids")
    return value


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    chosen = list(params) if isinstance(params, Sequence) else [params]
    for one in chosen:
        if not isinstance(one, SamplingParams):
            raise UserError("sampling_params", one, "a SamplingParams", "Give e.g. SamplingParams(max_tokens=32)")
    if len(chosen) != count:
        raise UserError("sampling_params", f"{len(chosen)} of them", f"one, or one a prompt ({count})")
    return chosen


def _one_priority_each(priority: Priority | None, count: int) -> list[int | None]:
    if priority is None or isinstance(priority, int):
        return [priority] * count
    if isinstance(priority, str | bytes) or not isinstance(priority, Sequence) or len(priority) != count:
        raise UserError("priority", priority, f"a whole number, or one a prompt ({count})")
    return list(priority)


def _wait(results: list[GenerationResult], *, show: bool) -> None:
    with progress("generating", len(results), show=show, unit="requests") as advance:
        for result in results:
            with contextlib.suppress(CamshaftError):
                result.result()
            advance(1)


def _settled(result: GenerationResult) -> RequestOutput:
    try:
        return result.result()
    except CamshaftError as error:
        logger.warning("request %d failed: %s", result.request_id, error)
        return result.snapshot()
