"""Gated feed-forward block. Separate gate and up projections; merging them and fusing the product are passes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from camshaft.layers.linear import Linear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` (SwiGLU; Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        down: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x_TH)) * self.up_proj(x_TH))
        return down
