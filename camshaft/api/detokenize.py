"""Text of a request as its tokens arrive: whole characters only, and nothing past a stop string.

Owns the held-back bytes and the held-back start of a possible stop string. Joined together, what it gives
out is always the decoded text of the tokens that count, cut at the stop. Ends on token ids and on length
are the executor's.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterable, Sequence

from camshaft.api.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one call added to the text."""

    text: str = ""
    stopped: str | None = None
    """The stop string that was completed; no later token counts."""
    num_tokens_kept: int = 0
    """How many of the tokens just pushed count: all of them, or those up to the one that completed the stop."""


class _StopMatcher:
    """Finds the stop string that is completed first (the longest of several), character by character.

    A state is a prefix of some stop string: the longest one the text so far ends with. An Aho-Corasick
    automaton: each character is looked at once, however many stop strings there are.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()
        self.state = 0

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
                self._fail.append(0)
            state = self._next[state][char]
        self._match[state] = stop

    def _link(self) -> None:
        """Breadth first: a state's longest proper suffix that is itself a state, and the match found on the way."""
        waiting = list(self._next[0].values())
        for state in waiting:
            for char, child in self._next[state].items():
                self._fail[child] = self._step(self._fail[state], char)
                waiting.append(child)
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def feed(self, char: str) -> str | None:
        """Take one character; the stop string it completes, if any."""
        self.state = self._step(self.state, char)
        return self._match[self.state]

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text may still grow into a stop string."""
        state = self.state
        while state and not self._next[state]:
            state = self._fail[state]
        return self._depth[state]


class IncrementalDetokenizer:
    """The text of one request. Not to be shared between threads.

    A stop string ends the text when the token that completes it is at least the ``min_tokens``-th of the
    output, tokens that are skipped included. It is cut off, or kept whole with ``include_stop``.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, stop: Sequence[str] = (),
                 include_stop: bool = False, min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._started = False
        self._held = ""
        self._stopped: str | None = None

    def push(self, token_ids: Iterable[int]) -> Delta:
        """Take tokens; the text that is certain now. After a stop every further token is discarded."""
        parts: list[str] = []
        num_kept = 0
        for token_id in token_ids:
            if self._stopped is not None:
                break
            num_kept += 1
            self._num_tokens += 1
            text = self._decoder.decode(self._bytes_of(token_id))
            if text:
                parts.append(self._release(text))
        return Delta(text="".join(parts), stopped=self._stopped, num_tokens_kept=num_kept)

    def finish(self) -> Delta:
        """End of the output: what was held back, an unfinished character as U+FFFD."""
        if self._stopped is not None:
            return Delta(stopped=self._stopped)
        text = self._release(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return Delta(text=text, stopped=self._stopped)

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        piece = self._tokenizer.token_bytes(token_id)
        if not self._started and piece:
            self._started = True
            return self._tokenizer.first_bytes(token_id)
        return piece

    def _release(self, text: str) -> str:
        """Add ``text`` to what is held and give out all that cannot become part of a stop string."""
        matcher = self._matcher
        if matcher is None:
            return text
        for index, char in enumerate(text):
            stop = matcher.feed(char)
            if stop is not None and self._num_tokens >= self._min_tokens:
                whole = self._held + text[:index + 1]
                self._held, self._stopped = "", stop
                return whole if self._include_stop else whole[:len(whole) - len(stop)]
        whole = self._held + text
        cut = len(whole) - matcher.num_held
        self._held = whole[cut:]
        return whole[:cut]
