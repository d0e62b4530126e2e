"""The engine manifest: everything about an engine that is not its graph or its tensors, as JSON-able data.

Owns the schema and its version. Reading, writing and checking files is ``engine/artifact.py``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from camshaft.config.build import DEVICES, BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import GenerationDefaults, ModelConfig
from camshaft.engine.schema import check_types

FORMAT_VERSION = 2
"""Rises with every change of the fields or of an op's arguments, so that an older engine is called old, not corrupt."""


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
    num_token_ids: int | None = None
    """Ids below this are tokens; the rest of the model's vocabulary is padding. None: there is no tokenizer to ask."""
    self_contained: bool = True
    """False only for a cache engine: its tensors may name files outside the engine folder."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; :meth:`from_dict` reads it back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Manifest:
        """Inverse of :meth:`to_dict`. Raises KeyError, TypeError or ValueError for data of another shape."""
        native = data["native"]
        rest = {name: data[name] for name in ("format_version", "camshaft_version", "torch_version",
                                              "activation_peak_bytes", "weights_id", "num_token_ids",
                                              "self_contained")}
        found = cls(
            **rest,
            model=ModelConfig.from_dict(data["model"]),
            generation=GenerationDefaults(**{**data["generation"],
                                             "eos_token_ids": tuple(data["generation"]["eos_token_ids"])}),
            build=BuildConfig.from_dict(data["build"]),
            device=DeviceRequirement(kind=data["device"]["kind"], features=tuple(data["device"]["features"])),
            life_cycles=tuple(LifeCycleSpec(**{**spec, "layers": tuple(spec["layers"])})
                              for spec in data["life_cycles"]),
            graph=FileEntry(**data["graph"]),
            native=None if native is None else FileEntry(**native),
            tokenizer=tuple(FileEntry(**entry) for entry in data["tokenizer"]),
            tensors={name: TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
                     for name, entry in data["tensors"].items()},
            history=tuple(data["history"]),
            kernels=tuple(data["kernels"]),
        )
        check_types(found, cls, "manifest")
        found.check_numbers()
        return found

    def check_numbers(self) -> None:
        """Raise ValueError for numbers, each of its type, that no build writes."""
        build, layers = self.build, [layer for spec in self.life_cycles for layer in spec.layers]
        sound = {
            "device": self.device.kind in DEVICES,
            "build": build.max_seq_len is not None and build.dtype != "auto",
            "num_token_ids": self.num_token_ids is None or 0 < self.num_token_ids <= self.model.vocab_size,
            "activation_peak_bytes": self.activation_peak_bytes >= 0,
            "life_cycles": bool(layers) and len(set(layers)) == len(layers) and min(layers) >= 0
            and {spec.page_size for spec in self.life_cycles} == {build.page_size},
        }
        for name, holds in sound.items():
            if not holds:
                raise ValueError(f"manifest.{name} is {getattr(self, name)}")
