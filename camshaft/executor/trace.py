"""Step traces: every plan an executor made and what came of it, a JSON line each, so that a run can be run again.

Owns the file: its header, writing it beside a running executor, and reading it back. ``replay.py`` runs one; how a plan
becomes JSON is ``runtime/step_json.py``.

The first line is the header. A step is two lines: ``plan``, written before the step runs, so that a step that ends the
process is in the file; then ``output`` (or ``failure``). Each line is flushed; a last line that was cut off is left
out on reading. The file holds the token ids of prompts and answers, and no text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from camshaft.config.doc import INT32_MAX
from camshaft.core.errors import UserError, words_of
from camshaft.core.log import logger
from camshaft.executor.messages import GenerationRequest
from camshaft.runtime.step import StepHandle, StepOutput, StepPlan, StepRunner
from camshaft.runtime.step_json import from_json, to_json

FORMAT_VERSION = 1
_MARK = "camshaft_trace"
_WHAT = "a step trace of this version, as --trace FILE writes it"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What must be equal for the recorded plans to mean the same."""

    camshaft: str
    torch: str
    """Versions that recorded it; informative."""
    model: str | None
    """The model as it was asked for; None: the default model."""
    revision: str | None
    weights_id: str
    """The engine's identity, with the next two."""
    build: dict[str, Any]
    device: dict[str, Any]
    num_pages: tuple[int, ...]
    """Pages of each life cycle's pool."""
    num_threads: int
    kv_cache: dict[str, Any]
    scheduler: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One recorded step."""

    plan: StepPlan
    output: StepOutput | None
    """None where the step failed, or the file ends before its output."""
    failure: str | None
    """What the step raised, in words."""
    host_us: int
    """From the runner's last return to this submission, idle time included."""
    runner_us: int
    """Spent inside the runner: submitting, and waiting for the result."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A whole trace."""

    header: TraceHeader
    steps: tuple[TraceStep, ...]
    is_cut: bool
    """Whether the last line was incomplete and left out."""


def check_target(path: Path) -> None:
    """Raise UserError unless a trace may be written at ``path``: nothing there, an empty file, or an older trace."""
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise UserError("trace", str(path), "a file in a folder that exists", "Make the folder, or name another")
        return
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(_MARK) + 4)
        if not start or start == f'{{"{_MARK}":'.encode():
            return
    elif path.is_char_device() or path.is_fifo():
        return
    raise UserError("trace", str(path), "a new or empty file, or a trace to replace", "Choose another name")


class TraceWriter:
    """Appends lines to a trace file. A disk that refuses ends the trace with an error in the log, never the engine."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        check_target(path)
        self._path = path
        self._lock = threading.Lock()
        # what people asked is theirs: nobody else on this machine may read it
        self._file: IO[str] | None = open(path, "w", encoding="utf-8", opener=_private)  # noqa: SIM115 - closed by close
        self.write({_MARK: FORMAT_VERSION, **dataclasses.asdict(header)})

    def write(self, line: Mapping[str, Any]) -> None:
        """Write and flush one line; nothing once the trace has ended."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                logger.error("the step trace %s ends here: %s", self._path, error)
                self._end()

    def close(self) -> None:
        """End the trace. Idempotent."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                logger.error("the step trace %s could not be finished: %s", self._path, error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def check_recordable(request: GenerationRequest) -> None:
    """Raise UserError for a request whose steps cannot be written down: code of the caller's takes part in them."""
    if request.sampling.processors:
        raise UserError("logits_processor", list(request.sampling.processors), "none while a trace is recorded: code "
                        "cannot be written into it", "Leave the processor out, or the trace")


class RecordingRunner:
    """A runner that writes every step down on its way to another runner."""

    def __init__(self, runner: StepRunner, writer: TraceWriter) -> None:
        self._runner = runner
        self._writer = writer
        self.last_return_s = time.perf_counter()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Record the plan, then submit it."""
        host_us = _micros(time.perf_counter() - self.last_return_s)
        self._writer.write({"host_us": host_us, "plan": to_json(plan)})
        started = time.perf_counter()
        try:
            handle = self._runner.submit(plan)
        except Exception as error:
            self.landed(plan.step, time.perf_counter() - started, error)
            raise
        self.last_return_s = time.perf_counter()
        return _RecordedStep(self, plan.step, handle, self.last_return_s - started)

    def landed(self, step: int, seconds: float, outcome: StepOutput | Exception) -> None:
        """Record what became of a step that took ``seconds`` inside the runner."""
        line: dict[str, Any] = {"step": step, "runner_us": _micros(seconds)}
        if isinstance(outcome, Exception):
            line["failure"] = words_of(outcome)
        else:
            line["output"] = to_json(outcome)
        self._writer.write(line)
        self.last_return_s = time.perf_counter()


class _RecordedStep:
    """The handle of a step whose result is recorded when it is read."""

    def __init__(self, recorder: RecordingRunner, step: int, handle: StepHandle, seconds: float) -> None:
        self._recorder = recorder
        self._step = step
        self._handle = handle
        self._seconds = seconds

    def result(self) -> StepOutput:
        """The step's output; raises what the step raised."""
        started = time.perf_counter()
        try:
            output = self._handle.result()
        except Exception as error:
            self._recorder.landed(self._step, self._seconds + time.perf_counter() - started, error)
            raise
        self._recorder.landed(self._step, self._seconds + time.perf_counter() - started, output)
        return output


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def read_trace(path: Path) -> Trace:
    """Read a trace. UserError, with the line, for a file that is none or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError("trace", str(path), f"a file that can be read ({error.strerror})", "Check the path") from error
    lines = data.split(b"\n")
    is_cut = lines.pop() != b""
    if not lines:
        raise UserError("trace", str(path), _WHAT, "The file has no whole line")
    header = _header(path, lines[0])
    steps = tuple(_steps(path, lines[1:]))
    return Trace(header=header, steps=steps, is_cut=is_cut)


def _header(path: Path, line: bytes) -> TraceHeader:
    try:
        data = json.loads(line)
        version = data.pop(_MARK)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError("trace", str(path), _WHAT, "Its first line is no header of one") from error
    if version != FORMAT_VERSION:
        raise UserError("trace", str(path), f"format {FORMAT_VERSION}; this is format {version}",
                        f"Read it with camshaft {data.get('camshaft', 'of that time')}")
    try:
        header = TraceHeader(**{**data, "num_pages": tuple(data["num_pages"])})
    except (TypeError, KeyError) as error:
        raise UserError("trace", str(path), _WHAT, f"Its header is of another shape ({error})") from error
    wrong = _wrong_fields(header)
    if wrong:
        raise UserError("trace", str(path), _WHAT, f"Its header is of another shape ({', '.join(wrong)})")
    return header


def _wrong_fields(header: TraceHeader) -> list[str]:
    """Names of the fields that hold something else than a writer puts there."""
    sound = {**{name: isinstance(getattr(header, name), str) for name in ("camshaft", "torch", "weights_id")},
             **{name: isinstance(getattr(header, name), str | None) for name in ("model", "revision")},
             **{name: isinstance(getattr(header, name), dict) for name in ("build", "device", "kv_cache", "scheduler")},
             "num_pages": all(_is_count(pages) for pages in header.num_pages),
             "num_threads": _is_count(header.num_threads)}
    return [name for name, is_sound in sound.items() if not is_sound]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= INT32_MAX


def _steps(path: Path, lines: list[bytes]) -> Iterator[TraceStep]:
    """Steps in order of submission. Only the last ones may lack an outcome: a writer leaves nothing out."""
    plans: dict[int, tuple[StepPlan, int]] = {}
    outcomes: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 2):
        try:
            data = json.loads(line)
            if "plan" in data:
                _take_plan(data, plans)
            else:
                _take_outcome(data, plans, outcomes)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError("trace", f"{path}, line {number}", _WHAT, words_of(error)) from error
    unknown = {"output": None, "failure": None, "runner_us": 0}
    for step, (plan, host_us) in plans.items():
        yield TraceStep(plan=plan, host_us=host_us, **outcomes.get(step, unknown))


def _take_plan(data: dict[str, Any], plans: dict[int, tuple[StepPlan, int]]) -> None:
    plan = from_json(StepPlan, data["plan"])
    last = next(reversed(plans), None)
    if last is not None and plan.step != last + 1:
        raise ValueError(f"step {plan.step} comes after step {last}")
    plans[plan.step] = plan, int(data["host_us"])


def _take_outcome(data: dict[str, Any], plans: dict[int, tuple[StepPlan, int]],
                  outcomes: dict[int, dict[str, Any]]) -> None:
    """Outputs come in the order of their steps; a failure may come before the output of a step under way."""
    step, output = data["step"], None
    if "output" in data:
        output = from_json(StepOutput, data["output"])
        awaited = next((each for each in plans if each not in outcomes), None)
        if step != awaited or output.step != step:
            raise ValueError(f"the output of step {step} where that of step {awaited} belongs")
    elif step not in plans or step in outcomes or not isinstance(data["failure"], str):
        raise ValueError(f"the failure of step {step}, which is not under way")
    outcomes[step] = {"output": output, "failure": None if output is not None else data["failure"],
                      "runner_us": int(data["runner_us"])}
