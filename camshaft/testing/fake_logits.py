"""What the fake engine's model says: tokens and log-probabilities that follow from a sequence's hash alone.

Owns the hash of a sequence and all that is derived from it, so that what a request is told can be compared with
what it would be told alone. Needs numpy only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from camshaft.executor.messages import TokenLogprob
from camshaft.runtime.step import BoolArray, Int32Array, RowSampling, StepLogprobs

UInt64Array = npt.NDArray[np.uint64]
_BASE = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def mixed(value: int) -> int:
    """Finaliser of splitmix64: spreads every input bit over the word."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def powers(count: int) -> UInt64Array:
    """[count] ``_BASE ** (i + 1)`` modulo 2**64: what the token at position i is multiplied by."""
    return np.cumprod(np.full(count, _BASE, dtype=np.uint64), dtype=np.uint64)


def prefix_hashes(token_ids: npt.NDArray[np.integer]) -> UInt64Array:
    """[N] hash of the sequence up to each token."""
    return np.cumsum((token_ids.astype(np.uint64) + np.uint64(1)) * powers(len(token_ids)), dtype=np.uint64)


def picked_token(prefix: int, index: int, sampling: RowSampling, vocab_size: int, num_prompt_tokens: int) -> int:
    """The token after a history with hash ``prefix``.

    Greedy depends on it alone, sampling on the seed too, and what needs the history on where the prompt ended.
    """
    key = prefix
    if sampling.temperature > 0:
        key ^= mixed((mixed(sampling.seed) + sampling.choice * _BASE + mixed(index + 1)) & _WORD)
    if sampling.needs_history:
        key ^= mixed(num_prompt_tokens + 1)
    token = mixed(key) % vocab_size
    if index < sampling.min_tokens:
        suppressed = set(sampling.suppressed_token_ids.tolist())
        while token in suppressed and len(suppressed) < vocab_size:
            token = (token + 1) % vocab_size
    return token


def expected_tokens(prompt: Int32Array, count: int, *, sampling: RowSampling, vocab_size: int) -> list[int]:
    """The first ``count`` tokens that ``prompt`` yields when it runs alone."""
    factors = powers(len(prompt) + count)
    prefix = int(prefix_hashes(prompt)[-1])
    tokens: list[int] = []
    for index in range(count):
        tokens.append(picked_token(prefix, index, sampling, vocab_size, len(prompt)))
        prefix = (prefix + (tokens[-1] + 1) * int(factors[len(prompt) + index])) % 2**64
    return tokens


def step_logprobs(prefixes: list[int], token_ids: list[int], finite: BoolArray, num_top: int,
                  vocab_size: int) -> StepLogprobs:
    """Log-probabilities of ``token_ids`` [M], each after the sequence with the hash beside it."""
    first = np.array([mixed(prefix ^ 1) % vocab_size for prefix in prefixes], np.int64).reshape(-1, 1)
    lift = np.array([mixed(prefix ^ 2) % 1000 / 1000 for prefix in prefixes], np.float64).reshape(-1, 1)
    places = np.arange(min(num_top, vocab_size))
    ranks = (np.array(token_ids, np.int64).reshape(-1, 1) - first) % vocab_size + 1
    return StepLogprobs(logprobs=(-ranks - lift).astype(np.float32)[:, 0], ranks=ranks.astype(np.int32)[:, 0],
                        top_ids=((first + places) % vocab_size).astype(np.int32),
                        top_logprobs=(-(places + 1) - lift).astype(np.float32), finite=finite)


def expected_logprobs(token_ids: Int32Array, start: int, num_top: int, vocab_size: int) -> list[TokenLogprob]:
    """Of the tokens from ``start`` (at least 1) on, as a request that asked for ``num_top`` is told them."""
    found = step_logprobs(prefix_hashes(token_ids)[start - 1:-1].tolist(), token_ids[start:].tolist(),
                          np.ones(len(token_ids) - start, np.bool_), num_top, vocab_size)
    return [TokenLogprob(token_id=int(token_ids[start + at]), logprob=float(found.logprobs[at]),
                         rank=int(found.ranks[at]), top_ids=tuple(found.top_ids[at].tolist()),
                         top_logprobs=tuple(found.top_logprobs[at].tolist()))
            for at in range(len(token_ids) - start)]
