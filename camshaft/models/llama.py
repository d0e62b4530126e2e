"""Llama and the models that share its definition: Llama 2, Llama 3.x, SmolLM2, Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.layers.attention import Attention
from camshaft.layers.embedding import Embedding
from camshaft.layers.linear import Linear
from camshaft.layers.mlp import GatedMLP
from camshaft.layers.norm import RMSNorm
from camshaft.layers.rope import RotaryTable
from camshaft.models.config_fields import bool_field, check_heads, float_field, int_field, require, rope_field
from camshaft.models.registry import ModelFamily, register_family


class Block(nn.Module):
    """Pre-norm transformer block: attention and gated feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), cos_sin_TD)
        out_TH: torch.Tensor = x_TH + self.mlp(self.post_attention_layernorm(x_TH))
        return out_TH


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.rope, config.head_dim)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, H]``."""
        x_TH = self.embed_tokens(token_ids_T)
        cos_sin_TD = self.rotary(positions_T)
        for block in self.layers:
            x_TH = block(x_TH, cos_sin_TD)
        normed: torch.Tensor = self.norm(x_TH)
        return normed


class LlamaForCausalLM(nn.Module):
    """The decoder and its head; a tied head is the embedding table itself, so it has no parameter of its own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[L, V]`` of the tokens ``logits_rows[L]`` among the packed ``token_ids[T]`` at ``positions[T]``."""
        x_TH = self.model(token_ids, positions)
        x_LH = x_TH.index_select(0, logits_rows)
        logits: torch.Tensor = self.model.embed_tokens.as_head(x_LH) if self.lm_head is None else self.lm_head(x_LH)
        return logits


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
        # Mistral's own default is a window of 4096; null is how a checkpoint says it has none.
        window = data.get("sliding_window", 4096) if mistral else None
        if window is not None:
            window = int_field(data, "sliding_window", 4096)
        bias = not mistral and bool_field(data, "attention_bias", False)
        num_layers = int_field(data, "num_hidden_layers")
        return ModelConfig(
            architecture=architecture, vocab_size=int_field(data, "vocab_size"), hidden_size=hidden,
            intermediate_size=int_field(data, "intermediate_size"), num_layers=num_layers,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, max_position=max_position,
            norm_eps=float_field(data, "rms_norm_eps", 1e-6), rope=rope_field(data),
            tie_word_embeddings=bool_field(data, "tie_word_embeddings", False),
            qkv_bias=bias, attention_out_bias=bias,
            mlp_bias=not mistral and bool_field(data, "mlp_bias", False),
            windows=(window,) * num_layers if window is not None and window < max_position else ())

    def module(self, config: ModelConfig) -> nn.Module:
        """See :meth:`ModelFamily.module`."""
        return LlamaForCausalLM(config)

    def weight_names(self, config: ModelConfig) -> dict[str, str]:
        """The definition's parameters bear the checkpoint's names already."""
        with torch.device("meta"):
            return {name: name for name, _ in self.module(config).named_parameters()}

    def tiny_config(self) -> ModelConfig:
        """Two layers, grouped heads, every bias, llama3 rotary scaling, an untied head."""
        rope = RopeConfig(kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                          original_max_position=64)
        return ModelConfig(architecture="LlamaForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
                           num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_position=256, norm_eps=1e-5,
                           rope=rope, qkv_bias=True, attention_out_bias=True, mlp_bias=True)
