"""Increments from landed tokens. Owns their making, cheaply for the many rows that just go on."""

from __future__ import annotations

from types import MappingProxyType

from camshaft.core.errors import NonFiniteLogitsError
from camshaft.core.ids import RequestId
from camshaft.executor.decoder.stop import LENGTH, STOP
from camshaft.executor.messages import Increment, TokenLogprob
from camshaft.runtime.step import StepLogprobs

_REASONS = MappingProxyType({STOP: "stop", LENGTH: "length"})


def cancelled(request_id: RequestId) -> Increment:
    """The last word to a request that was aborted or shut down."""
    return Increment(id=request_id, finish_reason="cancelled")


def failed(request_id: RequestId, error: Exception) -> Increment:
    """The last word to a request that ended with an error."""
    return Increment(id=request_id, error=error)


def non_finite(request_id: RequestId, output_index: int) -> Increment:
    """The last word to a request whose logits were not finite."""
    return failed(request_id, NonFiniteLogitsError(
        f"the model gave NaN or infinite logits for output token {output_index}; this request alone ends. "
        "A wider dtype (bfloat16 or float32) helps where the model overflows"))


def landed(request_id: RequestId, token_id: int, verdict: int, *, num_cached_tokens: int | None,
           logprobs: tuple[TokenLogprob, ...], prompt_logprobs: tuple[TokenLogprob, ...]) -> Increment:
    """A request's newest token with its verdict; ``num_cached_tokens`` on the first increment only."""
    return Increment(id=request_id, token_ids=(token_id,), finish_reason=_REASONS.get(verdict),
                     stop_token_id=token_id if verdict == STOP else None, num_cached_tokens=num_cached_tokens,
                     logprobs=logprobs, prompt_logprobs=prompt_logprobs)


def scored(request_id: RequestId, prompt_logprobs: tuple[TokenLogprob, ...], verdict: int, *,
           num_cached_tokens: int | None) -> Increment:
    """Scores of a chunk that gave no token."""
    return Increment(id=request_id, finish_reason=_REASONS.get(verdict), num_cached_tokens=num_cached_tokens,
                     prompt_logprobs=prompt_logprobs)


def token_logprob(found: StepLogprobs, place: int, token_id: int, num_top: int) -> TokenLogprob:
    """Entry ``place`` of ``found``, which is ``token_id``'s, with the ``num_top`` likeliest beside it."""
    return TokenLogprob(token_id=token_id, logprob=float(found.logprobs[place]), rank=int(found.ranks[place]),
                        top_ids=tuple(found.top_ids[place, :num_top].tolist()),
                        top_logprobs=tuple(found.top_logprobs[place, :num_top].tolist()))


def plain_increments(request_ids: list[RequestId], token_ids: list[int]) -> list[Increment]:
    """One-token increments of requests that go on."""
    return [Increment(request_id, (token_id,)) for request_id, token_id in zip(request_ids, token_ids, strict=True)]
