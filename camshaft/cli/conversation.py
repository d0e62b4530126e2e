"""A conversation with a model: what was said, what of it still fits, and the commands that change it.

Owns turns, ``/`` commands, overflow of the context and stopping an answer. Knows no terminal: what is to be seen goes
to a ``Screen``; ``chat.py`` has the real one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from camshaft.cli.settings import assign, parse_assignments
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import CamshaftError, RequestTooLargeError, UserError
from camshaft.core.registry import Registry

if TYPE_CHECKING:
    from camshaft.api.outputs import RequestOutput
    from camshaft.api.result import GenerationResult

_ROOM_AFTER_DROPPING = 0.75
"""Share of the context that the history may take once turns had to go, so that not every further turn drops one:
the cached prefix ends where the history's beginning changes."""


class Screen(Protocol):
    """Where a conversation is seen."""

    def answer(self, text: str) -> None:
        """Show the next piece of an answer; the empty text ends it."""
        ...

    def note(self, text: str) -> None:
        """Say something about the conversation, apart from it."""
        ...

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Show pairs, one a line."""
        ...


class Model(Protocol):
    """What a conversation needs of an ``LLM``."""

    @property
    def description(self) -> dict[str, Any]:
        """The resolved configuration."""
        ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        ...

    def generate_async(self, inputs: Sequence[int], sampling_params: SamplingParams) -> GenerationResult:
        """Start one request."""
        ...

    def get_stats(self) -> dict[str, Any]:
        """Counters."""
        ...


@dataclasses.dataclass(slots=True)
class Turn:
    """One question and its answer, as far as it came."""

    question: str
    answer: str = ""


@dataclasses.dataclass(slots=True)
class Conversation:
    """What was said. ``handle`` takes a line at a time."""

    model: Model
    screen: Screen
    settings: dict[str, Any]
    """Fields of SamplingParams."""
    system: str | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    num_forgotten: int = 0
    """Turns from the first that no longer go to the model, since the context has no room for them."""
    num_failed: int = 0
    """Lines that could not be done."""

    def handle(self, line: str) -> bool:
        """Do what a line says: a command, or something to answer. False when the conversation is over.

        ``//`` at the start stands for a message that begins with a slash. A mistake becomes a note.
        """
        text = line.strip()
        try:
            if text.startswith("/") and not text.startswith("//"):
                name, _, rest = text.partition(" ")
                return COMMANDS.get(name).run(self, rest.strip())
            if text:
                self.say(text.removeprefix("/") if text.startswith("//") else text)
        except CamshaftError as error:
            self.num_failed += 1
            self.screen.note(str(error))
        return True

    def say(self, question: str) -> None:
        """Ask, and stream the answer. Ctrl-C ends the answer and keeps what there is of it."""
        self.turns.append(Turn(question))
        try:
            self._answer(self.turns[-1])
        finally:
            if not self.turns[-1].answer:
                self.turns.pop()
                self.num_forgotten = min(self.num_forgotten, len(self.turns))

    def _answer(self, turn: Turn) -> None:
        asked, first, output, num_first = time.perf_counter(), None, None, 0
        with contextlib.closing(self._start()) as stream:
            try:
                for output in stream:
                    if first is None:
                        first, num_first = time.perf_counter(), len(output.outputs[0].token_ids)
                    turn.answer += output.outputs[0].text_diff
                    self.screen.answer(output.outputs[0].text_diff)
            except KeyboardInterrupt:
                self.screen.answer("")
                self.screen.note("Stopped.")
                raise
        self.screen.answer("")
        if output is not None and first is not None:
            self.screen.note(_rates(output, first - asked, time.perf_counter() - first, num_first))
            if not turn.answer:
                self.screen.note("The model said nothing, so the question is not kept.")

    def _start(self) -> Generator[RequestOutput, None, None]:
        """The stream of an answer to the last turn, after leaving out as many of the oldest as it takes."""
        params = SamplingParams(**self.settings)
        before = self.num_forgotten
        try:
            result = self._submit(params, before)
        except BaseException:
            self.num_forgotten = before
            raise
        if self.num_forgotten > before:
            self.screen.note(f"The context is full: the oldest {self.num_forgotten} of {len(self.turns) - 1} turns "
                             "are left out from here on (/clear begins anew).")
        yield from result

    def _submit(self, params: SamplingParams, before: int) -> GenerationResult:
        while True:
            ids = self.model.apply_chat_template(self.messages())
            if self._fits(len(ids), params, dropping=self.num_forgotten > before):
                try:
                    return self.model.generate_async(ids, params)
                except RequestTooLargeError:
                    if self.num_forgotten + 1 >= len(self.turns):
                        raise
            self.num_forgotten += 1

    def _fits(self, num_tokens: int, params: SamplingParams, *, dropping: bool) -> bool:
        """Whether a prompt leaves room for an answer; the last question alone always goes to the engine to judge."""
        longest = int(self.model.description["build"]["max_seq_len"])
        room = longest - min(params.max_tokens, longest // 4)
        return self.num_forgotten + 1 >= len(self.turns) or num_tokens <= room * (
            _ROOM_AFTER_DROPPING if dropping else 1)

    def messages(self) -> list[dict[str, str]]:
        """What goes to the model: the system text, and the turns that are not forgotten."""
        return self._messages(self.turns[self.num_forgotten:])

    def _messages(self, turns: list[Turn]) -> list[dict[str, str]]:
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in turns:
            found.append({"role": "user", "content": turn.question})
            if turn.answer:
                found.append({"role": "assistant", "content": turn.answer})
        return found

    def save(self, path: Path) -> int:
        """Write every message to a JSON file; returns how many."""
        messages = self._messages(self.turns)
        path.write_text(json.dumps(messages, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return len(messages)

    def load(self, path: Path) -> int:
        """Replace the conversation by the messages of a JSON file; returns how many. UserError for another shape."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError("/load", str(path), f"a JSON file ({error})", "Give a file that /save wrote") from error
        json.dumps(data, ensure_ascii=False).encode("utf-8")  # half a surrogate pair could be neither said nor saved
        self.system, self.turns = _conversation(path, data)
        self.num_forgotten = 0
        return len(data)


def _conversation(path: Path, data: Any) -> tuple[str | None, list[Turn]]:
    """System text and turns of a list of messages."""
    wanted = "a list of messages: perhaps one of role system, then user and assistant by turns"
    shapes = [(message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
              for message in (data if isinstance(data, list) else [None])]
    if not all(isinstance(content, str) for _, content in shapes):
        raise UserError("/load", str(path), wanted, "Give a file that /save wrote")
    system = str(shapes.pop(0)[1]) if shapes and shapes[0][0] == "system" else None
    roles = [role for role, _ in shapes]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise UserError("/load", str(path), wanted, "Give a file that /save wrote")
    texts = [str(content) for _, content in shapes]
    return system, [Turn(question, answer) for question, answer in zip(texts[::2], texts[1::2], strict=True)]


def _rates(output: RequestOutput, wait_s: float, stream_s: float, num_first: int) -> str:
    """A line on an answer whose first ``num_first`` tokens came after ``wait_s``, the others in ``stream_s``."""
    completion = output.outputs[0]
    num_new = len(completion.token_ids)
    rate = f"{(num_new - num_first) / stream_s:.1f} tokens/s, " if num_new > num_first and stream_s > 0 else ""
    return (f"[{len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them cached · first after "
            f"{wait_s:.2f} s · {num_new} new, {rate}{completion.finish_reason}]")


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A ``/`` command; ``run`` returns False when the conversation is over."""

    usage: str
    doc: str
    run: Callable[[Conversation, str], bool]


_Act = Callable[["Conversation", str], object]
COMMANDS: Registry[Command] = Registry("command")


def _command(usage: str, doc: str) -> Callable[[_Act], _Act]:
    """Register a command under the first word of its usage."""
    name, _, argument = usage.partition(" ")

    def decorate(act: _Act) -> _Act:
        def run(chat: Conversation, text: str) -> bool:
            if text and not argument:
                raise UserError(name, text, "nothing after it")
            if not text and argument and not argument.startswith("["):
                raise UserError(name, "", argument, f"Say {usage}")
            try:
                return act(chat, text) is not False
            except OSError as error:
                raise UserError(name, text, f"a file that can be used ({error.strerror})", "Check the path") from error
            except UnicodeError as error:
                raise UserError(name, text, f"text that UTF-8 can hold ({error})") from error

        COMMANDS.add(name, Command(usage, doc, run))
        return act

    return decorate


@_command("/help", "This list.")
def _help(chat: Conversation, text: str) -> None:
    chat.screen.table([(command.usage, command.doc) for command in COMMANDS]
                      + [("//TEXT", "Say /TEXT to the model."), ('"""', "Begins and ends a message of several lines.")])


@_command("/clear", "Forget every turn; system text and settings stay.")
def _clear(chat: Conversation, text: str) -> None:
    chat.turns, chat.num_forgotten = [], 0
    chat.screen.note("A new conversation.")


@_command("/system [TEXT]", "Set the system text; without TEXT take it away.")
def _system(chat: Conversation, text: str) -> None:
    chat.system = text or None
    chat.screen.note("System text set." if text else "No system text.")


@_command("/undo", "Take back the last question and its answer.")
def _undo(chat: Conversation, text: str) -> None:
    turn = _last_turn(chat, "/undo")
    chat.screen.note(f"Taken back: {_shortened(turn.question)}")


@_command("/retry", "Answer the last question again.")
def _retry(chat: Conversation, text: str) -> None:
    turn = _last_turn(chat, "/retry")
    num_before = len(chat.turns)
    try:
        chat.say(turn.question)
    finally:
        if len(chat.turns) == num_before:
            chat.turns.append(turn)


def _last_turn(chat: Conversation, name: str) -> Turn:
    """Take the last turn out of the conversation."""
    if not chat.turns:
        raise UserError(name, "", "a conversation with at least one turn")
    turn = chat.turns.pop()
    chat.num_forgotten = min(chat.num_forgotten, len(chat.turns))
    return turn


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"


@_command("/save FILE", "Write the conversation to a JSON file of messages.")
def _save(chat: Conversation, text: str) -> None:
    chat.screen.note(f"{chat.save(_path('/save', text))} messages in {text}.")


@_command("/load FILE", "Go on from a conversation that was saved.")
def _load(chat: Conversation, text: str) -> None:
    chat.screen.note(f"{chat.load(_path('/load', text))} messages from {text}.")


def _path(name: str, text: str) -> Path:
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:
        raise UserError(name, text, f"a path ({error})", "Name a user who exists") from error
    if "\0" in text:
        raise UserError(name, text, "a path without a NUL character")
    return path


@_command("/set [NAME=VALUE …]", "Change sampling settings, e.g. /set max_tokens=200 temperature=0.7; without any, "
                                 "show them. NAME=none gives one back to the model.")
def _set(chat: Conversation, text: str) -> None:
    changed = dict(chat.settings)
    for name, value in parse_assignments(text):
        assign(changed, name, value)
    SamplingParams(**changed)
    chat.settings = changed
    chat.screen.table([(name, str(value)) for name, value in sorted(changed.items())])


@_command("/stats", "Counters of the engine and its KV cache.")
def _stats(chat: Conversation, text: str) -> None:
    chat.screen.table([("turns", f"{len(chat.turns)}, {chat.num_forgotten} of them left out"), *_flat(
        chat.model.get_stats())])


def _flat(stats: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in stats.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, f"{value:.1f}" if isinstance(value, float) else str(value)


@_command("/exit", "As /quit.")
@_command("/quit", "Leave; Ctrl-D does too.")
def _quit(chat: Conversation, text: str) -> bool:
    return False
