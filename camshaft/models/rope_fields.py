"""Rotary settings of ``config.json``, in every spelling Hugging Face has used.

Owns one reader a kind of stretching, and where the settings stand. What a kind computes is ``layers/rope.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.core.registry import Registry
from camshaft.layers.rope import is_computable
from camshaft.models.config_fields import (
    BROKEN,
    LAYER_TYPES,
    MAX_SIZE,
    bool_field,
    float_field,
    int_field,
    optional_float,
    require,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stated:
    """The settings as they are stated, and what of the rest of the configuration a kind may need."""

    scaling: Mapping[str, Any]
    data: Mapping[str, Any]
    theta: float
    head_dim: int
    max_position: int

    def factor(self, default: float | None = None) -> float:
        """How far positions are stretched."""
        factor = float_field(self.scaling, "factor", default)
        if factor > MAX_SIZE:
            raise CheckpointError("config.json factor", factor, f"at most {MAX_SIZE}", BROKEN)
        return factor

    def original_positions(self, default: int | None = None) -> int:
        """Positions of the first training; beside the settings (Phi 3) they count before those among them."""
        name = "original_max_position_embeddings"
        original = int_field(self.data if self.data.get(name) is not None else self.scaling, name, default)
        if original < 2:
            raise CheckpointError(f"config.json {name}", original, "2 or more", BROKEN)
        return original


ROPE_READERS: Registry[Callable[[_Stated], RopeConfig]] = Registry("config.json rope_scaling")
"""Reader of a kind's settings, by its name in ``rope_type``."""


def rope_field(data: Mapping[str, Any], *, head_dim: int, max_position: int, default_theta: float = 10000.0,
               layer_type: str | None = None) -> RopeConfig:
    """Rotary settings from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Where they are given for each type of layer, those of ``layer_type``; None: all types must agree. A kind that no
    layer knows, a partial rotation, and fields the kind cannot compute with are refused by name.
    """
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        scaling.update(_rope_part(data, name, layer_type))
    theta = float_field({**data, **scaling}, "rope_theta", default_theta)
    require({**data, **scaling}, "partial_rotary_factor", (1, 1.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_READERS.names():
        raise CheckpointError("config.json rope_scaling", kind, f"one of {', '.join(ROPE_READERS.names())}",
                              "This way of stretching positions is not supported")
    rope = ROPE_READERS.get(kind)(_Stated(scaling=scaling, data=data, theta=theta, head_dim=head_dim,
                                          max_position=max_position))
    if not is_computable(rope, head_dim):
        raise CheckpointError("config.json rope_scaling" if scaling else "config.json rope_theta", scaling or theta,
                              "settings whose table has nothing but numbers", BROKEN)
    return rope


@ROPE_READERS.register("default")
def _default(stated: _Stated) -> RopeConfig:
    return RopeConfig(theta=stated.theta)


@ROPE_READERS.register("linear")
def _linear(stated: _Stated) -> RopeConfig:
    return RopeConfig(theta=stated.theta, kind="linear", factor=stated.factor())


@ROPE_READERS.register("dynamic")
def _dynamic(stated: _Stated) -> RopeConfig:
    if stated.head_dim < 4:
        raise CheckpointError("config.json head_dim", stated.head_dim, "4 or more, as dynamic rotary settings need")
    return RopeConfig(theta=stated.theta, kind="dynamic", factor=stated.factor(),
                      original_max_position=stated.max_position)


@ROPE_READERS.register("llama3")
def _llama3(stated: _Stated) -> RopeConfig:
    original = stated.original_positions()
    low, high = float_field(stated.scaling, "low_freq_factor"), float_field(stated.scaling, "high_freq_factor")
    if low >= high:
        raise CheckpointError("config.json low_freq_factor", low, f"less than high_freq_factor ({high:g})", BROKEN)
    return RopeConfig(theta=stated.theta, kind="llama3", factor=stated.factor(), low_freq_factor=low,
                      high_freq_factor=high, original_max_position=original)


@ROPE_READERS.register("yarn")
def _yarn(stated: _Stated) -> RopeConfig:
    scaling, original = stated.scaling, stated.original_positions(stated.max_position)
    factor = stated.factor(stated.max_position / original)
    if stated.theta <= 1:
        raise CheckpointError("config.json rope_theta", stated.theta, "more than 1, as yarn needs", BROKEN)
    return RopeConfig(theta=stated.theta, kind="yarn", factor=factor, original_max_position=original,
                      attention_factor=optional_float(scaling, "attention_factor"),
                      beta_fast=float_field(scaling, "beta_fast", 32.0),
                      beta_slow=float_field(scaling, "beta_slow", 1.0),
                      mscale=optional_float(scaling, "mscale") or 0.0,
                      mscale_all_dim=optional_float(scaling, "mscale_all_dim") or 0.0,
                      truncate=bool_field(scaling, "truncate", True))


@ROPE_READERS.register("longrope")
def _longrope(stated: _Stated) -> RopeConfig:
    scaling, original = stated.scaling, stated.original_positions(stated.max_position)
    factor = stated.factor(stated.max_position / original)
    return RopeConfig(theta=stated.theta, kind="longrope", factor=factor, original_max_position=original,
                      attention_factor=optional_float(scaling, "attention_factor"),
                      short_factors=_factors(scaling, "short_factor", stated.head_dim // 2),
                      long_factors=_factors(scaling, "long_factor", stated.head_dim // 2))


def _rope_part(data: Mapping[str, Any], name: str, layer_type: str | None) -> Mapping[str, Any]:
    """One object of rotary settings, taken out of an object by types of layers where it is one."""
    part = data.get(name) or {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json {name}", part, "an object or null", BROKEN)
    by_type = {key: value for key, value in part.items() if key in LAYER_TYPES}
    if not by_type:
        return part
    found = [by_type.get(layer_type)] if layer_type is not None else list(by_type.values())
    if any(each != found[0] for each in found):
        raise CheckpointError(f"config.json {name}", by_type, "the same for all types of layers in this architecture",
                              "Settings that differ between layers are not supported here")
    chosen = {} if found[0] is None else found[0]
    if not isinstance(chosen, Mapping):
        raise CheckpointError(f"config.json {name}", chosen, "an object or null for each type of layer", BROKEN)
    return chosen


def _factors(scaling: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = scaling.get(name)
    if not isinstance(values, list) or len(values) != count:
        shown = f"{len(values)} values" if isinstance(values, list) else values
        raise CheckpointError(f"config.json {name}", shown, f"a list of {count} numbers, one a rotated pair", BROKEN)
    return tuple(float_field({name: value}, name) for value in values)
