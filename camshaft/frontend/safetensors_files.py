"""Safetensors files of a model folder: which of them hold the model, and their tensors as mapped, lazy weights.

Owns the header format (https://github.com/huggingface/safetensors#format), the shard index as a two-way contract,
and refusing what is ambiguous. Knows no model: which tensors a definition needs is ``weights.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from camshaft.core.errors import CheckpointError
from camshaft.core.log import logger
from camshaft.ir.weight import FileSpan, Weight

INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound; a longer header is damage, not a model."""

DTYPES = MappingProxyType({
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
})

_REFETCH = "Download the file again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One tensor as a file's header describes it; ``offset`` counts from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Tensors of a safetensors file by name, without reading their bytes.

    CheckpointError when the header is not one, or does not describe exactly the bytes the file holds.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(str(path), length, f"a header that fits the file's {size} bytes", _REFETCH)
        text = file.read(length)
    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), str(error), "a header in JSON with every name once", _REFETCH) from error
    if not isinstance(entries, dict):
        raise CheckpointError(str(path), type(entries).__name__, "a header that is a JSON object", _REFETCH)
    entries.pop("__metadata__", None)
    found = {name: _tensor(path, name, entry, 8 + length) for name, entry in entries.items()}
    _check_spans(path, found, 8 + length, size)
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{sorted(name for name in set(names) if names.count(name) > 1)[:3]} twice")
    return dict(pairs)


def _sizes(value: object) -> list[int] | None:
    sound = isinstance(value, list) and all(isinstance(size, int) and not isinstance(size, bool) and size >= 0
                                            for size in value)
    return value if sound else None  # type: ignore[return-value]


def _tensor(path: Path, name: str, entry: object, base: int) -> TensorHeader:
    fields = entry if isinstance(entry, dict) else {}
    shape, offsets, kind = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets")), fields.get("dtype")
    if shape is None or offsets is None or len(offsets) != 2 or not isinstance(kind, str):
        raise CheckpointError(f"{path}: {name}", entry, "dtype, shape and two data_offsets", _REFETCH)
    if kind not in DTYPES:
        raise CheckpointError(f"{path}: {name}", kind, f"a tensor type of {', '.join(DTYPES)}")
    begin, end = offsets
    dtype, num_bytes = DTYPES[kind], end - begin
    # An empty tensor fits any bytes, so its other sizes need a bound of their own: torch overflows beyond it.
    if num_bytes != math.prod(shape) * dtype.itemsize or math.prod(max(size, 1) for size in shape) >= 2**60:
        raise CheckpointError(f"{path}: {name}", offsets, f"as many bytes as {kind} {shape} takes", _REFETCH)
    return TensorHeader(dtype=dtype, shape=tuple(shape), offset=base + begin, num_bytes=num_bytes)


def _check_spans(path: Path, tensors: Mapping[str, TensorHeader], start: int, size: int) -> None:
    """The tensors must tile the rest of the file: a gap, an overlap or a short file means damage."""
    cursor = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if tensor.offset != cursor:
            problem = "overlaps the tensor before it" if tensor.offset < cursor else "leaves a gap before it"
            raise CheckpointError(f"{path}: {name}", tensor.offset - start, f"an offset of {cursor - start}; this one "
                                  + problem, _REFETCH)
        cursor += tensor.num_bytes
    if cursor != size:
        raise CheckpointError(str(path), f"{size} bytes", f"{cursor} bytes, as its header says", _REFETCH)


class _MappedFile:
    """A file mapped privately on first use: pages are read when touched, and a write never reaches the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def data(self) -> torch.Tensor:
        return torch.from_file(str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8)

    def read(self, tensor: TensorHeader) -> torch.Tensor:
        if tensor.num_bytes == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        raw = self.data[tensor.offset:tensor.offset + tensor.num_bytes]
        if len(raw) < tensor.num_bytes:
            raise CheckpointError(str(self.path), f"{len(self.data)} bytes", "the size it had when it was opened",
                                  "The file changed while it was in use; open the model again")
        if tensor.offset % tensor.dtype.itemsize:
            raw = raw.clone()
        return raw.view(tensor.dtype).view(tensor.shape)


def file_weights(path: Path) -> dict[str, Weight]:
    """Every tensor of one file as a lazy weight whose bytes stay in the mapped file."""
    mapped = _MappedFile(path)
    return {name: Weight(shape=tensor.shape, dtype=tensor.dtype, read=functools.partial(mapped.read, tensor),
                         span=FileSpan(path=path, offset=tensor.offset, num_bytes=tensor.num_bytes), origin=name)
            for name, tensor in read_header(path).items()}


def folder_weights(folder: Path) -> tuple[dict[str, Weight], tuple[Path, ...]]:
    """Every tensor of the model in ``folder``, and the files that hold them (the index included).

    With an index, index and shards must agree in both directions. Without one, exactly one file may hold the model.
    """
    candidates = _candidates(folder)
    index = folder / INDEX_FILE
    if index.is_file():
        return _indexed_weights(index, candidates)
    if not candidates:
        raise _no_safetensors(folder)
    only = candidates[0]
    total = re.search(r"-of-(\d+)\.safetensors$", only.name)
    if len(candidates) > 1 or (total and int(total[1]) > 1):
        raise CheckpointError("model", [path.name for path in candidates], f"one file, or shards with {INDEX_FILE}",
                              f"Download {INDEX_FILE} as well, and remove files that belong to another model")
    return file_weights(only), (only,)


def _candidates(folder: Path) -> list[Path]:
    """Safetensors files that may hold the model. Mistral's ``consolidated`` files repeat it in another layout."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        if path.name.startswith("consolidated"):
            logger.info("%s repeats the model in another layout; not read", path)
        elif path.name.startswith("model"):
            found.append(path)
        else:
            logger.warning("%s is not named model*.safetensors; not read", path)
    return found


def _indexed_weights(index: Path, candidates: list[Path]) -> tuple[dict[str, Weight], tuple[Path, ...]]:
    folder, weight_map = index.parent, _weight_map(index)
    shards = [folder / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in shards if not path.is_file()]
    if missing:
        raise CheckpointError(str(index), missing, "shards that are in the folder", "Download the missing files")
    stray = [path.name for path in candidates if path not in shards]
    if stray:
        raise CheckpointError(str(folder), stray, f"only the files {INDEX_FILE} names",
                              "Two versions of the model may be mixed: remove the files that do not belong")
    found: dict[str, Weight] = {}
    for shard in shards:
        tensors = file_weights(shard)
        unlisted = sorted(name for name in tensors if weight_map.get(name) != shard.name)
        if unlisted:
            raise CheckpointError(str(shard), unlisted[:5], f"only tensors that {INDEX_FILE} places in this file",
                                  "The shard belongs to another version of the model: download it again")
        found |= tensors
    absent = sorted(weight_map.keys() - found.keys())
    if absent:
        raise CheckpointError(str(index), absent[:5], "tensors that their shards hold",
                              "A shard belongs to another version of the model: download the files again")
    return found, (index, *shards)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        data = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(index), str(error), "a JSON file with every name once", _REFETCH) from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(str(index), weight_map, "a weight_map of tensor names to files", _REFETCH)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {tensor}", name, "the name of a .safetensors file in the same folder")
    return weight_map


def _no_safetensors(folder: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        return CheckpointError("model", pickles, "weights in safetensors; pickle files can run code and are not read",
                               "Load them with transformers and call save_pretrained(folder) to convert")
    return CheckpointError("model", str(folder), f"model.safetensors, or shards with {INDEX_FILE}",
                           "Check that the download is complete")
