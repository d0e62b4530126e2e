"""Llama and the models that share its definition: Llama 2, Llama 3.x, SmolLM2, Mistral."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.layers.decoder import CausalLM, PreNormBlock
from camshaft.models.config_fields import bool_field, int_field, windows_field
from camshaft.models.decoder_fields import decoder_config
from camshaft.models.registry import ModelFamily, register_family


@register_family
class Llama(ModelFamily):
    """The reference family: pre-norm blocks, RMS norm, rotary positions, grouped heads, SwiGLU.

    Mistral differs from Llama in two settings only: it has no biases, and it may limit attention to a sliding window.
    """

    architectures: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "MistralForCausalLM")

    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """See :meth:`ModelFamily.config_from_hf`. Refuses activations other than silu and unknown rotary kinds."""
        mistral = data["architectures"][0] == "MistralForCausalLM"
        hidden, heads = int_field(data, "hidden_size"), int_field(data, "num_attention_heads")
        config = decoder_config(
            data, num_kv_heads=int_field(data, "num_key_value_heads", 8 if mistral else heads),
            head_dim=int_field(data, "head_dim", hidden // heads),
            max_position=int_field(data, "max_position_embeddings", 131072 if mistral else 2048))
        if mistral:
            # a window of 4096 is Mistral's own default; null is how a checkpoint says it has none
            data = {"sliding_window": 4096, **data}
        else:
            bias = bool_field(data, "attention_bias", False)
            config = dataclasses.replace(config, qkv_bias=bias, attention_out_bias=bias,
                                         mlp_bias=bool_field(data, "mlp_bias", False))
        slides = mistral and data["sliding_window"] is not None
        return config.with_windows(windows_field(data, config.num_layers, lambda layer: slides))

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
