"""What a request may ask of an executor: bounds, validity, and whether it can ever fit.

Owns the numbers that follow from a request alone (output limit, worst case in tokens) and the refusals.
Tracks nothing: running requests live in ``table.RequestTable``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from camshaft.config.doc import INT32_MAX, check_int, check_range
from camshaft.core.errors import RequestTooLargeError, UserError
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import GenerationRequest
from camshaft.runtime.step import RowSampling

_MAX_BAD_TOKENS = 65536
_MAX_EDIT = 1e6
"""Largest change of a logit: far beyond any model's logits, far within float32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """Bounds that come with the engine."""

    max_seq_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Token ids lie below this."""
    max_logits_rows: int
    """Most tokens that are sampled and scored in one step; at least the scheduler's max_batch_size."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """How large a request is and may become, in tokens."""

    num_prompt_tokens: int
    max_tokens: int
    min_tokens: int

    @classmethod
    def of(cls, request: GenerationRequest) -> RequestSize:
        """The size of ``request``."""
        return cls(num_prompt_tokens=len(request.prompt_token_ids), max_tokens=request.max_tokens,
                   min_tokens=request.min_tokens)

    def output_limit(self, limits: ExecutorLimits) -> int:
        """Most tokens it can generate: its own limit, or what max_seq_len leaves."""
        return min(self.max_tokens, limits.max_seq_len - self.num_prompt_tokens)

    def worst_case_tokens(self, limits: ExecutorLimits) -> int:
        """Most positions it can ever hold in the cache; the last token generated is never fed."""
        return self.num_prompt_tokens + max(self.output_limit(limits) - 1, 0)


def check_fits(size: RequestSize, limits: ExecutorLimits, kv: KVCacheManager, step_tokens: int) -> None:
    """Raise RequestTooLargeError, with the numbers, for a request that could never run to its end.

    ``step_tokens`` is how many positions of it are reserved ahead at most (``config.kv.reserved_ahead``).
    """
    room = limits.max_seq_len - size.num_prompt_tokens
    holds = kv.can_ever_hold(max(size.worst_case_tokens(limits), 1), step_tokens)
    least = min(size.max_tokens, max(size.min_tokens, 1))
    if room >= least and holds:
        return
    pool_tokens = _pool_tokens(limits, kv, step_tokens)
    found = (f"prompt of {size.num_prompt_tokens} tokens, max_tokens {size.max_tokens}, "
             f"max_seq_len {limits.max_seq_len}, KV cache of {pool_tokens} tokens")
    if room < min(size.max_tokens, 1):
        raise RequestTooLargeError("prompt", found, f"at most {limits.max_seq_len - min(size.max_tokens, 1)} prompt "
                                   "tokens", "Shorten the prompt, or build with a larger max_seq_len")
    if size.min_tokens > room:
        raise RequestTooLargeError("min_tokens", f"{size.min_tokens} ({found})",
                                   f"at most the {room} tokens that are left",
                                   "Lower min_tokens, shorten the prompt, or build with a larger max_seq_len")
    raise RequestTooLargeError("max_tokens", found, f"at most {pool_tokens} tokens of prompt and output together, "
                               "what the whole KV cache holds",
                               "Lower max_tokens, shorten the prompt, or give the KV cache more memory")


def _pool_tokens(limits: ExecutorLimits, kv: KVCacheManager, step_tokens: int) -> int:
    """Longest sequence that the whole cache holds, as far as max_seq_len and its smallest pool."""
    low, high = 0, max(limits.max_seq_len, int(kv.usable_pages().min()) * kv.page_size)
    while low < high:
        middle = (low + high + 1) // 2
        if kv.can_ever_hold(middle, step_tokens):
            low = middle
        else:
            high = middle - 1
    return low


def check_request(request: GenerationRequest, limits: ExecutorLimits, kv: KVCacheManager, step_tokens: int) -> None:
    """Raise UserError for a request no executor should see, RequestTooLargeError for one that can never fit."""
    tokens = request.prompt_token_ids
    if tokens.ndim != 1 or tokens.dtype != np.int32:
        raise UserError("prompt_token_ids", f"{tokens.dtype} of shape {tokens.shape}", "one row of int32")
    if len(tokens) == 0:
        raise UserError("prompt", [], "at least one token", "Give a prompt that is not empty")
    _check_ids("prompt_token_ids", tokens, limits)
    scores_only = request.sampling.num_prompt_logprobs is not None and request.max_tokens == 0
    if request.max_tokens < 1 and not scores_only:
        raise UserError("max_tokens", request.max_tokens, "at least 1, or 0 with prompt log-probabilities")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise UserError("min_tokens", request.min_tokens, f"from 0 to max_tokens ({request.max_tokens})")
    if any(not 0 <= token < limits.vocab_size for token in request.stop_token_ids):
        raise UserError("stop_token_ids", sorted(request.stop_token_ids),
                        f"token ids from 0 to {limits.vocab_size - 1}")
    check_int("priority", request.priority, -INT32_MAX, INT32_MAX)
    _check_sampling(request.sampling, limits)
    _check_edits(request.sampling, limits)
    check_fits(RequestSize.of(request), limits, kv, step_tokens)


def _check_sampling(sampling: RowSampling, limits: ExecutorLimits) -> None:
    """The bounds of the runtime's row state: a value beyond them would fail a step, and every request in it."""
    check_range("temperature", sampling.temperature, 0.0, 100.0)
    check_int("top_k", sampling.top_k, 0, INT32_MAX)
    check_range("top_p", sampling.top_p, 0.0, 1.0)
    check_range("min_p", sampling.min_p, 0.0, 1.0)
    check_int("seed", sampling.seed, 0, 2**64 - 1)
    check_int("choice", sampling.choice, 0, INT32_MAX)
    check_int("min_tokens", sampling.min_tokens, 0, INT32_MAX)
    _check_ids("suppressed_token_ids", sampling.suppressed_token_ids, limits)
    for name, number in (("logprobs", sampling.num_logprobs), ("prompt_logprobs", sampling.num_prompt_logprobs)):
        if number is not None:
            check_int(name, number, 0, limits.vocab_size)


def _check_edits(sampling: RowSampling, limits: ExecutorLimits) -> None:
    check_range("repetition_penalty", sampling.repetition_penalty, 1 / _MAX_EDIT, _MAX_EDIT)
    for name in ("presence_penalty", "frequency_penalty"):
        check_range(name, getattr(sampling, name), -_MAX_EDIT, _MAX_EDIT)
    check_int("no_repeat_ngram_size", sampling.no_repeat_ngram_size, 0, INT32_MAX)
    if not isinstance(sampling.bad_words, tuple) or any(len(word) == 0 for word in sampling.bad_words):
        raise UserError("bad", sampling.bad_words, "token sequences of at least one token")
    if sum(map(len, sampling.bad_words)) > _MAX_BAD_TOKENS:
        raise UserError("bad", f"{sum(map(len, sampling.bad_words))} tokens", f"at most {_MAX_BAD_TOKENS} tokens")
    for word in sampling.bad_words:
        _check_ids("bad", word, limits)
    ids, values = sampling.bias_token_ids, sampling.bias_values
    _check_ids("logit_bias", ids, limits)
    if len(np.unique(ids)) != len(ids) or values.shape != ids.shape or values.dtype != np.float32:
        raise UserError("logit_bias", f"{len(ids)} ids, {values.dtype} of shape {values.shape}",
                        "different ids and a float32 for each")
    if len(values) and not np.abs(values).max() <= _MAX_EDIT:
        raise UserError("logit_bias", values.tolist(), f"finite numbers up to {_MAX_EDIT:g}")
    if sampling.allowed_token_ids is not None:
        _check_ids("allowed_token_ids", sampling.allowed_token_ids, limits)
        if len(sampling.allowed_token_ids) == 0:
            raise UserError("allowed_token_ids", [], "at least one token id", "Leave it out to allow all")
    if not isinstance(sampling.processors, tuple) or not all(map(callable, sampling.processors)):
        raise UserError("logits_processor", sampling.processors, "callables")


def _check_ids(field: str, ids: npt.NDArray[Any], limits: ExecutorLimits) -> None:
    if ids.ndim != 1 or ids.dtype != np.int32:
        raise UserError(field, f"{ids.dtype} of shape {ids.shape}", "one row of int32")
    if len(ids) and not 0 <= ids.min() <= ids.max() < limits.vocab_size:
        wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise UserError(field, wrong, f"token ids from 0 to {limits.vocab_size - 1}")
