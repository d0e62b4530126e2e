"""Rotary position embedding (Su et al., 2021): the frequencies and the table a forward pass makes from them once.

Owns the scaling kinds a model was trained with. Rotating queries and keys is the op ``camshaft::rope``.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from camshaft.config.model import RopeConfig
from camshaft.core.errors import InternalError

ROPE_KINDS = ("default", "linear", "llama3")


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair: ``[head_dim / 2]`` float32, on the CPU whatever the default device.

    ``linear`` stretches every wavelength by ``factor``. ``llama3`` (Llama 3.1 model card) stretches only those longer
    than ``original_max_position / low_freq_factor``, leaves those shorter than ``original_max_position /
    high_freq_factor``, and blends in between.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / (rope.theta ** exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position * plain / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
        return keep * plain + (1.0 - keep) * plain / rope.factor
    raise InternalError(f"rope kind {rope.kind!r} reached a layer; known: {', '.join(ROPE_KINDS)}")


class RotaryTable(nn.Module):
    """Cosines and sines of a step's positions, shared by all layers."""

    inv_freq: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """``[T, head_dim]`` float32: half cosines, half sines."""
        table: torch.Tensor = torch.ops.camshaft.rope_cos_sin(positions_T, self.inv_freq, 1.0)
        return table
