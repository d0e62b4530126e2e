"""Reading ``config.json``: typed fields, and windows layer by layer.

Owns the checks families share; which fields a family needs is the family's business. Rotary settings are
``rope_fields``, what Llama-like decoders say alike is ``decoder_fields``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from camshaft.core.errors import CheckpointError

BROKEN = "The file is damaged or not a decoder's configuration"
"""Remedy of a value that no decoder has."""
MAX_SIZE = 2**27
"""Bound of every size in a configuration: above any real model's, and no product of two overflows torch's counts."""
MAX_LAYERS = 4096
"""Bound of a configuration's layers, held before anything is made a layer at a time."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Words of ``layer_types`` and of settings that are given by type of layer."""


def int_field(data: Mapping[str, Any], name: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
    """A whole number from 1 to ``most``; ``default`` when missing or null, CheckpointError without one."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
        raise CheckpointError(f"config.json {name}", value, f"a whole number from 1 to {most}", BROKEN)
    return value


def float_field(data: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A positive finite number; ``default`` when missing or null, CheckpointError without one."""
    value = data.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise CheckpointError(f"config.json {name}", value, "a positive number", BROKEN)
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
        raise CheckpointError(f"config.json {name}", value, "true or false", BROKEN)
    return value


def check_heads(where: str, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """CheckpointError unless query heads share key-value heads evenly and a head can be rotated in halves."""
    even = num_heads % num_kv_heads == 0 and head_dim % 2 == 0
    if not even or not 0 < num_heads * head_dim <= MAX_SIZE:
        raise CheckpointError(where, (num_heads, num_kv_heads, head_dim),
                              f"a multiple of the key-value heads, an even size of 2 or more, together at most "
                              f"{MAX_SIZE}", BROKEN)


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
    elif not isinstance(types, list) or len(types) != num_layers or any(kind not in LAYER_TYPES for kind in types):
        raise CheckpointError("config.json layer_types", types, f"{num_layers} of {' and '.join(LAYER_TYPES)}",
                              "Other kinds of layers are not supported")
    else:
        sliding = [kind == "sliding_attention" for kind in types]
    if not any(sliding):
        return ()
    window = int_field(data, "sliding_window")
    return tuple(window if layer_slides else None for layer_slides in sliding)
