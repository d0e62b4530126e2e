"""What ``config.json`` says alike for the decoders of Llama's line: sizes, heads, norms, rotary settings, a tied head.

Owns that part of a shape. Biases, windows and the defaults in which families differ are the families' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from camshaft.config.model import ModelConfig
from camshaft.models.config_fields import (
    MAX_LAYERS,
    MAX_SIZE,
    bool_field,
    check_heads,
    float_field,
    int_field,
    require,
    windows_field,
)
from camshaft.models.rope_fields import rope_field


def decoder_config(data: Mapping[str, Any], *, num_kv_heads: int, head_dim: int, max_position: int) -> ModelConfig:
    """The shape without biases and windows; the arguments are what the family reads under its own defaults.

    CheckpointError for heads that do not fit each other and for an activation other than silu.
    """
    num_heads = int_field(data, "num_attention_heads")
    check_heads("config.json num_attention_heads, num_key_value_heads, head_dim", num_heads, num_kv_heads, head_dim)
    require(data, "hidden_act", ("silu",))
    return ModelConfig(
        architecture=data["architectures"][0], vocab_size=int_field(data, "vocab_size"),
        hidden_size=int_field(data, "hidden_size"), intermediate_size=int_field(data, "intermediate_size"),
        num_layers=int_field(data, "num_hidden_layers", most=MAX_LAYERS), num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, max_position=max_position,
        norm_eps=float_field(data, "rms_norm_eps", 1e-6),
        rope=rope_field(data, head_dim=head_dim, max_position=max_position),
        tie_word_embeddings=bool_field(data, "tie_word_embeddings", False))


def later_windows_field(data: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """How far back each layer sees where the first ``max_window_layers`` (28 unless given) see everything and those
    after them a window (4096 unless given), if ``use_sliding_window`` is set; ``layer_types`` says it layer by layer.
    """
    window = data.get("sliding_window", 4096) if bool_field(data, "use_sliding_window", False) else None
    first = 0 if data.get("max_window_layers") == 0 else int_field(data, "max_window_layers", 28, most=MAX_SIZE)
    return windows_field({**data, "sliding_window": window}, num_layers,
                         lambda layer: window is not None and layer >= first)
