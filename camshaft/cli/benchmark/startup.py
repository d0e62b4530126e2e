"""Starts in fresh processes: what a user waits for before the first token, with and without a cached engine.

Owns the child's protocol (one line of JSON with wall-clock stamps) and the parent that times it. Files are as warm in
the system's own cache as reading them before leaves them: neither kind of start waits for a cold disk.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from camshaft.cli.benchmark.report import percentiles
from camshaft.config.build import BuildConfig
from camshaft.config.parse import config_from
from camshaft.config.runtime import KvCacheConfig, SchedulerConfig
from camshaft.config.sampling import SamplingParams
from camshaft.core import env
from camshaft.core.errors import InternalError, UserError

CHILD = "first-token"
"""Name of the hidden command that the child runs."""
_PROMPT = tuple(range(10, 26))
_STAGES = ("imported", "ready", "first_token")


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start, and the token it ended with."""

    import_s: float
    """From the process' start until the package and torch are there."""
    ready_s: float
    """From there to an engine that is built or loaded, and warm."""
    first_token_s: float
    """From there to the first token of a prompt of 16."""
    token_id: int


def measure_starts(model: Path, settings: Mapping[str, Any], *, rounds: int, is_engine: bool,
                   advance: Callable[[int], None]) -> dict[str, list[Start]]:
    """``rounds`` starts of each kind: "cold" on an empty engine cache, then "cached" on the one it left.

    A built engine is never built, so it has no cold start.
    """
    found: dict[str, list[Start]] = {"cached": []} if is_engine else {"cold": [], "cached": []}
    with tempfile.TemporaryDirectory(prefix="camshaft-bench-") as scratch:
        for index in range(rounds):
            for kind, starts in found.items():
                starts.append(_start(model, settings, Path(scratch) / str(index)))
                advance(1)
                if is_engine and index == 0 and kind == "cached":
                    starts.clear()  # the first one filled the caches of the system and of compiled kernels
                    starts.append(_start(model, settings, Path(scratch) / str(index)))
    return found


def _start(model: Path, settings: Mapping[str, Any], cache: Path) -> Start:
    command = [sys.executable, "-m", "camshaft", "bench", CHILD, str(model), "--settings", json.dumps(settings)]
    began = time.time()
    done = subprocess.run(command, env=env.for_child(CAMSHAFT_CACHE_DIR=str(cache)), stdin=subprocess.DEVNULL,
                          capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise UserError("model", str(model), f"a model that starts; the process ended with status {done.returncode}",
                        last.removeprefix("Error: "))
    try:
        stamps = json.loads(done.stdout.splitlines()[-1])
        imported, ready, first = (float(stamps[stage]) for stage in _STAGES)
        return Start(imported - began, ready - imported, first - ready, int(stamps["token_id"]))
    except (ValueError, KeyError, IndexError) as error:
        raise InternalError(f"the started process said {done.stdout[-200:]!r}") from error


def run_child(model: str, settings: str) -> str:
    """Start, make one token, and say when what was there: a line of JSON."""
    given = json.loads(settings)
    from camshaft.api.llm import LLM

    stamps: dict[str, float] = {"imported": time.time()}
    with LLM(model, build=config_from(BuildConfig, given["build"], where="build"),
             kv_cache=config_from(KvCacheConfig, given["kv_cache"], where="kv_cache"),
             scheduler=config_from(SchedulerConfig, given["scheduler"], where="scheduler")) as llm:
        stamps["ready"] = time.time()
        output = llm.generate_async(_PROMPT, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True,
                                                            detokenize=False)).result()
        stamps["first_token"] = time.time()
    return json.dumps({**stamps, "token_id": output.outputs[0].token_ids[0]})


def startup_report(found: Mapping[str, Sequence[Start]]) -> dict[str, Any]:
    """The measured part of a report. Every start must have made the same token (InternalError)."""
    tokens = {start.token_id for starts in found.values() for start in starts}
    if len(tokens) != 1:
        raise InternalError(f"equal starts gave different first tokens: {sorted(tokens)}")
    return {"startup": {kind: {
        "import_s": percentiles([start.import_s for start in starts]),
        ("build_s" if kind == "cold" else "load_s"): percentiles([start.ready_s for start in starts]),
        "first_token_s": percentiles([start.first_token_s for start in starts]),
        "total_s": percentiles([start.import_s + start.ready_s + start.first_token_s for start in starts])}
        for kind, starts in found.items()}}
