"""Llama and the models that share its definition: Llama 2, Llama 3.x, SmolLM2, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.layers.decoder import CausalLM, PreNormBlock
from camshaft.models.config_fields import (
    MAX_LAYERS,
    bool_field,
    check_heads,
    float_field,
    int_field,
    require,
    rope_field,
    windows_field,
)
from camshaft.models.registry import ModelFamily, register_family


@register_family
class Llama(ModelFamily):
    """The reference family: pre-norm blocks, RMS norm, rotary positions, grouped heads, SwiGLU.

    Mistral differs from Llama in two settings only: it has no biases, and it may limit attention to a sliding window.
    """

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "MistralForCausalLM")

    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """See :meth:`ModelFamily.config_from_hf`. Refuses activations other than silu and unknown rotary kinds."""
        architecture = data["architectures"][0]
        mistral = architecture == "MistralForCausalLM"
        hidden, heads = int_field(data, "hidden_size"), int_field(data, "num_attention_heads")
        kv_heads = int_field(data, "num_key_value_heads", 8 if mistral else heads)
        head_dim = int_field(data, "head_dim", hidden // heads)
        check_heads("config.json num_attention_heads, num_key_value_heads, head_dim", heads, kv_heads, head_dim)
        require(data, "hidden_act", ("silu",))
        max_position = int_field(data, "max_position_embeddings", 131072 if mistral else 2048)
        bias = not mistral and bool_field(data, "attention_bias", False)
        num_layers = int_field(data, "num_hidden_layers", most=MAX_LAYERS)
        if mistral:
            # Mistral's own default is a window of 4096; null is how a checkpoint says it has none.
            data = {"sliding_window": 4096, **data}
        config = ModelConfig(
            architecture=architecture, vocab_size=int_field(data, "vocab_size"), hidden_size=hidden,
            intermediate_size=int_field(data, "intermediate_size"), num_layers=num_layers,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position=max_position,
            norm_eps=float_field(data, "rms_norm_eps", 1e-6),
            rope=rope_field(data, head_dim=head_dim, max_position=max_position),
            tie_word_embeddings=bool_field(data, "tie_word_embeddings", False),
            qkv_bias=bias, attention_out_bias=bias,
            mlp_bias=not mistral and bool_field(data, "mlp_bias", False))
        slides = mistral and data["sliding_window"] is not None
        return config.with_windows(windows_field(data, num_layers, lambda layer: slides))

    def module(self, config: ModelConfig) -> nn.Module:
        """See :meth:`ModelFamily.module`."""
        return CausalLM(config, PreNormBlock)

    def tiny_config(self) -> ModelConfig:
        """Two layers, grouped heads, every bias, llama3 rotary scaling, an untied head."""
        rope = RopeConfig(kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position=64)
        return ModelConfig(architecture="LlamaForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
                           num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=256, norm_eps=1e-5,
                           rope=rope, qkv_bias=True, attention_out_bias=True, mlp_bias=True)
