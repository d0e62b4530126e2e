"""Reading ``config.json``: typed fields, windows and rotary settings, in every spelling Hugging Face has used.

Owns the checks families share; which fields a family needs is the family's business.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.layers.rope import ROPE_KINDS

_BROKEN = "The file is damaged or not a decoder's configuration"
MAX_SIZE = 2**27
"""Bound of every size in a configuration: above any real model's, and no product of two overflows torch's counts."""

MAX_LAYERS = 4096
"""Bound of a configuration's layers, held before anything is made a layer at a time."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def int_field(data: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    """A whole number from 1 to ``most``; ``default`` when missing or null, CheckpointError without one."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise CheckpointError(f"config.json {name}", value, f"a whole number from 1 to {most}", _BROKEN)
    return value


def float_field(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive finite number; ``default`` when missing or null, CheckpointError without one."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json {name}", value, "a positive number", _BROKEN)
    return float(value)


def optional_float(data: Mapping[str, Any], name: str) -> float | None:
    """A positive finite number; None when missing or null."""
    return None if data.get(name) is None else float_field(data, name)


def bool_field(data: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or False; ``default`` when missing or null."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json {name}", value, "true or false", _BROKEN)
    return value


def check_heads(where: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """CheckpointError unless query heads share key-value heads evenly and a head can be rotated in halves."""
    even = num_heads % num_kv_heads == 0 and head_dim % 2 == 0
    if not even or not 0 < num_heads * head_dim <= MAX_SIZE:
        raise CheckpointError(where, (num_heads, num_kv_heads, head_dim),
                              f"a multiple of the key-value heads, an even size of 2 or more, together at most "
                              f"{MAX_SIZE}", _BROKEN)


def require(data: Mapping[str, Any], name: str, accepted: tuple[Any, ...]) -> None:
    """CheckpointError unless the field is missing, null or one of ``accepted``."""
    value = data.get(name)
    if value is not None and value not in accepted:
        raise CheckpointError(f"config.json {name}", value,
                              f"{' or '.join(map(repr, accepted))}, as no other is supported")


def windows_field(data: Mapping[str, Any], num_layers: int, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """How far back each layer sees: ``sliding_window`` for those ``layer_types`` names as sliding; () where none is.

    Without ``layer_types``, ``slides`` says which layers are. CheckpointError for a type of layer other than full and
    sliding attention.
    """
    types = data.get("layer_types")
    if types is None:
        sliding = [slides(layer) for layer in range(num_layers)]
    elif not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise CheckpointError("config.json layer_types", types, f"{num_layers} of {' and '.join(_LAYER_TYPES)}",
                              "Other kinds of layers are not supported")
    else:
        sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding):
        return ()
    window = int_field(data, "sliding_window")
    return tuple(window if layer_slides else None for layer_slides in sliding)


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
    if kind not in ROPE_KINDS:
        raise CheckpointError("config.json rope_scaling", kind, f"one of {', '.join(ROPE_KINDS)}",
                              "This way of stretching positions is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=_factor(scaling))
    if kind == "dynamic":
        if head_dim < 4:
            raise CheckpointError("config.json head_dim", head_dim, "4 or more, as dynamic rotary settings need")
        return RopeConfig(theta=theta, kind=kind, factor=_factor(scaling), original_max_position=max_position)
    if kind == "llama3":
        return _llama3(scaling, theta, _original_positions(data, scaling, None))
    original = _original_positions(data, scaling, max_position)
    factor = _factor(scaling, max_position / original)
    if kind == "yarn":
        return _yarn(scaling, theta, factor, original)
    return RopeConfig(theta=theta, kind=kind, factor=factor, original_max_position=original,
                      attention_factor=optional_float(scaling, "attention_factor"),
                      short_factors=_factors(scaling, "short_factor", head_dim // 2),
                      long_factors=_factors(scaling, "long_factor", head_dim // 2))


def _rope_part(data: Mapping[str, Any], name: str, layer_type: str | None) -> Mapping[str, Any]:
    """One object of rotary settings, taken out of an object by types of layers where it is one."""
    part = data.get(name) or {}
    if not isinstance(part, Mapping):
        raise CheckpointError(f"config.json {name}", part, "an object or null", _BROKEN)
    by_type = {key: value for key, value in part.items() if key in _LAYER_TYPES}
    if not by_type:
        return part
    found = [by_type.get(layer_type)] if layer_type is not None else list(by_type.values())
    if any(each != found[0] for each in found):
        raise CheckpointError(f"config.json {name}", by_type, "the same for all types of layers in this architecture",
                              "Settings that differ between layers are not supported here")
    chosen = {} if found[0] is None else found[0]
    if not isinstance(chosen, Mapping):
        raise CheckpointError(f"config.json {name}", chosen, "an object or null for each type of layer", _BROKEN)
    return chosen


def _factor(scaling: Mapping[str, Any], default: float | None = None) -> float:
    factor = float_field(scaling, "factor", default)
    if factor > MAX_SIZE:
        raise CheckpointError("config.json factor", factor, f"at most {MAX_SIZE}", _BROKEN)
    return factor


def _original_positions(data: Mapping[str, Any], scaling: Mapping[str, Any], default: int | None) -> int:
    """Positions of the first training; beside the settings (Phi 3) it counts before the one among them."""
    name = "original_max_position_embeddings"
    original = int_field(data if data.get(name) is not None else scaling, name, default)
    if original < 2:
        raise CheckpointError(f"config.json {name}", original, "2 or more", _BROKEN)
    return original


def _llama3(scaling: Mapping[str, Any], theta: float, original: int) -> RopeConfig:
    low, high = float_field(scaling, "low_freq_factor"), float_field(scaling, "high_freq_factor")
    if low >= high:
        raise CheckpointError("config.json low_freq_factor", low, f"less than high_freq_factor ({high:g})", _BROKEN)
    return RopeConfig(theta=theta, kind="llama3", factor=_factor(scaling), low_freq_factor=low, high_freq_factor=high,
                      original_max_position=original)


def _yarn(scaling: Mapping[str, Any], theta: float, factor: float, original: int) -> RopeConfig:
    if theta <= 1:
        raise CheckpointError("config.json rope_theta", theta, "more than 1, as yarn needs", _BROKEN)
    return RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_position=original,
                      attention_factor=optional_float(scaling, "attention_factor"),
                      beta_fast=float_field(scaling, "beta_fast", 32.0),
                      beta_slow=float_field(scaling, "beta_slow", 1.0),
                      mscale=optional_float(scaling, "mscale") or 0.0,
                      mscale_all_dim=optional_float(scaling, "mscale_all_dim") or 0.0,
                      truncate=bool_field(scaling, "truncate", True))


def _factors(scaling: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    values = scaling.get(name)
    if not isinstance(values, list) or len(values) != count:
        shown = f"{len(values)} values" if isinstance(values, list) else values
        raise CheckpointError(f"config.json {name}", shown, f"a list of {count} numbers, one a rotated pair", _BROKEN)
    return tuple(float_field({name: value}, name) for value in values)
