"""Triton ``sample`` and ``logprobs``: no row is sorted, and no probability is written down.

A row's result depends on its own row alone, and grids on sizes alone, so both can be captured. Greedy rows end after
their maximum, which several programs a row look for. For the others, one program a row finds places in the order of
the vocabulary by searching the logits' bits: each pass over the row counts the mass above ``_PIVOTS`` of them, until
one value is left. Masses are fp32, their sums over lanes fp64, always added in the same order: off the contract's
float64 by about 1e-6 of the row's mass.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl

from camshaft.kernels.op import OpCall, TensorInfo
from camshaft.kernels.sampling.ref import logprobs_op, sample_op

_PARAMETERS = (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
               ("min_p", torch.float32), ("uniform", torch.float32))
_LANES = 2048
_WARPS = 16
_STAGES = 5
_PIVOTS = 8
_PIECE = 8192
"""Least part of a row for which a program of its own looks for the maximum."""
_MOST_PIECES = 32
_PROGRAMS = 528
"""Programs that fill the GPU: four a multiprocessor."""
_ZERO_BITS = MappingProxyType({torch.float32: 0, torch.bfloat16: 16, torch.float16: 13})
"""Low bits that are zero in every value of a type that became fp32."""


@triton.jit
def ordered_bits(values, ZERO_BITS: tl.constexpr):
    """Bits of fp32 values as int32 in the same order, without ZERO_BITS low ones; both zeros are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> ZERO_BITS


@triton.jit
def value_of(key, ZERO_BITS: tl.constexpr):
    """Inverse of ``ordered_bits``."""
    bits = key << ZERO_BITS
    bits = tl.where(bits < 0, (bits | ((1 << ZERO_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def load_lanes(row, lanes, count):
    """fp32 logits at ``lanes``, those beyond the last being -inf."""
    return tl.load(row + lanes, mask=lanes < count, other=-float("inf")).to(tl.float32)


@triton.jit
def mass_of(values, best, per_temperature):
    """exp((value - best) / temperature) of fp32 values."""
    return tl.exp2((values - best) * per_temperature)


@triton.jit
def weight_of(values, best, per_temperature, COUNTED: tl.constexpr):
    """What a value adds to a sum: its mass, or 1 where it is COUNTED and finite."""
    if COUNTED:
        return tl.where(values > -float("inf"), 1.0, 0.0)
    else:
        return mass_of(values, best, per_temperature)


@triton.jit
def mass_above(row, count, best, per_temperature, key, LANES: tl.constexpr, STAGES: tl.constexpr,
               ZERO_BITS: tl.constexpr, COUNTED: tl.constexpr):
    """Sum (fp64) over the values whose bits are above ``key``."""
    lanes = tl.arange(0, LANES)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in tl.range(0, count, LANES, num_stages=STAGES):
        values = load_lanes(row, start + lanes, count)
        weights = weight_of(values, best, per_temperature, COUNTED)
        total += tl.where(ordered_bits(values, ZERO_BITS) > key, weights, 0.0)
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def mass_from(row, count, best, per_temperature, floor, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Sum (fp64) of the masses that are at least ``floor``."""
    lanes = tl.arange(0, LANES)
    total = tl.zeros((LANES,), dtype=tl.float32)
    for start in tl.range(0, count, LANES, num_stages=STAGES):
        masses = mass_of(load_lanes(row, start + lanes, count), best, per_temperature)
        total += tl.where(masses >= floor, masses, 0.0)
    return tl.sum(total.to(tl.float64), axis=0)


@triton.jit
def search(row, count, best, per_temperature, low, high, target, REACHED: tl.constexpr, COUNTED: tl.constexpr,
           LANES: tl.constexpr, STAGES: tl.constexpr, PIVOTS: tl.constexpr, ZERO_BITS: tl.constexpr):
    """Bits of the value at which the sum over the row, largest first, exceeds ``target``, and the sum (fp64) above it.

    REACHED: at which it gets as far as ``target``. The answer is above ``low``, and at most ``high``.
    """
    lanes = tl.arange(0, LANES)
    steps = (tl.arange(0, PIVOTS) + 1).to(tl.int64)
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while high - low > 1:
        step = tl.maximum((high - low) // (PIVOTS + 1), 1)
        pivots = tl.minimum(low + step * steps, high)
        keys = pivots.to(tl.int32)
        totals = tl.zeros((PIVOTS, LANES), dtype=tl.float32)
        for start in tl.range(0, count, LANES, num_stages=STAGES):
            values = load_lanes(row, start + lanes, count)
            weights = weight_of(values, best, per_temperature, COUNTED)
            totals += tl.where(ordered_bits(values, ZERO_BITS)[None, :] > keys[:, None], weights[None, :], 0.0)
        sums = tl.sum(totals.to(tl.float64), axis=1)
        enough = sums < target if REACHED else sums <= target
        high, low = (tl.minimum(high, tl.min(tl.where(enough, pivots, high), axis=0)),
                     tl.maximum(low, tl.max(tl.where(enough, low, pivots), axis=0)))
    key = high.to(tl.int32)
    return key, mass_above(row, count, best, per_temperature, key, LANES, STAGES, ZERO_BITS, COUNTED)


@triton.jit
def nth_equal(row, count, key, place, LANES: tl.constexpr, STAGES: tl.constexpr, ZERO_BITS: tl.constexpr):
    """The id of the value with bits ``key`` that has ``place`` such before it; ``count`` where there is none."""
    lanes = tl.arange(0, LANES)
    seen = place * 0
    found = place * 0 + count
    for start in tl.range(0, count, LANES, num_stages=STAGES):
        ids = start + lanes
        equal = ((ordered_bits(load_lanes(row, ids, count), ZERO_BITS) == key) & (ids < count)).to(tl.int32)
        places = seen + tl.cumsum(equal, axis=0) - equal
        found = tl.minimum(found, tl.min(tl.where((equal > 0) & (places == place), ids, count), axis=0))
        seen += tl.sum(equal, axis=0)
    return found


@triton.jit
def best_kernel(logits, bests, tokens, leasts, broken, count, stride, span, LANES: tl.constexpr, STAGES: tl.constexpr):
    """Of a piece of a row: the largest logit, its lowest id, the least finite one, whether NaN or +inf is there."""
    line, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + line * stride
    lanes = tl.arange(0, LANES)
    last = tl.minimum((piece + 1) * span, count)
    best = tl.full((LANES,), -float("inf"), dtype=tl.float32)
    least = tl.full((LANES,), float("inf"), dtype=tl.float32)
    token = tl.zeros((LANES,), dtype=tl.int32) + count
    strange = tl.zeros((LANES,), dtype=tl.int32)
    for start in tl.range(piece * span, last, LANES, num_stages=STAGES):
        values = load_lanes(row, start + lanes, last)
        strange |= ((values != values) | (values == float("inf"))).to(tl.int32)
        token = tl.where(values > best, start + lanes, token)
        best = tl.where(values > best, values, best)
        least = tl.where((values > -float("inf")) & (values < least), values, least)
    largest = tl.max(best, axis=0)
    place = line * tl.num_programs(1) + piece
    tl.store(bests + place, largest)
    tl.store(tokens + place, tl.min(tl.where(best == largest, token, count), axis=0))
    tl.store(leasts + place, tl.min(least, axis=0))
    tl.store(broken + place, tl.max(strange, axis=0))


@triton.jit
def join_pieces(bests, tokens, leasts, broken, line, pieces, count, PIECES: tl.constexpr):
    """What ``best_kernel`` found, of a whole row; and whether the row has finite logits, no NaN and no +inf."""
    part = tl.arange(0, PIECES)
    places, inside = line * pieces + part, part < pieces
    best = tl.load(bests + places, mask=inside, other=-float("inf"))
    largest = tl.max(best, axis=0)
    token = tl.load(tokens + places, mask=inside, other=count)
    token = tl.min(tl.where(best == largest, token, count), axis=0)
    least = tl.min(tl.load(leasts + places, mask=inside, other=float("inf")), axis=0)
    strange = tl.max(tl.load(broken + places, mask=inside, other=0), axis=0)
    return largest, token, least, (strange == 0) & (largest > -float("inf"))


@triton.jit
def sample_kernel(logits, bests, tokens, leasts, broken, temperature, top_k, top_p, min_p, uniform, ids, finite, count,
                  stride, pieces, PIECES: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr,
                  PIVOTS: tl.constexpr, ZERO_BITS: tl.constexpr):
    """One row: the best token where the temperature is 0, else the one at ``uniform`` of the mass that is kept."""
    line = tl.program_id(0).to(tl.int64)
    row = logits + line * stride
    best, token, least, sound = join_pieces(bests, tokens, leasts, broken, line, pieces, count, PIECES)
    heat = tl.load(temperature + line)
    if sound & (heat > 0):
        per_temperature = 1.4426950408889634 / heat
        high = ordered_bits(best, ZERO_BITS)
        low = ordered_bits(least, ZERO_BITS) - 1
        kept = mass_above(row, count, best, per_temperature, low, LANES, STAGES, ZERO_BITS, False)
        limit = tl.load(top_k + line)
        if (limit > 0) & (limit < count):
            places = limit.to(tl.float64)
            key, above = search(row, count, best, per_temperature, low, high, places, True, True, LANES, STAGES, PIVOTS,
                                ZERO_BITS)
            mass = mass_of(value_of(key, ZERO_BITS), best, per_temperature).to(tl.float64)
            heavier = mass_above(row, count, best, per_temperature, key, LANES, STAGES, ZERO_BITS, False)
            kept = tl.minimum(kept, heavier + (places - above) * mass)
        portion = tl.load(top_p + line)
        if portion < 1:
            target = portion.to(tl.float64) * kept
            key, above = search(row, count, best, per_temperature, low, high, target, True, False, LANES, STAGES,
                                PIVOTS, ZERO_BITS)
            mass = mass_of(value_of(key, ZERO_BITS), best, per_temperature).to(tl.float64)
            kept = tl.minimum(kept, above + tl.maximum(tl.ceil((target - above) / mass), 1.0) * mass)
        floor = tl.load(min_p + line)
        if floor > 0:
            kept = tl.minimum(kept, mass_from(row, count, best, per_temperature, floor, LANES, STAGES))
        target = tl.load(uniform + line).to(tl.float64) * tl.maximum(kept, 1.0)
        key, above = search(row, count, best, per_temperature, low, high, target, False, False, LANES, STAGES, PIVOTS,
                            ZERO_BITS)
        mass = mass_of(value_of(key, ZERO_BITS), best, per_temperature).to(tl.float64)
        place = tl.floor(tl.minimum(tl.maximum((target - above) / mass, 0.0), 2147483647.0)).to(tl.int32)
        found = nth_equal(row, count, key, place, LANES, STAGES, ZERO_BITS)
        token = tl.where(found < count, found, token)
    tl.store(ids + line, tl.where(sound, token, 0).to(tl.int64))
    tl.store(finite + line, sound)


@triton.jit(do_not_specialize=["num_top"])
def logprobs_kernel(logits, bests, tokens, leasts, broken, targets, of_target, ranks, top_ids, top, finite, count,
                    stride, pieces, num_top, PIECES: tl.constexpr, LANES: tl.constexpr, STAGES: tl.constexpr):
    """One row: the normaliser and the target's rank in a pass each, then a pass for each of the likeliest."""
    line = tl.program_id(0).to(tl.int64)
    row = logits + line * stride
    lanes = tl.arange(0, LANES)
    best, _, _, sound = join_pieces(bests, tokens, leasts, broken, line, pieces, count, PIECES)
    everything = mass_from(row, count, best, 1.4426950408889634, 0.0, LANES, STAGES)
    normaliser = tl.log(everything) + best.to(tl.float64)
    target = tl.load(targets + line).to(tl.int32)
    chosen = tl.load(row + target).to(tl.float32)
    key = ordered_bits(chosen, 0)
    before = tl.zeros((LANES,), dtype=tl.int32)
    for start in tl.range(0, count, LANES, num_stages=STAGES):
        ids = start + lanes
        bits = ordered_bits(load_lanes(row, ids, count), 0)
        before += (((bits > key) | ((bits == key) & (ids < target))) & (ids < count)).to(tl.int32)
    tl.store(ranks + line, tl.where(sound, tl.sum(before, axis=0) + 1, 0).to(tl.int64))
    tl.store(of_target + line, tl.where(sound, (chosen.to(tl.float64) - normaliser).to(tl.float32), 0.0))
    tl.store(finite + line, sound)
    # bits above, what is left to the last id below: one number orders by logit, then by id
    nothing = tl.full((LANES,), -9223372036854775808, dtype=tl.int64)
    previous = tl.full((), 9223372036854775807, dtype=tl.int64)
    for place in range(num_top):
        largest = nothing
        for start in tl.range(0, count, LANES, num_stages=STAGES):
            ids = start + lanes
            bits = ordered_bits(load_lanes(row, ids, count), 0).to(tl.int64)
            order = (bits << 32) | (2147483647 - ids).to(tl.int64)
            largest = tl.maximum(largest, tl.where((ids < count) & (order < previous), order, nothing))
        previous = tl.max(largest, axis=0)
        value = value_of((previous >> 32).to(tl.int32), 0).to(tl.float64)
        chosen_id = 2147483647 - (previous & 0xFFFFFFFF)
        tl.store(top_ids + line * num_top + place, tl.where(sound, chosen_id, 0))
        tl.store(top + line * num_top + place, tl.where(sound, (value - normaliser).to(tl.float32), 0.0))


def _find_bests(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What ``best_kernel`` stores, each [S, pieces]; S and V are at least 1."""
    rows, count = logits.shape
    pieces = min(_MOST_PIECES, triton.cdiv(count, _PIECE), triton.cdiv(_PROGRAMS, rows))
    span = triton.cdiv(triton.cdiv(count, pieces), _LANES) * _LANES
    found = tuple(torch.empty((rows, pieces), dtype=dtype, device=logits.device)
                  for dtype in (torch.float32, torch.int32, torch.float32, torch.int32))
    best_kernel[(rows, pieces)](logits, *found, count, logits.stride(0), span, LANES=_LANES, STAGES=_STAGES,
                                num_warps=_WARPS)
    return found


def _lines(logits: torch.Tensor) -> torch.Tensor:
    """Logits with contiguous lanes, copied only where they must be."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _supports(call: OpCall) -> str | None:
    logits, *parameters = call.args
    if isinstance(logits, TensorInfo) and logits.dtype not in _ZERO_BITS:
        return f"logits are {logits.dtype}"
    for (name, dtype), tensor in zip(_PARAMETERS, parameters, strict=True):
        if isinstance(tensor, TensorInfo) and tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}, not {dtype}"
    return None


@sample_op.impl("triton", device="cuda", supports=_supports, rank=10)
def sample(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
           min_p: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two kernels, whatever the rows ask for: greedy rows leave the second at once."""
    rows, count = logits.shape
    ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        logits = _lines(logits)
        found = _find_bests(logits)
        parameters = (part.contiguous() for part in (temperature, top_k, top_p, min_p, uniform))
        sample_kernel[(rows,)](logits, *found, *parameters, ids, finite, count, logits.stride(0), found[0].shape[1],
                               PIECES=_MOST_PIECES, LANES=_LANES, STAGES=_STAGES, PIVOTS=_PIVOTS,
                               ZERO_BITS=_ZERO_BITS[logits.dtype], num_warps=_WARPS)
    return ids, finite


def _supports_logprobs(call: OpCall) -> str | None:
    logits, targets, _ = call.args
    if logits.dtype not in _ZERO_BITS or targets.dtype is not torch.int64:
        return f"logits and targets are {logits.dtype} and {targets.dtype}"
    return None


@logprobs_op.impl("triton", device="cuda", supports=_supports_logprobs, rank=10)
def logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """A pass over the row for each of ``num_top``: meant for tens of them."""
    rows, count = logits.shape
    shapes = ((rows,), (rows, num_top))
    of_target, top = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in shapes)
    ranks, top_ids = (torch.empty(shape, dtype=torch.int64, device=logits.device) for shape in shapes)
    finite = torch.empty(rows, dtype=torch.bool, device=logits.device)
    if rows:
        logits = _lines(logits)
        found = _find_bests(logits)
        logprobs_kernel[(rows,)](logits, *found, targets.contiguous(), of_target, ranks, top_ids, top, finite, count,
                                 logits.stride(0), found[0].shape[1], num_top, PIECES=_MOST_PIECES, LANES=_LANES,
                                 STAGES=_STAGES, num_warps=_WARPS)
    return of_target, ranks, top_ids, top, finite
