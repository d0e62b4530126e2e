"""Step plans and outputs as plain JSON data and back, from their dataclasses alone: a field that is new comes along.

Owns the encoding. An array is an object whose key is its dtype (``{"int32": [1, 2]}``), with its ``shape`` beside it
where it has other than one dimension. A field that holds its plain default is left out. Numbers JSON has no
word for are strings ("inf", "-inf", "nan"). An exception comes back as InternalError with its text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from camshaft.core.errors import InternalError, UserError, words_of
from camshaft.runtime.step import StepOutput, StepPlan

R = TypeVar("R", StepPlan, StepOutput)
_PLAIN = (bool, int, float, str)
_SHAPE = "shape"
_NOT_FINITE = ("nan", "inf", "-inf")


def to_json(record: StepPlan | StepOutput) -> dict[str, Any]:
    """``record`` as data that ``json.dumps`` takes.

    Raises UserError naming the field for what cannot be written down, such as a logits processor.
    """
    return _encoded_fields(record)


def from_json(kind: type[R], data: Mapping[str, Any]) -> R:
    """Inverse of :func:`to_json`. Raises KeyError, TypeError or ValueError for data of another shape."""
    return cast("R", _decoded_fields(kind, data))


def _encoded_fields(record: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if not _is_default(field, value):
            found[field.name] = _encoded(field.name, value)
    return found


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    default = field.default
    return (value is None or isinstance(value, (*_PLAIN, tuple))) and type(value) is type(default) and value == default


def _encoded(name: str, value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, np.ndarray):
        return _encoded_array(value)
    if isinstance(value, tuple):
        return [_encoded(name, part) for part in value]
    if isinstance(value, Exception):
        return words_of(value)
    if dataclasses.is_dataclass(value):
        return _encoded_fields(value)
    raise UserError(name, value, "what can be written down: numbers, arrays, texts",
                    "Record the step without it")


def _encoded_array(array: npt.NDArray[Any]) -> dict[str, Any]:
    flat: list[Any] = array.ravel().tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        flat = [value if math.isfinite(value) else repr(value) for value in flat]
    found: dict[str, Any] = {array.dtype.name: flat}
    if array.ndim != 1:
        found[_SHAPE] = list(array.shape)
    return found


def _decoded_fields(kind: Any, data: Mapping[str, Any]) -> Any:
    if not isinstance(data, Mapping):
        raise TypeError(f"{str(data)[:40]} in place of a {kind.__name__}")
    hints = _hints(kind)
    unknown = data.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {sorted(unknown)[0]!r} in this version")
    return kind(**{name: _decoded(hints[name], value) for name, value in data.items()})


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _decoded(hint: Any, data: Any) -> Any:
    if data is None:
        return None
    origin = typing.get_origin(hint)
    if hasattr(origin, "__value__"):  # numpy 2.5 declares NDArray by a type statement
        return _decoded(origin.__value__[typing.get_args(hint)], data)
    if origin in (types.UnionType, typing.Union):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        return _decoded(hint, data)
    if origin is np.ndarray:
        return _decoded_array(data)
    if origin is tuple:
        parts = typing.get_args(hint)
        if parts[-1] is Ellipsis:
            return tuple(_decoded(parts[0], part) for part in data)
        return tuple(_decoded(part, value) for part, value in zip(parts, data, strict=True))
    if hint in _PLAIN:
        return _decoded_plain(hint, data)
    if dataclasses.is_dataclass(hint):
        return _decoded_fields(hint, data)
    if isinstance(hint, type) and issubclass(hint, Exception):
        return InternalError(str(data))
    raise TypeError(f"a recorded step cannot hold {hint}")


def _decoded_plain(hint: Any, data: Any) -> Any:
    if hint is float and isinstance(data, int | float | str) and not isinstance(data, bool):
        return float(data)
    if type(data) is not hint:
        raise TypeError(f"{data!r} where a {hint.__name__} belongs")
    return data


def _decoded_array(data: Mapping[str, Any]) -> npt.NDArray[Any]:
    names = data.keys() - {_SHAPE} if isinstance(data, Mapping) else ()
    if len(names) != 1:
        raise ValueError(f"{str(data)[:40]} in place of an array of one dtype")
    (name,) = names
    dtype = _dtype(name)
    if not isinstance(data[name], list) or not all(_is_of(dtype, value) for value in data[name]):
        raise ValueError(f"{str(data[name])[:40]} in place of numbers of {name}")
    try:
        array: npt.NDArray[Any] = np.array(data[name], dtype=dtype)
    except OverflowError as error:
        raise ValueError(f"a number beyond {name}") from error
    return array.reshape(data[_SHAPE]) if _SHAPE in data else array


def _is_of(dtype: np.dtype[Any], value: object) -> bool:
    """Whether an array of ``dtype`` holds just this value: numpy would round or convert others."""
    if dtype.kind == "b":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    return isinstance(value, int) or (dtype.kind == "f" and (isinstance(value, float) or value in _NOT_FINITE))


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {name} in place of numbers")
    return dtype
