"""What a request may ask of an executor: bounds, validity, and whether it can ever fit.

Owns the numbers that follow from a request alone (output limit, worst case in tokens) and the refusals.
Tracks nothing: running requests live in ``table.RequestTable``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from camshaft.config.doc import INT32_MAX, check_int, check_range
from camshaft.core.errors import RequestTooLargeError, UserError
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import GenerationRequest
from camshaft.runtime.step import RowSampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorLimits:
    """Bounds that come with the engine."""

    max_seq_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    """Token ids lie below this."""


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
        return self.num_prompt_tokens + self.output_limit(limits) - 1


def check_fits(size: RequestSize, limits: ExecutorLimits, kv: KVCacheManager) -> None:
    """Raise RequestTooLargeError, with the numbers, for a request that could never run to its end."""
    room = limits.max_seq_len - size.num_prompt_tokens
    pool_tokens = kv.usable_pages() * kv.page_size
    found = (f"prompt of {size.num_prompt_tokens} tokens, max_tokens {size.max_tokens}, "
             f"max_seq_len {limits.max_seq_len}, KV cache of {pool_tokens} tokens")
    if room < 1:
        raise RequestTooLargeError("prompt", found, f"at most {limits.max_seq_len - 1} prompt tokens",
                                   "Shorten the prompt, or build with a larger max_seq_len")
    if size.min_tokens > room:
        raise RequestTooLargeError("min_tokens", f"{size.min_tokens} ({found})",
                                   f"at most the {room} tokens that are left",
                                   "Lower min_tokens, shorten the prompt, or build with a larger max_seq_len")
    if not kv.can_ever_hold(size.worst_case_tokens(limits)):
        raise RequestTooLargeError("max_tokens", found, f"at most {pool_tokens} tokens of prompt and output together, "
                                   "what the whole KV cache holds",
                                   "Lower max_tokens, shorten the prompt, or give the KV cache more memory")


def check_request(request: GenerationRequest, limits: ExecutorLimits, kv: KVCacheManager) -> None:
    """Raise UserError for a request no executor should see, RequestTooLargeError for one that can never fit."""
    tokens = request.prompt_token_ids
    if tokens.ndim != 1 or tokens.dtype != np.int32:
        raise UserError("prompt_token_ids", f"{tokens.dtype} of shape {tokens.shape}", "one row of int32")
    if len(tokens) == 0:
        raise UserError("prompt", [], "at least one token", "Give a prompt that is not empty")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        raise UserError("prompt_token_ids", low if low < 0 else high, f"token ids from 0 to {limits.vocab_size - 1}")
    if request.max_tokens < 1:
        raise UserError("max_tokens", request.max_tokens, "at least 1")
    if not 0 <= request.min_tokens <= request.max_tokens:
        raise UserError("min_tokens", request.min_tokens, f"from 0 to max_tokens ({request.max_tokens})")
    if any(not 0 <= token < limits.vocab_size for token in request.stop_token_ids):
        raise UserError("stop_token_ids", sorted(request.stop_token_ids),
                        f"token ids from 0 to {limits.vocab_size - 1}")
    _check_sampling(request.sampling, limits)
    check_fits(RequestSize.of(request), limits, kv)


def _check_sampling(sampling: RowSampling, limits: ExecutorLimits) -> None:
    """The bounds of the runtime's row state: a value beyond them would fail a step, and every request in it."""
    check_range("temperature", sampling.temperature, 0.0, 100.0)
    check_int("top_k", sampling.top_k, 0, INT32_MAX)
    check_range("top_p", sampling.top_p, 0.0, 1.0)
    check_range("min_p", sampling.min_p, 0.0, 1.0)
    check_int("seed", sampling.seed, 0, 2**64 - 1)
    check_int("choice", sampling.choice, 0, INT32_MAX)
    suppressed = sampling.suppressed_token_ids
    if len(suppressed) and not 0 <= suppressed.min() <= suppressed.max() < limits.vocab_size:
        raise UserError("suppressed_token_ids", suppressed.tolist(), f"token ids from 0 to {limits.vocab_size - 1}")
