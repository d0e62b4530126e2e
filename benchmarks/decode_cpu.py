"""Batch-1 decode and prefill of the default model on this CPU, beside transformers on the same fp32 weights.

    python benchmarks/decode_cpu.py [MODEL.gguf] [--json OUT]

In one run, interleaved: memory read bandwidth, camshaft through its public API, transformers; medians over all
samples of each. The limit of decode is the bytes a step must read (every weight once, keys and values of the mean
context) over the measured bandwidth. Prints JSON with the full configuration, and how many greedy tokens agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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

PROMPT_TOKENS, NEW_TOKENS, ROUNDS, PREFILL_TOKENS = 128, 96, 5, 512


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


def transformers_model(path: Path) -> torch.nn.Module:
    """LlamaForCausalLM holding the very tensors camshaft runs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_position, rms_norm_eps=c.norm_eps,
        rope_theta=c.rope.theta, tie_word_embeddings=c.tie_word_embeddings)
    model = LlamaForCausalLM(config).eval()
    state = {name: weight.read().float() for name, weight in checkpoint.tensors.items()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One generation: seconds to the first token, seconds between further ones, the tokens."""

    first: float
    gaps: list[float]
    tokens: list[int]


def transformers_run(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> Run:
    """Greedy generation by the plain loop over ``model`` with its own cache."""
    with torch.inference_mode():
        stamps = [time.perf_counter()]
        out = model(torch.tensor([prompt]), use_cache=True)
        tokens = [int(out.logits[0, -1].argmax())]
        stamps.append(time.perf_counter())
        while len(tokens) < new_tokens:
            out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
            stamps.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(stamps)]
    return Run(times[0], times[1:], tokens)


def camshaft_run(llm: LLM, prompt: list[int], new_tokens: int) -> Run:
    """Greedy generation through the public API, tokens taken as they stream."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    stamps, tokens = [time.perf_counter()], list[int]()
    for output in llm.generate_async(prompt, params):
        tokens += output.outputs[0].token_ids_diff
        stamps += [time.perf_counter()] * len(output.outputs[0].token_ids_diff)
    times = [after - before for before, after in itertools.pairwise(stamps)]
    return Run(times[0], times[1:], tokens)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or default_model(show_progress=True).path
    rng = np.random.default_rng(0)
    reference = transformers_model(path)
    num_params = sum(parameter.numel() for parameter in reference.parameters())
    bandwidth, ours, theirs, our_prefill, their_prefill = [], [], [], [], []
    with LLM(path, device="cpu", dtype="float32", kv_cache={"enable_block_reuse": False, "max_bytes": 2**29}) as llm:
        shape = open_checkpoint(path).config
        for round_index in range(ROUNDS + 1):
            prompt, long = (rng.integers(10, shape.vocab_size - 100, count).tolist()
                            for count in (PROMPT_TOKENS, PREFILL_TOKENS))
            samples = (read_bandwidth(), camshaft_run(llm, prompt, NEW_TOKENS), camshaft_run(llm, long, 1),
                       transformers_run(reference, prompt, NEW_TOKENS), transformers_run(reference, long, 1))
            if round_index:  # the first round warms up
                bandwidth += samples[0]
                ours.append(samples[1])
                theirs.append(samples[3])
                our_prefill.append(samples[2].first)
                their_prefill.append(samples[4].first)
    kv_bytes = 8 * shape.num_layers * shape.num_kv_heads * shape.head_dim * (PROMPT_TOKENS + NEW_TOKENS // 2)
    step_bytes, rate = num_params * 4 + kv_bytes, statistics.median(bandwidth)
    limit = step_bytes / rate / 1e9
    decode, their_decode = (statistics.median(gap for run in runs for gap in run.gaps) for runs in (ours, theirs))
    prefill, their_first = statistics.median(our_prefill), statistics.median(their_prefill)
    same = sum(a == b for mine, other in zip(ours, theirs, strict=True)
               for a, b in zip(mine.tokens, other.tokens, strict=True))
    result = {
        "benchmark": "decode_cpu", "camshaft": __version__, "torch": torch.__version__,
        "python": platform.python_version(), "cpu": probe_cpu().name, "threads": torch.get_num_threads(),
        "model": path.name, "dtype": "float32", "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
        "rounds": ROUNDS, "weight_bytes": num_params * 4, "kv_bytes": kv_bytes,
        "read_bandwidth_GBps": round(rate, 2), "decode_limit_tok_s": round(1 / limit, 1),
        "decode_tok_s": round(1 / decode, 1), "decode_fraction_of_limit": round(limit / decode, 3),
        "transformers_decode_tok_s": round(1 / their_decode, 1), "decode_speedup": round(their_decode / decode, 2),
        "prefill_tokens": PREFILL_TOKENS, "prefill_tok_s": round(PREFILL_TOKENS / prefill, 1),
        "transformers_prefill_tok_s": round(PREFILL_TOKENS / their_first, 1),
        "prefill_speedup": round(their_first / prefill, 2), "tokens_equal": f"{same} of {ROUNDS * NEW_TOKENS}",
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
