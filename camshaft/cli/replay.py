"""``camshaft replay``: a recorded trace run again on a fresh engine, every token compared; or what it amounts to."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camshaft.cli.arguments import NoCacheOption, RevisionOption
from camshaft.core.errors import UserError
from camshaft.core.log import configure_logging, progress

if TYPE_CHECKING:
    from camshaft.engine.artifact import Engine
    from camshaft.executor.replay import Difference, ReplayReport, TraceSummary
    from camshaft.executor.trace import Trace, TraceHeader


def replay(trace: Annotated[Path, typer.Argument(help="File that --trace FILE wrote. It holds the token ids of prompts "
                                                      "and answers: share it only where those may be read.")],
           model: Annotated[str | None, typer.Argument(help="Folder, .gguf file, engine folder or hub id; default: "
                                                            "what the trace was recorded on.")] = None,
           revision: RevisionOption = None,
           summary: Annotated[bool, typer.Option("--summary", help="Run nothing; print steps, tokens, batch sizes "
                                                                   "and times.")] = False,
           no_cache: NoCacheOption = False,
           as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Run a step trace again and compare every token; exit code 1 where one differs, or none can be compared."""
    configure_logging()
    if summary and (model is not None or revision is not None):
        raise UserError("model", model or revision, "nothing beside --summary, which runs no model", "Leave it out")
    from camshaft.executor.trace import read_trace

    recorded = read_trace(trace)
    if recorded.is_cut:
        typer.echo(f"{trace} was cut off inside its last line, which is left out.", err=True)
    if summary:
        _show_summary(recorded, as_json)
        return
    report = _replayed(recorded, model, revision, use_cache=not no_cache)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=1))
    else:
        typer.echo(_verdict(report))
    if not report.is_equal:
        raise typer.Exit(1)


def _replayed(recorded: Trace, model: str | None, revision: str | None, *, use_cache: bool) -> ReplayReport:
    import torch

    from camshaft.executor.replay import replay as run_again

    header = recorded.header
    engine = _engine(header, model, revision, use_cache=use_cache)
    _check_same(header, engine)
    if torch.get_num_threads() != header.num_threads:
        typer.echo(f"Recorded on {header.num_threads} threads, replayed on {torch.get_num_threads()}.", err=True)
    runner = _runner(engine, header)
    with progress("replaying", len(recorded.steps), show=True, unit="steps") as advance:
        return run_again(recorded.steps, runner, advance)


def _engine(header: TraceHeader, model: str | None, revision: str | None, *, use_cache: bool) -> Engine:
    from camshaft.api.assembly import Source
    from camshaft.builder.cache import cached_engine
    from camshaft.config.build import BuildConfig
    from camshaft.engine.artifact import is_engine_folder

    named = model is not None or revision is not None
    source = Source(model=model if named else header.model, revision=revision if named else header.revision, token=None,
                    use_cache=use_cache, show_progress=True)
    path, _ = source.resolve()
    try:
        build = None if is_engine_folder(path) else BuildConfig.from_dict(header.build)
    except (TypeError, KeyError) as error:
        raise UserError("trace", header.build, f"build settings of this version ({error})",
                        "Give an engine folder that was built with them") from error
    return cached_engine(path, build, use_cache=use_cache, show_progress=True)


def _check_same(header: TraceHeader, engine: Engine) -> None:
    """Raise UserError, with what differs, for an engine that is not the trace's."""
    manifest = engine.manifest
    if manifest.weights_id != header.weights_id:
        raise UserError("model", manifest.weights_id[:12], f"the model the trace was recorded on "
                        f"({header.weights_id[:12]}, which was called {header.model or 'the default model'!r})",
                        "Give that model, in the type it was recorded in")
    ours: dict[str, Any] = json.loads(json.dumps(manifest.build.to_dict()))
    different = sorted(name for name in ours.keys() | header.build.keys() if ours.get(name) != header.build.get(name))
    if different:
        raise UserError("build", {name: ours.get(name) for name in different},
                        f"the trace's { {name: header.build.get(name) for name in different} }",
                        "Give the checkpoint, or an engine built with those settings")
    if list(manifest.device.features) != header.device.get("features"):
        typer.echo("Recorded on a processor with other features: kernels may round differently.", err=True)


def _runner(engine: Engine, header: TraceHeader) -> Any:
    from camshaft.runtime.model_engine import ModelEngine

    if len(header.num_pages) != len(engine.manifest.life_cycles):
        raise UserError("trace", header.num_pages, f"pages of {len(engine.manifest.life_cycles)} life cycles, as the "
                        "engine has", "Its header was changed")
    runner = ModelEngine(engine, num_pages=header.num_pages)
    runner.warm_up()
    return runner


def _verdict(report: ReplayReport) -> str:
    left = f" {report.num_without_outcome} steps have no recorded outcome." if report.num_without_outcome else ""
    gap = report.largest_logprob_difference
    left += f" Log-probabilities differ by at most {gap:.3g}." if gap else ""
    if report.first is None and not report.is_equal:
        return f"Nothing to compare: the trace holds no outcome of its {report.num_steps} steps."
    if report.first is None:
        return f"Equal: {report.num_tokens} tokens in {report.num_steps} steps.{left}"
    return (f"Different: {report.num_different_steps} of {report.num_steps} steps; first, {_place(report.first)}: "
            f"{report.first.what} was {report.first.recorded}, is {report.first.replayed}.{left}")


def _place(difference: Difference) -> str:
    return f"step {difference.step}" + ("" if difference.row is None else f", row {difference.row}")


def _show_summary(recorded: Trace, as_json: bool) -> None:
    from camshaft.executor.replay import summarise

    found = summarise(recorded.steps)
    if as_json:
        typer.echo(json.dumps({"header": dataclasses.asdict(recorded.header), "summary": dataclasses.asdict(found)},
                              indent=1))
        return
    from rich.console import Console
    from rich.table import Column, Table

    table = Table("trace", Column("", overflow="fold"), show_header=False, box=None)
    for name, value in _summary_rows(recorded.header, found):
        table.add_row(name, value)
    Console(highlight=False).print(table)


def _summary_rows(header: TraceHeader, found: TraceSummary) -> tuple[tuple[str, str], ...]:
    return (
        ("model", f"{header.model or 'the default model'}, {header.build.get('dtype')} on {header.device.get('kind')}, "
                  f"{header.num_threads} threads"),
        ("recorded by", f"camshaft {header.camshaft}, torch {header.torch}"),
        ("KV pages", " + ".join(map(str, header.num_pages))),
        ("steps", f"{found.num_steps}, {found.num_failed_steps} failed"),
        ("requests", f"{found.num_requests} arrivals"),
        ("tokens", f"{found.num_context_tokens} of prompts, {found.num_generated_tokens} generated"),
        ("rows a step", f"median {found.median_rows:g}, at most {found.largest_rows}"),
        ("tokens a step", f"median {found.median_step_tokens:g}, at most {found.largest_step_tokens}"),
        ("pages copied", str(found.num_pages_copied)),
        ("time a step", f"median {found.median_runner_us:.0f} µs in the runner, {found.median_host_us:.0f} µs before "
                        "it (waiting for requests included)"),
        ("time in the runner", f"{found.runner_s:.2f} s"),
    )
