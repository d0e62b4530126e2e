"""Weights as recipes: a name, a shape, and how to read it, so that nothing is held twice.

Owns reading, casting, joining and rounding to 8 bits lazily; file formats live in the frontend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from camshaft.core.errors import CheckpointError, InternalError
from camshaft.kernels.gemm.ref import quantise_rows, quantise_rows_fp8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileSpan:
    """Bytes of a file that are exactly a weight, row-major and unpadded."""

    path: Path
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A tensor that is read when someone needs it. ``read()`` may return a view of a mapped file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]
    span: FileSpan | None = None
    """Where the same bytes already lie in a file; None once they are computed (cast, joined, dequantised)."""
    origin: str = ""
    """Tensor names in the checkpoint, for messages and ``camshaft inspect``."""
    fixed: bool = False
    """Whether its dtype is not the arithmetic's to choose: tables, and what a definition keeps in float32."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor when read."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    def cast(self, dtype: torch.dtype) -> Weight:
        """The same weight in another dtype; itself when nothing changes."""
        if dtype == self.dtype:
            return self
        return Weight(shape=self.shape, dtype=dtype, read=lambda: self.read().to(dtype), origin=self.origin)


def constant(tensor: torch.Tensor, origin: str) -> Weight:
    """A weight that is already in memory (small tables such as inverse frequencies)."""
    return Weight(shape=tuple(tensor.shape), dtype=tensor.dtype, read=lambda: tensor, origin=origin)


def concat(parts: tuple[Weight, ...]) -> Weight:
    """Rows of ``parts`` one after another (dimension 0); all else must agree (InternalError)."""
    first = parts[0]
    if any(part.dtype != first.dtype or part.shape[1:] != first.shape[1:] for part in parts):
        raise InternalError(f"cannot join {[(part.origin, part.dtype, part.shape) for part in parts]}")
    rows = sum(part.shape[0] for part in parts)

    def read() -> torch.Tensor:
        joined = torch.empty((rows, *first.shape[1:]), dtype=first.dtype)
        start = 0
        for part in parts:
            joined[start:start + part.shape[0]] = part.read()
            start += part.shape[0]
        return joined

    return Weight(shape=(rows, *first.shape[1:]), dtype=first.dtype, read=read,
                  origin=" + ".join(part.origin for part in parts))


_VALUES_AT_ONCE = 1 << 18
"""Rounding makes a few fp32 copies, of so many values at a time."""


class _Rows8:
    """A matrix in 8 bits, read through once where its values are asked for before its scales."""

    def __init__(self, matrix: Weight, dtype: torch.dtype) -> None:
        self._matrix = matrix
        self._dtype = dtype
        self._round = quantise_rows if dtype is torch.int8 else quantise_rows_fp8
        self._scale: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        matrix = self._matrix.read()
        values, scale = torch.empty(matrix.shape, dtype=self._dtype), torch.empty(matrix.shape[0])
        num_rows = max(1, _VALUES_AT_ONCE // max(1, matrix.shape[1]))
        for start in range(0, matrix.shape[0], num_rows):
            part = slice(start, start + num_rows)
            rounded, scales = self._round(matrix[part].to(torch.float32))
            values[part], scale[part] = rounded, scales[:, 0]
        self._scale = scale
        return values

    def scale(self) -> torch.Tensor:
        if self._scale is None:
            self.values()
        if self._scale is None or not self._scale.isfinite().all():
            raise CheckpointError(self._matrix.origin, "NaN or infinity", "finite values, to be rounded to 8 bits",
                                  "Download the model again, or build without quantization")
        return self._scale


def quantised(matrix: Weight, dtype: torch.dtype = torch.int8) -> tuple[Weight, Weight]:
    """``matrix`` [N, K] in 8 bits, and the fp32 scale [N] of its rows.

    They are rounded as by ``quantise_rows`` to int8, or as by ``quantise_rows_fp8`` to float8_e4m3fn.
    Reading the scale raises CheckpointError where the matrix is not finite.
    """
    rows = _Rows8(matrix, dtype)
    return (Weight(shape=matrix.shape, dtype=dtype, read=rows.values, origin=matrix.origin),
            Weight(shape=matrix.shape[:1], dtype=torch.float32, read=rows.scale, origin=f"scales of {matrix.origin}"))
