"""What a prompt and its parameters ask of an engine: token ids, sampling values, stops, all checked.

Owns the order in which values count (the request's own, the checkpoint's, the default), the bounds that come
with the model, and the token sequences of bad words. Submits nothing.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from camshaft.api.tokenizer import Tokenizer
from camshaft.config.doc import INT32_MAX, check_int
from camshaft.config.model import GenerationDefaults
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import UserError
from camshaft.core.ids import RequestId
from camshaft.executor.messages import GenerationRequest, PrefixScope
from camshaft.runtime.step import Int32Array, RowSampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that may be submitted: nothing about it is left to find wrong but its size and the queue's."""

    prompt: str | None
    token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    sampling: RowSampling
    """Of the first sequence; the others differ in ``choice``."""
    scope: PrefixScope
    priority: int = 0

    @property
    def silent_stop_ids(self) -> frozenset[int]:
        """Ids whose text is left out when they end a sequence."""
        return frozenset() if self.params.include_stop_str_in_output else self.stop_token_ids

    def sequences(self, ids: Sequence[RequestId]) -> list[GenerationRequest]:
        """One request an id, for choices 0, 1, … The prompt is scored once, with the first."""
        tokens = np.array(self.token_ids, dtype=np.int32)
        return [GenerationRequest(
            id=request_id, prompt_token_ids=tokens, max_tokens=self.params.max_tokens,
            min_tokens=self.params.min_tokens, stop_token_ids=self.stop_token_ids, scope=self.scope,
            priority=self.priority, sampling=self._sampling(choice)) for choice, request_id in enumerate(ids)]

    def _sampling(self, choice: int) -> RowSampling:
        if choice == 0:
            return self.sampling
        return dataclasses.replace(self.sampling, choice=choice, num_prompt_logprobs=None)


class RequestResolver:
    """Prepares requests for one engine. Nothing changes after construction, so threads may share it.

    ``vocab_size`` is the model's: token ids lie below it. ``reads_priority``: whether the queue looks at priorities.
    """

    def __init__(self, tokenizer: Tokenizer | None, generation: GenerationDefaults, *, vocab_size: int,
                 scope: PrefixScope, reads_priority: bool = False) -> None:
        self._tokenizer = tokenizer
        self._generation = generation
        self._vocab_size = vocab_size
        self._scope = scope
        self._reads_priority = reads_priority

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams, *, where: str,
                priority: int | None = None) -> PreparedRequest:
        """Check and resolve one request. ``where`` names the prompt in errors. Raises UserError."""
        token_ids = self._encode(prompt, params, where)
        self._check_ids(params)
        self._check_logprobs(params)
        self._check_priority(priority)
        if params.stop and self._tokenizer is None:
            raise UserError("stop", params.stop, "token ids only, as this engine has no tokenizer",
                            "Use stop_token_ids")
        ends = self._generation.eos_token_ids if params.end_id is None else (params.end_id,)
        stops = frozenset(params.stop_token_ids or ()) | frozenset(() if params.ignore_eos else ends)
        return PreparedRequest(
            prompt=prompt if isinstance(prompt, str) else None, token_ids=token_ids, params=params,
            stop_token_ids=stops, sampling=self._row_sampling(params, stops), scope=self._scope,
            priority=priority or 0)

    def _encode(self, prompt: str | Sequence[int], params: SamplingParams, where: str) -> list[int]:
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

    def _check_ids(self, params: SamplingParams) -> None:
        given: dict[str, Iterable[int]] = {
            "stop_token_ids": params.stop_token_ids or (), "end_id": (params.end_id or 0,),
            "bad_token_ids": params.bad_token_ids or (), "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": dict(params.logit_bias or ())}
        for field, tokens in given.items():
            for token in tokens:
                if token >= self._vocab_size:
                    raise UserError(field, token, f"token ids from 0 to {self._vocab_size - 1}")

    def _check_logprobs(self, params: SamplingParams) -> None:
        for field, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if wanted is not None and wanted > self._vocab_size:
                raise UserError(field, wanted, f"at most the vocabulary's {self._vocab_size} tokens")

    def _check_priority(self, priority: int | None) -> None:
        if priority is None:
            return
        if not self._reads_priority:
            raise UserError("priority", priority, "left out, as this LLM's queue policy does not look at it",
                            "Make the LLM with scheduler={'queue_policy': 'priority'}")
        check_int("priority", priority, -INT32_MAX, INT32_MAX)

    def _row_sampling(self, params: SamplingParams, stops: frozenset[int]) -> RowSampling:
        defaults = self._generation
        temperature = _first(params.temperature, defaults.temperature, 0.0)
        ranked = params.num_sequences > params.n
        if ranked and temperature == 0.0:
            raise UserError("best_of", params.best_of, f"n ({params.n}) where decoding is greedy, as all sequences "
                            "would be equal", "Give a temperature above 0, or leave best_of out")
        bias = dict(params.logit_bias or ())
        allowed = params.allowed_token_ids
        return RowSampling(
            temperature=temperature, top_k=int(_first(params.top_k, defaults.top_k, 0)),
            top_p=_first(params.top_p, defaults.top_p, 1.0), min_p=_first(params.min_p, defaults.min_p, 0.0),
            seed=secrets.randbits(64) if params.seed is None else params.seed, choice=0,
            min_tokens=params.min_tokens, suppressed_token_ids=_ids(stops),
            repetition_penalty=_first(params.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=params.presence_penalty or 0.0, frequency_penalty=params.frequency_penalty or 0.0,
            no_repeat_ngram_size=int(_first(params.no_repeat_ngram_size, defaults.no_repeat_ngram_size, 0)),
            bad_words=self._bad_words(params), bias_token_ids=np.array(list(bias), dtype=np.int32),
            bias_values=np.array(list(bias.values()), dtype=np.float32),
            allowed_token_ids=None if allowed is None else _ids(allowed),
            num_logprobs=0 if ranked and params.logprobs is None else params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs, processors=_tuple(params.logits_processor))

    def _bad_words(self, params: SamplingParams) -> tuple[Int32Array, ...]:
        words: set[tuple[int, ...]] = {(token,) for token in params.bad_token_ids or ()}
        for text in params.bad or ():
            if self._tokenizer is None:
                raise UserError("bad", params.bad, "token ids only, as this engine has no tokenizer",
                                "Use bad_token_ids")
            words |= self._spellings(text, self._tokenizer)
        return tuple(np.array(word, dtype=np.int32) for word in sorted(words))

    def _spellings(self, text: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
        """Token sequences of a word: at the start of a text, after a space, and right after other text.

        Tokenizers that put a space before every text show the last of these only behind something else.
        """
        word = text.lstrip(" ") or text
        line = tokenizer.encode("\n", add_special_tokens=False)
        behind = tokenizer.encode("\n" + word, add_special_tokens=False)
        found = {tuple(tokenizer.encode(spelling, add_special_tokens=False)) for spelling in (word, " " + word)}
        if behind[:len(line)] == line:
            found.add(tuple(behind[len(line):]))
        known = {word for word in found if word and max(word) < self._vocab_size}
        if not known:
            raise UserError("bad", text, "text that the tokenizer turns into tokens the model knows")
        return known


def _first(*values: float | None) -> float:
    """The first value that is given: the request's own, else the checkpoint's, else the default."""
    return next(value for value in values if value is not None)


def _ids(tokens: Iterable[int]) -> Int32Array:
    return np.array(sorted(set(tokens)), dtype=np.int32)


def _tuple(given: Any) -> tuple[Any, ...]:
    """What SamplingParams holds as a tuple or None."""
    return given or ()
