"""What a request's tokens so far forbid or make costlier next: counts, n-grams, bad words.

Owns that state, kept up one token at a time: nothing here is recounted a step. Knows no logits (``edits.py``).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from camshaft.runtime.step import Float32Array, Int32Array, Int64Array


class SeenTokens:
    """The distinct tokens of prompt and output, and how often each is in the output.

    Of the prompt only those in ``history[:num_prompt_tokens]``; leave them out where only the output counts.
    """

    def __init__(self, history: Int32Array, num_prompt_tokens: int) -> None:
        ids, first_counts = np.unique(history, return_counts=True)
        in_prompt, prompt_counts = np.unique(history[:num_prompt_tokens], return_counts=True)
        first_counts[np.searchsorted(ids, in_prompt)] -= prompt_counts
        self._size = len(ids)
        self._ids = np.zeros(max(16, 2 * len(ids)), np.int64)
        self._counts = np.zeros(len(self._ids), np.int64)
        self._ids[:len(ids)], self._counts[:len(ids)] = ids, first_counts
        self._place_of = dict(zip(ids.tolist(), range(len(ids)), strict=True))

    def append(self, token: int) -> None:
        """One more output token."""
        place = self._place_of.setdefault(token, self._size)
        if place == self._size:
            if place == len(self._ids):
                self._ids, self._counts = _doubled(self._ids), _doubled(self._counts)
            self._ids[place], self._size = token, place + 1
        self._counts[place] += 1

    @property
    def ids(self) -> Int64Array:
        """The distinct tokens, in no order that means anything."""
        return self._ids[:self._size]

    def charges(self, presence: float, frequency: float) -> Float32Array:
        """What to take off the logit of each of ``ids``: ``presence`` once and ``frequency`` an output occurrence."""
        counts = self._counts[:self._size]
        return (presence * (counts > 0) + frequency * counts).astype(np.float32)


class RepeatedNgrams:
    """For the last ``size - 1`` tokens, those that have followed them before."""

    def __init__(self, size: int, history: list[int]) -> None:
        self._before = size - 1
        self._followers: dict[tuple[int, ...], list[int]] = {}
        for end in range(self._before, len(history)):
            self._followers.setdefault(tuple(history[end - self._before:end]), []).append(history[end])

    def append(self, history: list[int]) -> None:
        """``history`` has grown by its last token."""
        end = len(history) - 1
        if end >= self._before:
            self._followers.setdefault(tuple(history[end - self._before:end]), []).append(history[end])

    def banned(self, history: list[int]) -> list[int]:
        """Tokens that would complete an n-gram ``history`` holds."""
        if len(history) < self._before:
            return []
        return self._followers.get(tuple(history[len(history) - self._before:]), [])


class BadWords:
    """Token sequences that must never be completed; found by the token before their last."""

    def __init__(self, words: tuple[Int32Array, ...]) -> None:
        self._alone: list[int] = []
        self._by_last_seen: dict[int, list[tuple[list[int], int]]] = {}
        for word in words:
            *beginning, last = word.tolist()
            if beginning:
                self._by_last_seen.setdefault(beginning[-1], []).append((beginning, last))
            else:
                self._alone.append(last)

    def banned(self, history: list[int]) -> list[int]:
        """Tokens that would complete a word after ``history``."""
        begun = self._by_last_seen.get(history[-1], ()) if history else ()
        return self._alone + [last for beginning, last in begun if history[-len(beginning):] == beginning]


def _doubled(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([array, np.zeros_like(array)])
