"""Two reports side by side. Owns which numbers are judged, which way is better, and what makes reports comparable."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from camshaft.cli.benchmark.report import REPORT_VERSION, at
from camshaft.core.errors import UserError

_HIGHER, _LOWER = True, False
_METRICS = (
    ("performance.request_throughput_req_s", _HIGHER, True),
    ("performance.system_output_throughput_tok_s", _HIGHER, True),
    ("performance.avg_request_latency_ms", _LOWER, True),
    ("streaming_metrics.avg_ttft_ms", _LOWER, True),
    ("streaming_metrics.avg_tpot_ms", _LOWER, True),
    ("performance.request_latency_percentiles_ms.p99", _LOWER, False),
    ("streaming_metrics.ttft_percentiles.p99", _LOWER, False),
    ("streaming_metrics.tpot_percentiles.p99", _LOWER, False),
    ("startup.cold.total_s.p50", _LOWER, True),
    ("startup.cold.build_s.p50", _LOWER, False),
    ("startup.cached.total_s.p50", _LOWER, True),
    ("startup.cached.import_s.p50", _LOWER, False),
    ("startup.cached.load_s.p50", _LOWER, False),
    ("startup.cached.first_token_s.p50", _LOWER, False),
)
"""Place in the report, whether more is better, whether it is judged: single samples such as a p99 are only shown."""


@dataclasses.dataclass(frozen=True, slots=True)
class ComparedMetric:
    """One number in both reports."""

    place: str
    old: float
    new: float
    is_regression: bool
    """Judged, and worse by more than the tolerance."""

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old if self.old else float("inf") if self.new else 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """What two reports say together."""

    metrics: tuple[ComparedMetric, ...]
    notes: tuple[str, ...]

    @property
    def regressions(self) -> tuple[ComparedMetric, ...]:
        """The judged numbers that became worse."""
        return tuple(metric for metric in self.metrics if metric.is_regression)


def read_report(path: Path, benchmark: str) -> dict[str, Any]:
    """A report of ``benchmark`` that was written before. UserError for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("compare", str(path), f"a report that can be read ({error})", "Check the path") from error
    if not isinstance(data, dict) or not all(isinstance(data.get(name), dict) for name in ("configuration",
                                                                                           "environment")):
        raise UserError("compare", str(path), "a report that camshaft bench wrote with --output")
    if (data.get("benchmark"), data.get("report_version")) != (benchmark, REPORT_VERSION):
        raise UserError("compare", str(path), f"a report of camshaft bench {benchmark}, version {REPORT_VERSION}; it "
                        f"is one of {data.get('benchmark')}, version {data.get('report_version')}")
    numbers = [(place, value) for place, *_ in _METRICS if (value := at(data, place)) is not None]
    wrong = [f"{place} {value!r}" for place, value in numbers if not _is_measured(value)]
    if wrong or not numbers:
        raise UserError("compare", str(path), "a report with the numbers that were measured; this one has "
                        f"{', '.join(wrong) or 'none'}", "Measure and write it again")
    return data


def check_comparable(old: Mapping[str, Any], configuration: Mapping[str, Any]) -> None:
    """Raise UserError naming what differs, unless ``old`` was measured with ``configuration``.

    A setting that only one of them knows is no difference: versions add settings. Numbers across machines are
    compared, with a note.
    """
    before, now = dict(_flat(old["configuration"])), dict(_flat(configuration))
    different = [name for name in now if name in before and before[name] != now[name]]
    if different:
        raise UserError("compare", {name: before[name] for name in different},
                        "the same configuration as now: " + ", ".join(f"{name}={now[name]!r}" for name in different),
                        "Measure both with the same settings")


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerance: float) -> Comparison:
    """Set two comparable reports side by side; worse by more than ``tolerance`` (0.05: 5 %) is a regression."""
    metrics = []
    for place, is_higher_better, is_judged in _METRICS:
        before, now = at(old, place), at(new, place)
        if before is None or now is None:
            continue
        worse = now < before * (1 - tolerance) if is_higher_better else now > before * (1 + tolerance)
        metrics.append(ComparedMetric(place, before, now, is_judged and worse))
    return Comparison(tuple(metrics), tuple(_notes(old, new)))


def _is_measured(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _notes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    before, now = (dict(_flat(report.get("environment", {}))) for report in (old, new))
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name) and name != "date":
            yield f"{name} was {before.get(name)!r}, is {now.get(name)!r}"
    settings = [dict(_flat(report["configuration"])).keys() for report in (old, new)]
    if unknown := sorted(settings[0] ^ settings[1]):
        yield f"only one report knows {', '.join(unknown)}"
    if old.get("output_sha256") != new.get("output_sha256"):
        yield "the output tokens differ"


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, list(value) if isinstance(value, tuple) else value
