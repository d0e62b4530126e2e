"""GGUF tensor types: their block layouts and how blocks become float32.

Owns the table of types and vectorised dequantisation on packed rows. Reads no files and knows no tensor
names. Layouts follow ggml's ``ggml-quants``: a block stores one or two float16 scales and packed integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType

import torch

_CHUNK_ELEMENTS = 1 << 15  # 128 KiB of result stays in the L2 cache; torch starts no threads below this size

UNSUPPORTED_NAMES = MappingProxyType({
    10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL",
    21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M",
    34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
})
"""Types a file may hold that are refused, so that the refusal can name them."""

Unpack = Callable[[torch.Tensor, torch.Tensor], None]
"""``unpack(blocks[n, block_bytes] uint8, out[n, block_elements] float32)`` fills ``out``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """One storage type. A row of ``n`` elements takes ``n / block_elements * block_bytes`` bytes."""

    name: str
    block_elements: int
    block_bytes: int
    dtype: torch.dtype
    """What a read yields: the storage dtype of plain types, float32 of packed ones."""
    unpack: Unpack | None
    """None: the bytes already are ``dtype``."""


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """[n, 1] float32 from the float16 at byte ``start`` of every block."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low nibbles of ``packed[..., k]`` into ``out[..., 0, k]``, high ones into ``out[..., 1, k]``."""
    out.select(-2, 0).copy_(packed & 15)
    out.select(-2, 1).copy_(packed >> 4)


def _fifth_bits(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """[n, 2, 16] uint8, 16 where the element's bit in the 32-bit word at ``start`` is set, else 0."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, start:start + 4, None] >> shifts) & 1
    return bits.reshape(-1, 2, 16) << 4


def _unpack_q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 2:], out.view(-1, 2, 16))
    out.sub_(8.0).mul_(_half(blocks, 0))


def _unpack_q4_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 4:], out.view(-1, 2, 16))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q5_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    pairs = out.view(-1, 2, 16)
    _nibbles(blocks[:, 6:], pairs)
    pairs.add_(_fifth_bits(blocks, 2))
    out.sub_(16.0).mul_(_half(blocks, 0))


def _unpack_q5_1(blocks: torch.Tensor, out: torch.Tensor) -> None:
    pairs = out.view(-1, 2, 16)
    _nibbles(blocks[:, 8:], pairs)
    pairs.add_(_fifth_bits(blocks, 4))
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, 8, 1] float32 scales and minimums of a K block's eight sub-blocks (12 bytes of 6-bit fields at byte 4)."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=1)
    return ((scales * _half(blocks, 0)).unsqueeze(-1), (minimums * _half(blocks, 2)).unsqueeze(-1))


def _unpack_q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.view(-1, 4, 2, 32))
    scales, minimums = _k_scales(blocks)
    out.view(-1, 8, 32).mul_(scales).sub_(minimums)


def _unpack_q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.view(-1, 4, 2, 32))
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, None, 16:48] >> shifts) & 1) << 4
    scales, minimums = _k_scales(blocks)
    out.view(-1, 8, 32).add_(fifth).mul_(scales).sub_(minimums)


def _unpack_q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    low = blocks[:, :128].reshape(-1, 2, 1, 2, 32)
    quarters = out.view(-1, 2, 2, 2, 32)
    quarters[:, :, 0:1].copy_(low & 15)
    quarters[:, :, 1:2].copy_(low >> 4)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    out.view(-1, 2, 4, 32).add_(high)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    out.view(-1, 16, 16).sub_(32.0).mul_(scales.unsqueeze(-1))


def _plain(name: str, dtype: torch.dtype) -> BlockType:
    return BlockType(name=name, block_elements=1, block_bytes=dtype.itemsize, dtype=dtype, unpack=None)


def _packed(name: str, block_elements: int, block_bytes: int, unpack: Unpack) -> BlockType:
    return BlockType(name=name, block_elements=block_elements, block_bytes=block_bytes, dtype=torch.float32,
                     unpack=unpack)


BLOCK_TYPES = MappingProxyType({
    0: _plain("F32", torch.float32),
    1: _plain("F16", torch.float16),
    2: _packed("Q4_0", 32, 18, _unpack_q4_0),
    3: _packed("Q4_1", 32, 20, _unpack_q4_1),
    6: _packed("Q5_0", 32, 22, _unpack_q5_0),
    7: _packed("Q5_1", 32, 24, _unpack_q5_1),
    8: _packed("Q8_0", 32, 34, _unpack_q8_0),
    12: _packed("Q4_K", 256, 144, _unpack_q4_k),
    13: _packed("Q5_K", 256, 176, _unpack_q5_k),
    14: _packed("Q6_K", 256, 210, _unpack_q6_k),
    30: _plain("BF16", torch.bfloat16),
})
"""Supported types by their number in the file."""


def unpack_rows(raw: torch.Tensor, kind: BlockType, num_columns: int,
                row_order: torch.Tensor | None = None) -> torch.Tensor:
    """Values ``[rows, num_columns]`` of packed rows ``raw[rows, row_bytes]`` (uint8), in ``kind.dtype``.

    ``row_order[i]`` is the row of ``raw`` that becomes row i; None keeps the order. Plain types without a new
    order come back as a view. Packed ones are unpacked a few rows at a time, so that what is held beyond the
    result stays small.
    """
    if kind.unpack is None:
        picked = raw if row_order is None else raw[row_order]
        return picked.view(kind.dtype)
    num_rows = raw.shape[0]
    out = torch.empty((num_rows, num_columns), dtype=torch.float32)
    step = max(1, _CHUNK_ELEMENTS // num_columns)
    for start in range(0, num_rows, step):
        stop = min(start + step, num_rows)
        rows = raw[start:stop] if row_order is None else raw[row_order[start:stop]]
        kind.unpack(rows.reshape(-1, kind.block_bytes), out[start:stop].view(-1, kind.block_elements))
    return out
