"""Contracts of the products, in readable torch: ``linear`` and its forms with 8-bit weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, Tolerance, define_op

INT8_MAX = 127
"""Largest magnitude in use: without -128 the range is symmetric, and two products of two add up within 16 bits."""
BLOCK = 64
"""Values of a row of x that share a scale in ``linear_w8a8``: a few loud channels then spoil their block only."""
FP8_MAX = 448.0
"""Largest finite value of e4m3 (float8_e4m3fn)."""
SMALLEST_PEAK = 1e-30
"""A row whose largest magnitude is below this becomes zeros: its scale's inverse would not be finite."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times weight [N, K] transposed, plus bias [N] -> [T, N] contiguous, in x's dtype.

    The weight may be of a narrower type than x: its values are widened.
    """
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def linear_w8a16(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor,
                 bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times ``weight * scale[:, None]`` transposed, plus bias [N] -> [T, N] contiguous, in x's dtype.

    weight [N, K] is int8, scale [N] float32: one an output channel.
    """
    arithmetic = torch.promote_types(x.dtype, torch.float32)
    product = x.to(arithmetic) @ weight.to(arithmetic).t() * scale.to(arithmetic)
    return (product if bias is None else product + bias.to(arithmetic)).to(x.dtype)


def linear_w8a8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As ``linear_w8a16``, with x rounded to int8 on the way: each 64 values of a row by :func:`quantise_rows`.

    Integer products of a block are exact; a row's result depends on its own row alone.
    """
    arithmetic = torch.promote_types(x.dtype, torch.float32)
    tokens, depth = x.shape
    blocks = torch.nn.functional.pad(x.to(torch.float32), (0, -depth % BLOCK)).reshape(-1, BLOCK)
    quantised, x_scale = quantise_rows(blocks)
    rounded = (quantised.to(arithmetic) * x_scale.to(arithmetic)).reshape(tokens, depth + -depth % BLOCK)[:, :depth]
    return linear_w8a16(rounded, weight, scale, None if bias is None else bias.to(arithmetic)).to(x.dtype)


def quantise_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers of magnitude up to 127 (fp32) [R, K], and the fp32 scale [R, 1] that gives back about ``rows``.

    Symmetric: a row's largest magnitude becomes 127, halves round to even. A NaN or infinity makes its whole row's
    scale non-finite.
    """
    if rows.shape[1] == 0:
        return rows, rows.new_ones((rows.shape[0], 1))
    peak = rows.abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST_PEAK)
    # a number divided by a tensor is rounded twice in torch: by way of the tensor's reciprocal
    return (rows * (torch.full_like(peak, INT8_MAX) / peak)).round(), peak / INT8_MAX


def linear_fp8(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [T, K] times ``weight * scale[:, None]`` transposed, plus bias [N] -> [T, N] contiguous, in x's dtype.

    weight [N, K] is e4m3, scale float32 [N], one an output channel, or [1]. Each row of x is rounded to e4m3 on the way
    by :func:`quantise_rows_fp8`: a row's result depends on its own row alone.
    """
    arithmetic = torch.promote_types(x.dtype, torch.float32)
    rounded, x_scale = quantise_rows_fp8(x.to(torch.float32))
    product = rounded.to(arithmetic) @ weight.to(arithmetic).t() * x_scale.to(arithmetic) * scale.to(arithmetic)
    return (product if bias is None else product + bias.to(arithmetic)).to(x.dtype)


def quantise_rows_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [R, K] (fp32) as e4m3, and the fp32 scale [R, 1] that gives back about ``rows``.

    A row's largest magnitude becomes 448, halves round to even. A NaN or infinity makes its row's results NaN.
    """
    if rows.shape[1] == 0:
        return rows.to(torch.float8_e4m3fn), rows.new_ones((rows.shape[0], 1))
    peak = rows.abs().amax(dim=1, keepdim=True).clamp_min(SMALLEST_PEAK)
    # products and quotients of two tensors are rounded once on every device, so implementations agree to the bit
    return (rows * (torch.full_like(peak, FP8_MAX) / peak)).to(torch.float8_e4m3fn), peak * (1 / FP8_MAX)


def _fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


def _fake_scaled(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor,
                 bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


_Draw = Callable[..., torch.Tensor]
_Shapes = Iterable[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor | None]]


def _cases(draw_x: _Draw, draw_weight: _Draw) -> _Shapes:
    """(name, x, weight, bias): none, one, the sizes around register tiles and vectors, many; strides; an outlier."""
    for tokens, rows, depth in ((0, 8, 16), (1, 1, 1), (1, 64, 48), (2, 5, 17), (3, 7, 33), (4, 9, 64), (5, 4, 15),
                                (7, 13, 100), (8, 257, 31), (17, 66, 576), (65, 130, 70), (100, 12, 1536),
                                (19, 35, 769), (70, 33, 1537)):
        x, weight = draw_x(tokens, depth), draw_weight(rows, depth)
        yield f"{tokens}x{rows}x{depth}", x, weight, None
        yield f"{tokens}x{rows}x{depth}_bias", x, weight, draw_x(rows)
    yield "strided_rows", draw_x(6, 80)[:, 16:64], draw_weight(10, 48), None
    yield "every_second_row", draw_x(6, 48)[::2], draw_weight(20, 48)[::2], None
    yield "column_major", draw_x(48, 6).t(), draw_weight(48, 10).t(), None
    loud = draw_x(9, 64)
    loud[4] *= 1000
    yield "outlier_neighbour", loud, draw_weight(12, 64), None


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    for name, x, weight, bias in _cases(draw, draw):
        yield Sample(name, (x, weight, bias))
    for narrow in (torch.bfloat16, torch.float16) if dtype is torch.float32 else ():
        for name, x, weight, bias in _cases(draw, lambda *shape, kind=narrow: draw(*shape).to(kind)):
            yield Sample(f"{name}_{str(narrow).removeprefix('torch.')}_weight", (x, weight, bias))


def _scaled_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def draw_weight(*shape: int) -> torch.Tensor:
        return torch.randint(-INT8_MAX, INT8_MAX + 1, shape, generator=generator).to(device, torch.int8)

    def draw_scale(rows: int) -> torch.Tensor:
        return (torch.rand(rows, generator=generator) + 0.1).to(device) / INT8_MAX

    for name, x, weight, bias in _cases(draw, draw_weight):
        yield Sample(name, (x, weight, draw_scale(weight.shape[0]), bias))
    extreme = torch.full((6, 77), float(INT8_MAX), device=device, dtype=dtype)
    extreme[1::2] *= -1
    for sign in (1, -1):
        weight = torch.full((5, 77), sign * INT8_MAX, device=device, dtype=torch.int8)
        yield Sample(f"all_{sign * INT8_MAX}", (extreme, weight, draw_scale(5), None))
    silent = draw(3, 200)
    silent[1], silent[2, 64:128] = 0, 0
    yield Sample("zero_row_and_block", (silent, draw_weight(6, 200), draw_scale(6), draw(6)))


def _fp8_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def draw_weight(*shape: int) -> torch.Tensor:
        values = (100 * torch.randn(*shape, generator=generator)).clamp(-FP8_MAX, FP8_MAX)
        return values.to(torch.float8_e4m3fn).to(device)

    def draw_scale(rows: int) -> torch.Tensor:
        return (torch.rand(rows, generator=generator) + 0.1).to(device) / FP8_MAX

    for name, x, weight, bias in _cases(draw, draw_weight):
        yield Sample(name, (x, weight, draw_scale(weight.shape[0]), bias))
    yield Sample("one_scale", (draw(3, 64), draw_weight(32, 64), draw_scale(1), draw(32)))
    silent = draw(3, 200)
    silent[1] = 0
    yield Sample("zero_row", (silent, draw_weight(6, 200), draw_scale(6), draw(6)))


linear_op = define_op(OpSpec(
    name="linear", schema="(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=linear, fake=_fake, samples=_samples, tolerance=Tolerance(float32=2e-6),
))
linear_w8a16_op = define_op(OpSpec(
    name="linear_w8a16", schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    reference=linear_w8a16, fake=_fake_scaled, samples=_scaled_samples, tolerance=Tolerance(float32=2e-6),
))
linear_w8a8_op = define_op(OpSpec(
    name="linear_w8a8", schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    reference=linear_w8a8, fake=_fake_scaled, samples=_scaled_samples, tolerance=Tolerance(float32=2e-6),
))
linear_fp8_op = define_op(OpSpec(
    name="linear_fp8", schema="(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    reference=linear_fp8, fake=_fake_scaled, samples=_fp8_samples, tolerance=Tolerance(float32=2e-6),
))
