"""The engine manifest: everything about an engine that is not its graph or its tensors, as JSON-able data.

Owns the schema and its version. Reading, writing and checking files is ``engine/artifact.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import GenerationDefaults, ModelConfig

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one weight's bytes lie. ``file`` is relative to the engine folder, or absolute in a cache engine
    that points into its checkpoint."""

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]
    crc32: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A whole file of the engine folder (graph, native library, tokenizer), with its SHA-256 in hex."""

    file: str
    sha256: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRequirement:
    """What the loading process must offer."""

    kind: str
    features: tuple[str, ...]
    """Instruction sets the native code was compiled for; every one must be present."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """``engine.json``."""

    format_version: int
    camshaft_version: str
    torch_version: str
    """Of the builder; informative: the graph format does not depend on it."""
    model: ModelConfig
    generation: GenerationDefaults
    build: BuildConfig
    """Resolved: no "auto" left."""
    device: DeviceRequirement
    life_cycles: tuple[LifeCycleSpec, ...]
    graph: FileEntry
    native: FileEntry | None
    tokenizer: tuple[FileEntry, ...]
    """tokenizer.json and tokenizer_config.json (chat template, special tokens) when the source had them."""
    tensors: dict[str, TensorEntry]
    history: tuple[dict[str, Any], ...]
    """Pass records: name, matches, notes."""
    kernels: tuple[dict[str, Any], ...]
    """One entry an (op, implementation): op, kernel, count, why."""
    activation_peak_bytes: int
    """Upper bound of activation memory of a step at the limits."""
    weights_id: str
    """Hash identifying model + weights; the ``model`` field of prefix scopes."""
