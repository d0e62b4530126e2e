"""The frame of a decoder-only model: embedding, blocks over a residual stream, final norm, head.

Owns what families have in common; which block they repeat, and what differs in it, is their own file's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from camshaft.config.model import ModelConfig
from camshaft.layers.attention import Attention
from camshaft.layers.embedding import Embedding
from camshaft.layers.linear import Linear
from camshaft.layers.mlp import GatedMLP
from camshaft.layers.norm import RMSNorm
from camshaft.layers.rope import RotaryTable

MakeBlock = Callable[[ModelConfig, int], nn.Module]
"""Block of a layer: ``forward(x[T, H], cos_sin[T, head_dim]) -> [T, H]``."""


class PreNormBlock(nn.Module):
    """Pre-norm transformer block: attention and gated feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: type[RMSNorm] | None = None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, layer, qk_norm=qk_norm)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        x_TH = x_TH + self.self_attn(self.input_layernorm(x_TH), cos_sin_TD)
        out_TH: torch.Tensor = x_TH + self.mlp(self.post_attention_layernorm(x_TH))
        return out_TH


class Decoder(nn.Module):
    """Embedding, blocks and the final norm. Layers with a window rotate by ``config.local_rope`` where it is given."""

    def __init__(self, config: ModelConfig, block: MakeBlock, *, embed_scale: float | None = None,
                 norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=embed_scale)
        self.is_local = tuple(config.local_rope is not None and config.window(layer) is not None
                              for layer in range(config.num_layers))
        if not all(self.is_local):
            self.rotary = RotaryTable(config.rope, config.head_dim)
        if config.local_rope is not None and any(self.is_local):
            self.local_rotary = RotaryTable(config.local_rope, config.head_dim)
        self.layers = nn.ModuleList(block(config, layer) for layer in range(config.num_layers))
        self.norm = norm(config.hidden_size, config.norm_eps)

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, H]``."""
        x_TH = self.embed_tokens(token_ids_T)
        tables = {local: (self.local_rotary if local else self.rotary)(positions_T) for local in set(self.is_local)}
        for block, local in zip(self.layers, self.is_local, strict=True):
            x_TH = block(x_TH, tables[local])
        normed: torch.Tensor = self.norm(x_TH)
        return normed


class CausalLM(nn.Module):
    """The decoder and its head; a tied head is the embedding table itself, so it has no parameter of its own."""

    def __init__(self, config: ModelConfig, block: MakeBlock, *, embed_scale: float | None = None,
                 norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.model = Decoder(config, block, embed_scale=embed_scale, norm=norm)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(config.hidden_size, config.vocab_size)
        self.softcap = config.logits_softcap

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[L, V]`` of the tokens ``logits_rows[L]`` among the packed ``token_ids[T]`` at ``positions[T]``."""
        x_TH = self.model(token_ids, positions)
        x_LH = x_TH.index_select(0, logits_rows)
        logits: torch.Tensor = self.model.embed_tokens.as_head(x_LH) if self.lm_head is None else self.lm_head(x_LH)
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
