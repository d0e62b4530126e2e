"""Self-attention with rotary positions, over packed tokens seen as one causal sequence.

Owns the projections and the head counts. Where keys and values are cached is decided by the lowering pass.
"""

from __future__ import annotations

import torch
from torch import nn

from camshaft.config.model import ModelConfig
from camshaft.layers.linear import Linear
from camshaft.layers.norm import RMSNorm


class Attention(nn.Module):
    """Multi-head, grouped or multi-query attention of layer ``layer``; ``window`` limits how far back a token sees.

    ``qk_norm``: queries and keys are normalised head by head, by such norms, before they are rotated (Henry et al.,
    2020).
    """

    def __init__(self, config: ModelConfig, layer: int, *, qk_norm: type[RMSNorm] | None = None) -> None:
        super().__init__()
        hidden, head_dim, bias = config.hidden_size, config.head_dim, config.qkv_bias
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.scale = config.attention_scale or head_dim ** -0.5
        self.window = config.window(layer)
        self.softcap = config.attention_softcap
        self.sinks = config.sink_tokens
        self.q_proj = Linear(hidden, config.num_heads * head_dim, bias=bias)
        self.k_proj = Linear(hidden, config.num_kv_heads * head_dim, bias=bias)
        self.v_proj = Linear(hidden, config.num_kv_heads * head_dim, bias=bias)
        self.o_proj = Linear(config.num_heads * head_dim, hidden, bias=config.attention_out_bias)
        self.q_norm = None if qk_norm is None else qk_norm(head_dim, config.norm_eps)
        self.k_norm = None if qk_norm is None else qk_norm(head_dim, config.norm_eps)

    def forward(self, x_TH: torch.Tensor, cos_sin_TD: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``; ``cos_sin_TD`` is the step's rotary table."""
        q_TND, k_TND, v_TND = (project(x_TH).reshape(-1, heads, self.head_dim) for project, heads in (
            (self.q_proj, self.num_heads), (self.k_proj, self.num_kv_heads), (self.v_proj, self.num_kv_heads)))
        if self.q_norm is not None and self.k_norm is not None:
            q_TND, k_TND = self.q_norm(q_TND), self.k_norm(k_TND)
        q_TND, k_TND = torch.ops.camshaft.rope(q_TND, k_TND, cos_sin_TD)
        mixed_TND = torch.ops.camshaft.attention(q_TND, k_TND, v_TND, self.layer, self.scale, self.window,
                                                   self.softcap, self.sinks)
        out: torch.Tensor = self.o_proj(mixed_TND.reshape(-1, self.num_heads * self.head_dim))
        return out
