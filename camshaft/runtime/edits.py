"""What a request asks to be done to its logits before a token is picked, and the doing.

Owns the state of rows that ask for anything (``RowEdits``) and the edits of many rows at once (``apply_edits``);
the order of effects is that of ``RowSampling``. Custom code is ``processors.py``; picking is ``sampler.py``.
Legend: E edited rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from camshaft.core.errors import InternalError, UserError
from camshaft.runtime.history import BadWords, RepeatedNgrams, SeenTokens
from camshaft.runtime.step import Float32Array, Int64Array, RowArrival, RowSampling

_PUBLIC_NAMES: tuple[tuple[str, Callable[[RowSampling], bool]], ...] = (
    ("logit_bias", lambda sampling: len(sampling.bias_token_ids) > 0),
    ("allowed_token_ids", lambda sampling: sampling.allowed_token_ids is not None),
    ("repetition_penalty", lambda sampling: sampling.repetition_penalty != 1.0),
    ("presence_penalty", lambda sampling: sampling.presence_penalty != 0.0),
    ("frequency_penalty", lambda sampling: sampling.frequency_penalty != 0.0),
    ("bad", lambda sampling: len(sampling.bad_words) > 0),
    ("no_repeat_ngram_size", lambda sampling: sampling.no_repeat_ngram_size > 0),
    ("min_tokens", lambda sampling: sampling.min_tokens > 0 and len(sampling.suppressed_token_ids) > 0),
    ("logits_processor", lambda sampling: len(sampling.processors) > 0),
)
"""Whether a sampling asks for an edit, by the name its caller knows it by, in order of effect."""


def edits_asked(sampling: RowSampling) -> tuple[str, ...]:
    """Names of the edits that ``sampling`` asks for; none for most requests."""
    return tuple(name for name, asked in _PUBLIC_NAMES if asked(sampling))


class RowEdits:
    """One row's edits and the history they depend on. Raises InternalError for ids outside the vocabulary."""

    def __init__(self, arrival: RowArrival, vocab_size: int) -> None:
        sampling = arrival.sampling
        _check_ids(arrival, vocab_size)
        self.sampling = sampling
        self.tokens: list[int] = arrival.history.tolist()
        """Prompt and output, where ``sampling.needs_history``."""
        self._num_prompt_tokens = arrival.num_prompt_tokens
        self._bias = (sampling.bias_token_ids.astype(np.int64), sampling.bias_values.astype(np.float32))
        self._allowed = None if sampling.allowed_token_ids is None else sampling.allowed_token_ids.astype(np.int64)
        self._seen: SeenTokens | None = None
        if sampling.repetition_penalty != 1.0:
            self._seen = SeenTokens(arrival.history, arrival.num_prompt_tokens)
        elif sampling.presence_penalty or sampling.frequency_penalty:
            self._seen = SeenTokens(arrival.history[arrival.num_prompt_tokens:], 0)
        size = sampling.no_repeat_ngram_size
        self._ngrams = RepeatedNgrams(size, self.tokens) if size else None
        self._bad_words = BadWords(sampling.bad_words) if sampling.bad_words else None
        self._only_suppresses = edits_asked(sampling) == ("min_tokens",)

    def is_over(self, output_index: int) -> bool:
        """Whether there is nothing to edit any more from this output token on."""
        return self._only_suppresses and output_index >= self.sampling.min_tokens

    def check_index(self, output_index: int) -> None:
        """Raise InternalError unless the history ends just before output token ``output_index``."""
        if self.sampling.needs_history and len(self.tokens) - self._num_prompt_tokens != output_index:
            raise InternalError(f"output token {output_index} of a row whose history holds "
                                f"{len(self.tokens) - self._num_prompt_tokens}")

    def append(self, token: int) -> None:
        """Take the token that was picked into the history."""
        if not self.sampling.needs_history:
            return
        self.tokens.append(token)
        if self._seen is not None:
            self._seen.append(token)
        if self._ngrams is not None:
            self._ngrams.append(self.tokens)

    def bias(self) -> tuple[Int64Array, Float32Array]:
        """Ids, and what to add to their logits."""
        return self._bias

    def allowed(self) -> Int64Array | None:
        """The only ids that may be picked; None: all."""
        return self._allowed

    def penalties(self) -> tuple[Int64Array, Float32Array] | None:
        """Ids under repetition, presence or frequency penalties, and what to take off; None: none are."""
        if self._seen is None:
            return None
        sampling = self.sampling
        return self._seen.ids, self._seen.charges(sampling.presence_penalty, sampling.frequency_penalty)

    def banned(self, output_index: int) -> Int64Array:
        """Ids that may not be picked as output token ``output_index``; some may come twice."""
        banned: list[int] = []
        if self._bad_words is not None:
            banned += self._bad_words.banned(self.tokens)
        if self._ngrams is not None:
            banned += self._ngrams.banned(self.tokens)
        found = np.array(banned, np.int64)
        if output_index < self.sampling.min_tokens and len(self.sampling.suppressed_token_ids):
            found = np.concatenate([found, self.sampling.suppressed_token_ids.astype(np.int64)])
        return found

    def exhausted(self, output_index: int) -> UserError:
        """The error of a request whose edits leave no token to pick."""
        names = edits_asked(self.sampling)
        return UserError(" and ".join(names), f"no finite logit at output token {output_index}",
                         "settings that leave at least one token to pick",
                         "Loosen one of them" if len(names) > 1 else "Loosen it")


def _check_ids(arrival: RowArrival, vocab_size: int) -> None:
    """A wrong id would edit another row's logits."""
    sampling = arrival.sampling
    allowed = () if sampling.allowed_token_ids is None else (sampling.allowed_token_ids,)
    for ids in (arrival.history, sampling.bias_token_ids, sampling.suppressed_token_ids, *allowed,
                *sampling.bad_words):
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise InternalError(f"step plan refused: needs token ids from 0 to {vocab_size - 1} in a row's sampling")
    if len(sampling.bias_token_ids) != len(sampling.bias_values):
        raise InternalError("step plan refused: needs a bias value for every biased token")
    if not all(len(word) for word in sampling.bad_words):
        raise InternalError("step plan refused: needs bad words of at least one token")
    if sampling.needs_history and not 0 < arrival.num_prompt_tokens <= len(arrival.history):
        raise InternalError("step plan refused: needs the history of a row whose sampling depends on it")


def apply_edits(logits_EV: torch.Tensor, edits: Sequence[RowEdits], output_indices: Sequence[int]) -> None:
    """Edit float32 logits in place, row by row what ``edits`` ask for, processors aside. Rows do not mix."""
    flat, width, device = logits_EV.view(-1), logits_EV.shape[1], logits_EV.device

    def places(ids: Iterable[tuple[int, Int64Array]]) -> torch.Tensor:
        found = [row * width + of_row for row, of_row in ids]
        return torch.from_numpy(np.concatenate(found) if found else np.zeros(0, np.int64)).to(device)

    def values(parts: Sequence[Float32Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    biased = [(row, *edit.bias()) for row, edit in enumerate(edits) if len(edit.bias()[0])]
    if biased:
        flat.index_add_(0, places((row, ids) for row, ids, _ in biased), values([bias for _, _, bias in biased]))
    allowed = [(row, ids) for row, edit in enumerate(edits) if (ids := edit.allowed()) is not None]
    if allowed:
        index = places(allowed)
        kept = flat[index]
        logits_EV[torch.tensor([row for row, _ in allowed], device=device)] = -torch.inf
        flat[index] = kept
    penalised = [(row, edit, *found) for row, edit in enumerate(edits) if (found := edit.penalties()) is not None]
    if penalised:
        index = places((row, ids) for row, _, ids, _ in penalised)
        factor = values([np.full(len(ids), edit.sampling.repetition_penalty, np.float32)
                         for _, edit, ids, _ in penalised])
        logits = flat[index]
        scaled = torch.where(logits > 0, logits / factor, logits * factor)
        flat[index] = scaled - values([charges for *_, charges in penalised])
    flat[places((row, edit.banned(index))
                for row, (edit, index) in enumerate(zip(edits, output_indices, strict=True)))] = -torch.inf
