"""The engine: what a build leaves and a runtime starts from, in memory or as a folder.

Owns writing it whole or not at all, loading it with every part checked, and the full report of
``verify_engine``. Bytes and mapping are ``storage.py``; the schema is ``manifest.py``.

A folder holds ``engine.json`` (its first line is the SHA-256 of all that follows), ``graph.json``,
``weights.safetensors``, ``tokenizer/`` and, with native kernels, the shared library.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from camshaft import __version__
from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import GenerationDefaults, ModelConfig
from camshaft.core.device import probe
from camshaft.core.errors import (
    CamshaftError,
    EngineCorruptError,
    EngineDeviceError,
    EngineError,
    EngineVersionError,
    InternalError,
    UserError,
)
from camshaft.core.log import Advance, progress
from camshaft.engine import storage
from camshaft.engine.manifest import FORMAT_VERSION, DeviceRequirement, FileEntry, Manifest, TensorEntry
from camshaft.ir.weight import Weight
from camshaft.kernels.native import load_library

MANIFEST_FILE = "engine.json"
_GRAPH_FILE = "graph.json"
_WEIGHTS_FILE = "weights.safetensors"
_TOKENIZER_FOLDER = "tokenizer"
_IN_MEMORY = "(memory)"
_HEAD = b'{"sha256": "'
_BUILD_AGAIN = "Build the engine again on this machine"


def is_engine_folder(path: Path) -> bool:
    """Whether ``path`` is a folder that says it is an engine."""
    return (path / MANIFEST_FILE).is_file()


class Engine:
    """A built model. Tensors are views of mapped files, or of memory for an engine that was never saved.

    Made by ``Engine.load`` or ``EngineWriter.finish``; immutable after that.
    """

    def __init__(self, *, manifest: Manifest, graph_text: str, folder: Path | None,
                 tensors: dict[str, torch.Tensor], tokenizer_files: dict[str, bytes],
                 native: Path | ctypes.CDLL | None) -> None:
        self.manifest = manifest
        self.graph_text = graph_text
        self.folder = folder
        self._tensors = tensors
        self._tokenizer_files = tokenizer_files
        self._native = native

    def tensor(self, name: str) -> torch.Tensor:
        """One weight by name, on the CPU. Not to be written to."""
        return self._tensors[name]

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Every weight by name, on the CPU."""
        return MappingProxyType(self._tensors)

    def library(self) -> ctypes.CDLL | None:
        """The engine's compiled kernels, loaded on first use; None where it has none."""
        if isinstance(self._native, Path):
            self._native = load_library(self._native)
        return self._native

    def tokenizer_files(self) -> dict[str, bytes]:
        """Contents of tokenizer.json and tokenizer_config.json, by those names, where the source had them."""
        return dict(self._tokenizer_files)

    @classmethod
    def load(cls, folder: Path | str, *, show_progress: bool = False) -> Engine:
        """Open an engine folder, check every part of it, map its weights.

        Raises EngineVersionError (another format), EngineDeviceError (another device or feature set),
        EngineCorruptError (truncated, edited or missing parts, by file and tensor), and EngineError for
        something that is no engine at all.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        _check_device(manifest.device)
        graph_text = _checked(folder, manifest.graph).decode()
        tokenizer = {Path(entry.file).name: _checked(folder, entry) for entry in manifest.tokenizer}
        if manifest.native is not None:
            _checked(folder, manifest.native)
        tensors = storage.map_tensors(folder, manifest.tensors, pointers=not manifest.self_contained)
        total = sum(tensor.nbytes for tensor in tensors.values())
        with progress("loading", total, show=show_progress) as advance:
            for name, found in storage.bad_checksums(tensors, manifest.tensors, advance):
                raise _bad_tensor(name, manifest.tensors[name], found)
        native = None if manifest.native is None else storage.confined(folder, manifest.native.file)
        return cls(manifest=manifest, graph_text=graph_text, folder=folder, tensors=tensors,
                   tokenizer_files=tokenizer, native=native)


def _bad_tensor(name: str, entry: TensorEntry, found: int) -> EngineCorruptError:
    return storage.corrupt(f"tensor {name} of {entry.file}", f"CRC-32 {found:08x}", f"{entry.crc32:08x}")


def _checked(folder: Path, entry: FileEntry) -> bytes:
    data = storage.read_file(folder, entry.file)
    found = storage.sha256_of(data)
    if found != entry.sha256:
        raise storage.corrupt(f"file {entry.file}", f"SHA-256 {found}", entry.sha256)
    return data


def _check_device(needed: DeviceRequirement) -> None:
    try:
        device = probe(needed.kind)
    except UserError as error:
        raise EngineDeviceError("device", found="none", needed=needed.kind, remedy=_BUILD_AGAIN) from error
    missing = sorted(set(needed.features) - set(device.features))
    if missing:
        raise EngineDeviceError("device features", found=", ".join(device.features) or "none",
                                needed=", ".join(missing), remedy=_BUILD_AGAIN)


def _not_an_engine(path: Path) -> EngineError:
    """The error for something that was given as an engine and is none, in words."""
    needed = f"an engine folder with {MANIFEST_FILE}"
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(4)
        if start[:1] == b"\x80" or start == b"PK\x03\x04" or path.suffix in (".bin", ".pt", ".pth", ".pkl"):
            return EngineError(f"engine {path}", found="a pickle or torch.save file, which is never loaded here",
                               needed=needed, remedy="Convert the weights to safetensors and build from them")
        if path.suffix in (".engine", ".plan", ".trt"):
            return EngineError(f"engine {path}", found="a native TensorRT engine, which only TensorRT can run",
                               needed=needed, remedy="Build from the checkpoint it was made from")
        return EngineError(f"engine {path}", found="a file", needed=needed, remedy="Give the folder, or build one")
    if path.is_dir():
        if any(path.glob("*.engine")):
            return EngineError(f"engine {path}", found="a TensorRT-LLM engine folder", needed=needed,
                               remedy="Build from the checkpoint it was made from")
        return storage.corrupt(f"engine {path}", f"no {MANIFEST_FILE}", needed)
    return EngineError(f"engine {path}", found="nothing", needed=needed, remedy="Check the path")


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``engine.json`` alone. Raises EngineCorruptError, EngineVersionError or EngineError."""
    if not is_engine_folder(folder):
        raise _not_an_engine(folder)
    data = storage.read_file(folder, MANIFEST_FILE)
    head, newline, rest = data.partition(b"\n")
    if not (newline and head.startswith(_HEAD) and head.endswith(b'",')):
        raise storage.corrupt(f"file {MANIFEST_FILE}", "a first line without the hash", "the hash of the rest")
    found, needed = storage.sha256_of(rest), head[len(_HEAD):-2].decode(errors="replace")
    if found != needed:
        raise storage.corrupt(f"file {MANIFEST_FILE}", f"SHA-256 {found}", needed)
    try:
        fields = json.loads(data)["manifest"]
        version = fields["format_version"]
        if version != FORMAT_VERSION:
            raise EngineVersionError("engine format version", found=version, needed=FORMAT_VERSION,
                                     remedy="Build the engine again with this version")
        return Manifest.from_dict(fields)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise storage.corrupt(f"file {MANIFEST_FILE}", f"{type(error).__name__}: {error}",
                              "the fields of an engine manifest") from error


def _manifest_bytes(manifest: Manifest) -> bytes:
    rest = b'"manifest": ' + json.dumps(manifest.to_dict(), indent=1).encode() + b"}\n"
    return _HEAD + storage.sha256_of(rest).encode() + b'",\n' + rest


@dataclasses.dataclass(frozen=True, slots=True)
class PartCheck:
    """One line of a verification report: a file or tensor, and what is wrong with it (None: nothing)."""

    part: str
    num_bytes: int
    problem: str | None


def verify_engine(folder: Path) -> tuple[PartCheck, ...]:
    """Check every file's SHA-256 and every tensor's CRC-32 and report them all, good and bad.

    Raises only where there is no readable manifest to go by.
    """
    manifest = read_manifest(folder)
    report = [PartCheck(MANIFEST_FILE, (folder / MANIFEST_FILE).stat().st_size, None)]
    native = () if manifest.native is None else (manifest.native,)
    for entry in (manifest.graph, *native, *manifest.tokenizer):
        try:
            report.append(PartCheck(entry.file, len(_checked(folder, entry)), None))
        except EngineCorruptError as error:
            report.append(PartCheck(entry.file, 0, str(error)))
    for name, tensor_entry in manifest.tensors.items():
        entries = {name: tensor_entry}
        try:
            tensors = storage.map_tensors(folder, entries, pointers=not manifest.self_contained)
        except CamshaftError as error:
            report.append(PartCheck(name, 0, str(error)))
            continue
        bad = next(storage.bad_checksums(tensors, entries, lambda amount: None), None)
        problem = None if bad is None else str(_bad_tensor(name, tensor_entry, bad[1]))
        report.append(PartCheck(name, tensors[name].nbytes, problem))
    return tuple(report)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What a build hands over beside its weights; the fields are those of ``Manifest``."""

    graph_text: str
    model: ModelConfig
    generation: GenerationDefaults
    build: BuildConfig
    device: DeviceRequirement
    life_cycles: tuple[LifeCycleSpec, ...]
    history: tuple[dict[str, Any], ...]
    kernels: tuple[dict[str, Any], ...]
    activation_peak_bytes: int
    weights_id: str
    tokenizer_files: Mapping[str, bytes]
    native: Path | None
    """The compiled library; it is copied, or loaded for an engine in memory, before ``finish`` returns."""
    num_token_ids: int | None = None


class EngineWriter:
    """Collects a build's weights and writes the engine: a folder that appears whole, or memory (``folder=None``).

    ``allow_pointers`` leaves unchanged tensors in the checkpoint's own files (cache engines only).
    Raises UserError where ``folder`` holds something that is not an engine.
    """

    def __init__(self, folder: Path | None, *, allow_pointers: bool = False) -> None:
        if folder is not None and folder.exists() and not is_engine_folder(folder) and (
                not folder.is_dir() or any(folder.iterdir())):
            raise UserError("output", str(folder), "a new or empty folder, or an engine to replace",
                            "Choose another folder, or clear this one")
        if folder is not None:
            storage.check_writable(folder)
        self._folder = folder
        self._allow_pointers = allow_pointers
        self._weights: dict[str, Weight] = {}

    def add_tensor(self, name: str, weight: Weight) -> None:
        """Take a weight by name. Its bytes are read in ``finish``, one weight at a time."""
        if name in self._weights:
            raise InternalError(f"engine tensor {name} is added twice")
        self._weights[name] = weight

    def finish(self, parts: EngineParts, *, show_progress: bool = False) -> Engine:
        """Write everything and return the engine. Raises OSError where the disk refuses; then nothing is left."""
        total = sum(weight.num_bytes for weight in self._weights.values())
        with progress("writing" if self._folder else "reading", total, show=show_progress) as advance:
            if self._folder is None:
                return self._in_memory(parts, advance)
            with storage.atomic_folder(self._folder) as scratch:
                manifest = self._write(scratch, parts, advance)
        tensors = storage.map_tensors(self._folder, manifest.tensors, pointers=not manifest.self_contained)
        native = None if manifest.native is None else self._folder / manifest.native.file
        return Engine(manifest=manifest, graph_text=parts.graph_text, folder=self._folder, tensors=tensors,
                      tokenizer_files=dict(parts.tokenizer_files), native=native)

    def _in_memory(self, parts: EngineParts, advance: Advance) -> Engine:
        tensors, entries = {}, {}
        for name, weight in self._weights.items():
            tensors[name] = storage.read_weight(name, weight).detach().contiguous()
            advance(weight.num_bytes)
            entries[name] = TensorEntry(file=_IN_MEMORY, offset=0, dtype=str(weight.dtype).removeprefix("torch."),
                                        shape=weight.shape, crc32=0)
        native = None if parts.native is None else load_library(parts.native)
        manifest = _manifest(parts, entries, native_data=None if parts.native is None else parts.native.read_bytes())
        return Engine(manifest=manifest, graph_text=parts.graph_text, folder=None, tensors=tensors,
                      tokenizer_files=dict(parts.tokenizer_files), native=native)

    def _write(self, scratch: Path, parts: EngineParts, advance: Advance) -> Manifest:
        entries: dict[str, TensorEntry] = {}
        if self._allow_pointers:
            for name, weight in self._weights.items():
                entry = storage.point_at(name, weight, advance)
                if entry is not None:
                    entries[name] = entry
        copied = {name: weight for name, weight in self._weights.items() if name not in entries}
        pointed = bool(entries)
        entries |= storage.write_weights(scratch / _WEIGHTS_FILE, copied, advance)
        (scratch / _GRAPH_FILE).write_bytes(parts.graph_text.encode())
        for name, data in parts.tokenizer_files.items():
            path = storage.confined(scratch, f"{_TOKENIZER_FOLDER}/{name}")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)
        native_data = None
        if parts.native is not None:
            shutil.copyfile(parts.native, scratch / parts.native.name)
            native_data = parts.native.read_bytes()
        manifest = _manifest(parts, entries, native_data=native_data)
        manifest = dataclasses.replace(manifest, self_contained=not pointed)
        (scratch / MANIFEST_FILE).write_bytes(_manifest_bytes(manifest))
        return manifest


def _manifest(parts: EngineParts, entries: dict[str, TensorEntry], *, native_data: bytes | None) -> Manifest:
    shared = {field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)
              if field.name not in ("graph_text", "tokenizer_files", "native")}
    native = None
    if parts.native is not None and native_data is not None:
        native = FileEntry(file=parts.native.name, sha256=storage.sha256_of(native_data))
    return Manifest(
        **shared, format_version=FORMAT_VERSION, camshaft_version=__version__, torch_version=torch.__version__,
        graph=FileEntry(file=_GRAPH_FILE, sha256=storage.sha256_of(parts.graph_text.encode())), native=native,
        tokenizer=tuple(FileEntry(file=f"{_TOKENIZER_FOLDER}/{name}", sha256=storage.sha256_of(data))
                        for name, data in parts.tokenizer_files.items()),
        tensors=entries)
