"""A request in flight as the front sees it: its sequences, what was said of each, and the result they make.

Owns the way from increments to text, log-probabilities and the choice among ``best_of``. Used by the
front's thread alone; knows neither queues nor aborts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from camshaft.api.detokenize import IncrementalDetokenizer
from camshaft.api.outputs import CompletionOutput, Logprob, RequestOutput
from camshaft.api.resolve import PreparedRequest
from camshaft.api.result import GenerationResult
from camshaft.api.tokenizer import Tokenizer
from camshaft.core.errors import CamshaftError, InternalError
from camshaft.core.ids import RequestId
from camshaft.executor.messages import Increment, TokenLogprob


class LiveRequest:
    """Applies increments to ``result``, which ``abort`` cuts short; ``check_may_wait`` goes before every wait for it.

    ``request_ids`` are those of its sequences, in order of choice; the request goes by the first.
    """

    def __init__(self, prepared: PreparedRequest, request_ids: Sequence[RequestId], tokenizer: Tokenizer | None,
                 abort: Callable[[], None], check_may_wait: Callable[[], None]) -> None:
        params = prepared.params
        self._num_returned = params.n
        self._texts = _TokenTexts(tokenizer if params.detokenize else None)
        self._sequences = {request_id: _Sequence(index, prepared, tokenizer)
                           for index, request_id in enumerate(request_ids)}
        self._running = dict.fromkeys(request_ids)
        self._ranked = len(request_ids) > params.n
        completions = [sequence.completion for sequence in self._sequences.values()]
        if self._ranked:
            completions = [CompletionOutput(index=index) for index in range(params.n)]
        self.result = GenerationResult(RequestOutput(
            request_id=request_ids[0], prompt=prepared.prompt, prompt_token_ids=prepared.token_ids,
            outputs=completions, prompt_logprobs=None if params.prompt_logprobs is None else [None]), abort,
            check_may_wait)

    def take(self, increment: Increment) -> list[RequestId]:
        """Apply news of one sequence; the ids of those that are over with it: it, all when it failed, or none."""
        if increment.error is not None:
            return self.fail(_as_camshaft_error(increment.error))
        sequence = self._sequences[increment.id]
        news = sequence.read(increment, self._texts)
        ended = news.finish_reason is not None
        if ended:
            del self._running[increment.id]

        def change(output: RequestOutput) -> None:
            sequence.extend(news)
            output.num_generated_tokens += len(news.token_ids)
            if increment.prompt_logprobs and output.prompt_logprobs is not None:
                output.prompt_logprobs.extend([self._texts.entry(found) for found in increment.prompt_logprobs])
            if increment.num_cached_tokens is not None and sequence.index == 0:
                output.num_cached_tokens = increment.num_cached_tokens
            if not self._running:
                output.outputs = self._chosen()
                output.finished = True

        self.result.update(change, quiet=self._ranked and bool(self._running))
        return [increment.id] if ended else []

    def fail(self, error: CamshaftError) -> list[RequestId]:
        """End the whole request with ``error``; the ids of the sequences that ran."""
        left = list(self._running)
        self._running.clear()
        self.result.fail(error)
        return left

    def _chosen(self) -> list[CompletionOutput]:
        completions = [sequence.completion for sequence in self._sequences.values()]
        if not self._ranked:
            return completions
        best = sorted(completions, key=lambda each: -(each.cumulative_logprob or 0.0))[:self._num_returned]
        for index, completion in enumerate(best):
            completion.index = index
        return best


class _News(NamedTuple):
    """What one increment adds to a sequence, cut at a stop."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[dict[int, Logprob]]
    finish_reason: str | None
    stop_reason: int | str | None


class _Sequence:
    """One of a request's sequences: its text so far and where it stops."""

    def __init__(self, index: int, prepared: PreparedRequest, tokenizer: Tokenizer | None) -> None:
        params = prepared.params
        scored = prepared.sampling.num_logprobs is not None
        self.index = index
        self.completion = CompletionOutput(index=index, cumulative_logprob=0.0 if scored else None,
                                           logprobs=None if params.logprobs is None else [])
        self._scored = scored
        self._reported_stops = frozenset(params.stop_token_ids or ())
        self._silent_stops = prepared.silent_stop_ids
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens, stop=tuple(params.stop or ()),
                include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens)

    def read(self, increment: Increment, texts: _TokenTexts) -> _News:
        """The news in ``increment``. Tokens and log-probabilities are cut in this one place."""
        token_ids, reason, found = increment.token_ids, increment.finish_reason, increment.logprobs
        if self._scored and len(found) != len(token_ids):
            raise InternalError(f"{len(found)} log-probabilities came with {len(token_ids)} tokens")
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
        entries = [texts.entry(each) for each in found[:len(token_ids)]] if self._scored else ()
        return _News(text, token_ids, entries, reason, stop_reason)

    def extend(self, news: _News) -> None:
        """Add ``news`` to the completion."""
        completion = self.completion
        completion.token_ids.extend(news.token_ids)
        completion.text += news.text
        completion.finish_reason, completion.stop_reason = news.finish_reason, news.stop_reason
        if completion.cumulative_logprob is None:
            return
        completion.cumulative_logprob += sum(entry[token].logprob for token, entry
                                             in zip(news.token_ids, news.logprobs, strict=True))
        if completion.logprobs is not None:
            completion.logprobs.extend(news.logprobs)


class _TokenTexts:
    """Log-probabilities with the texts of their tokens."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def entry(self, found: TokenLogprob) -> dict[int, Logprob]:
        """The token's own log-probability, then the likeliest ones in order."""
        entry = {found.token_id: self._logprob(found.token_id, found.logprob, found.rank)}
        for place, (token, logprob) in enumerate(zip(found.top_ids, found.top_logprobs, strict=True)):
            if token not in entry:
                entry[token] = self._logprob(token, logprob, place + 1)
        return entry

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)


def _as_camshaft_error(error: Exception) -> CamshaftError:
    if isinstance(error, CamshaftError):
        return error
    wrapped = InternalError(f"the engine failed while this request ran: {error!r}")
    wrapped.__cause__ = error
    return wrapped
