"""From timings to the numbers of a benchmark, under the names that trtllm-bench gives them; and a table of them.

Owns formulas and layout; measures nothing. Times in milliseconds, rates a second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from camshaft.cli.benchmark.measure import Timing

REPORT_VERSION = 1
_PERCENTILES = (50, 90, 95, 99)

_ROWS = (
    ("Request throughput", "performance.request_throughput_req_s", "req/s"),
    ("Total output throughput", "performance.system_output_throughput_tok_s", "tokens/s"),
    ("Total token throughput", "performance.system_total_throughput_tok_s", "tokens/s"),
    ("Output throughput per user, with prompt", "performance.output_throughput_per_user_tok_s", "tokens/s"),
    ("Output speed per user (1/TPOT)", "streaming_metrics.token_output_speed_tok_s", "tokens/s"),
    ("Total latency", "performance.total_latency_ms", "ms"),
    ("Average request latency", "performance.avg_request_latency_ms", "ms"),
    ("Average time to first token (TTFT)", "streaming_metrics.avg_ttft_ms", "ms"),
    ("Average time per output token (TPOT)", "streaming_metrics.avg_tpot_ms", "ms"),
    ("Requests", "request_info.num_requests", ""),
    ("Average requests under way", "request_info.avg_num_concurrent_requests", ""),
    ("Average input length", "request_info.avg_input_length", "tokens"),
    ("Average output length", "request_info.avg_output_length", "tokens"),
    ("Prompt tokens from the cache", "request_info.num_cached_tokens", "tokens"),
)
"""Label, place in the report, unit."""
_DISTRIBUTIONS = (
    ("Request latency, ms", "performance.request_latency_percentiles_ms"),
    ("TTFT, ms", "streaming_metrics.ttft_percentiles"),
    ("TPOT, ms", "streaming_metrics.tpot_percentiles"),
    ("Generation, tokens/s", "streaming_metrics.gen_tps_percentiles"),
)


def performance(timings: Sequence[Timing]) -> dict[str, Any]:
    """The measured part of a report. ``timings`` holds at least one request of at least one output token."""
    asked, first, ended = (np.array([getattr(timing, name) for timing in timings])
                           for name in ("asked_s", "first_s", "ended_s"))
    num_outputs = np.array([len(timing.token_ids) for timing in timings])
    num_inputs = np.array([timing.num_input for timing in timings])
    total_s = float(ended.max() - asked.min())
    latency_s, generation_s = ended - asked, ended - first
    streams = (num_outputs > 1) & (generation_s > 0)
    tpot_ms = generation_s[streams] / (num_outputs[streams] - 1) * 1e3
    ttft_ms = (first - asked) * 1e3
    return {
        "request_info": {
            "num_requests": len(timings), "avg_num_concurrent_requests": float(latency_s.sum()) / total_s,
            "avg_input_length": float(num_inputs.mean()), "avg_output_length": float(num_outputs.mean()),
            "num_cached_tokens": sum(timing.num_cached for timing in timings)},
        "performance": {
            "total_latency_ms": total_s * 1e3, "avg_request_latency_ms": float(latency_s.mean()) * 1e3,
            "request_throughput_req_s": len(timings) / total_s,
            "system_output_throughput_tok_s": int(num_outputs.sum()) / total_s,
            "system_total_throughput_tok_s": int(num_outputs.sum() + num_inputs.sum()) / total_s,
            "output_throughput_per_user_tok_s": float((num_outputs / latency_s).mean()),
            "request_latency_percentiles_ms": percentiles(latency_s * 1e3)},
        "streaming_metrics": {
            "avg_ttft_ms": float(ttft_ms.mean()), "avg_tpot_ms": _mean(tpot_ms),
            "token_output_speed_tok_s": _mean(1e3 / tpot_ms),
            "ttft_percentiles": percentiles(ttft_ms), "tpot_percentiles": percentiles(tpot_ms),
            "gen_tps_percentiles": percentiles(1e3 / tpot_ms)},
        "output_sha256": output_hash(timings),
    }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float] | None:
    """Percentiles (linear between neighbours), extremes and mean; None of nothing."""
    if not len(values):
        return None
    found = {f"p{rank}": float(np.percentile(values, rank)) for rank in _PERCENTILES}
    return {**found, "minimum": float(np.min(values)), "maximum": float(np.max(values)),
            "average": float(np.mean(values))}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def output_hash(timings: Sequence[Timing]) -> str:
    """SHA-256 over every request's output tokens, in order: equal runs have equal hashes."""
    digest = hashlib.sha256()
    for timing in timings:
        digest.update(np.array([len(timing.token_ids), *timing.token_ids], dtype="<i4").tobytes())
    return digest.hexdigest()


def at(report: Mapping[str, Any], place: str) -> Any:
    """What lies at a dotted place of a report; None where nothing does."""
    found: Any = report
    for name in place.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def report_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, value with its unit) of every single number in a report that is there."""
    return [(label, f"{shown(at(report, place))} {unit}".rstrip()) for label, place, unit in _ROWS
            if at(report, place) is not None]


def distribution_rows(report: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """(label, percentiles) of everything in a report that was measured more than once."""
    found = [(label, at(report, place)) for label, place in _DISTRIBUTIONS]
    for kind in ("cold", "cached"):
        found += [(f"{kind}: {name.removesuffix('_s').replace('_', ' ')}, s", samples)
                  for name, samples in (at(report, f"startup.{kind}") or {}).items()]
    return [(label, samples) for label, samples in found if samples is not None]


def shown(value: float) -> str:
    """A number for people: four digits that matter, whole numbers as they are."""
    if isinstance(value, int):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
