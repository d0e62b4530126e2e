"""What a caller gets back: plain data, the same whether it was streamed or not."""

from __future__ import annotations

import dataclasses

from camshaft.core.errors import CamshaftError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """One token at one place of a sequence: how likely the model held it, before penalties and temperature."""

    logprob: float
    """Natural logarithm of its probability."""
    rank: int
    """Its place among all tokens by likelihood, from 1."""
    decoded_token: str | None = None
    """The bytes of this token alone as text, U+FFFD for part of a character; None where no text is made."""


@dataclasses.dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One generated sequence, so far or in full.

    ``token_ids`` are the tokens the model produced, up to and including the one that ended it; ``text``
    is what a reader sees of them. The ``*_diff`` fields hold what is new since the previous streamed
    output; joined over a stream they equal the full fields.
    """

    index: int
    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of ``token_ids``; None unless they, or ``best_of``, were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One entry a token of ``token_ids``, by token id: the token's own first, then the likeliest ones in order; None
    unless asked for."""
    finish_reason: str | None = None
    """"stop" (a stop id or string), "length" (max_tokens or max_seq_len), "cancelled", "error"; None while running."""
    stop_reason: int | str | None = None
    """The caller's stop id or stop string that matched; None for an end-of-sequence id."""
    text_diff: str = ""
    token_ids_diff: list[int] = dataclasses.field(default_factory=list)
    logprobs_diff: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its completions."""

    request_id: int
    prompt: str | None
    """The prompt as text; None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """``n`` of them. Where ``best_of`` is more, they are empty until the end, then the best ones, the best first."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry a prompt token scored so far, as in ``CompletionOutput.logprobs``; the first, which nothing precedes,
    is None. None unless asked for."""
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens served from shared KV pages, for the first of the sequences."""
    num_generated_tokens: int = 0
    """Tokens of all sequences, those that ``best_of`` did not choose included."""
    error: CamshaftError | None = None
    """Why this request failed while others went on; None otherwise."""
