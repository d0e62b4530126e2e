"""Running a recorded trace again, comparing every token; and what a trace amounts to.

Owns comparison and sums. Where the runner comes from, and that it is the same engine, is the caller's business.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from camshaft.core.errors import InternalError, words_of
from camshaft.executor.trace import TraceStep
from camshaft.runtime.step import Float32Array, Int32Array, StepLogprobs, StepOutput, StepRunner

_LARGEST_ROUNDING = 0.5
"""Log-probabilities this far apart are not the same numbers rounded otherwise, whatever the processor."""


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
    """Over all recorded log-probabilities; 0 where there are none. What rounding may make is no difference."""

    @property
    def is_equal(self) -> bool:
        """Whether everything was equal, and there was something to compare."""
        return self.first is None and self.num_without_outcome < self.num_steps


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
        place = _first_unequal(getattr(recorded, what), getattr(output, what))
        if place is not None:
            return _of(number, what, place, getattr(recorded, what), getattr(output, what), recorded.rows)
    before, now = _failures(recorded), _failures(output)
    if before != now:
        return Difference(step=number, row=None, what="failures", recorded=str(before), replayed=str(now))
    return (_logprobs_difference(number, "logprobs", recorded.logprobs, output.logprobs, recorded.rows)
            or _logprobs_difference(number, "scores", recorded.scores, output.scores, None))


def _failures(output: StepOutput) -> list[tuple[int, str]]:
    """Places and words of a step's failures; an error that was read from a trace is nothing but its words."""
    return [(place, str(error) if type(error) is InternalError else words_of(error))
            for place, error in output.failures]


def _first_unequal(before: npt.NDArray[Any], now: npt.NDArray[Any]) -> int | None:
    """Index along the first dimension where two arrays part; 0 where their shapes differ; None: equal."""
    if before.shape != now.shape:
        return 0
    unequal = (before != now) & ~((before != before) & (now != now))  # NaN is NaN here
    places = np.argwhere(unequal)[:, :1].ravel()
    return int(places[0]) if len(places) else None


def _of(step: int, what: str, place: int, before: npt.NDArray[Any], now: npt.NDArray[Any],
        rows: Int32Array | None) -> Difference:
    if before.shape != now.shape:
        return Difference(step=step, row=None, what=what, recorded=f"of shape {list(before.shape)}",
                          replayed=f"of shape {list(now.shape)}")
    return Difference(step=step, row=None if rows is None else int(rows[place]), what=what,
                      recorded=str(before[place]), replayed=str(now[place]))


def _logprobs_difference(step: int, what: str, before: StepLogprobs | None, now: StepLogprobs | None,
                         rows: Int32Array | None) -> Difference | None:
    """Where log-probabilities differ by more than rounding could make them: what there is of them, which are finite,
    and, where the numbers are the very same, ranks and ids."""
    if before is None or now is None:
        if before is now:
            return None
        shown = ["none" if each is None else f"{len(each.logprobs)}" for each in (before, now)]
        return Difference(step=step, row=None, what=what, recorded=shown[0], replayed=shown[1])
    is_rounded = 0.0 < _largest_gap(before, now) < _LARGEST_ROUNDING
    for field in ("finite", "logprobs", "top_logprobs", "ranks", "top_ids"):
        old, new = getattr(before, field), getattr(now, field)
        place = _first_unequal(old, new)
        if place is not None and (old.shape != new.shape or field == "finite" or not is_rounded):
            return _of(step, f"{what}.{field}", place, old, new, rows)
    return None


def _logprob_difference(recorded: StepOutput, output: StepOutput) -> float:
    pairs = ((recorded.logprobs, output.logprobs), (recorded.scores, output.scores))
    return max((_largest_gap(before, now) for before, now in pairs if before is not None and now is not None),
               default=0.0)


def _largest_gap(before: StepLogprobs, now: StepLogprobs) -> float:
    """Largest difference of two log-probabilities; infinite where only one of them is a number."""
    return max(_gap(before.logprobs, now.logprobs), _gap(before.top_logprobs, now.top_logprobs))


def _gap(before: Float32Array, now: Float32Array) -> float:
    if before.shape != now.shape:
        return float("inf")
    numbers = np.isfinite(before) & np.isfinite(now)
    same = numbers | (before == now) | (np.isnan(before) & np.isnan(now))
    return float(np.abs(before[numbers] - now[numbers]).max(initial=0.0)) if same.all() else float("inf")


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
