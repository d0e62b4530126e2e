"""What goes into an executor and what comes out of it, as plain data.

Owns the messages; the front (api/) makes requests and consumes increments, the executor does the reverse.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from camshaft.core.ids import RequestId
from camshaft.runtime.step import RowSampling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixScope:
    """Who may share cached pages: equal scopes only. Typed fields, never a joined string."""

    model: str
    """Identity of the weights (an engine hash)."""
    adapter: int = 0
    """Load-uid of the adapter; 0 is the base model."""
    salt: str = ""
    """The caller's cache salt."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One sequence to generate, validated and resolved by the front."""

    id: RequestId
    prompt_token_ids: npt.NDArray[np.int32]
    """At least one token, each below the vocabulary size."""
    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]
    """Every id that ends the request with reason "stop": end-of-sequence ids (unless ignored) and the caller's."""
    sampling: RowSampling
    scope: PrefixScope
    reuse: bool = True
    """Whether the request may read and leave shared pages. With prompt log-probabilities it leaves them only: every
    prompt token is computed, as its logits are wanted."""
    priority: int = 0
    """Larger goes first, where the queue policy looks at it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token, beside the likeliest ones at its place."""

    token_id: int
    logprob: float
    rank: int
    """From 1."""
    top_ids: tuple[int, ...]
    """As many as were asked for, likeliest first."""
    top_logprobs: tuple[float, ...]


class Increment(NamedTuple):
    """News of one request. The last one of a request has ``finish_reason`` or ``error`` set, and nothing follows it.

    A tuple, since every running request gets one every step: a frozen dataclass takes four times as long to make.
    """

    id: RequestId
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    """"stop", "length" or "cancelled"."""
    stop_token_id: int | None = None
    """The id that ended it, when ``finish_reason`` is "stop"; it is the last of ``token_ids``."""
    error: Exception | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens served from shared pages; set once, on the first increment."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One a token of ``token_ids`` when the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt tokens scored since the last increment, in order; the first prompt token has none."""
