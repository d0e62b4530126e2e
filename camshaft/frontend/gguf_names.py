"""What GGUF calls things, and what Hugging Face calls them: hyperparameters, tensors, rotary layout.

Owns the mapping of a file onto ModelConfig and Hugging Face tensor names; what differs between architectures is in
``gguf_architectures``. Everything that is not known is refused by name. Reads no bytes of a file.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from camshaft.config.model import GenerationDefaults, ModelConfig
from camshaft.core.errors import CheckpointError
from camshaft.frontend.gguf_architectures import ARCHITECTURES, GgufArchitecture, Sizes
from camshaft.frontend.gguf_metadata import Metadata
from camshaft.frontend.gguf_rope import ROPE_FREQS, rope_config
from camshaft.models.config_fields import MAX_SIZE, check_heads

_CONTROL = 3
_TURN_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>")
_QWEN_TEXT_END = "<|endoftext|>"
"""Ends a text beside the turn's end in Qwen's models; in others it only separates training texts."""
_DTYPES = MappingProxyType({"F16": "float16", "BF16": "bfloat16"})
_TOP = MappingProxyType({"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
                         "output.weight": "lm_head.weight"})

Inventory = dict[str, tuple[tuple[int, ...], str]]
"""Tensor name → row-major shape and type name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """How one tensor of a file becomes one of the checkpoint."""

    target: str
    """Hugging Face name."""
    rotary_heads: int | None = None
    """Number of heads, when rows are stored interleaved for rotation; None: rows are in order."""
    holds_one_plus: bool = False
    """Whether the file has 1 + w where the checkpoint has w."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufPlan:
    """How a file becomes a checkpoint."""

    config: ModelConfig
    generation: GenerationDefaults
    tensors: dict[str, TensorPlan]
    """By GGUF name; tensors folded into the configuration are left out."""


def halves_order(num_rows: int, num_heads: int) -> torch.Tensor:
    """[num_rows] GGUF row of each Hugging Face row.

    GGUF keeps the two elements that rotate together next to each other; Hugging Face keeps the first ones
    of all pairs of a head in its first half, the second ones in its second half.
    """
    return torch.arange(num_rows).view(num_heads, -1, 2).transpose(1, 2).reshape(-1)


def _check_supported(general: Metadata, inventory: Inventory) -> GgufArchitecture:
    """The architecture's description, once the file is known to be one that can be read."""
    name = general.text("general.architecture", "")
    if name not in ARCHITECTURES:
        raise general.refuse("general.architecture", f"one of {', '.join(ARCHITECTURES.names())}",
                             "Use the model's Hugging Face folder, or another model")
    if general.whole("split.count", 1) > 1:
        raise general.refuse("split.count", "a file in one part",
                             "Join the parts with llama.cpp's gguf-split --merge and open the result")
    meta, architecture = general.under(name), ARCHITECTURES.get(name)()
    if meta.whole("expert_count", 0):
        raise meta.refuse("expert_count", "a model without experts; mixtures are not supported from GGUF")
    for key in architecture.refused_keys:
        if key in meta:
            raise meta.refuse(key, f"to be absent, as the {name} definition does not compute it")
    for tensor in ("token_embd.weight", "output_norm.weight"):
        if tensor not in inventory:
            raise CheckpointError("tensor", tensor, f"to be present in {general.path}",
                                  "Download or convert the file again")
    if len(inventory["token_embd.weight"][0]) != 2:
        raise CheckpointError("tensor", "token_embd.weight", f"two dimensions in {general.path}",
                              "Download or convert the file again")
    return architecture


def _num_layers(meta: Metadata, inventory: Inventory) -> int:
    """Bounded by the tensors, before anything is made a layer."""
    found = meta.size("block_count")
    if found > len(inventory):
        raise meta.refuse("block_count", f"no more layers than the file's {len(inventory)} tensors")
    return found


def _config(architecture: GgufArchitecture, meta: Metadata, inventory: Inventory,
            factors: torch.Tensor | None) -> ModelConfig:
    vocab_size, hidden_size = inventory["token_embd.weight"][0]
    num_heads = meta.size("attention.head_count")
    if hidden_size != meta.size("embedding_length"):
        raise meta.refuse("embedding_length", f"the embedding's {hidden_size} columns")
    head_dim = meta.size("attention.key_length", max(hidden_size // num_heads, 1))
    num_kv_heads = meta.size("attention.head_count_kv", num_heads)
    check_heads(f"{meta.prefix}attention.head_count, head_count_kv, key_length (in {meta.path})", num_heads,
                num_kv_heads, head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.size(key, head_dim) != head_dim:
            raise meta.refuse(key, f"the head size {head_dim}")
    counts: collections.Counter[str] = collections.Counter()
    for shape, kind in inventory.values():
        counts[kind] += math.prod(shape)
    sizes = Sizes(num_layers=_num_layers(meta, inventory), hidden_size=hidden_size, num_heads=num_heads,
                  max_position=meta.size("context_length"))
    attention = architecture.attention(meta, sizes)
    return ModelConfig(
        architecture=architecture.architecture, vocab_size=vocab_size, hidden_size=hidden_size,
        intermediate_size=meta.size("feed_forward_length"), num_layers=sizes.num_layers,
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, max_position=sizes.max_position,
        norm_eps=meta.real("attention.layer_norm_rms_epsilon"), rope=rope_config(meta, head_dim, factors),
        tie_word_embeddings="output.weight" not in inventory, qkv_bias="blk.0.attn_q.bias" in inventory,
        attention_out_bias="blk.0.attn_output.bias" in inventory, mlp_bias="blk.0.ffn_up.bias" in inventory,
        windows=attention.windows, local_rope=attention.local_rope, attention_scale=attention.attention_scale,
        attention_softcap=attention.attention_softcap, logits_softcap=attention.logits_softcap,
        checkpoint_dtype=_DTYPES.get(counts.most_common(1)[0][0], "float32"))


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
        qwen = values.get("tokenizer.ggml.pre") == "qwen2"
        ends += [controls.get(name) for name in (*_TURN_ENDS, *([_QWEN_TEXT_END] if qwen else []))]
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


def _tensor(path: Path, name: str, shape: tuple[int, ...], architecture: GgufArchitecture,
            config: ModelConfig) -> TensorPlan | None:
    """What becomes of a tensor; None when this architecture has no such tensor."""
    target = _TOP.get(name)
    if target is not None:
        return TensorPlan(target=target, holds_one_plus=architecture.norms_hold_one_plus and "norm" in name)
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or not parts[1].isdecimal() or parts[3] not in ("weight", "bias"):
        return None
    stem = architecture.block.get(parts[2])
    if stem is None or int(parts[1]) >= config.num_layers:
        return None
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(parts[2])
    if heads is not None and shape[0] != heads * config.head_dim:
        raise CheckpointError("tensor", name, f"{heads * config.head_dim} rows (found {shape[0]}, in {path})",
                              "Use another conversion of the model")
    return TensorPlan(target=f"model.layers.{int(parts[1])}.{stem}.{parts[3]}",
                      rotary_heads=heads if architecture.interleaved else None,
                      holds_one_plus=architecture.norms_hold_one_plus and "norm" in parts[2])


def plan(path: Path, metadata: dict[str, Any], inventory: Inventory, factors: torch.Tensor | None) -> GgufPlan:
    """Decide how the file at ``path`` is read. ``factors`` are the values of ``rope_freqs.weight``, if it has them.

    Raises CheckpointError for an architecture, hyperparameter or tensor that is missing or not known.
    """
    general = Metadata(path, metadata)
    architecture = _check_supported(general, inventory)
    name = general.text("general.architecture", "")
    config = _config(architecture, general.under(name), inventory, factors)
    tensors: dict[str, TensorPlan] = {}
    for tensor, (shape, _) in inventory.items():
        if tensor == ROPE_FREQS:
            continue
        planned = _tensor(path, tensor, shape, architecture, config)
        if planned is None:
            raise CheckpointError("tensor", tensor, f"a tensor of a {name} model with {config.num_layers} layers "
                                                    f"(in {path})", "Use another conversion of the model")
        tensors[tensor] = planned
    return GgufPlan(config=config, generation=generation_defaults(metadata), tensors=tensors)
