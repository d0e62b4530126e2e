"""Time to first token of a request whose first 1,024 tokens another one left in the cache.

    python benchmarks/prefix_cpu.py [MODEL.gguf] [--json OUT]

Each round draws a new prefix; its first request computes it, the second one shares it and has a tail of its own.
Medians over the rounds; the tokens of the second request are compared with those of an engine without reuse.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from camshaft import LLM, SamplingParams, __version__
from camshaft.core.device import probe_cpu
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.default_model import default_model

PREFIX_TOKENS, TAIL_TOKENS, NEW_TOKENS, ROUNDS = 1024, 8, 8, 7


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and all tokens."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    start, first, tokens = time.perf_counter(), None, list[int]()
    for output in llm.generate_async(prompt, params):
        first = first or time.perf_counter()
        tokens += output.outputs[0].token_ids_diff
    assert first is not None
    return first - start, tokens


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or default_model(show_progress=True).path
    rng = np.random.default_rng(0)
    vocab_size = open_checkpoint(path).config.vocab_size
    cold, warm, same = [], [], 0
    with LLM(path, device="cpu", dtype="float32", kv_cache={"max_bytes": 2**29}) as llm, \
            LLM(path, device="cpu", dtype="float32",
                kv_cache={"enable_block_reuse": False, "max_bytes": 2**29}) as plain:
        for round_index in range(ROUNDS + 1):
            drawn = rng.integers(10, vocab_size - 100, PREFIX_TOKENS + 2 * TAIL_TOKENS).tolist()
            prefix = drawn[:PREFIX_TOKENS]
            first, second = prefix + drawn[-2 * TAIL_TOKENS:-TAIL_TOKENS], prefix + drawn[-TAIL_TOKENS:]
            before, after = first_token(llm, first), first_token(llm, second)
            if round_index:  # the first round warms up
                cold.append(before[0])
                warm.append(after[0])
                same += after[1] == first_token(plain, second)[1]
    result = {
        "benchmark": "prefix_cpu", "camshaft": __version__, "torch": torch.__version__,
        "python": platform.python_version(), "cpu": probe_cpu().name, "threads": torch.get_num_threads(),
        "model": path.name, "dtype": "float32", "prefix_tokens": PREFIX_TOKENS, "tail_tokens": TAIL_TOKENS,
        "rounds": ROUNDS, "first_ms": round(1000 * statistics.median(cold), 1),
        "second_ms": round(1000 * statistics.median(warm), 1),
        "ratio": round(statistics.median(warm) / statistics.median(cold), 4), "same_tokens": f"{same} of {ROUNDS}",
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
