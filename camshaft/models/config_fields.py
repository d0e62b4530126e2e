"""Reading ``config.json``: typed fields and the rotary settings, in every spelling Hugging Face has used.

Owns the checks families share; which fields a family needs is the family's business.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from camshaft.config.model import RopeConfig
from camshaft.core.errors import CheckpointError
from camshaft.layers.rope import ROPE_KINDS

_BROKEN = "The file is damaged or not a decoder's configuration"
MAX_SIZE = 2**27
"""Bound of every size in a configuration: above any real model's, and no product of two overflows torch's counts."""


def int_field(data: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number from 1 to ``MAX_SIZE``; ``default`` when missing or null, CheckpointError without one."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MAX_SIZE:
        raise CheckpointError(f"config.json {name}", value, f"a whole number from 1 to {MAX_SIZE}", _BROKEN)
    return value


def float_field(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive finite number; ``default`` when missing or null, CheckpointError when there is none."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json {name}", value, "a positive number", _BROKEN)
    return float(value)


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


def rope_field(data: Mapping[str, Any], *, default_theta: float = 10000.0) -> RopeConfig:
    """Rotary settings from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    A kind other than default, linear and llama3, and a partial rotation, are refused by name.
    """
    scaling: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        part = data.get(name) or {}
        if not isinstance(part, Mapping):
            raise CheckpointError(f"config.json {name}", part, "an object or null", _BROKEN)
        scaling.update(part)
    theta = float_field({**data, **scaling}, "rope_theta", default_theta)
    require({**data, **scaling}, "partial_rotary_factor", (1, 1.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError("config.json rope_scaling", kind, f"one of {', '.join(ROPE_KINDS)}",
                              "This way of stretching positions is not supported")
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = float_field(scaling, "factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    low, high = float_field(scaling, "low_freq_factor"), float_field(scaling, "high_freq_factor")
    if low >= high:
        raise CheckpointError("config.json low_freq_factor", low, f"less than high_freq_factor ({high:g})", _BROKEN)
    return RopeConfig(theta=theta, kind=kind, factor=factor, low_freq_factor=low, high_freq_factor=high,
                      original_max_position=int_field(scaling, "original_max_position_embeddings"))
