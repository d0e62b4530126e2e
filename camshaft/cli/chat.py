"""``camshaft chat``: talk to a model in a terminal, or through a pipe, one line a message.

Owns the terminal: prompts, line editing, colours, Ctrl-C and Ctrl-D. What is said is ``conversation.py``'s.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camshaft.cli.arguments import ModelArgument, NoCacheOption, RevisionOption, TraceOption
from camshaft.cli.conversation import COMMANDS, Conversation
from camshaft.cli.opening import Opening
from camshaft.cli.options import typed_fields, with_options
from camshaft.cli.settings import refuse_fixed
from camshaft.config.build import BuildConfig
from camshaft.config.doc import Doc
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import SamplingFields, SamplingParams
from camshaft.core import env
from camshaft.core.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_MAX_TOKENS = 512
_HISTORY_LINES = 1000
_UNSHOWN = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)]) | {ord("\n"): "\n", ord("\t"): "\t"}
"""Control characters, which would steer the terminal: a model's text has no say there."""
_FENCE = '"""'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SamplingFields(SamplingFields):
    """The sampling options as this command has them: answers of a conversation are longer than the library's."""

    max_tokens: Annotated[int, Doc("Most tokens of an answer; the engine's max_seq_len may end it sooner."
                                   )] = DEFAULT_MAX_TOKENS


@with_options(_SamplingFields, BuildConfig, kv=KvCacheConfig, scheduler=SchedulerConfig)
def chat(model: ModelArgument = None,
         system: Annotated[str | None, typer.Option("--system", "-s", help="System text to begin with.")] = None,
         revision: RevisionOption = None, no_cache: NoCacheOption = False, trace: TraceOption = None,
         **given: Any) -> None:
    """Chat with a model; /help lists the commands. Without a terminal each line of standard input is a message."""
    settings = {"max_tokens": DEFAULT_MAX_TOKENS} | typed_fields(_SamplingFields, given)
    refuse_fixed(settings)
    SamplingParams(**settings)
    opening = Opening.of(given, model=model, revision=revision, no_cache=no_cache, trace=trace)
    if sys.stdin is None:
        raise UserError("standard input", None, "a terminal or messages, one a line; it is closed")
    with opening.open() as llm:
        if not llm.has_chat_template:
            raise UserError("model", model or "default", "a model with a chat template, which this one has not",
                            "Continue plain text with: camshaft run --raw")
        typer.echo(llm.summary, err=True)
        if sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty():
            screen = TerminalScreen()
            talk(Conversation(llm, screen, settings, system), screen)
        elif not listen(Conversation(llm, PlainScreen(), settings, system)):
            raise typer.Exit(1)


class PlainScreen:
    """Answers on standard output, all else on standard error."""

    def __init__(self) -> None:
        self._is_inside_line = False

    def answer(self, text: str) -> None:
        """Write a piece of an answer at once; the empty text ends its line."""
        if text or self._is_inside_line:
            typer.echo(text, nl=not text)
            self._is_inside_line = bool(text)
            if sys.stdout is not None:
                sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line on standard error."""
        typer.echo(text, err=True)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Pairs on standard error."""
        for name, value in rows:
            typer.echo(f"{name}: {value}", err=True)


class TerminalScreen:
    """A conversation in colours."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console

        self._console = console or Console(highlight=False)
        self._is_inside_line = False

    def answer(self, text: str) -> None:
        """Write a piece of an answer at once, without the control characters in it; the empty text ends its line."""
        if text or self._is_inside_line:
            self._console.print(text.translate(_UNSHOWN), end="" if text else "\n", markup=False, soft_wrap=True)
            self._is_inside_line = bool(text)

    def note(self, text: str) -> None:
        """A dim line."""
        self._console.print(text.translate(_UNSHOWN), style="dim", markup=False)

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Pairs in two columns."""
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(Text(name, style="bold"), Text(value.translate(_UNSHOWN)))
        self._console.print(table)

    def ask(self, prompt: str) -> str:
        """A line from the keyboard, with line editing where there is any. EOFError at Ctrl-D."""
        # readline counts what is between the two control signs as taking no room
        return input(f"\x01\x1b[1;36m\x02{prompt}\x01\x1b[0m\x02")


def talk(conversation: Conversation, screen: TerminalScreen) -> None:
    """Read from the keyboard until the end. Ctrl-C stops an answer, or empties the line; a second one leaves."""
    screen.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    is_leaving = False
    with _line_history(env.cache_dir() / "chat_history"):
        while True:
            line = None
            try:
                line = _message(screen)
                is_leaving = False
                if not conversation.handle(line):
                    return
            except EOFError:
                screen.note("")
                return
            except UnicodeDecodeError as error:
                screen.note(f"That line is not text in {error.encoding}; nothing was said.")
            except KeyboardInterrupt:
                if line is None:
                    screen.note("")
                if is_leaving:
                    return
                is_leaving = True
                screen.note("Ctrl-C again or Ctrl-D leaves.")


def _message(screen: TerminalScreen) -> str:
    """One message: a line, or the lines between two fences."""
    line = screen.ask("> ")
    if not line.startswith(_FENCE):
        return line
    lines = [line.removeprefix(_FENCE)]
    while not lines[-1].endswith(_FENCE):
        lines.append(screen.ask(". "))
    lines[-1] = lines[-1].removesuffix(_FENCE)
    return "\n".join(lines).strip()


@contextlib.contextmanager
def _line_history(path: Path) -> Iterator[None]:
    """Line editing, completion of commands and a history kept in ``path``, as far as this system offers them."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    names = COMMANDS.names()
    readline.set_completer_delims(" ")
    readline.set_completer(lambda text, index: next(
        (name for place, name in enumerate(n for n in names if text and n.startswith(text)) if place == index), None))
    readline.parse_and_bind("tab: complete")
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a history that cannot be kept is no failure of the chat
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


def listen(conversation: Conversation) -> bool:
    """Take each line of standard input as a message; whether all could be done."""
    for number, raw in enumerate(sys.stdin.buffer, 1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError("standard input", f"line {number}", "UTF-8 text", f"Byte {error.start} of it is "
                            "not") from error
        if not conversation.handle(line):
            break
    return conversation.num_failed == 0
