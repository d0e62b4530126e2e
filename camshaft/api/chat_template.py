"""Messages to prompt text with the model's own template.

Owns the sandboxed Jinja environment templates are written for, checks of messages, and the words of
template errors. What it renders already holds the special tokens: encode it with add_special_tokens=False.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from camshaft.api.tokenizer import named_special_tokens, read_settings
from camshaft.core.errors import UserError

if TYPE_CHECKING:
    import jinja2

_MAX_STEPS, _MAX_CHARACTERS = 10_000_000, 2**26
"""Bounds of one rendering: rounds of loops and calls, and text. Templates come with models, which anyone publishes."""
_BUDGET = "__camshaft_budget"
_CONTENT_KINDS = (str, list, tuple, type(None))


def _raise_exception(message: str) -> None:
    raise UserError("messages", message, "a conversation this model's chat template accepts",
                    "Change the messages as the template says")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).astimezone().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes HTML signs, which models have not seen in training."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Budget:
    """What is left to one rendering."""

    def __init__(self) -> None:
        self._steps = _MAX_STEPS
        self._characters = _MAX_CHARACTERS

    def step(self) -> None:
        """One round of a loop, or one call."""
        self._steps -= 1
        if self._steps < 0:
            raise self._refusal(f"{_MAX_STEPS} rounds of loops and calls")

    def written(self, text: str) -> str:
        """``text``, once it is known to fit."""
        self._characters -= len(text)
        if self._characters < 0:
            raise self._refusal(f"{_MAX_CHARACTERS} characters")
        return text

    @staticmethod
    def _refusal(bound: str) -> UserError:
        return UserError("chat_template", f"more than {bound}", "a template that comes to an end",
                         "Mend chat_template in tokenizer_config.json, or use generate() with a prompt")


def _compiled(source: str) -> jinja2.Template:
    """The template, with every loop counting its rounds."""
    from jinja2 import nodes

    tree = _environment().parse(source)
    for loop in tree.find_all(nodes.For):
        loop.iter = nodes.Filter(loop.iter, _BUDGET, [], [], None, None, lineno=loop.lineno)
    return _environment().from_string(tree)


@functools.cache
def _environment() -> jinja2.Environment:
    """The environment Hugging Face templates expect. Importing Jinja is put off until a chat needs it."""
    from jinja2 import pass_context
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import Context
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Counting(ImmutableSandboxedEnvironment):
        """Calls count as steps too, for macros may call themselves. ``parent`` is out of a template's reach."""

        def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            """See :class:`jinja2.sandbox.SandboxedEnvironment`, which names its arguments so too."""
            __context.parent[_BUDGET].step()
            return super().call(__context, __obj, *args, **kwargs)

    @pass_context
    def counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            context.parent[_BUDGET].step()
            yield item

    class Generation(Extension):
        """``{% generation %}…{% endgeneration %}`` marks training targets; for a prompt the body is all there is."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            """The statements between the two tags."""
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Counting(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters[_BUDGET] = counted
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _message_text(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(field, message, "a dict with 'role' and 'content'", "Give [{'role': 'user', 'content': '…'}]")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise UserError(f"{field}.role", role, "a name such as 'system', 'user', 'assistant' or 'tool'")
    if "content" not in message and not message.get("tool_calls"):
        raise UserError(f"{field}.content", None, "text", "Give every message a 'content'")
    content = message.get("content")
    if not isinstance(content, _CONTENT_KINDS):
        raise UserError(f"{field}.content", content, "a string or a list of parts")
    return {**message, **({"content": _joined(field, content)} if isinstance(content, list | tuple) else {})}


def _joined(field: str, parts: Sequence[Any]) -> str:
    """Content given in parts as one text; only text parts mean something to a text model."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in ("text", "input_text", "output_text"):
            raise UserError(f"{field}.content[{index}]", part, "a part {'type': 'text', 'text': '…'}",
                            "This model reads text only")
        if not isinstance(part.get("text"), str):
            raise UserError(f"{field}.content[{index}].text", part.get("text"), "a string")
        texts.append(part["text"])
    return "\n".join(texts)


class ChatTemplate:
    """A compiled chat template. Rendering changes nothing, so threads may share it.

    Raises UserError for a template that does not compile.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        import jinja2

        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compiled(source)
        except jinja2.TemplateError as error:
            line = getattr(error, "lineno", None)
            raise UserError("chat_template", source, f"a valid Jinja template ({error}, line {line})",
                            "Mend chat_template in tokenizer_config.json, or use generate() with a prompt") from None

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> ChatTemplate:
        """The template of tokenizer_config.json. Raises UserError when there is none."""
        settings = read_settings(files)
        return cls(_pick(settings.get("chat_template")), named_special_tokens(settings))

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
               tools: Sequence[Mapping[str, Any]] | None = None, **kwargs: Any) -> str:
        """The prompt text of ``messages``; ``kwargs`` are further variables of the template.

        Raises UserError naming the message and field that is wrong, or what the template refused.
        """
        import jinja2

        if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
            raise UserError("messages", messages, "a list of messages", "Give [{'role': 'user', 'content': '…'}]")
        if not messages:
            raise UserError("messages", messages, "at least one message")
        checked = [_message_text(f"messages[{index}]", message) for index, message in enumerate(messages)]
        for index, tool in enumerate(tools or ()):
            if not isinstance(tool, Mapping):
                raise UserError(f"tools[{index}]", tool, "a dict: {'type': 'function', 'function': {…}}")
        variables = {**self._special_tokens, **kwargs, "messages": checked, "tools": tools,
                     "add_generation_prompt": add_generation_prompt}
        budget = variables[_BUDGET] = _Budget()
        try:
            return "".join(map(budget.written, self._template.generate(variables)))
        except UserError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
                RecursionError, MemoryError) as error:
            raise UserError("messages", checked[-1], f"a conversation the chat template can render ({error})",
                            "Compare the messages with what the model's card shows") from error


def _pick(found: Any) -> str:
    """A template, or the one called "default" of several."""
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str) or not found:
        raise UserError("chat_template", found, "a chat template; this model has none",
                        "Use generate() with a prompt, or an instruction-tuned model")
    return found
