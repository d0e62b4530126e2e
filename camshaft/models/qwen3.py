"""Qwen3's dense models (Yang et al., 2025)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.layers.decoder import CausalLM, PreNormBlock
from camshaft.layers.norm import RMSNorm
from camshaft.models.config_fields import bool_field, int_field
from camshaft.models.decoder_fields import decoder_config, later_windows_field
from camshaft.models.registry import ModelFamily, register_family


@register_family
class Qwen3(ModelFamily):
    """Differs from Llama in that every query and key head is RMS-normalised before it is rotated, and in a head size
    of its own (``head_dim``, 128 unless given). Windows are as in Qwen2; projections have biases only where
    ``attention_bias`` asks for them.
    """

    architectures: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)

    def config_from_hf(self, data: Mapping[str, Any]) -> ModelConfig:
        """See :meth:`ModelFamily.config_from_hf`."""
        heads, bias = int_field(data, "num_attention_heads"), bool_field(data, "attention_bias", False)
        config = decoder_config(data, num_kv_heads=int_field(data, "num_key_value_heads", heads),
                                head_dim=int_field(data, "head_dim", 128),
                                max_position=int_field(data, "max_position_embeddings", 32768))
        config = dataclasses.replace(config, qkv_bias=bias, attention_out_bias=bias)
        return config.with_windows(later_windows_field(data, config.num_layers))

    def module(self, config: ModelConfig) -> nn.Module:
        """See :meth:`ModelFamily.module`."""
        return CausalLM(config, functools.partial(PreNormBlock, qk_norm=RMSNorm))

    def tiny_config(self) -> ModelConfig:
        """Two layers, the second with a window, heads wider together than the hidden size, every attention bias."""
        return ModelConfig(architecture="Qwen3ForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
                           num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position=256, norm_eps=1e-6,
                           rope=RopeConfig(theta=1000000.0), qkv_bias=True, attention_out_bias=True,
                           windows=(None, 12))
