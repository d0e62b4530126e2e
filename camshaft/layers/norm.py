"""Normalisation. Owns the weight and epsilon; fusing with the residual add is a pass."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, statistics in float32 (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Normalise each row of ``x_TH``; same shape and dtype."""
        normed: torch.Tensor = torch.ops.camshaft.rms_norm(x_TH, self.weight, self.eps)
        return normed


class WideRMSNorm(RMSNorm):
    """The norm whose weight stays float32 beside 16-bit activations: their product is rounded once, as in Gemma."""

    float32_parameters: ClassVar[tuple[str, ...]] = ("weight",)
