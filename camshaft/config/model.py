"""A decoder's shape, whatever it was read from (config.json, GGUF metadata, an engine).

Owns the numbers a definition needs; knows no file format and no weight names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")
"""Kinds of rotary settings whose table depends on how long a sequence is."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: base frequency and the scaling that was trained in. What each kind does with its
    fields is in ``layers/rope.py``."""

    theta: float = 10000.0
    kind: str = "default"
    """``"default"``, ``"linear"``, ``"dynamic"``, ``"yarn"``, ``"longrope"`` or ``"llama3"``."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    """Positions of the first training, before stretching; 0 where the kind does not use it."""
    attention_factor: float | None = None
    """Scale of the table (yarn, longrope); None: what the kind's rule gives."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """[head_dim / 2] divisors of the frequencies up to ``original_max_position`` positions (longrope)."""
    long_factors: tuple[float, ...] = ()
    """[head_dim / 2] divisors beyond it."""
    longest_sequence: int | None = None
    """Longest sequence a length-dependent table is made for, in tokens; None: ``original_max_position``."""

    def at_length(self, longest: int) -> RopeConfig:
        """These settings for sequences of up to ``longest`` tokens.

        A dynamic or longrope model is given one table, for the longest sequence its engine takes, and not one that
        changes as a sequence grows: cached keys stay right, and a request's tokens depend neither on its batch nor
        on how its prompt was cut. Up to ``original_max_position`` that is the table of the first training.
        """
        return dataclasses.replace(self, longest_sequence=longest) if self.kind in LENGTH_DEPENDENT_ROPES else self


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
    qkv_bias: bool = False
    """Whether the query, key and value projections have a bias."""
    attention_out_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """How many tokens back each layer sees, itself included; None: all. Empty: no layer has a window."""
    sink_tokens: int = 0
    """Tokens at the start that layers with a window see however far back they are."""
    local_rope: RopeConfig | None = None
    """Rotary settings of the layers with a window where they differ from ``rope``."""
    attention_scale: float | None = None
    """Factor of the attention scores; None: ``head_dim ** -0.5``."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    checkpoint_dtype: str = "float32"
    """Storage type of most weights in the checkpoint (quantised GGUF counts as float32)."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of :meth:`to_dict`."""
        local = data["local_rope"]
        return cls(**{**data, "rope": _rope(data["rope"]), "local_rope": None if local is None else _rope(local),
                      "windows": tuple(data["windows"])})

    @property
    def max_sequence(self) -> int:
        """Most tokens of a sequence: ``max_position``, or as far as yarn or dynamic settings stretch it."""
        if self.rope.kind not in ("dynamic", "yarn"):
            return self.max_position
        return max(self.max_position, int(self.rope.original_max_position * self.rope.factor))

    @property
    def default_sequence(self) -> int:
        """Longest sequence to build for unless more is asked for: no further than a table is left unstretched."""
        return self.rope.original_max_position if self.rope.kind in LENGTH_DEPENDENT_ROPES else self.max_sequence

    def at_length(self, longest: int) -> ModelConfig:
        """The same model for sequences of up to ``longest`` tokens; see :meth:`RopeConfig.at_length`."""
        local = None if self.local_rope is None else self.local_rope.at_length(longest)
        return dataclasses.replace(self, rope=self.rope.at_length(longest), local_rope=local)

    def with_windows(self, windows: tuple[int | None, ...]) -> ModelConfig:
        """The same model with ``windows``; none where even its longest sequence is too short for them to hide any."""
        hiding = any(window is not None and window < self.max_sequence for window in windows)
        return dataclasses.replace(self, windows=windows if hiding else ())

    def window(self, layer: int) -> int | None:
        """How many tokens back ``layer`` sees, itself included; None: all."""
        return self.windows[layer] if self.windows else None


def _rope(data: dict[str, Any]) -> RopeConfig:
    return RopeConfig(**{**data, "short_factors": tuple(data["short_factors"]),
                         "long_factors": tuple(data["long_factors"])})


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
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
