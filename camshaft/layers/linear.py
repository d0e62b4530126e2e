"""Linear projection. Owns its weight's shape; merging, quantising and sharding are passes."""

from __future__ import annotations

import torch
from torch import nn


class Linear(nn.Module):
    """``y[T, N] = x[T, K] @ weight[N, K].T + bias[N]``; the bias is optional."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Project ``x_TK``; returns ``[T, N]`` in its dtype."""
        projected: torch.Tensor = torch.ops.camshaft.linear(x_TK, self.weight, self.bias)
        return projected
