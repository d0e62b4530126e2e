"""Running a recorded trace again, comparing every token; and what a trace amounts to.

Owns comparison and sums. Where the runner comes from, and that it is the same engine, is the caller's business.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from camshaft.core.errors import words_of
from camshaft.executor.trace import TraceStep
from camshaft.runtime.step import StepLogprobs, StepOutput, StepRunner


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where a replay went another way."""

    step: int
    row: int | None
    """None where the whole step differs."""
    what: str
    recorded: str
    replayed: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What a replay found."""

    num_steps: int
    num_tokens: int
    """Sampled tokens that were compared."""
    num_different_steps: int
    first: Difference | None
    """None: everything was equal."""
    num_without_outcome: int
    """Steps that were run but whose outcome the trace does not hold."""
    largest_logprob_difference: float
    """Over all recorded log-probabilities; 0 where there are none. It alone makes no difference."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """A trace in numbers."""

    num_steps: int
    num_requests: int
    """Arrivals; a request that was preempted arrives again."""
    num_context_tokens: int
    """Prompt tokens fed."""
    num_generated_tokens: int
    """Tokens sampled, those that nobody took included."""
    num_failed_steps: int
    num_pages_copied: int
    median_rows: float
    largest_rows: int
    median_step_tokens: float
    largest_step_tokens: int
    median_host_us: float
    median_runner_us: float
    runner_s: float
    """All time inside the runner."""


def replay(steps: Sequence[TraceStep], runner: StepRunner,
           advance: Callable[[int], None] = lambda amount: None) -> ReplayReport:
    """Submit every recorded plan to ``runner``, a fresh one of the same engine and pool size, and compare."""
    first: Difference | None = None
    num_different = num_tokens = num_without = 0
    largest = 0.0
    for step in steps:
        output, failure = _run(step, runner)
        advance(1)
        if step.output is None and step.failure is None:
            num_without += 1
            continue
        found = _difference(step, output, failure)
        if found is not None:
            num_different += 1
            first = first or found
        elif step.output is not None and output is not None:
            num_tokens += len(step.output.token_ids)
            largest = max(largest, _logprob_difference(step.output, output))
    return ReplayReport(num_steps=len(steps), num_tokens=num_tokens, num_different_steps=num_different, first=first,
                        num_without_outcome=num_without, largest_logprob_difference=largest)


def _run(step: TraceStep, runner: StepRunner) -> tuple[StepOutput | None, str | None]:
    try:
        return runner.submit(step.plan).result(), None
    except Exception as error:  # noqa: BLE001 - a recorded failure must be met again, whatever it is
        return None, words_of(error)


def _difference(step: TraceStep, output: StepOutput | None, failure: str | None) -> Difference | None:
    number, recorded = step.plan.step, step.output
    if recorded is None or output is None:
        if failure == step.failure:
            return None
        return Difference(step=number, row=None, what="failure", recorded=step.failure or "none",
                          replayed=failure or "none")
    for what in ("rows", "epochs", "token_ids", "finite"):
        before, now = getattr(recorded, what), getattr(output, what)
        if before.shape != now.shape:
            return Difference(step=number, row=None, what=what, recorded=f"{len(before)} rows",
                              replayed=f"{len(now)} rows")
        places = np.flatnonzero(before != now)
        if len(places):
            place = int(places[0])
            return Difference(step=number, row=int(recorded.rows[place]), what=what, recorded=str(before[place]),
                              replayed=str(now[place]))
    return None


def _logprob_difference(recorded: StepOutput, output: StepOutput) -> float:
    pairs = ((recorded.logprobs, output.logprobs), (recorded.scores, output.scores))
    return max((_largest_gap(before, now) for before, now in pairs if before is not None and now is not None),
               default=0.0)


def _largest_gap(before: StepLogprobs, now: StepLogprobs) -> float:
    if before.logprobs.shape != now.logprobs.shape:
        return float("inf")
    both = np.isfinite(before.logprobs) & np.isfinite(now.logprobs)
    return float(np.abs(before.logprobs[both] - now.logprobs[both]).max(initial=0.0))


def summarise(steps: Sequence[TraceStep]) -> TraceSummary:
    """The numbers of a trace; nothing is run."""
    plans = [step.plan for step in steps]
    outputs = [step.output for step in steps if step.output is not None]
    rows, tokens = [plan.num_rows for plan in plans], [plan.num_tokens for plan in plans]
    landed = [step.runner_us for step in steps if step.runner_us]
    return TraceSummary(
        num_steps=len(steps), num_requests=sum(len(plan.arrivals) for plan in plans),
        num_context_tokens=sum(len(plan.context_token_ids) for plan in plans),
        num_generated_tokens=sum(len(output.token_ids) for output in outputs),
        num_failed_steps=sum(step.failure is not None for step in steps),
        num_pages_copied=sum(len(updates.copy_to) for plan in plans for updates in plan.page_updates),
        median_rows=_median(rows), largest_rows=max(rows, default=0), median_step_tokens=_median(tokens),
        largest_step_tokens=max(tokens, default=0), median_host_us=_median([step.host_us for step in steps]),
        median_runner_us=_median(landed), runner_s=sum(landed) / 1e6)


def _median(values: Sequence[int]) -> float:
    return float(statistics.median(values)) if values else 0.0
