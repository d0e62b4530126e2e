"""Batch-1 decode and prefill of the default model on this CPU: every weight type, beside transformers in fp32.

    python benchmarks/decode_cpu.py [MODEL.gguf] [--llama-cpp '/path/to/python --no-extra-buffers'] [--json OUT]

In one run, interleaved: memory read bandwidth, camshaft through its public API with each kind of weights, transformers
on the same fp32 weights, and llama.cpp with Q8_0 weights where an interpreter that has ``llama_cpp`` is named; medians
over all samples of each. The limit of decode is the bytes a step must read (every weight once, keys and values of the
mean context) over the measured bandwidth. Prints JSON with the full configuration, and how many greedy tokens agree
with transformers' fp32: with rounded weights fewer do.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import platform
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import Run, transformers_model, transformers_run

from camshaft import LLM, SamplingParams, __version__
from camshaft.core.device import probe_cpu
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.default_model import default_model

PROMPT_TOKENS, NEW_TOKENS, ROUNDS, PREFILL_TOKENS = 128, 96, 5, 512
WEIGHTS: dict[str, dict[str, str]] = {
    "float32": {}, "bfloat16_weights": {"weight_dtype": "bfloat16"}, "w8a16": {"quantization": "w8a16"},
    "w8a8": {"quantization": "w8a8"},
}
"""Contestants: build options beside dtype float32."""


def read_bandwidth() -> list[float]:
    """GB/s of reading a buffer far larger than the caches on all threads, a few samples; the faster of two readers."""
    buffer = torch.ones(2**27, dtype=torch.float32)
    samples = []
    for _ in range(5):
        times = []
        for read in (torch.sum, torch.amax):
            start = time.perf_counter()
            read(buffer)
            times.append(time.perf_counter() - start)
        samples.append(buffer.numel() * 4 / min(times) / 1e9)
    return samples


def camshaft_run(llm: LLM, prompt: list[int], new_tokens: int) -> Run:
    """Greedy generation through the public API, tokens taken as they stream."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    stamps, tokens = [time.perf_counter()], list[int]()
    for output in llm.generate_async(prompt, params):
        tokens += output.outputs[0].token_ids_diff
        stamps += [time.perf_counter()] * len(output.outputs[0].token_ids_diff)
    times = [after - before for before, after in itertools.pairwise(stamps)]
    return Run(times[0], times[1:], tokens)


class LlamaCpp:
    """llama.cpp with Q8_0 weights; ``command`` is an interpreter and further arguments of the worker."""

    def __init__(self, command: str, model: Path) -> None:
        python, *more = shlex.split(command)
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        self._process = subprocess.Popen(
            [python, worker, model, "--threads", str(torch.get_num_threads()), *more], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.facts = self._read()

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise SystemExit("llama.cpp gave up; run benchmarks/llama_cpp_worker.py by hand to see why")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, prompt: list[int], new_tokens: int) -> Run:
        """Greedy generation."""
        if self._process.stdin:
            self._process.stdin.write(json.dumps({"prompt": prompt, "new": new_tokens}) + "\n")
            self._process.stdin.flush()
        return Run(**self._read())

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


def weight_bytes(llm: LLM) -> int:
    """Bytes of weights a step reads: all tensors of the engine but a table that only embeddings are looked up in."""
    from camshaft.engine.artifact import Engine

    engine = Engine.load(llm.description["engine"])
    lines = [line for line in engine.graph_text.splitlines() if '"aten.embedding.default"' not in line]
    return sum(tensor.nbytes for name, tensor in engine.tensors().items()
               if any(f'"@{name}"' in line for line in lines))


Contestant = Callable[[list[int], int], Run]


def take_turns(contestants: dict[str, Contestant], vocab_size: int) -> tuple[list[float], dict[str, list[Run]],
                                                                             dict[str, list[Run]]]:
    """Bandwidths, decode runs and prefill runs of every round after the first, which warms up."""
    rng = np.random.default_rng(0)
    bandwidth: list[float] = []
    decodes, prefills = ({name: list[Run]() for name in contestants} for _ in range(2))
    for round_index in range(ROUNDS + 1):
        prompt, long = (rng.integers(10, vocab_size - 100, count).tolist() for count in (PROMPT_TOKENS, PREFILL_TOKENS))
        samples = read_bandwidth()
        decoded = {name: run(prompt, NEW_TOKENS) for name, run in contestants.items()}
        prefilled = {name: run(long, 1) for name, run in contestants.items()}
        if round_index:
            bandwidth += samples
            for name in contestants:
                decodes[name].append(decoded[name])
                prefills[name].append(prefilled[name])
    return bandwidth, decodes, prefills


def summary(name: str, decodes: dict[str, list[Run]], prefills: dict[str, list[Run]],
            read_seconds: float | None) -> dict[str, Any]:
    """One contestant's numbers, beside transformers'. ``read_seconds``: what reading a step's bytes takes."""
    both = (name, "transformers")
    decode, peer = (statistics.median(gap for run in decodes[who] for gap in run.gaps) for who in both)
    prefill, peer_prefill = (statistics.median(run.first for run in prefills[who]) for who in both)
    same = sum(a == b for mine, other in zip(decodes[name], decodes["transformers"], strict=True)
               for a, b in zip(mine.tokens, other.tokens, strict=True))
    limit = {} if read_seconds is None else {"decode_limit_tok_s": round(1 / read_seconds, 1),
                                             "decode_fraction_of_limit": round(read_seconds / decode, 3)}
    return {"decode_tok_s": round(1 / decode, 1), "decode_ms": round(1e3 * decode, 2), **limit,
            "decode_speedup": round(peer / decode, 2), "prefill_tok_s": round(PREFILL_TOKENS / prefill, 1),
            "prefill_speedup": round(peer_prefill / prefill, 2), "tokens_equal": f"{same} of {ROUNDS * NEW_TOKENS}"}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--llama-cpp", help="an interpreter that has llama_cpp, and arguments for llama_cpp_worker.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or default_model(show_progress=True).path
    shape = open_checkpoint(path).config
    reference = transformers_model(path)
    with contextlib.ExitStack() as stack:
        contestants: dict[str, Contestant] = {}
        sizes, peers = dict[str, int](), dict[str, Any]()
        for name, options in WEIGHTS.items():
            llm = stack.enter_context(LLM(path, build={"device": "cpu", "dtype": "float32", **options},
                                          kv_cache={"enable_block_reuse": False, "max_bytes": 2**28}))
            contestants[name], sizes[name] = functools.partial(camshaft_run, llm), weight_bytes(llm)
        contestants["transformers"] = functools.partial(transformers_run, reference)
        if args.llama_cpp:
            peer = LlamaCpp(args.llama_cpp, path)
            stack.callback(peer.close)
            contestants["llama_cpp_q8_0"], peers["llama_cpp"] = peer.run, peer.facts
        bandwidth, decodes, prefills = take_turns(contestants, shape.vocab_size)
    kv_bytes = 8 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (PROMPT_TOKENS + NEW_TOKENS // 2)
    rate = statistics.median(bandwidth) * 1e9
    result = {
        "benchmark": "decode_cpu", "camshaft": __version__, "torch": torch.__version__, **peers,
        "python": platform.python_version(), "cpu": probe_cpu().name, "threads": torch.get_num_threads(),
        "model": path.name, "dtype": "float32", "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
        "prefill_tokens": PREFILL_TOKENS, "rounds": ROUNDS, "weight_bytes": sizes, "kv_bytes": kv_bytes,
        "read_bandwidth_GBps": round(rate / 1e9, 2),
        "results": {name: summary(name, decodes, prefills,
                                  (sizes[name] + kv_bytes) / rate if name in sizes else None) for name in contestants},
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
