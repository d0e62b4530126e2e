"""Triton products for up to 64 tokens, where reading the weight is all the time there is; beyond, torch's libraries.

Owns the kernels, the tiles they may run with (``TILES``) and which tile a shape gets (``tile_for``). Every weight is
read once. No sum crosses programs but by way of a workspace that is added up in a fixed order, so results are the same
every time; a row's bits depend on its own row and on the tile, which the number of tokens picks by its bucket.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from camshaft.kernels.gemm.ref import FP8_MAX, SMALLEST_PEAK, linear_fp8_op, linear_op
from camshaft.kernels.gemm.ref import linear as torch_linear
from camshaft.kernels.op import OpCall

MAX_TOKENS = 64
"""Beyond so many tokens a product is no longer bound by its weight's bytes."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LANES_OF_ROUNDING = 4096
_LANES_OF_SUMMING = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a product is cut into programs."""

    tokens: int
    """Rows of x a program holds: 1 multiplies without matrix units, else 16, 32 or 64."""
    rows: int
    """Output channels of a program."""
    depth: int
    """Elements of a row read at a time."""
    warps: int
    stages: int = 1
    """Loads in flight, in steps of ``depth``, by way of shared memory; 1 loads straight into registers."""
    splits: int = 1
    """Pieces the depth is cut into, each its own program."""
    weight_first: bool = False
    """The weight is the left operand: its rows fill the 64 that a warp group's matrix instruction wants."""
    early: bool = False
    """Starts before the kernel ahead ends and fetches weights meanwhile: only where no kernel ahead writes them."""


def _named(tiles: tuple[Tile, ...]) -> Mapping[str, Tile]:
    return MappingProxyType({
        f"{'w' if tile.weight_first else 'x'}{tile.tokens}_{tile.rows}x{tile.depth}_{tile.warps}w{tile.stages}s"
        + (f"_split{tile.splits}" if tile.splits > 1 else "") + ("_early" if tile.early else ""): tile
        for tile in tiles})


def _for_tokens(tokens: int) -> tuple[Tile, ...]:
    return (
        Tile(tokens=tokens, rows=16, depth=256, warps=2, stages=4 if tokens < 64 else 3),
        Tile(tokens=tokens, rows=32, depth=128, warps=4, stages=5),
        Tile(tokens=tokens, rows=32, depth=256, warps=4, stages=4 if tokens < 64 else 3),
        Tile(tokens=tokens, rows=64, depth=128, warps=4, stages=4, weight_first=True),
        Tile(tokens=tokens, rows=64, depth=128, warps=4, stages=4, splits=2, weight_first=True),
        Tile(tokens=tokens, rows=64, depth=128, warps=4, stages=4, splits=4, weight_first=True),
    )


TILES = _named((
    Tile(tokens=1, rows=1, depth=1024, warps=2),
    Tile(tokens=1, rows=2, depth=1024, warps=4),
    Tile(tokens=1, rows=4, depth=1024, warps=4),
    Tile(tokens=1, rows=8, depth=512, warps=4),
    Tile(tokens=1, rows=8, depth=1024, warps=8),
    Tile(tokens=1, rows=16, depth=512, warps=8),
    Tile(tokens=1, rows=4, depth=1024, warps=4, stages=4),
    Tile(tokens=1, rows=8, depth=1024, warps=8, stages=4),
    Tile(tokens=1, rows=4, depth=1024, warps=4, early=True),
    Tile(tokens=1, rows=8, depth=1024, warps=8, early=True),
    *(tile for tokens in (16, 32, 64) for tile in _for_tokens(tokens)),
))
"""Every tile that may be picked, by name: what is timed and what is chosen are the same."""

_MOST_PROGRAMS = MappingProxyType({16: 384, 32: 256, 64: 128})
"""By bucket: depths from _SPLIT_FROM on are split while programs stay this few, twice as many from _DEEP on."""
_SPLIT_FROM = 2048
_DEEP = 8192


def bucket_of(num_tokens: int) -> int:
    """The least of 1, 16, 32 and 64 that holds ``num_tokens``; 64 beyond."""
    return next((size for size in (1, 16, 32) if num_tokens <= size), 64)


@functools.lru_cache(maxsize=4096)
def tile_for(num_tokens: int, num_rows: int, depth: int) -> Tile:
    """The tile of a product, by rules that were measured on an H200 over the products of an 8B and a 0.6B model.

    Their time is within 14% of the best tile for every shape and number of tokens there, 1% in the mean
    (benchmarks/notes/gpu_gemm.md).
    """
    bucket = bucket_of(num_tokens)
    if bucket == 1:
        if num_rows < 4096:
            return TILES["x1_1x1024_2w1s"]
        return TILES["x1_4x1024_4w1s" if num_rows == 4096 and depth >= 4096 else "x1_8x512_4w1s"]
    most = _MOST_PROGRAMS[bucket] * (2 if depth >= _DEEP else 1)
    programs = triton.cdiv(num_rows, 64)
    splits = next((pieces for pieces in (4, 2) if programs * pieces <= most and depth >= _SPLIT_FROM), 1)
    return TILES[f"w{bucket}_64x128_4w4s" + (f"_split{splits}" if splits > 1 else "")]


@triton.jit
def vector_kernel(x, weight, bias, x_scale, scale, out, num_rows, depth, weight_stride, scale_stride,
                  ROWS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
                  SCALED: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):
    """One row x [K] times ROWS rows of the weight, whole, in fp32 without matrix units."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, DEPTH)
    read = tl.minimum(rows, num_rows - 1)
    places = weight + read.to(tl.int64)[:, None] * weight_stride + lanes[None, :]
    if EVEN:
        values = tl.load(places, eviction_policy="evict_first")
    else:
        values = tl.load(places, mask=(lanes < depth)[None, :], other=0.0, eviction_policy="evict_first")
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    inputs = tl.load(x + lanes) if EVEN else tl.load(x + lanes, mask=lanes < depth, other=0.0)
    total = values.to(tl.float32) * inputs.to(tl.float32)[None, :]
    for start in tl.range(DEPTH, depth, DEPTH, num_stages=STAGES):
        if EVEN:
            values = tl.load(places + start, eviction_policy="evict_first")
            inputs = tl.load(x + start + lanes)
        else:
            inside = start + lanes < depth
            values = tl.load(places + start, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            inputs = tl.load(x + start + lanes, mask=inside, other=0.0)
        total += values.to(tl.float32) * inputs.to(tl.float32)[None, :]
    result = tl.sum(total, axis=1)
    if SCALED:
        result = result * tl.load(x_scale) * tl.load(scale + read * scale_stride)
    if HAS_BIAS:
        result += tl.load(bias + read).to(tl.float32)
    tl.store(out + rows, result.to(out.dtype.element_ty), mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def matrix_kernel(x, weight, bias, x_scale, scale, out, partial, num_tokens, num_rows, depth, x_stride, weight_stride,
                  scale_stride, TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
                  WEIGHT_FIRST: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr):
    """TOKENS rows of x times ROWS rows of the weight, over one of SPLITS pieces of the depth.

    Rows and tokens beyond the last are read as the last, and not written.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    piece = tl.program_id(1)
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    lanes = tl.arange(0, DEPTH)
    read_rows, read_tokens = tl.minimum(rows, num_rows - 1), tl.minimum(tokens, num_tokens - 1)
    weights = weight + read_rows.to(tl.int64)[:, None] * weight_stride + lanes[None, :]
    inputs = x + read_tokens.to(tl.int64)[:, None] * x_stride + lanes[None, :]
    span = tl.cdiv(tl.cdiv(depth, DEPTH), SPLITS) * DEPTH
    first = piece * span
    last = tl.minimum(first + span, depth)
    total = tl.zeros((ROWS, TOKENS) if WEIGHT_FIRST else (TOKENS, ROWS), dtype=tl.float32)
    for start in range(first, last, DEPTH):
        if EVEN:
            left = tl.load(inputs + start)
            right = tl.load(weights + start, eviction_policy="evict_first")
        else:
            inside = (start + lanes < last)[None, :]
            left = tl.load(inputs + start, mask=inside, other=0.0)
            right = tl.load(weights + start, mask=inside, other=0.0, eviction_policy="evict_first")
        if WEIGHT_FIRST:
            total = tl.dot(right, tl.trans(left), total, input_precision="ieee", max_num_imprecise_acc=DEPTH)
        else:
            total = tl.dot(left, tl.trans(right), total, input_precision="ieee", max_num_imprecise_acc=DEPTH)
    if WEIGHT_FIRST:
        total = tl.trans(total)
    places = tokens.to(tl.int64)[:, None] * num_rows + rows[None, :]
    written = (tokens < num_tokens)[:, None] & (rows < num_rows)[None, :]
    if SPLITS > 1:
        tl.store(partial + piece.to(tl.int64) * num_tokens * num_rows + places, total, mask=written)
    else:
        if SCALED:
            total = total * tl.load(x_scale + read_tokens)[:, None] * tl.load(scale + read_rows * scale_stride)[None, :]
        if HAS_BIAS:
            total += tl.load(bias + read_rows).to(tl.float32)[None, :]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["num_tokens"])
def sum_kernel(partial, bias, x_scale, scale, out, num_tokens, num_rows, scale_stride, SPLITS: tl.constexpr,
               LANES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr):
    """Adds the SPLITS pieces up, the first one first, and ends the product as ``matrix_kernel`` would have."""
    token = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = rows < num_rows
    total = tl.zeros((LANES,), dtype=tl.float32)
    for piece in tl.static_range(SPLITS):
        total += tl.load(partial + (piece * num_tokens + token) * num_rows + rows, mask=inside, other=0.0)
    if SCALED:
        total = total * tl.load(x_scale + token) * tl.load(scale + rows * scale_stride, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * num_rows + rows, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def quantise_kernel(x, rounded, x_scale, depth, x_stride, LARGEST: tl.constexpr, SMALLEST_PEAK: tl.constexpr,
                    LANES: tl.constexpr):
    """A row of x to e4m3 with its own scale, to the bit as ``quantise_rows_fp8`` does."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, LANES)
    peaks = tl.zeros((LANES,), dtype=tl.float32)
    for start in range(0, depth, LANES):
        values = tl.load(x + row * x_stride + start + lanes, mask=start + lanes < depth, other=0.0).to(tl.float32)
        peaks = tl.maximum(peaks, tl.abs(values))
    peak = tl.maximum(tl.max(peaks, axis=0), SMALLEST_PEAK)
    inverse = tl.div_rn(tl.zeros_like(peak) + LARGEST, peak)
    tl.store(x_scale + row, peak * (1.0 / LARGEST))
    for start in range(0, depth, LANES):
        inside = start + lanes < depth
        values = tl.load(x + row * x_stride + start + lanes, mask=inside, other=0.0).to(tl.float32)
        tl.store(rounded + row * depth + start + lanes, (values * inverse).to(tl.float8e4nv), mask=inside)


def quantise_rows_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K] as e4m3 [T, K], contiguous, and the fp32 scale [T] of its rows; as the reference of that name."""
    num_tokens, depth = x.shape
    if depth and x.stride(1) != 1:
        x = x.contiguous()
    rounded = torch.empty((num_tokens, depth), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens:
        lanes = min(_LANES_OF_ROUNDING, max(32, triton.next_power_of_2(depth)))
        quantise_kernel[(num_tokens,)](x, rounded, scale, depth, x.stride(0), LARGEST=FP8_MAX,
                                       SMALLEST_PEAK=SMALLEST_PEAK, LANES=lanes, num_warps=8 if lanes > 1024 else 4)
    return rounded, scale


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """What a product of e4m3 values is multiplied by: ``x`` [T] a row of x, ``weight`` [N] or [1] a channel."""

    x: torch.Tensor
    weight: torch.Tensor


def run_tile(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile,
             scales: Scales | None = None) -> None:
    """Fill out [T, N], contiguous, by the product of x [T, K] and weight [N, K], whose lanes are contiguous.

    T is at least 1, and 1 where ``tile.tokens`` is 1; more than ``tile.tokens`` take several programs.
    """
    num_tokens, depth = x.shape
    num_rows = weight.shape[0]
    x_scale, scale = (x, x) if scales is None else (scales.x, scales.weight)
    scale_stride = 0 if scale.shape[0] == 1 else scale.stride(0)
    even, has_bias, scaled = depth % tile.depth == 0 and depth > 0, bias is not None, scales is not None
    bias = x if bias is None else bias
    if tile.tokens == 1:
        early = {"launch_pdl": True} if tile.early else {}
        vector_kernel[(triton.cdiv(num_rows, tile.rows),)](
            x, weight, bias, x_scale, scale, out, num_rows, depth, weight.stride(0), scale_stride, ROWS=tile.rows,
            DEPTH=tile.depth, EVEN=even, HAS_BIAS=has_bias, SCALED=scaled, STAGES=tile.stages,
            EARLY=tile.early, num_warps=tile.warps, **early)
        return
    split = tile.splits > 1
    partial = torch.empty((tile.splits, num_tokens, num_rows), dtype=torch.float32, device=x.device) if split else out
    matrix_kernel[(triton.cdiv(num_rows, tile.rows), tile.splits, triton.cdiv(num_tokens, tile.tokens))](
        x, weight, bias, x_scale, scale, out, partial, num_tokens, num_rows, depth, x.stride(0), weight.stride(0),
        scale_stride, TOKENS=tile.tokens, ROWS=tile.rows, DEPTH=tile.depth, SPLITS=tile.splits,
        WEIGHT_FIRST=tile.weight_first, EVEN=even, HAS_BIAS=has_bias, SCALED=scaled, num_warps=tile.warps,
        num_stages=tile.stages)
    if split:
        sum_kernel[(triton.cdiv(num_rows, _LANES_OF_SUMMING), num_tokens)](
            partial, bias, x_scale, scale, out, num_tokens, num_rows, scale_stride, SPLITS=tile.splits,
            LANES=_LANES_OF_SUMMING, HAS_BIAS=has_bias, SCALED=scaled, num_warps=4)


def _lines(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with contiguous lanes, copied only where it must be."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _floats(call: OpCall) -> str | None:
    x, weight, bias = call.args
    if x.dtype not in _FLOATS or weight.dtype not in _FLOATS:
        return f"x and weight are {x.dtype} and {weight.dtype}"
    if weight.dtype is not x.dtype and x.dtype is not torch.float32:
        return f"a weight of {weight.dtype} is not widened to {x.dtype}"
    if bias is not None and bias.dtype is not x.dtype:
        return f"the bias is {bias.dtype}, x {x.dtype}"
    return None


@linear_op.impl("triton", device="cuda", supports=_floats, rank=10)
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One token of any type, and up to 64 of a 16-bit type, by Triton; other products by cuBLAS through torch."""
    num_tokens, num_rows = x.shape[0], weight.shape[0]
    if num_tokens > MAX_TOKENS or (num_tokens > 1 and x.dtype is torch.float32):
        return torch_linear(x, weight, bias)
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if out.numel():
        run_tile(_lines(x), _lines(weight), bias, out, tile_for(num_tokens, num_rows, x.shape[1]))
    return out


def _fp8_fits(call: OpCall) -> str | None:
    x, weight, scale, bias = call.args
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x.dtype}, not of 16 bits"
    if weight.dtype is not torch.float8_e4m3fn or scale.dtype is not torch.float32:
        return f"weight and scale are {weight.dtype} and {scale.dtype}, not float8_e4m3fn and float32"
    if bias is not None and bias.dtype is not x.dtype:
        return f"the bias is {bias.dtype}, x {x.dtype}"
    return None


@linear_fp8_op.impl("triton", device="cuda", supports=_fp8_fits, rank=10)
def linear_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Up to 64 tokens, and shapes or types that cuBLASLt has no product for, by Triton; others by ``_scaled_mm``.

    The matrix units add e4m3 products in fewer bits than fp32's; each step of the depth is added on in fp32.
    """
    num_tokens, depth = x.shape
    num_rows = weight.shape[0]
    out = torch.empty((num_tokens, num_rows), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rounded, x_scale = quantise_rows_fp8(x)
    weight = _lines(weight)
    if num_tokens > MAX_TOKENS and x.dtype is torch.bfloat16 and _library_takes(weight):
        scales = scale.expand(num_rows).contiguous()
        product = torch._scaled_mm(rounded, weight.t(), x_scale[:, None], scales[None, :], out_dtype=x.dtype,
                                   use_fast_accum=True)
        return product if bias is None else product.add_(bias)
    run_tile(rounded, weight, bias, out, tile_for(num_tokens, num_rows, depth), Scales(x=x_scale, weight=scale))
    return out


def _library_takes(weight: torch.Tensor) -> bool:
    """Whether sizes and rows of an e4m3 matrix are as aligned as cuBLASLt wants them."""
    return weight.shape[0] % 16 == 0 and weight.shape[1] % 16 == 0 and weight.stride(0) % 16 == 0
