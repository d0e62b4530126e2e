"""The front: turns prompts into requests and increments into text, on one thread beside the executor.

Owns live requests, detokenising, string stops and their aborts. Knows nothing of pages or steps.
"""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
from collections.abc import Callable, Sequence

import numpy as np

from camshaft.api.detokenize import IncrementalDetokenizer
from camshaft.api.outputs import CompletionOutput, RequestOutput
from camshaft.api.result import GenerationResult
from camshaft.api.tokenizer import Tokenizer
from camshaft.config.model import GenerationDefaults
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import CamshaftError, EngineDeadError, InternalError, UserError
from camshaft.core.ids import RequestId
from camshaft.core.log import logger
from camshaft.executor.messages import GenerationRequest, Increment, PrefixScope
from camshaft.runtime.step import RowSampling

Submit = Callable[[GenerationRequest], None]
Abort = Callable[[RequestId], None]


class Front:
    """Between callers and the executor. ``sink`` is what the executor calls with each step's increments."""

    def __init__(self, tokenizer: Tokenizer | None, generation: GenerationDefaults, *, vocab_size: int,
                 scope: PrefixScope) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._vocab_size = vocab_size
        self._scope = scope
        self._ids = itertools.count(1)
        self._live: dict[RequestId, _Live] = {}
        self._lock = threading.Lock()
        self._news: queue.SimpleQueue[list[Increment] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="camshaft-front", daemon=True)
        self._submit: Submit | None = None
        self._abort: Abort | None = None

    def start(self, submit: Submit, abort: Abort) -> None:
        """Begin to serve; ``submit`` and ``abort`` are the executor's."""
        self._submit, self._abort = submit, abort
        self._thread.start()

    def sink(self, increments: list[Increment]) -> None:
        """Take a step's increments; returns at once."""
        self._news.put(increments)

    def stop(self) -> None:
        """Serve what has arrived, then end the thread. Requests still live fail."""
        self._news.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        # the executor holds this object's sink: without this, neither they nor the engine's memory would be freed
        self._submit = self._abort = None

    def encode(self, prompt: str | Sequence[int], params: SamplingParams, *, where: str) -> list[int]:
        """Token ids of a prompt, checked. ``where`` names the prompt in errors."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise UserError(where, prompt, "token ids, as this engine has no tokenizer",
                                "Pass a list of token ids, or build from a checkpoint with tokenizer.json")
            ids = self._tokenizer.encode(prompt, add_special_tokens=params.add_special_tokens)
            if max(ids, default=0) >= self._vocab_size:
                raise UserError(where, prompt, f"text whose tokens the model knows; its tokenizer gave id {max(ids)}, "
                                f"the model has {self._vocab_size}", "The tokenizer belongs to another model")
        else:
            ids = [self._checked_id(token, where) for token in prompt]
        if not ids:
            raise UserError(where, prompt, "at least one token", "Give a prompt that is not empty")
        return ids

    def _checked_id(self, token: int, where: str) -> int:
        integral = isinstance(token, int | np.integer) and not isinstance(token, bool)
        if not integral or not 0 <= int(token) < self._vocab_size:
            raise UserError(where, token, f"token ids from 0 to {self._vocab_size - 1}")
        return int(token)

    def submit(self, prompt: str | None, token_ids: list[int], params: SamplingParams) -> GenerationResult:
        """Send one request on its way. Raises what the executor refuses it with."""
        submit = self._submit
        if submit is None:
            raise EngineDeadError("the engine is shut down, or was never started")
        request_id = RequestId(next(self._ids))
        request = self._request(request_id, token_ids, params)
        output = RequestOutput(request_id=request_id, prompt=prompt, prompt_token_ids=token_ids,
                               outputs=[CompletionOutput(index=0)])
        result = GenerationResult(output, lambda: self.abort(request_id))
        live = _Live(result, self._detokenizer(params), frozenset(params.stop_token_ids or ()),
                     request.stop_token_ids if not params.include_stop_str_in_output else frozenset())
        with self._lock:
            self._live[request_id] = live
        try:
            submit(request)
        except BaseException:  # Ctrl-C may come after the executor took the request: nobody would wait for it
            with self._lock:
                self._live.pop(request_id, None)
            self.abort(request_id)
            raise
        return result

    def abort(self, request_id: RequestId) -> None:
        """Ask the executor to end a request; its final increment ends the result."""
        abort = self._abort
        if abort is not None:
            abort(request_id)

    def _request(self, request_id: RequestId, token_ids: list[int], params: SamplingParams) -> GenerationRequest:
        given = (*(("stop_token_ids", token) for token in params.stop_token_ids or ()), ("end_id", params.end_id or 0))
        for field, token in given:
            if token >= self._vocab_size:
                raise UserError(field, token, f"token ids from 0 to {self._vocab_size - 1}")
        ends = self._generation.eos_token_ids if params.end_id is None else (params.end_id,)
        stops = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else ends)
        suppressed = np.array(sorted(stops), dtype=np.int32)
        return GenerationRequest(
            id=request_id, prompt_token_ids=np.array(token_ids, dtype=np.int32), max_tokens=params.max_tokens,
            min_tokens=params.min_tokens, stop_token_ids=stops, scope=self._scope,
            sampling=self._row_sampling(params, suppressed))

    def _row_sampling(self, params: SamplingParams, suppressed: np.ndarray) -> RowSampling:
        defaults = self._generation
        return RowSampling(
            temperature=_first(params.temperature, defaults.temperature, 0.0),
            top_k=int(_first(params.top_k, defaults.top_k, 0)), top_p=_first(params.top_p, defaults.top_p, 1.0),
            min_p=_first(params.min_p, defaults.min_p, 0.0),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            choice=0, min_tokens=params.min_tokens, suppressed_token_ids=suppressed)

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        if self._tokenizer is None or not params.detokenize:
            if params.stop:
                raise UserError("stop", params.stop, "token ids only, as this engine has no tokenizer",
                                "Use stop_token_ids")
            return None
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=params.skip_special_tokens,
                                      stop=tuple(params.stop or ()), include_stop=params.include_stop_str_in_output,
                                      min_tokens=params.min_tokens)

    def _run(self) -> None:
        while (increments := self._news.get()) is not None:
            for increment in increments:
                self._deliver(increment)
        with self._lock:
            left = list(self._live.values())
            self._live.clear()
        for live in left:
            live.result.fail(InternalError("the engine was shut down before this request finished"))

    def _deliver(self, increment: Increment) -> None:
        live = self._live.get(increment.id)
        if live is None:  # already ended by a stop string
            return
        try:
            ended = live.take(increment)
        except Exception as error:  # noqa: BLE001 - whatever a tokenizer raises ends this request and no other
            logger.exception("request %d failed while its tokens were turned into text", increment.id)
            live.result.fail(error if isinstance(error, CamshaftError) else InternalError(repr(error)))
            ended = True
        if ended:
            with self._lock:
                self._live.pop(increment.id, None)
            if increment.finish_reason is None and increment.error is None:
                self.abort(increment.id)


class _Live:
    """One running request as the front sees it."""

    def __init__(self, result: GenerationResult, detokenizer: IncrementalDetokenizer | None,
                 reported_stops: frozenset[int], silent_stops: frozenset[int]) -> None:
        self.result = result
        self._detokenizer = detokenizer
        self._reported_stops = reported_stops
        self._silent_stops = silent_stops

    def take(self, increment: Increment) -> bool:
        """Apply news to the result; True when the request has ended."""
        if increment.error is not None:
            self.result.fail(_as_camshaft_error(increment.error))
            return True
        token_ids, reason = list(increment.token_ids), increment.finish_reason
        stop_reason: int | str | None = None
        if increment.stop_token_id in self._reported_stops:
            stop_reason = increment.stop_token_id
        text = ""
        if self._detokenizer is not None:
            silent = increment.stop_token_id is not None and increment.stop_token_id in self._silent_stops
            delta = self._detokenizer.push(token_ids[:-1] if silent else token_ids)
            text = delta.text
            if delta.stopped is not None:
                token_ids, reason, stop_reason = token_ids[:delta.num_tokens_kept], "stop", delta.stopped
            elif reason is not None:
                text += self._detokenizer.finish().text

        def change(output: RequestOutput) -> None:
            completion = output.outputs[0]
            completion.token_ids.extend(token_ids)
            completion.text += text
            completion.finish_reason, completion.stop_reason = reason, stop_reason
            output.finished = reason is not None
            if increment.num_cached_tokens is not None:
                output.num_cached_tokens = increment.num_cached_tokens

        self.result.update(change)
        return reason is not None


def _first(*values: float | None) -> float:
    """The first value that is given: the request's own, else the checkpoint's, else the default."""
    return next(value for value in values if value is not None)


def _as_camshaft_error(error: Exception) -> CamshaftError:
    if isinstance(error, CamshaftError):
        return error
    wrapped = InternalError(f"the engine failed while this request ran: {error!r}")
    wrapped.__cause__ = error
    return wrapped
