"""The peer the CPU benchmarks run beside: transformers on the very tensors camshaft runs.

Owns making the model and its two ways to generate (one request, a static batch). What is compared is each
benchmark's own business.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import torch

from camshaft.frontend.checkpoint import open_checkpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One generation: seconds to the first token, seconds between further ones, the tokens."""

    first: float
    gaps: list[float]
    tokens: list[int]


def transformers_model(path: Path) -> torch.nn.Module:
    """LlamaForCausalLM holding the tensors of the Llama checkpoint at ``path`` in fp32."""
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


@torch.inference_mode()
def transformers_run(model: torch.nn.Module, prompt: list[int], new_tokens: int) -> Run:
    """Greedy generation of one request by the plain loop over ``model`` with its own cache."""
    stamps = [time.perf_counter()]
    out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    tokens = [int(out.logits[0, -1].argmax())]
    stamps.append(time.perf_counter())
    while len(tokens) < new_tokens:
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        tokens.append(int(out.logits[0, -1].argmax()))
        stamps.append(time.perf_counter())
    times = [after - before for before, after in itertools.pairwise(stamps)]
    return Run(times[0], times[1:], tokens)


@torch.inference_mode()
def transformers_batch(model: torch.nn.Module, prompts: list[list[int]], new_tokens: list[int]) -> list[list[int]]:
    """Greedy generation of a static batch: prompts padded on the left, every row runs until the longest has ended."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    picked, position = [out.logits[:, -1].argmax(-1)], positions[:, -1:]
    for _ in range(max(new_tokens) - 1):
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=mask.dtype)], 1)
        position = position + 1
        out = model(picked[-1][:, None], attention_mask=mask, position_ids=position,
                    past_key_values=out.past_key_values, use_cache=True)
        picked.append(out.logits[:, -1].argmax(-1))
    rows = torch.stack(picked, 1).tolist()
    return [row[:count] for row, count in zip(rows, new_tokens, strict=True)]
