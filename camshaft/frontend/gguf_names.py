"""What GGUF calls things, and what Hugging Face calls them: hyperparameters, tensors, rotary layout.

Owns the mapping of the "llama" architecture (Llama 2 and 3, Mistral, SmolLM2) onto ModelConfig and
Hugging Face tensor names; everything it does not know is refused by name. Reads no bytes of a file.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from camshaft.config.model import GenerationDefaults, ModelConfig, RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.layers.rope import inverse_frequencies
from camshaft.models.config_fields import MAX_SIZE, check_heads

ROPE_FREQS = "rope_freqs.weight"
_CONTROL = 3
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
_LLAMA3_ORIGINAL_POSITIONS = 8192
_DTYPES = {"F16": "float16", "BF16": "bfloat16"}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}

Inventory = dict[str, tuple[tuple[int, ...], str]]
"""Tensor name → row-major shape and type name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """How a file becomes a checkpoint."""

    config: ModelConfig
    generation: GenerationDefaults
    targets: dict[str, str]
    """GGUF tensor name → Hugging Face name; tensors folded into the configuration are left out."""
    rotary_heads: dict[str, int]
    """Tensors whose rows GGUF stores interleaved for rotation → their number of heads."""


def halves_order(num_rows: int, num_heads: int) -> torch.Tensor:
    """[num_rows] GGUF row of each Hugging Face row.

    GGUF keeps the two elements that rotate together next to each other; Hugging Face keeps the first ones
    of all pairs of a head in its first half, the second ones in its second half.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


class _Metadata:
    """Typed look-ups of metadata with errors that name the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def refuse(self, key: str, allowed: str, remedy: str = "Use another conversion of the model") -> CheckpointError:
        return CheckpointError(key, self.values.get(key), f"{allowed} (in {self.path})", remedy)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a per-layer array is accepted when all its values agree."""
        found = self.values.get(key, default)
        if isinstance(found, np.ndarray):
            if found.size == 0 or (found != found[0]).any():
                raise self.refuse(key, "one value for all layers; per-layer sizes are not supported")
            found = found[0].item()
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= MAX_SIZE:
            raise self.refuse(key, f"a whole number from 1 to {MAX_SIZE}")
        return found

    def text(self, key: str, default: str) -> str:
        """A string."""
        found = self.values.get(key, default)
        if not isinstance(found, str):
            raise self.refuse(key, "a string")
        return found

    def whole(self, key: str, default: int) -> int:
        """A whole number that may be 0."""
        found = self.values.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 1 << 31:
            raise self.refuse(key, "a whole number")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        found = self.values.get(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found < math.inf:
            raise self.refuse(key, "a positive number")
        return float(found)


def _check_supported(meta: _Metadata, inventory: Inventory) -> None:
    if meta.text("general.architecture", "") != "llama":
        raise meta.refuse("general.architecture", "'llama', the only GGUF architecture supported so far "
                          "(Llama, Mistral, SmolLM2)", "Use the model's Hugging Face folder, or another model")
    if meta.whole("split.count", 1) > 1:
        raise meta.refuse("split.count", "a file in one part",
                          "Join the parts with llama.cpp's gguf-split --merge and open the result")
    if meta.whole("llama.expert_count", 0):
        raise meta.refuse("llama.expert_count", "a model without experts; mixtures are not supported from GGUF")
    for name in ("token_embd.weight", "output_norm.weight"):
        if name not in inventory:
            raise CheckpointError("tensor", name, f"to be present in {meta.path}", "Download or convert the file again")
    if len(inventory["token_embd.weight"][0]) != 2:
        raise CheckpointError("tensor", "token_embd.weight", f"two dimensions in {meta.path}",
                              "Download or convert the file again")


def _rope(meta: _Metadata, head_dim: int, factors: torch.Tensor | None) -> RopeConfig:
    theta = meta.real("llama.rope.freq_base", 10000.0)
    kind = meta.text("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise meta.refuse("llama.rope.scaling.type", "'none' or 'linear'")
    if factors is not None and not bool((factors == 1).all()):
        if kind != "none":
            raise meta.refuse("llama.rope.scaling.type", f"'none' beside {ROPE_FREQS}")
        return _llama3_rope(meta, theta, head_dim, factors.double())
    linear = meta.real("llama.rope.scaling.factor", meta.values.get("llama.rope.scale_linear", 1.0))
    if kind == "linear" or (linear != 1.0 and "llama.rope.scaling.type" not in meta.values):
        return RopeConfig(theta=theta, kind="linear", factor=linear)
    return RopeConfig(theta=theta)


def llama3_factors(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float64: what Llama 3's scaling divides each frequency by."""
    plain = inverse_frequencies(dataclasses.replace(rope, kind="default"), head_dim)
    return plain.double() / inverse_frequencies(rope, head_dim).double()


def _llama3_rope(meta: _Metadata, theta: float, head_dim: int, factors: torch.Tensor) -> RopeConfig:
    """The file gives one divisor a frequency and not the rule behind them, so the rule is checked against them."""
    original = meta.size("llama.rope.scaling.original_context_length", _LLAMA3_ORIGINAL_POSITIONS)
    rope = RopeConfig(theta=theta, kind="llama3", factor=round(float(factors.max()), 4), low_freq_factor=1.0,
                      high_freq_factor=4.0, original_max_position=original)
    if factors.shape != (head_dim // 2,) or not torch.allclose(llama3_factors(rope, head_dim), factors, rtol=1e-4):
        raise CheckpointError("tensor", ROPE_FREQS, f"the frequency factors of Llama 3.1's scaling (in {meta.path})",
                              "Other factors are not supported; use the model's Hugging Face folder")
    return rope


def _config(meta: _Metadata, inventory: Inventory, factors: torch.Tensor | None) -> ModelConfig:
    vocab_size, hidden_size = inventory["token_embd.weight"][0]
    num_heads = meta.size("llama.attention.head_count")
    if hidden_size != meta.size("llama.embedding_length"):
        raise meta.refuse("llama.embedding_length", f"the embedding's {hidden_size} columns")
    head_dim = meta.size("llama.attention.key_length", max(hidden_size // num_heads, 1))
    num_kv_heads = meta.size("llama.attention.head_count_kv", num_heads)
    check_heads(f"llama.attention.head_count, head_count_kv, key_length (in {meta.path})", num_heads, num_kv_heads,
                head_dim)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if meta.size(key, head_dim) != head_dim:
            raise meta.refuse(key, f"the head size {head_dim}")
    counts: collections.Counter[str] = collections.Counter()
    for shape, kind in inventory.values():
        counts[kind] += math.prod(shape)
    window, num_layers = meta.whole("llama.attention.sliding_window", 0), meta.size("llama.block_count")
    return ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab_size, hidden_size=hidden_size,
        intermediate_size=meta.size("llama.feed_forward_length"), num_layers=num_layers,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        max_position=meta.size("llama.context_length"),
        norm_eps=_shortest(meta.real("llama.attention.layer_norm_rms_epsilon")),
        rope=_rope(meta, head_dim, factors), tie_word_embeddings="output.weight" not in inventory,
        qkv_bias="blk.0.attn_q.bias" in inventory,
        attention_out_bias="blk.0.attn_output.bias" in inventory, mlp_bias="blk.0.ffn_up.bias" in inventory,
        windows=(window,) * num_layers if window else (),
        checkpoint_dtype=_DTYPES.get(counts.most_common(1)[0][0], "float32"))


def _shortest(value: float) -> float:
    """A float32 of the file as the decimal it was made from (1e-5 rather than 9.99999974e-06)."""
    return float(str(np.float32(value)))


def generation_defaults(values: dict[str, Any]) -> GenerationDefaults:
    """Ending and sampling defaults of the metadata; the ends of a chat turn are found by their names too."""
    tokens = values.get("tokenizer.ggml.tokens")
    types = values.get("tokenizer.ggml.token_type")
    limit = len(tokens) if isinstance(tokens, list) else 1 << 31

    def token_id(key: str) -> int | None:
        found = _number(values, f"tokenizer.ggml.{key}_token_id", limit - 1)
        return None if found is None else int(found)

    ends = [token_id("eos"), token_id("eot"), token_id("eom")]
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) == len(tokens):
        controls = {tokens[index]: int(index) for index in np.flatnonzero(types == _CONTROL)}
        ends += [controls.get(name) for name in _TURN_ENDS]
    top_k = _number(values, "general.sampling.top_k", MAX_SIZE)
    return GenerationDefaults(
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)), bos_token_id=token_id("bos"),
        pad_token_id=token_id("padding"), temperature=_number(values, "general.sampling.temp", 100),
        top_k=None if top_k is None else int(top_k), top_p=_number(values, "general.sampling.top_p", 1),
        min_p=_number(values, "general.sampling.min_p", 1))


def _number(values: dict[str, Any], key: str, bound: float) -> float | None:
    """A number from 0 to ``bound``; defaults that are none are worth no refusal."""
    found = values.get(key)
    usable = isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= bound
    return found if usable else None


def _target(name: str, num_layers: int) -> str | None:
    """Hugging Face name of a tensor; None when this architecture has no such tensor."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal() or parts[3] not in ("weight", "bias"):
        return None
    stem = _BLOCK.get(parts[2])
    if stem is None or int(parts[1]) >= num_layers:
        return None
    return f"model.layers.{int(parts[1])}.{stem}.{parts[3]}"


def plan(path: Path, metadata: dict[str, Any], inventory: Inventory, factors: torch.Tensor | None) -> GgufPlan:
    """Decide how the file at ``path`` is read. ``factors`` are the values of ``rope_freqs.weight``, if it has them.

    Raises CheckpointError for an architecture, hyperparameter or tensor that is missing or not known.
    """
    meta = _Metadata(path, metadata)
    _check_supported(meta, inventory)
    config = _config(meta, inventory, factors)
    targets: dict[str, str] = {}
    rotary_heads: dict[str, int] = {}
    for name, (shape, _) in inventory.items():
        if name == ROPE_FREQS:
            continue
        target = _target(name, config.num_layers)
        if target is None:
            raise CheckpointError("tensor", name, f"a tensor of a Llama model with {config.num_layers} layers "
                                                  f"(in {path})", "Use another conversion of the model")
        targets[name] = target
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            if shape[0] != heads * config.head_dim:
                raise CheckpointError("tensor", name, f"{heads * config.head_dim} rows (found {shape[0]}, in {path})",
                                      "Use another conversion of the model")
            rotary_heads[name] = heads
    return GgufPlan(config=config, generation=generation_defaults(metadata), targets=targets, rotary_heads=rotary_heads)
