"""Contracts of the norms, in readable torch. Statistics run over the last dimension, in fp32 at least."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, define_op


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., H] over its root mean square, times weight [H], in x's dtype; contiguous.

    A weight of x's dtype multiplies the quotient cast to it, as Llama's does. A float32 weight beside a 16-bit x
    multiplies it in float32, and the product is rounded once, as Gemma's.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        scaled = scaled.to(x.dtype)
    return (scaled * weight).to(x.dtype).contiguous()


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``; the sum is rounded to x's dtype first."""
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., H] minus its mean, over its standard deviation (biased), times weight [H] plus bias [H]; contiguous."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype).contiguous()


def add_layer_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                   eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``(layer_norm(x + residual), x + residual)``; the sum is rounded to the dtype first."""
    total = (x + residual).contiguous()
    return layer_norm(total, weight, bias, eps), total


def _fake_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                       eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def _fake_add_layer_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                         eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _rows(dtype: torch.dtype, device: torch.device,
          generator: torch.Generator) -> Iterable[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, x, residual): none, one, sizes off every vector, many rows, heads of a merged product, other layouts."""

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 3 + 0.5).to(device, dtype)

    for shape in ((0, 32), (1, 576), (1, 1), (3, 17), (5, 7), (2, 3, 96), (200, 577)):
        yield "x".join(map(str, shape)), draw(*shape), draw(*shape)
    merged = draw(6, 9 * 32)
    yield "strided_rows", merged[:, 32:112], draw(12, 80)[::2]
    heads = merged.view(6, 9, 32)
    yield "heads_of_a_merged_product", heads[:, 2:5], heads[:, 6:9]
    yield "column_major", draw(40, 6).t(), draw(40, 6).t()
    yield "tiny_values", draw(4, 64) * 1e-3, draw(4, 64) * 1e-3


def _weight(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(x.shape[-1], generator=generator) + 1).to(x.device, x.dtype)


def _rms_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    for name, x, _ in _rows(dtype, device, generator):
        yield Sample(name, (x, _weight(x, generator), 1e-5))
        if dtype.itemsize == 2:
            yield Sample(f"{name}_float32_weight", (x, _weight(x.float(), generator), 1e-5))


def _add_rms_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    for name, x, residual in _rows(dtype, device, generator):
        yield Sample(name, (x, residual, _weight(x, generator), 1e-5))
        if dtype.itemsize == 2:
            yield Sample(f"{name}_float32_weight", (x, residual, _weight(x.float(), generator), 1e-5))


def _layer_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    for name, x, _ in _rows(dtype, device, generator):
        yield Sample(name, (x, _weight(x, generator), None, 1e-5))
        yield Sample(f"{name}_bias", (x, _weight(x, generator), _weight(x, generator), 1e-5))


def _add_layer_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    for name, x, residual in _rows(dtype, device, generator):
        yield Sample(name, (x, residual, _weight(x, generator), None, 1e-5))
        yield Sample(f"{name}_bias", (x, residual, _weight(x, generator), _weight(x, generator), 1e-5))


rms_norm_op = define_op(OpSpec(
    name="rms_norm", schema="(Tensor x, Tensor weight, float eps) -> Tensor",
    reference=rms_norm, fake=_fake_rms_norm, samples=_rms_samples,
))
add_rms_norm_op = define_op(OpSpec(
    name="add_rms_norm", schema="(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
    reference=add_rms_norm, fake=_fake_add_rms_norm, samples=_add_rms_samples,
))
layer_norm_op = define_op(OpSpec(
    name="layer_norm", schema="(Tensor x, Tensor weight, Tensor? bias, float eps) -> Tensor",
    reference=layer_norm, fake=_fake_layer_norm, samples=_layer_samples,
))
add_layer_norm_op = define_op(OpSpec(
    name="add_layer_norm",
    schema="(Tensor x, Tensor residual, Tensor weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    reference=add_layer_norm, fake=_fake_add_layer_norm, samples=_add_layer_samples,
))
