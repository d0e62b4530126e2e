"""Bytes of an engine on disk: atomic folders, one weights file in safetensors layout, mapped reading, checksums.

Owns how bytes are written, confined, mapped and checked. What the files mean is ``artifact.py``.
No pickle anywhere. Every read failure is an EngineCorruptError naming the file; a write failure is the
operating system's own OSError, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import mmap
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import filelock
import torch

from camshaft.core.device import probe_cpu
from camshaft.core.errors import EngineCorruptError, InternalError
from camshaft.engine.manifest import TensorEntry
from camshaft.ir.weight import Weight

ALIGNMENT = 64
"""Every tensor starts at a multiple of this in its file: a cache line, and any vector load."""
_CHUNK_BYTES = 8 << 20
_REBUILD = "Build the engine again"
_LAYOUT_NAMES = MappingProxyType({
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
})
_DTYPES = MappingProxyType({str(dtype).removeprefix("torch."): dtype for dtype in _LAYOUT_NAMES})


def dtype_named(name: str) -> torch.dtype:
    """The torch type a manifest spells ``name``, e.g. "bfloat16". Raises EngineCorruptError for any other word."""
    if name not in _DTYPES:
        raise EngineCorruptError("tensor type", found=repr(name), needed=", ".join(sorted(_DTYPES)), remedy=_REBUILD)
    return _DTYPES[name]


def corrupt(part: str, found: object, needed: object) -> EngineCorruptError:
    """The error for a truncated, edited or missing ``part``."""
    return EngineCorruptError(part, found=found, needed=needed, remedy=f"{_REBUILD}, or restore the file")


def check_writable(target: Path) -> None:
    """OSError where ``target`` can plainly not be made, to be asked before long work rather than after it."""
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``target``; on success it becomes ``target`` whole, else nothing remains.

    An existing ``target`` is replaced. Leftovers of writers that died are removed first. Raises OSError.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target.parent, glob.escape(target.name))
    token = secrets.token_hex(4)
    lock_path = target.with_name(f".{target.name}.{token}.lock")
    scratch = target.with_name(f".{target.name}.{token}.partial")
    lock_path.touch()  # refused at once where nothing can be made here; the lock alone would be tried for ever
    with filelock.FileLock(lock_path):
        try:
            scratch.mkdir()
            yield scratch
            _sync_tree(scratch)
            _replace_folder(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
    _sync(target.parent)


def remove_leftovers(parent: Path, name: str = "*") -> None:
    """Clear what writers of ``parent / name`` left that were killed; a folder they had moved aside comes back.

    ``name`` may be a pattern of :mod:`glob`; what living writers use is locked and stays.
    """
    for lock_path in parent.glob(f".{name}.*.lock"):
        with contextlib.suppress(filelock.Timeout), filelock.FileLock(lock_path, timeout=0):
            target = lock_path.with_name(lock_path.name[1:].rsplit(".", 2)[0])
            old = lock_path.with_suffix(".old")
            if old.exists() and not target.exists():
                os.rename(old, target)
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(lock_path.with_suffix(".partial"), ignore_errors=True)
            lock_path.unlink(missing_ok=True)


def _replace_folder(scratch: Path, target: Path) -> None:
    if not target.exists():
        os.rename(scratch, target)
        return
    old = scratch.with_suffix(".old")
    os.rename(target, old)
    try:
        os.rename(scratch, target)
    except OSError:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        _sync(path)
    _sync(folder)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes, row-major; a view where it already lies so."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def read_weight(name: str, weight: Weight) -> torch.Tensor:
    """Read a weight and hold it to its declared shape and type (InternalError)."""
    tensor = weight.read()
    if tuple(tensor.shape) != weight.shape or tensor.dtype != weight.dtype:
        raise InternalError(f"weight {name} reads as {tensor.dtype} {tuple(tensor.shape)}, "
                            f"declared {weight.dtype} {weight.shape}")
    return tensor


def checksum(data: memoryview) -> int:
    """CRC-32 of ``data``; the interpreter lock is free while it runs."""
    value = 0
    for start in range(0, len(data), _CHUNK_BYTES):
        value = zlib.crc32(data[start:start + _CHUNK_BYTES], value)
    return value


def _layout(weights: Mapping[str, Weight]) -> tuple[bytes, dict[str, int]]:
    """The file's header and every tensor's offset in the file. Gaps are padding tensors: the format allows no holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset, starts = 0, {}
    for name, weight in weights.items():
        gap = -offset % ALIGNMENT
        if gap:
            header[f"__padding_{offset}__"] = {"dtype": "U8", "shape": [gap], "data_offsets": [offset, offset + gap]}
            offset += gap
        starts[name] = offset
        end = offset + weight.num_bytes
        header[name] = {"dtype": _LAYOUT_NAMES[weight.dtype], "shape": list(weight.shape),
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    prefix = len(text).to_bytes(8, "little") + text
    return prefix, {name: len(prefix) + start for name, start in starts.items()}


def write_weights(path: Path, weights: Mapping[str, Weight], advance: Callable[[int], None]) -> dict[str, TensorEntry]:
    """Write ``weights`` to ``path`` one at a time, in order, and return where each lies. Raises OSError.

    ``advance`` is told the bytes written as they go.
    """
    prefix, starts = _layout(weights)
    entries = {}
    with open(path, "wb", buffering=0) as file:
        _write_all(file, memoryview(prefix))
        for name, weight in weights.items():
            data = _bytes_of(read_weight(name, weight))
            _write_all(file, memoryview(bytes(starts[name] - file.tell())))
            crc = 0
            for start in range(0, len(data), _CHUNK_BYTES):
                piece = data[start:start + _CHUNK_BYTES]
                crc = zlib.crc32(piece, crc)
                _write_all(file, piece)
                advance(len(piece))
            entries[name] = TensorEntry(file=path.name, offset=starts[name], dtype=str(weight.dtype).removeprefix(
                "torch."), shape=weight.shape, crc32=crc)
    return entries


def _write_all(file: Any, data: memoryview) -> None:
    while len(data):
        data = data[file.write(data):]


def point_at(name: str, weight: Weight, advance: Callable[[int], None]) -> TensorEntry | None:
    """An entry that leaves the bytes where they lie in the checkpoint; None where they must be copied."""
    span = weight.span
    if span is None or span.num_bytes != weight.num_bytes or span.offset % weight.dtype.itemsize:
        return None
    crc = checksum(_bytes_of(read_weight(name, weight)))
    advance(span.num_bytes)
    return TensorEntry(file=str(span.path.resolve()), offset=span.offset,
                       dtype=str(weight.dtype).removeprefix("torch."), shape=weight.shape, crc32=crc)


def confined(folder: Path, name: str) -> Path:
    """``folder / name`` for a relative name that stays inside the folder, links followed; else EngineCorruptError."""
    pure = PurePosixPath(name)
    path = folder / pure
    if pure.is_absolute() or ".." in pure.parts or "\\" in name or "\0" in name or not pure.parts:
        raise corrupt(f"file name {name!r}", "a path that leaves the engine", "a name inside the engine folder")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise corrupt(f"file {name!r}", "a link that leaves the engine", "a file inside the engine folder")
    return path


def map_file(path: Path) -> torch.Tensor:
    """The file as a uint8 tensor, mapped private: reading copies nothing, and no write reaches the file."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise corrupt(f"file {path}", error, "a readable, non-empty file") from error
    return torch.frombuffer(mapped, dtype=torch.uint8)


def map_tensors(folder: Path, entries: Mapping[str, TensorEntry], *, pointers: bool) -> dict[str, torch.Tensor]:
    """Every tensor as a view of its mapped file, bounds checked. ``pointers``: absolute file names are allowed."""
    files: dict[str, torch.Tensor] = {}
    tensors = {}
    for name, entry in entries.items():
        if entry.file not in files:
            outside = pointers and Path(entry.file).is_absolute()
            files[entry.file] = map_file(Path(entry.file) if outside else confined(folder, entry.file))
        base, dtype = files[entry.file], dtype_named(entry.dtype)
        num_bytes = dtype.itemsize
        for size in entry.shape:
            num_bytes *= size
        if min(entry.offset, *entry.shape, 0) < 0 or entry.offset % dtype.itemsize:
            raise corrupt(f"tensor {name} of {entry.file}", f"offset {entry.offset}, shape {entry.shape}",
                          "sizes that are not negative and an aligned offset")
        if entry.offset + num_bytes > len(base):
            raise corrupt(f"tensor {name} of {entry.file}", f"a file of {len(base)} bytes",
                          f"at least {entry.offset + num_bytes}")
        tensors[name] = base[entry.offset:entry.offset + num_bytes].view(dtype).view(entry.shape)
    return tensors


def bad_checksums(tensors: Mapping[str, torch.Tensor], entries: Mapping[str, TensorEntry],
                  advance: Callable[[int], None]) -> Iterator[tuple[str, int]]:
    """Yield (name, CRC found) of every tensor whose bytes changed. Several threads read; large tensors go first."""

    def check(name: str) -> tuple[str, int]:
        data = _bytes_of(tensors[name])
        found = checksum(data)
        advance(len(data))
        return name, found

    order = sorted(entries, key=lambda name: -tensors[name].nbytes)
    with ThreadPoolExecutor(max_workers=probe_cpu().num_threads) as pool:
        for name, found in pool.map(check, order):
            if found != entries[name].crc32:
                yield name, found


def sha256_of(data: bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def read_file(folder: Path, name: str) -> bytes:
    """A whole small file of the engine; EngineCorruptError where it is missing or unreadable."""
    path = confined(folder, name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise corrupt(f"file {path}", error, "a readable file") from error
