"""Sixteen requests at once, lengths uniform in 32–256 in and out, beside transformers on the same fp32 weights.

    python benchmarks/throughput_cpu.py [MODEL.gguf] [--rounds N] [--json OUT]

Three ways through the same work in one run: camshaft's in-flight batching, transformers' static batches of 16 (padded,
every row runs until the longest has ended), transformers one request after the other. Medians over the rounds (the
last, slowest way runs once). Prints output tokens a second, the ratios, and how many greedy tokens agree.
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
from peers import transformers_batch, transformers_model, transformers_run

from camshaft import LLM, SamplingParams, __version__
from camshaft.core.device import probe_cpu
from camshaft.frontend.default_model import default_model

NUM_REQUESTS, SHORTEST, LONGEST, SEED = 16, 32, 256, 0


def camshaft_batch(llm: LLM, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    """All requests at once through the public API, output lengths forced."""
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
              for count in new_tokens]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or default_model(show_progress=True).path
    model = transformers_model(path)
    rng = np.random.default_rng(SEED)
    lens = rng.integers(SHORTEST, LONGEST + 1, (2, NUM_REQUESTS)).tolist()
    prompts = [rng.integers(10, model.config.vocab_size - 100, count).tolist() for count in lens[0]]
    new_tokens: list[int] = lens[1]
    ours, static = [], []
    with LLM(path, device="cpu", dtype="float32", kv_cache={"enable_block_reuse": False, "max_bytes": 2**29}) as llm:
        camshaft_batch(llm, prompts[:2], [4, 4])
        transformers_batch(model, prompts[:2], [4, 4])
        for _ in range(args.rounds):
            start = time.perf_counter()
            our_tokens = camshaft_batch(llm, prompts, new_tokens)
            ours.append(time.perf_counter() - start)
            start = time.perf_counter()
            static_tokens = transformers_batch(model, prompts, new_tokens)
            static.append(time.perf_counter() - start)
    start = time.perf_counter()
    single_tokens = [transformers_run(model, prompt, count).tokens
                     for prompt, count in zip(prompts, new_tokens, strict=True)]
    single = time.perf_counter() - start
    total = sum(new_tokens)

    def agreement(theirs: list[list[int]]) -> str:
        same = sum(a == b for mine, other in zip(our_tokens, theirs, strict=True)
                   for a, b in zip(mine, other, strict=True))
        return f"{same} of {total}"

    mine, batch = statistics.median(ours), statistics.median(static)
    result = {
        "benchmark": "throughput_cpu", "camshaft": __version__, "torch": torch.__version__,
        "python": platform.python_version(), "cpu": probe_cpu().name, "threads": torch.get_num_threads(),
        "model": path.name, "dtype": "float32", "requests": NUM_REQUESTS, "lengths": [SHORTEST, LONGEST],
        "seed": SEED, "input_tokens": sum(lens[0]), "output_tokens": total, "rounds": args.rounds,
        "seconds": [round(value, 2) for value in ours], "static_seconds": [round(value, 2) for value in static],
        "one_by_one_seconds": round(single, 2), "output_tok_s": round(total / mine, 1),
        "static_output_tok_s": round(total / batch, 1), "one_by_one_output_tok_s": round(total / single, 1),
        "over_static": round(batch / mine, 2), "over_one_by_one": round(single / mine, 2),
        "tokens_equal_one_by_one": agreement(single_tokens), "tokens_equal_static": agreement(static_tokens),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
