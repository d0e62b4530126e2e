"""Host cost of a step at 256 running requests: everything but the forward pass and detokenising.

The runner does the host's part of a real one (row state, graph inputs, random numbers) and answers at once with
prepared tokens. Requests decode for long, so pages are crossed and committed
to the prefix cache all the time; every step's increments go into a queue; one request in ten has stop ids,
a seed and sampling. Prints JSON: the configuration, then median and p99 in microseconds a step at overlap
depth 0 and 1, in wall time and in the thread's own CPU time (which a busy machine disturbs less).
With ``--check`` the exit status is 1 where the target is missed.

    python benchmarks/host_step.py [--requests 256] [--steps 1500] [--check]
"""

import argparse
import gc
import json
import platform
import queue
import sys
import time
from types import SimpleNamespace

import numpy as np

from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.runtime import SchedulerConfig
from camshaft.core.ids import RequestId
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.loop import Executor
from camshaft.executor.messages import GenerationRequest, PrefixScope
from camshaft.executor.request import ExecutorLimits
from camshaft.kernels.sampling.philox import uniforms
from camshaft.runtime.inputs import RowState
from camshaft.runtime.step import RowSampling, StepOutput, StepPlan

VOCAB_SIZE = 32000
STOP_IDS = range(VOCAB_SIZE, VOCAB_SIZE + 3)
MAX_NUM_TOKENS = 8192
TARGET_MEDIAN_US, TARGET_P99_US = 1000, 2000


class PreparedResults:
    """A runner without a model: the real host-side row state, and tokens drawn beforehand, never a stop id."""

    def __init__(self, life_cycle: LifeCycleSpec, num_pages: int, max_seq_len: int, num_rows: int) -> None:
        rng = np.random.default_rng(1)
        self._tokens = rng.integers(0, VOCAB_SIZE, (64, num_rows)).astype(np.int32)
        self._finite = np.ones(num_rows, np.bool_)
        build = BuildConfig(max_seq_len=max_seq_len, max_num_tokens=MAX_NUM_TOKENS, max_batch_size=num_rows)
        shape = SimpleNamespace(build=build, life_cycles=(life_cycle,),
                                model=SimpleNamespace(vocab_size=VOCAB_SIZE + len(STOP_IDS)))
        self._state = RowState(shape, (num_pages,))  # type: ignore[arg-type]  # the fields it reads, and no more

    def submit(self, plan: StepPlan) -> "Prepared":
        """The step's handle, at once."""
        rows, state = plan.rows[plan.samples], self._state
        state.apply(plan)
        state.build(plan)
        uniforms(state.seed[rows], state.choice[rows], plan.output_indices[plan.samples])
        tokens = self._tokens[plan.step % 64, :len(rows)]
        state.last_token[rows] = tokens
        return Prepared(StepOutput(step=plan.step, rows=rows, epochs=plan.epochs[plan.samples], token_ids=tokens,
                                   finite=self._finite[:len(rows)]))


class Prepared:
    """A step that has run."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        """The prepared tokens."""
        return self._output


def make_request(number: int, prompt: np.ndarray, max_tokens: int) -> GenerationRequest:
    """Request ``number``; every tenth has stop ids, a seed and sampling."""
    special = number % 10 == 0
    stops = frozenset(STOP_IDS) if special else frozenset()
    sampling = RowSampling(temperature=0.8 if special else 0.0, top_k=0, top_p=0.95 if special else 1.0, min_p=0.0,
                           seed=number, choice=0, min_tokens=0, suppressed_token_ids=np.array(sorted(stops), np.int32))
    return GenerationRequest(id=RequestId(number), prompt_token_ids=prompt, max_tokens=max_tokens, min_tokens=0,
                             stop_token_ids=stops, sampling=sampling, scope=PrefixScope(model="benchmark"))


def measure(num_requests: int, num_steps: int, depth: int) -> dict[str, float]:
    """Time ``num_steps`` steps of ``num_requests`` decoding requests, in microseconds."""
    rng = np.random.default_rng(0)
    max_seq_len, page_size, prompt_tokens = num_steps + 600, 16, 256
    life_cycle = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=8, head_dim=128, page_size=page_size,
                               dtype="bfloat16")
    num_pages = num_requests * (max_seq_len // page_size + 1) + 1
    kv = KVCacheManager((life_cycle,), (num_pages,), enable_block_reuse=True, enable_partial_reuse=True)
    increments: queue.SimpleQueue[list[object]] = queue.SimpleQueue()
    scheduler = SchedulerConfig(max_batch_size=num_requests, max_num_tokens=MAX_NUM_TOKENS, overlap_depth=depth)
    runner = PreparedResults(life_cycle, num_pages, max_seq_len, num_requests)
    executor = Executor(runner, kv, scheduler=scheduler, sink=increments.put,
                        limits=ExecutorLimits(max_seq_len=max_seq_len, vocab_size=VOCAB_SIZE + len(STOP_IDS),
                                               max_logits_rows=num_requests))
    for number in range(num_requests):
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(16, prompt_tokens))).astype(np.int32)
        executor.submit(make_request(number, prompt, max_seq_len - len(prompt)))
    warm = 50
    for _ in range(warm):
        executor.step()
    gc.collect()
    gc.freeze()
    wall_us, cpu_us = np.empty(num_steps), np.empty(num_steps)
    for step in range(num_steps):
        began, began_cpu = time.perf_counter(), time.thread_time()
        executor.step()
        wall_us[step], cpu_us[step] = (time.perf_counter() - began) * 1e6, (time.thread_time() - began_cpu) * 1e6
        while increments.qsize() > 1:
            increments.get()
    gc.unfreeze()
    stats = executor.stats()
    if stats.num_running != num_requests or stats.counters.num_finished:
        raise SystemExit(f"not what was to be measured: {stats}")
    executor.shutdown()
    return {"median_us": round(float(np.median(wall_us)), 1), "p99_us": round(float(np.quantile(wall_us, 0.99)), 1),
            "max_us": round(float(wall_us.max()), 1), "cpu_median_us": round(float(np.median(cpu_us)), 1),
            "cpu_p99_us": round(float(np.quantile(cpu_us, 0.99)), 1)}


def main() -> None:
    """Measure both depths and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--check", action="store_true", help="exit 1 where the target is missed")
    args = parser.parse_args()
    results = {f"depth_{depth}": measure(args.requests, args.steps, depth) for depth in (0, 1)}
    print(json.dumps({
        "benchmark": "host_step", "requests": args.requests, "steps": args.steps, "page_size": 16,
        "share_with_stops_and_seeds": 0.1, "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(), "numpy": np.__version__,
        "target": {"median_us": TARGET_MEDIAN_US, "p99_us": TARGET_P99_US}, "results": results}, indent=1))
    missed = any(result["median_us"] > TARGET_MEDIAN_US or result["p99_us"] > TARGET_P99_US
                 for result in results.values())
    sys.exit(1 if args.check and missed else 0)


if __name__ == "__main__":
    main()
