"""Typed look-ups in the metadata of a GGUF file, with errors that name the key.

Owns what counts as a usable size, number, string or flag; what the keys mean is the business of those who ask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from camshaft.core.errors import CheckpointError
from camshaft.models.config_fields import MAX_SIZE

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Metadata:
    """The entries of a file whose names start with ``prefix``, which callers leave out."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def under(self, prefix: str) -> Metadata:
        """The same file's entries that start with ``prefix`` and a point."""
        return Metadata(self.path, self.values, f"{prefix}.")

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self.values

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it was read, of whatever type."""
        return self.values.get(self.prefix + key, default)

    def refuse(self, key: str, allowed: str, remedy: str = "Use another conversion of the model") -> CheckpointError:
        """The error that says which value was found under ``key`` and what would have been usable."""
        return CheckpointError(self.prefix + key, self.get(key), f"{allowed} (in {self.path})", remedy)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a per-layer array is accepted when all its values agree."""
        found = self.get(key, default)
        if isinstance(found, np.ndarray):
            if found.size == 0 or (found != found[0]).any():
                raise self.refuse(key, "one value for all layers; per-layer sizes are not supported")
            found = found[0].item()
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= MAX_SIZE:
            raise self.refuse(key, f"a whole number from 1 to {MAX_SIZE}")
        return found

    def text(self, key: str, default: str) -> str:
        """A string."""
        found = self.get(key, default)
        if not isinstance(found, str):
            raise self.refuse(key, "a string")
        return found

    def whole(self, key: str, default: int) -> int:
        """A whole number that may be 0."""
        found = self.get(key, default)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < 1 << 31:
            raise self.refuse(key, "a whole number")
        return found

    def real(self, key: str, default: float | None = None) -> float:
        """A finite positive number; float32 values as the decimals they were made from (1e-5, not 9.99999974e-06)."""
        found = self.get(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not _SMALLEST <= found <= _LARGEST:
            raise self.refuse(key, "a positive number")
        return float(str(np.float32(found)))
