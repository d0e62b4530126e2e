"""Gated feed-forward block. Separate gate and up projections; merging them and fusing the product are passes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from camshaft.layers.linear import Linear

_ACTIVATIONS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("silu", F.silu), ("gelu_tanh", functools.partial(F.gelu, approximate="tanh")))


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (SwiGLU and GeGLU; Shazeer, 2020). ``activation``: silu or gelu_tanh."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False,
                 activation: str = "silu") -> None:
        super().__init__()
        self.activation = dict(_ACTIVATIONS)[activation]
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` to ``[T, H]``."""
        down: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x_TH)) * self.up_proj(x_TH))
        return down
