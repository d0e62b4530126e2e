"""``camshaft bench``: throughput, latency and startup of a model on this machine, and comparisons with earlier reports.

Owns the commands and where reports go. What is measured, and how, is the ``benchmark`` folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import camshaft
from camshaft.cli.arguments import ModelArgument, NoCacheOption, RevisionOption, TraceOption
from camshaft.cli.benchmark.compare import check_comparable, compare, read_report
from camshaft.cli.benchmark.report import REPORT_VERSION, distribution_rows, report_rows, shown
from camshaft.cli.benchmark.startup import CHILD
from camshaft.cli.benchmark.workload import ConcurrentConfig, WorkloadConfig
from camshaft.cli.opening import Opening
from camshaft.cli.options import GroupedCommand, pick, with_options
from camshaft.config.build import BuildConfig
from camshaft.config.doc import Doc, check_int, check_range
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.core.errors import UserError
from camshaft.core.log import configure_logging, progress

if TYPE_CHECKING:
    from rich.console import Console

    from camshaft.api.llm import LLM

bench = typer.Typer(name="bench", no_args_is_help=True, rich_markup_mode=None,
                    help="Measure throughput, latency or startup; JSON on standard output, a table on standard error.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    """What becomes of a report."""

    output: Annotated[Path | None, Doc("Write the JSON to this file, not to standard output.")] = None
    compare: Annotated[Path | None, Doc("An earlier report to set beside this one; exit code 1 on a "
                                        "regression.")] = None
    tolerance: Annotated[float, Doc("How much worse is a regression, as a share.")] = 0.05

    def __post_init__(self) -> None:
        check_range("tolerance", self.tolerance, 0.0, 10.0)
        if self.output is not None and not self.output.absolute().parent.is_dir():
            raise UserError("output", str(self.output), "a file in a folder that exists", "Make the folder")


@bench.command(cls=GroupedCommand)
@with_options(ConcurrentConfig, ReportConfig, BuildConfig, kv=KvCacheConfig, scheduler=SchedulerConfig)
def throughput(model: ModelArgument = None, revision: RevisionOption = None, no_cache: NoCacheOption = False,
               trace: TraceOption = None, **given: Any) -> None:
    """Many requests side by side, token ids in and out, every answer of the length that was asked for."""
    workload = pick(ConcurrentConfig, given)
    _measure("throughput", workload, workload.concurrency, pick(ReportConfig, given),
             Opening.of(given, model=model, revision=revision, no_cache=no_cache, trace=trace))


@bench.command(cls=GroupedCommand)
@with_options(WorkloadConfig, ReportConfig, BuildConfig, kv=KvCacheConfig, scheduler=SchedulerConfig)
def latency(model: ModelArgument = None, revision: RevisionOption = None, no_cache: NoCacheOption = False,
            trace: TraceOption = None, **given: Any) -> None:
    """One request after the other, each alone."""
    _measure("latency", pick(WorkloadConfig, given), 1, pick(ReportConfig, given),
             Opening.of(given, model=model, revision=revision, no_cache=no_cache, trace=trace))


@bench.command(cls=GroupedCommand)
@with_options(ReportConfig, BuildConfig, kv=KvCacheConfig, scheduler=SchedulerConfig)
def startup(model: ModelArgument = None, revision: RevisionOption = None,
            rounds: Annotated[int, typer.Option("--rounds", help="Starts of each kind.")] = 3, **given: Any) -> None:
    """Fresh processes up to their first token: with an empty engine cache, and with the engine cached."""
    configure_logging()
    check_int("rounds", rounds, 1)
    reporting = pick(ReportConfig, given)
    settings = {"build": pick(BuildConfig, given).to_dict(), "kv_cache": dataclasses.asdict(
        pick(KvCacheConfig, given, "kv_")), "scheduler": dataclasses.asdict(pick(SchedulerConfig, given, "scheduler_"))}
    from camshaft.api.assembly import Source
    from camshaft.cli.benchmark.startup import measure_starts, startup_report
    from camshaft.engine.artifact import is_engine_folder

    path, name = Source(model=model, revision=revision, token=None, use_cache=True, show_progress=True).resolve()
    is_engine = is_engine_folder(path)
    configuration = {"model": name, **settings}
    old = _earlier(reporting, "startup", configuration)
    with progress("starting", rounds * (1 if is_engine else 2), show=True, unit="starts") as advance:
        found = measure_starts(path, settings, rounds=rounds, is_engine=is_engine, advance=advance)
    _finish({**_head("startup", configuration), **startup_report(found)}, old, reporting)


@bench.command(CHILD, hidden=True)
def first_token(model: str, settings: Annotated[str, typer.Option("--settings")]) -> None:
    """One start, for ``startup``."""
    from camshaft.cli.benchmark.startup import run_child

    typer.echo(run_child(model, settings))


def _measure(benchmark: str, workload: WorkloadConfig, concurrency: int | None, reporting: ReportConfig,
             opening: Opening) -> None:
    from camshaft.cli.benchmark.measure import run_requests
    from camshaft.cli.benchmark.report import performance
    from camshaft.cli.benchmark.workload import make_requests

    with opening.open() as llm:
        typer.echo(llm.summary, err=True)
        configuration = _configuration(llm, workload)
        old = _earlier(reporting, benchmark, configuration)
        warmup, measured = make_requests(workload, llm.description["model_config"]["vocab_size"],
                                         lambda text: _encoded(llm, text),
                                         longest=llm.description["build"]["max_seq_len"])
        with progress("warming up", len(warmup), show=bool(warmup), unit="requests") as advance:
            run_requests(llm, warmup, concurrency, advance)
        with progress("measuring", len(measured), show=True, unit="requests") as advance:
            timings = run_requests(llm, measured, concurrency, advance)
        report = {**_head(benchmark, configuration), "kv_pages": llm.description["kv_pages"], **performance(timings),
                  "peak_memory_bytes": _peak_memory_bytes()}
    _finish(report, old, reporting)


def _encoded(llm: LLM, text: str) -> list[int]:
    if llm.tokenizer is None:
        raise UserError("dataset", text, "input_ids, as this model has no tokenizer")
    return llm.tokenizer.encode(text)


def _configuration(llm: LLM, workload: WorkloadConfig) -> dict[str, Any]:
    import torch

    found = llm.description
    return {"weights_id": found["weights_id"], "model_config": found["model_config"], "build": found["build"],
            "kv_cache": found["kv_cache"], "scheduler": found["scheduler"], "threads": torch.get_num_threads(),
            "workload": workload.to_dict()}


def _head(benchmark: str, configuration: Mapping[str, Any]) -> dict[str, Any]:
    """What a report begins with: what it is, of what, where and with what it was measured."""
    import numpy as np
    import torch

    from camshaft.core.device import probe

    device = probe(configuration["build"]["device"])
    environment = {
        "camshaft": camshaft.__version__, "torch": torch.__version__, "numpy": np.__version__,
        "python": platform.python_version(), "system": platform.platform(), "device": dataclasses.asdict(device),
        "date": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")}
    return {"benchmark": benchmark, "report_version": REPORT_VERSION, "configuration": dict(configuration),
            "environment": environment}


def _peak_memory_bytes() -> int | None:
    """Most memory this process has held; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _earlier(reporting: ReportConfig, benchmark: str, configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    """The report to compare with, once it is known to be comparable."""
    if reporting.compare is None:
        return None
    old = read_report(reporting.compare, benchmark)
    check_comparable(old, json.loads(json.dumps(configuration)))
    return old


def _finish(report: dict[str, Any], old: dict[str, Any] | None, reporting: ReportConfig) -> None:
    """Show and write a report; exit code 1 where it is worse than ``old``."""
    from rich.console import Console

    text = json.dumps(report, indent=1)
    report = json.loads(text)
    console = Console(stderr=True, highlight=False)
    _show_report(console, report)
    if reporting.output is None:
        typer.echo(text)
    else:
        reporting.output.write_text(text + "\n", encoding="utf-8")
    if old is not None and _show_comparison(console, old, report, reporting):
        raise typer.Exit(1)


def _show_report(console: Console, report: Mapping[str, Any]) -> None:
    from rich.table import Table

    numbers = Table("", "", title=f"camshaft bench {report['benchmark']}", title_justify="left", show_header=False,
                    box=None)
    for label, value in report_rows(report):
        numbers.add_row(label, value)
    console.print(numbers)
    rows = distribution_rows(report)
    spread = Table("", *rows[0][1], box=None)
    for label, samples in rows:
        spread.add_row(label, *map(shown, samples.values()))
    console.print(spread)


def _show_comparison(console: Console, old: Mapping[str, Any], report: Mapping[str, Any],
                     reporting: ReportConfig) -> bool:
    """Print both reports' numbers; whether one of them became worse by more than the tolerance."""
    from rich.table import Column, Table

    found = compare(old, report, reporting.tolerance)
    table = Table(Column("number", overflow="fold"), "old", "new", "new / old", "",
                  title=f"Compared with {reporting.compare}", title_justify="left")
    for metric in found.metrics:
        table.add_row(metric.place, shown(metric.old), shown(metric.new), f"{metric.ratio:.3f}",
                      "REGRESSION" if metric.is_regression else "")
    console.print(table)
    for note in found.notes:
        console.print(f"Note: {note}.", markup=False)
    return bool(found.regressions)
