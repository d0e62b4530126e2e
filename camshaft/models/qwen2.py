"""Qwen2 and Qwen2.5 (Yang et al., 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.layers.decoder import CausalLM, PreNormBlock
from camshaft.models.config_fields import int_field
from camshaft.models.decoder_fields import decoder_config, later_windows_field
from camshaft.models.registry import ModelFamily, register_family


@register_family
class Qwen2(ModelFamily):
    """Differs from Llama in that queries, keys and values have a bias and the output projection has none, and in that
    later layers may see a sliding window only.
    """

    architectures: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)

    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """See :meth:`ModelFamily.config_from_hf`."""
        hidden, heads = int_field(data, "hidden_size"), int_field(data, "num_attention_heads")
        config = decoder_config(data, num_kv_heads=int_field(data, "num_key_value_heads", heads),
                                head_dim=int_field(data, "head_dim", hidden // heads),
                                max_position=int_field(data, "max_position_embeddings", 32768))
        config = dataclasses.replace(config, qkv_bias=True)
        return config.with_windows(later_windows_field(data, config.num_layers))

    def module(self, config: ModelConfig) -> nn.Module:
        """See :meth:`ModelFamily.module`."""
        return CausalLM(config, PreNormBlock)

    def tiny_config(self) -> ModelConfig:
        """Two layers, the second with a window, biased q, k and v, yarn rotary scaling, an untied head."""
        rope = RopeConfig(theta=1000000.0, kind="yarn", factor=4.0, original_max_position=64)
        return ModelConfig(architecture="Qwen2ForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
                           num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=256, norm_eps=1e-6,
                           rope=rope, qkv_bias=True, windows=(None, 12))
