"""Decode steps of the default model with the kernels' own thread pool and with OpenMP, quiet and beside a busy loop.

    python benchmarks/pool_cpu.py [MODEL.gguf | ENGINE] [--turns 6] [--steps 40] [--json OUT]

The same kernels are compiled twice, once with ``pool_openmp.c`` in place of the pool. Each turn runs every contestant
in a fresh process, quiet and beside one loop that never sleeps, on the cores this process may use; the busy loop ends
with its contestant. Step times of all turns together give the medians and percentiles. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from camshaft.builder.cache import cached_engine
from camshaft.core.device import probe_cpu
from camshaft.engine.artifact import Engine
from camshaft.frontend.default_model import default_model
from camshaft.kernels import native
from camshaft.runtime.model_engine import ModelEngine
from camshaft.runtime.step import PageUpdates, RowArrival, RowSampling, StepPlan

PROMPT_TOKENS, WARM_STEPS, PAGES = 100, 8, 64
CONTESTANTS = ("pool", "openmp")


def compile_with(name: str, folder: Path) -> Path:
    """All kernels, and as their pool the package's or ``pool_openmp.c``."""
    home = Path(native.__file__).parent
    pool = home / "pool.c" if name == "pool" else Path(__file__).with_name("pool_openmp.c")
    target = folder / f"{name}.so"
    compiler = native.find_compiler()
    if compiler is None:
        raise SystemExit("this benchmark needs a C compiler")
    subprocess.run([*shlex.split(compiler), *native.FLAGS, *(["-fopenmp"] if name == "openmp" else []), "-shared",
                    f"-I{home}", *map(str, native.source_files()), str(pool), "-o", str(target), "-lm"], check=True)
    return target


def plans(num_steps: int) -> Iterator[StepPlan]:
    """A prompt on row 0, then single tokens."""
    nothing, zero = np.empty(0, np.int32), np.zeros(1, np.int32)
    greedy = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, min_tokens=0,
                         suppressed_token_ids=nothing)
    pages = np.arange(PAGES - 1, dtype=np.int32)
    for step in range(num_steps):
        columns = nothing if step else pages
        updates = PageUpdates(rows=np.zeros_like(columns), columns=columns, pages=columns + 1, copy_from=nothing,
                              copy_to=nothing)
        yield StepPlan(
            step=step, arrivals=() if step else (RowArrival(row=0, epoch=0, sampling=greedy),),
            page_updates=(updates,), rows=zero, epochs=zero, num_generation=int(step > 0),
            query_lens=zero + (1 if step else PROMPT_TOKENS),
            start_positions=zero + (PROMPT_TOKENS + step - 1 if step else 0),
            context_token_ids=nothing if step else np.arange(5, 5 + PROMPT_TOKENS, dtype=np.int32),
            samples=np.array([True]), output_indices=zero + step)


def run_one(folder: Path, library: Path, num_steps: int) -> None:
    """The child's part: print the steps' milliseconds and tokens."""
    engine = Engine.load(folder)
    loaded = native.load_library(library)
    Engine.library = lambda self: loaded  # type: ignore[method-assign]  # the contestant instead of the engine's own
    runner = ModelEngine(engine, num_pages=(PAGES,))
    runner.warm_up()
    times, tokens = [], []
    for plan in plans(num_steps + WARM_STEPS):
        start = time.perf_counter()
        tokens.append(int(runner.submit(plan).result().token_ids[0]))
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"ms": times[WARM_STEPS:], "tokens": tokens}))


@contextlib.contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """One process that wants a core all the time."""
    if not busy:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            yield
        finally:
            loop.kill()


def summary(times: list[float]) -> dict[str, float]:
    """Milliseconds of a step."""
    return {"median_ms": round(statistics.median(times), 2), "p90_ms": round(float(np.percentile(times, 90)), 2),
            "p99_ms": round(float(np.percentile(times, 99)), 2), "max_ms": round(max(times), 2), "steps": len(times)}


def measure(folder: Path, turns: int, num_steps: int) -> dict[str, Any]:
    """All contestants, taking turns."""
    times: dict[tuple[str, str], list[float]] = {}
    tokens = set()
    with tempfile.TemporaryDirectory() as scratch:
        libraries = {name: compile_with(name, Path(scratch)) for name in CONTESTANTS}
        for turn in range(turns):
            for state in ("quiet", "busy"):
                for name in CONTESTANTS if turn % 2 else reversed(CONTESTANTS):
                    command = [sys.executable, __file__, str(folder), "--steps", str(num_steps),
                               "--library", str(libraries[name])]
                    with neighbour(state == "busy"):
                        done = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                    times.setdefault((state, name), []).extend(done["ms"])
                    tokens.add(tuple(done["tokens"]))
    return {"same_tokens": len(tokens) == 1,
            "steps": {state: {name: summary(times[state, name]) for name in CONTESTANTS}
                      for state in ("quiet", "busy")}}


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = args.model or default_model(show_progress=True).path
    if args.library:
        run_one(model, args.library, args.steps)
        return
    folder = model if (model / "engine.json").is_file() else cached_engine(model).folder
    if folder is None:
        raise SystemExit("this benchmark needs a cache folder it can write")
    load_before = os.getloadavg()[0]
    result = {"benchmark": "pool_cpu", "model": model.name, "dtype": "float32", "prompt_tokens": PROMPT_TOKENS,
              "turns": args.turns, "cpu": probe_cpu().name, "threads": torch.get_num_threads(),
              "torch": torch.__version__, "python": platform.python_version(), "load_average_before": load_before,
              **measure(folder, args.turns, args.steps)}
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
