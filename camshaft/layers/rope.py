"""Rotary position embedding (Su et al., 2021): the frequencies and the table a forward pass makes from them once.

Owns every way of stretching positions that models are trained with. Rotating queries and keys is the op
``camshaft::rope``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn

from camshaft.config.model import RopeConfig
from camshaft.core.errors import InternalError

_FURTHEST = 2.0**31
"""No position is beyond it."""


def _plain(theta: float, head_dim: int) -> torch.Tensor:
    """``theta ** (-2i / head_dim)`` for pair i, on the CPU whatever the default device."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    return 1.0 / (theta ** exponents)


def _default(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    return _plain(rope.theta, head_dim)


def _linear(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Position interpolation (Chen et al., 2023): every wavelength ``factor`` times as long."""
    return _plain(rope.theta, head_dim) / rope.factor


def _dynamic(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """NTK-aware scaling by length (bloc97 and emozilla, 2023): a larger base for sequences beyond the first training's.

    The longest sequence's last wavelength becomes ``factor * longest / original - (factor - 1)`` times as long, the
    first stays as it is.
    """
    original = rope.original_max_position
    longest = max(rope.longest_sequence or original, original)
    stretch = rope.factor * longest / original - (rope.factor - 1.0)
    return _plain(rope.theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _yarn(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023): pairs that turn more than ``beta_fast`` times within the first training's positions
    keep their frequency, those that turn less than ``beta_slow`` times are interpolated, with a ramp in between."""
    def pair_turning(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((pairs - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    return 1.0 / (rope.factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def _longrope(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """LongRoPE (Ding et al., 2024): a searched divisor for each pair, one set up to the first training's length and
    one beyond it."""
    longest = rope.longest_sequence or rope.original_max_position
    factors = rope.long_factors if longest > rope.original_max_position else rope.short_factors
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * rope.theta ** exponents)


def _llama3(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Llama 3.1 (model card): wavelengths above ``original_max_position / low_freq_factor`` are ``factor`` times as
    long, those below ``original_max_position / high_freq_factor`` stay, with a blend in between."""
    plain = _plain(rope.theta, head_dim)
    turns = rope.original_max_position / (2 * math.pi / plain)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - keep) * plain / rope.factor + keep * plain


_FREQUENCIES: tuple[tuple[str, Callable[[RopeConfig, int], torch.Tensor]], ...] = (
    ("default", _default), ("linear", _linear), ("dynamic", _dynamic), ("yarn", _yarn), ("longrope", _longrope),
    ("llama3", _llama3))

ROPE_KINDS = tuple(kind for kind, _ in _FREQUENCIES)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each rotated pair: ``[head_dim / 2]`` float32, on the CPU whatever the default device.

    What each kind does is said at its function. Dynamic and longrope tables are those of a sequence of
    ``rope.longest_sequence`` tokens (see :meth:`RopeConfig.at_length`).
    """
    found = dict(_FREQUENCIES).get(rope.kind)
    if found is None:
        raise InternalError(f"rope kind {rope.kind!r} reached a layer; known: {', '.join(ROPE_KINDS)}")
    return found(rope, head_dim)


def attention_factor(rope: RopeConfig) -> float:
    """What cosines and sines are multiplied by, so that attention stays as sharp over a stretched context.

    The configuration's own value; else by the rule of yarn (``0.1 * mscale * ln(factor) + 1``, over the same with
    ``mscale_all_dim`` where both are set) or of longrope (``sqrt(1 + ln(factor) / ln(original_max_position))``); 1 for
    every other kind.
    """
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0 or rope.kind not in ("yarn", "longrope"):
        return 1.0
    if rope.kind == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position))
    if rope.mscale and rope.mscale_all_dim:
        return _sharpness(rope.factor, rope.mscale) / _sharpness(rope.factor, rope.mscale_all_dim)
    return _sharpness(rope.factor, 1.0)


def _sharpness(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def is_computable(rope: RopeConfig, head_dim: int) -> bool:
    """Whether the table of these settings is made of numbers at every position and length that a model may have."""
    try:
        lengths = (None, int(rope.original_max_position * max(rope.factor, 1.0)))
        tables = [inverse_frequencies(dataclasses.replace(rope, longest_sequence=length), head_dim)
                  for length in lengths]
        scale = torch.tensor(attention_factor(rope), dtype=torch.float32, device="cpu")
    except (OverflowError, ValueError, ZeroDivisionError):
        return False
    return bool(scale.isfinite()) and all(bool((table * _FURTHEST).isfinite().all()) for table in tables)


class RotaryTable(nn.Module):
    """Cosines and sines of a step's positions, shared by all layers with the same settings."""

    inv_freq: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(rope, head_dim), persistent=False)
        self.scaling = attention_factor(rope)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """``[T, head_dim]`` float32: half cosines, half sines."""
        table: torch.Tensor = torch.ops.camshaft.rope_cos_sin(positions_T, self.inv_freq, self.scaling)
        return table
