"""Rotary settings of a GGUF file.

Owns the scalings these files can state: none, linear and yarn by their metadata, Llama 3's by the divisors in
``rope_freqs.weight``. What a scaling computes is in ``layers/rope.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.core.registry import Registry
from camshaft.frontend.gguf_metadata import Metadata
from camshaft.layers.rope import inverse_frequencies, is_computable

ROPE_FREQS = "rope_freqs.weight"
_LLAMA3_ORIGINAL_POSITIONS = 8192

_Scaling = Callable[[Metadata, float], RopeConfig]
SCALINGS: Registry[_Scaling] = Registry("rope.scaling.type")
"""Reader of a scaling from (metadata, base frequency), by its name in ``rope.scaling.type``."""


@SCALINGS.register("none")
def _none(meta: Metadata, theta: float) -> RopeConfig:
    return RopeConfig(theta=theta)


@SCALINGS.register("linear")
def _linear(meta: Metadata, theta: float) -> RopeConfig:
    factor = meta.real("rope.scaling.factor", meta.get("rope.scale_linear", 1.0))
    return RopeConfig(theta=theta, kind="linear", factor=factor)


@SCALINGS.register("yarn")
def _yarn(meta: Metadata, theta: float) -> RopeConfig:
    """YaRN (Peng et al. 2023) as transformers' defaults give it.

    Keys that llama.cpp multiplies into those defaults while converters write the whole under the same name are refused.
    """
    for key in ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"):
        if key in meta:
            raise meta.refuse(key, "to be absent: its meaning differs between converters",
                              "Use the model's Hugging Face folder")
    if meta.real("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise meta.refuse("rope.scaling.yarn_ext_factor", "1")
    fast, slow = meta.real("rope.scaling.yarn_beta_fast", 32.0), meta.real("rope.scaling.yarn_beta_slow", 1.0)
    if fast <= slow:
        raise meta.refuse("rope.scaling.yarn_beta_fast", f"more than yarn_beta_slow ({slow:g})")
    factor = meta.real("rope.scaling.factor")
    if factor < 1:
        raise meta.refuse("rope.scaling.factor", "1 or more")
    return RopeConfig(theta=theta, kind="yarn", factor=factor, beta_fast=fast, beta_slow=slow,
                      original_max_position=meta.size("rope.scaling.original_context_length"))


def rope_config(meta: Metadata, head_dim: int, factors: torch.Tensor | None) -> RopeConfig:
    """The settings of ``meta`` (an architecture's own entries).

    ``factors`` are the values of ``rope_freqs.weight`` where the file has them. CheckpointError for a scaling, or a
    combination of several, that is not known.
    """
    theta = meta.real("rope.freq_base", 10000.0)
    # Files of the first conversions state a linear factor and no type.
    bare_linear = meta.real("rope.scaling.factor", meta.get("rope.scale_linear", 1.0)) != 1
    kind = meta.text("rope.scaling.type", "linear" if bare_linear else "none")
    if kind not in SCALINGS:
        raise meta.refuse("rope.scaling.type", f"one of {', '.join(SCALINGS.names())}")
    if factors is not None and not bool((factors == 1).all()):
        if kind != "none":
            raise meta.refuse("rope.scaling.type", f"'none' beside {ROPE_FREQS}")
        return _llama3(meta, theta, head_dim, factors.double())
    rope = SCALINGS.get(kind)(meta, theta)
    if not is_computable(rope, head_dim):
        raise meta.refuse("rope.freq_base", f"settings, with rope.scaling of type {kind}, whose table has nothing but "
                          "numbers", "The file is damaged")
    return rope


def llama3_factors(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float64: what Llama 3's scaling divides each frequency by."""
    plain = inverse_frequencies(dataclasses.replace(rope, kind="default"), head_dim)
    return plain.double() / inverse_frequencies(rope, head_dim).double()


def _llama3(meta: Metadata, theta: float, head_dim: int, factors: torch.Tensor) -> RopeConfig:
    """The file gives one divisor a frequency and not the rule behind them, so the rule is checked against them."""
    original = meta.size("rope.scaling.original_context_length", _LLAMA3_ORIGINAL_POSITIONS)
    rope = RopeConfig(theta=theta, kind="llama3", factor=round(float(factors.max()), 4), low_freq_factor=1.0,
                      high_freq_factor=4.0, original_max_position=original)
    if factors.shape != (head_dim // 2,) or not torch.allclose(llama3_factors(rope, head_dim), factors, rtol=1e-4):
        raise CheckpointError("tensor", ROPE_FREQS, f"the frequency factors of Llama 3.1's scaling (in {meta.path})",
                              "Other factors are not supported; use the model's Hugging Face folder")
    return rope
