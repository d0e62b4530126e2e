"""What a caller gets back: plain data, the same whether it was streamed or not."""

from __future__ import annotations

import dataclasses

from camshaft.core.errors import CamshaftError


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
    finish_reason: str | None = None
    """"stop" (a stop id or string), "length" (max_tokens or max_seq_len), "cancelled", "error"; None while running."""
    stop_reason: int | str | None = None
    """The caller's stop id or stop string that matched; None for an end-of-sequence id."""
    text_diff: str = ""
    token_ids_diff: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request and its completions."""

    request_id: int
    prompt: str | None
    """The prompt as text; None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens served from shared KV pages."""
    error: CamshaftError | None = None
    """Why this request failed while others went on; None otherwise."""
