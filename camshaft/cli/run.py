"""``camshaft run``: one prompt in, an answer streamed out, a line of rates at the end."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camshaft.cli.arguments import ModelArgument, NoCacheOption, RevisionOption, TraceOption
from camshaft.cli.opening import Opening
from camshaft.cli.options import typed_fields, with_options
from camshaft.config.build import BuildConfig
from camshaft.config.doc import Doc
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import SamplingFields, SamplingParams
from camshaft.core.errors import UserError

if TYPE_CHECKING:
    from camshaft.api.llm import LLM
    from camshaft.api.outputs import RequestOutput

DEFAULT_PROMPT = "What is the capital of France, and what is it known for?"
DEFAULT_MAX_TOKENS = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _SamplingFields(SamplingFields):
    """The sampling options as this command has them: a person reads longer answers than the library's default."""

    max_tokens: Annotated[int, Doc("Most tokens to generate; the engine's max_seq_len may end it sooner."
                                   )] = DEFAULT_MAX_TOKENS


@with_options(_SamplingFields, BuildConfig, kv=KvCacheConfig, scheduler=SchedulerConfig)
def run(model: ModelArgument = None,
        prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="What to say; - reads standard input. "
                                                   f"(default: {DEFAULT_PROMPT})")] = None,
        raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat "
                                                        "template.")] = False,
        revision: RevisionOption = None, no_cache: NoCacheOption = False, trace: TraceOption = None,
        **given: Any) -> None:
    """Answer one prompt, token by token."""
    text = _prompt_text(prompt)
    params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS} | typed_fields(_SamplingFields, given))
    opening = Opening.of(given, model=model, revision=revision, no_cache=no_cache, trace=trace)
    started = time.perf_counter()
    with opening.open() as llm:
        typer.echo(llm.summary, err=True)
        _answer(llm, text, params, raw=raw, started=started)


def _prompt_text(prompt: str | None) -> str:
    if prompt is None:
        return DEFAULT_PROMPT
    if prompt != "-":
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError("prompt", prompt, "UTF-8 text", "Convert the text to UTF-8") from error
        return prompt
    if sys.stdin is None:
        raise UserError("prompt", "-", "text on standard input, which is closed", "Give the text itself")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError("prompt", "-", "UTF-8 text on standard input", f"Byte {error.start} is not UTF-8") from error


def _answer(llm: LLM, text: str, params: SamplingParams, *, raw: bool, started: float) -> None:
    use_template = llm.has_chat_template and not raw
    if not raw and not use_template:
        typer.echo("This model has no chat template: it continues the text as it is.", err=True)
    ids: Any = llm.apply_chat_template([{"role": "user", "content": text}]) if use_template else text
    asked = time.perf_counter()
    first, last = None, None
    for output in _stream(llm, ids, params):
        first = first or time.perf_counter()
        typer.echo(output.outputs[0].text_diff, nl=False)
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
        last = output
    typer.echo("")
    if last is not None and first is not None:
        typer.echo(_rates(last, started=started, asked=asked, first=first, ended=time.perf_counter()), err=True)


def _stream(llm: LLM, ids: Any, params: SamplingParams) -> Iterator[RequestOutput]:
    yield from llm.generate_async(ids, params)


def _rates(output: RequestOutput, *, started: float, asked: float, first: float, ended: float) -> str:
    num_prompt, num_new = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    decode = (num_new - 1) / (ended - first) if num_new > 1 else 0.0
    return (f"[{num_prompt} prompt tokens, first token after {first - asked:.2f} s · {num_new} new tokens, "
            f"{decode:.1f} tokens/s · ready in {asked - started:.1f} s · {output.outputs[0].finish_reason}]")

