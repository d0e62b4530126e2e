"""Batch-1 decode and prefill of the default model on this CPU, beside transformers on the same fp32 weights.

    python benchmarks/decode_cpu.py [MODEL.gguf] [--json OUT]

In one run, interleaved: memory read bandwidth, camshaft, transformers; medians. The limit of decode is the bytes
of all weights a step reads over the measured bandwidth. Prints JSON with the full configuration.
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

PROMPT_TOKENS, NEW_TOKENS, ROUNDS, PREFILL_TOKENS = 128, 96, 5, 512


def read_bandwidth() -> float:
    """GB/s of summing a buffer far larger than the caches, all threads, best of several."""
    buffer = torch.ones(2**27, dtype=torch.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        buffer.sum()
        times.append(time.perf_counter() - start)
    return buffer.numel() * 4 / min(times) / 1e9


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


def transformers_times(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds of prefill, and seconds a decoded token."""
    with torch.inference_mode():
        start = time.perf_counter()
        out = model(torch.tensor([prompt]), use_cache=True)
        prefill = time.perf_counter() - start
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        for _ in range(new_tokens - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1:].argmax(-1)
        return prefill, (time.perf_counter() - start) / max(new_tokens - 1, 1)


def camshaft_times(llm: LLM, prompt: list[int], new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and seconds a further token (mean of the run)."""
    params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    stamps = []
    for output in llm.generate_async(prompt, params):
        stamps += [time.perf_counter()] * len(output.outputs[0].token_ids_diff)
    return stamps[0] - start, (stamps[-1] - stamps[0]) / max(new_tokens - 1, 1)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or default_model(show_progress=True).path
    rng = np.random.default_rng(0)
    ours, theirs, bandwidth = [], [], []
    reference = transformers_model(path)
    weight_bytes = sum(p.numel() * 4 for name, p in reference.named_parameters())
    with LLM(path, kv_cache={"enable_block_reuse": False, "max_bytes": 2**29}) as llm:
        vocab = 49000
        for round_index in range(ROUNDS + 1):
            prompt = rng.integers(10, vocab, PROMPT_TOKENS).tolist()
            long = rng.integers(10, vocab, PREFILL_TOKENS).tolist()
            samples = (read_bandwidth(), camshaft_times(llm, prompt, NEW_TOKENS), camshaft_times(llm, long, 1),
                       transformers_times(reference, prompt, NEW_TOKENS), transformers_times(reference, long, 1))
            if round_index:  # the first round warms up
                bandwidth.append(samples[0])
                ours.append((samples[1][1], samples[2][0]))
                theirs.append((samples[3][1], samples[4][0]))
    decode, prefill = (statistics.median(column) for column in zip(*ours, strict=True))
    their_decode, their_prefill = (statistics.median(column) for column in zip(*theirs, strict=True))
    rate = statistics.median(bandwidth)
    limit = weight_bytes / rate / 1e9
    result = {
        "benchmark": "decode_cpu", "camshaft": __version__, "torch": torch.__version__,
        "python": platform.python_version(), "cpu": probe_cpu().name, "threads": torch.get_num_threads(),
        "model": path.name, "dtype": "float32", "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS,
        "rounds": ROUNDS, "weight_bytes": weight_bytes, "read_bandwidth_GBps": round(rate, 2),
        "decode_limit_tok_s": round(1 / limit, 1), "decode_tok_s": round(1 / decode, 1),
        "decode_fraction_of_limit": round(limit / decode, 3), "transformers_decode_tok_s": round(1 / their_decode, 1),
        "decode_speedup": round(their_decode / decode, 2), "prefill_tokens": PREFILL_TOKENS,
        "prefill_tok_s": round(PREFILL_TOKENS / prefill, 1),
        "transformers_prefill_tok_s": round(PREFILL_TOKENS / their_prefill, 1),
        "prefill_speedup": round(their_prefill / prefill, 2),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
