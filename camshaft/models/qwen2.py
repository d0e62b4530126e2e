"""Qwen2 and Qwen2.5 (Yang et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.layers.decoder import CausalLM, PreNormBlock
from camshaft.models.config_fields import (
    MAX_LAYERS,
    MAX_SIZE,
    bool_field,
    check_heads,
    float_field,
    int_field,
    require,
    rope_field,
    windows_field,
)
from camshaft.models.registry import ModelFamily, register_family


def qwen_config(data: Mapping[str, Any], *, head_dim: int, qkv_bias: bool, attention_out_bias: bool) -> ModelConfig:
    """The shape of a Qwen model, whose generations differ in the head size and in which projections have a bias.

    The first ``max_window_layers`` layers see everything and those after them a window, where ``use_sliding_window``
    is set; ``layer_types`` says it layer by layer.
    """
    heads = int_field(data, "num_attention_heads")
    kv_heads = int_field(data, "num_key_value_heads", heads)
    check_heads("config.json num_attention_heads, num_key_value_heads, head_dim", heads, kv_heads, head_dim)
    require(data, "hidden_act", ("silu",))
    max_position = int_field(data, "max_position_embeddings", 32768)
    num_layers = int_field(data, "num_hidden_layers", most=MAX_LAYERS)
    data = {**data, "sliding_window": data.get("sliding_window", 4096)}
    if not bool_field(data, "use_sliding_window", False):
        data["sliding_window"] = None
    first_sliding = _window_layers(data)
    config = ModelConfig(
        architecture=data["architectures"][0], vocab_size=int_field(data, "vocab_size"),
        hidden_size=int_field(data, "hidden_size"), intermediate_size=int_field(data, "intermediate_size"),
        num_layers=num_layers, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position=max_position,
        norm_eps=float_field(data, "rms_norm_eps", 1e-6),
        rope=rope_field(data, head_dim=head_dim, max_position=max_position),
        tie_word_embeddings=bool_field(data, "tie_word_embeddings", False),
        qkv_bias=qkv_bias, attention_out_bias=attention_out_bias)
    slides = data["sliding_window"] is not None
    return config.with_windows(windows_field(data, num_layers, lambda layer: slides and layer >= first_sliding))


def _window_layers(data: Mapping[str, Any]) -> int:
    return 0 if data.get("max_window_layers") == 0 else int_field(data, "max_window_layers", 28, most=MAX_SIZE)


@register_family
class Qwen2(ModelFamily):
    """Differs from Llama in that queries, keys and values have a bias and the output projection has none, and in that
    later layers may see a sliding window only.
    """

    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)

    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """See :meth:`ModelFamily.config_from_hf`."""
        hidden, heads = int_field(data, "hidden_size"), int_field(data, "num_attention_heads")
        head_dim = int_field(data, "head_dim", hidden // heads)
        return qwen_config(data, head_dim=head_dim, qkv_bias=True, attention_out_bias=False)

    def module(self, config: ModelConfig) -> nn.Module:
        """See :meth:`ModelFamily.module`."""
        return CausalLM(config, PreNormBlock)

    def tiny_config(self) -> ModelConfig:
        """Two layers, the second with a window, biased q, k and v, yarn rotary scaling, an untied head."""
        rope = RopeConfig(theta=1000000.0, kind="yarn", factor=4.0, original_max_position=64)
        return ModelConfig(architecture="Qwen2ForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
                           num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=256, norm_eps=1e-6,
                           rope=rope, qkv_bias=True, windows=(None, 12))
