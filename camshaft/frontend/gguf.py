"""GGUF files: the container (header, metadata, tensor table) and the checkpoint made of it.

Owns reading versions 2 and 3, little endian, from a private mapping; a malformed file is a CheckpointError
that says what is wrong and at which byte. Block layouts are ``gguf_blocks``, names and shapes
``gguf_names``, what architectures differ in ``gguf_architectures``, the tokenizer ``gguf_tokenizer``.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from camshaft.core.errors import CheckpointError
from camshaft.frontend.checkpoint import Checkpoint
from camshaft.frontend.gguf_blocks import BLOCK_TYPES, UNSUPPORTED_NAMES, BlockType, unpack_rows
from camshaft.frontend.gguf_names import TensorPlan, halves_order, plan
from camshaft.frontend.gguf_rope import ROPE_FREQS
from camshaft.ir.weight import FileSpan, Weight

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_ELEMENTS = 1 << 40
_NUMBERS = MappingProxyType({0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
                             10: "<u8", 11: "<i8", 12: "<f8"})
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY_BYTES = 13  # of a metadata entry: an empty key, a type and one byte
_SMALLEST_TENSOR_BYTES = 32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One entry of the tensor table. ``shape`` is row-major: the file's dimensions reversed."""

    name: str
    shape: tuple[int, ...]
    kind: BlockType
    offset: int
    """Of the first byte in the file."""
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Everything of a file but the tensor bytes. Arrays of numbers are numpy arrays, of strings lists."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class _Cursor:
    """Reads forward through the mapping. Every read is checked against the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.key = "header"

    def fail(self, problem: str) -> CheckpointError:
        return _broken(self.path, f"{problem} in {self.key} at byte {self.at}")

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self.data) - self.at:
            raise self.fail(f"the file ends ({num_bytes} bytes wanted, {len(self.data) - self.at} left)")
        part = self.data[self.at:self.at + num_bytes]
        self.at += num_bytes
        return part

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, what: str, smallest_bytes: int) -> int:
        """A number of things that each take at least ``smallest_bytes`` of what is left of the file."""
        found = self.u64()
        if found * smallest_bytes > len(self.data) - self.at:
            raise self.fail(f"{found} {what}, more than the file can hold")
        return found

    def text(self) -> str:
        raw = self.take(self.u64())
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string that is not UTF-8") from None

    def texts(self) -> list[str]:
        """An array of strings; written out flat because vocabularies have hundreds of thousands of them."""
        count = self.count("strings", 8)
        data, at, end = self.data, self.at, len(self.data)
        length_at = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    break
                found.append(str(data[start:at], "utf-8"))
        except (struct.error, UnicodeDecodeError) as error:
            self.at = at
            raise self.fail(f"a broken string ({error})") from None
        if len(found) != count:
            raise self.fail(f"string {len(found)} of {count} goes past the end of the file")
        self.at = at
        return found

    def number(self, code: int) -> int | float | bool:
        dtype = np.dtype(_NUMBERS[code])
        found: int | float | bool = np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()
        return found

    def value(self) -> Any:
        code = self.u32()
        if code in _NUMBERS:
            return self.number(code)
        if code == _STRING:
            return self.text()
        if code != _ARRAY:
            raise self.fail(f"unknown value type {code}")
        item = self.u32()
        if item == _STRING:
            return self.texts()
        if item not in _NUMBERS:
            raise self.fail(f"an array of type {item}, which is not supported")
        dtype = np.dtype(_NUMBERS[item])
        count = self.count("array items", dtype.itemsize)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def _broken(path: Path, problem: str) -> CheckpointError:
    return CheckpointError("model", str(path), f"a whole GGUF file, but found {problem}",
                           "Download or convert the file again")


def _read_intro(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; returns the numbers of tensors and of metadata entries."""
    if bytes(cursor.take(4)) != _MAGIC:
        cursor.at = 0
        raise cursor.fail("no GGUF magic")
    version = cursor.u32()
    if version not in _VERSIONS:
        kind = "a big-endian file" if version & 0xFFFF == 0 and version else f"version {version}"
        raise CheckpointError("model", str(cursor.path), f"GGUF version 2 or 3, little endian, but this is {kind}",
                              "Convert the file with a current llama.cpp")
    num_tensors = cursor.count("tensors", _SMALLEST_TENSOR_BYTES)
    return num_tensors, cursor.count("metadata entries", _SMALLEST_ENTRY_BYTES)


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockType, int]:
    name = cursor.text()
    cursor.key = f"tensor {name!r}"
    num_dims = cursor.u32()
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.fail(f"{num_dims} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    if 0 in shape or math.prod(shape) > _MAX_ELEMENTS:
        raise cursor.fail(f"shape {shape}")
    code = cursor.u32()
    if code not in BLOCK_TYPES:
        known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
        raise CheckpointError("tensor type", UNSUPPORTED_NAMES.get(code, code),
                              f"one of {known} (tensor {name!r} of {cursor.path})",
                              "Use a file of another quantisation, e.g. Q8_0, Q4_K_M or F16")
    kind = BLOCK_TYPES[code]
    if shape[-1] % kind.block_elements:
        raise cursor.fail(f"rows of {shape[-1]} elements, no multiple of {kind.name}'s {kind.block_elements},")
    return name, shape, kind, cursor.u64()


def read_header(path: Path, data: memoryview) -> GgufHeader:
    """Parse the header of the GGUF file at ``path`` mapped as ``data``. Raises CheckpointError."""
    cursor = _Cursor(path, data)
    num_tensors, num_entries = _read_intro(cursor)
    metadata: dict[str, Any] = {}
    for index in range(num_entries):
        cursor.key = f"metadata entry {index}"
        name = cursor.text()
        cursor.key = f"metadata {name!r}"
        if name in metadata:
            raise cursor.fail("a second value")
        metadata[name] = cursor.value()
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment {alignment!r}")
    entries = []
    for index in range(num_tensors):
        cursor.key = f"tensor entry {index}"
        entries.append(_read_tensor_entry(cursor))
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        num_bytes = math.prod(shape) // kind.block_elements * kind.block_bytes
        if name in tensors:
            raise _broken(path, f"tensor {name!r} twice")
        if offset % alignment or base + offset + num_bytes > len(data):
            raise _broken(path, f"tensor {name!r} at bytes {base + offset} to {base + offset + num_bytes} "
                                f"(alignment {alignment}, file size {len(data)})")
        tensors[name] = GgufTensor(name=name, shape=shape, kind=kind, offset=base + offset, num_bytes=num_bytes)
    return GgufHeader(metadata=metadata, tensors=tensors)


def _map(path: Path) -> np.memmap[Any, np.dtype[np.uint8]]:
    """The file as bytes. The mapping is private and writable, as torch wants it; writes never reach the file."""
    try:
        if path.stat().st_size == 0:
            raise _broken(path, "an empty file")
        return np.memmap(path, dtype=np.uint8, mode="c")
    except OSError as error:
        raise CheckpointError("model", str(path), f"a readable file ({error.strerror})",
                              "Check its permissions") from None


class GgufCheckpoint(Checkpoint):
    """A model in one GGUF file. Opening reads the header; tensors are unpacked when someone reads them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = (path,)
        mapped = _map(path)
        header = read_header(path, mapped.data)
        self.metadata = header.metadata
        found = plan(path, header.metadata, {name: (entry.shape, entry.kind.name)
                                             for name, entry in header.tensors.items()},
                     self._values(mapped, header.tensors.get(ROPE_FREQS)))
        self.config = found.config
        self.generation = found.generation
        self.tensors = {planned.target: self._weight(mapped, header.tensors[name], planned)
                        for name, planned in found.tensors.items()}

    @staticmethod
    def _values(mapped: np.memmap[Any, Any], entry: GgufTensor | None) -> torch.Tensor | None:
        return None if entry is None else _reader(mapped, entry, None)()

    def _weight(self, mapped: np.memmap[Any, Any], entry: GgufTensor, planned: TensorPlan) -> Weight:
        read = _reader(mapped, entry, planned.rotary_heads)
        if planned.holds_one_plus:
            return Weight(shape=entry.shape, dtype=torch.float32, read=lambda: read().float() - 1, origin=entry.name)
        untouched = entry.kind.unpack is None and planned.rotary_heads is None
        span = FileSpan(path=self.path, offset=entry.offset, num_bytes=entry.num_bytes) if untouched else None
        return Weight(shape=entry.shape, dtype=entry.kind.dtype, read=read, span=span, origin=entry.name)

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json and tokenizer_config.json rebuilt from the metadata; empty when it has no tokenizer."""
        from camshaft.frontend.gguf_tokenizer import rebuild_tokenizer

        return rebuild_tokenizer(self.metadata)


def _reader(mapped: np.memmap[Any, Any], entry: GgufTensor, rotary_heads: int | None) -> Callable[[], torch.Tensor]:
    """How to read a tensor. ``rotary_heads``: its rows are interleaved per head and come back in halves."""

    def read() -> torch.Tensor:
        num_rows = math.prod(entry.shape[:-1])
        raw = torch.from_numpy(mapped[entry.offset:entry.offset + entry.num_bytes])
        if rotary_heads is None:
            return unpack_rows(raw.view(num_rows, -1), entry.kind, entry.shape[-1]).view(entry.shape)
        columns = entry.shape[-1] if len(entry.shape) > 1 else 1
        order = halves_order(entry.shape[0], rotary_heads)
        return unpack_rows(raw.view(entry.shape[0], -1), entry.kind, columns, order).view(entry.shape)

    return read
