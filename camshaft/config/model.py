"""A decoder's shape, whatever it was read from (config.json, GGUF metadata, an engine).

Owns the numbers a definition needs; knows no file format and no weight names.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and the scaling that was trained in."""

    theta: float = 10000.0
    kind: str = "default"
    """``"default"``, ``"linear"`` or ``"llama3"``; others are refused by name when a model is read."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer."""

    architecture: str
    """Registry name, as Hugging Face spells it, e.g. ``"LlamaForCausalLM"``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Longest sequence the model was trained for, in tokens."""
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    checkpoint_dtype: str = "float32"
    """Storage type of most weights in the checkpoint (quantised GGUF counts as float32)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of :meth:`to_dict`."""
        return cls(**{**data, "rope": RopeConfig(**data["rope"])})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What the checkpoint says about ending and sampling (generation_config.json or GGUF metadata); None: nothing."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
