"""Contracts of the gated activations, in readable torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, Tolerance, define_op


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [..., 2I], gate first -> ``silu(gate) * up`` [..., I], contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).contiguous()


def gelu_mul(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    """gate_up [..., 2I], gate first -> ``gelu(gate) * up`` [..., I], contiguous. ``approximate``: "none" or "tanh"."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate=approximate) * up).contiguous()


def _fake_silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _fake_gelu_mul(gate_up: torch.Tensor, approximate: str) -> torch.Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _merged(dtype: torch.dtype, device: torch.device,
            generator: torch.Generator) -> Iterable[tuple[str, torch.Tensor]]:
    """(name, gate_up): none, one, off every vector, many rows, strided rows, saturated gates."""

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 4).to(device, dtype)

    for shape in ((0, 32), (1, 3072), (1, 2), (3, 34), (2, 5, 18), (150, 1030)):
        yield "x".join(map(str, shape)), draw(*shape)
    yield "strided_rows", draw(6, 128)[:, 32:100]
    yield "column_major", draw(20, 6).t()
    saturated = draw(2, 80)
    saturated[:, :40] *= 30
    yield "saturated", saturated


def _silu_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    for name, gate_up in _merged(dtype, device, generator):
        yield Sample(name, (gate_up,))


def _gelu_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    for name, gate_up in _merged(dtype, device, generator):
        for approximate in ("none", "tanh"):
            yield Sample(f"{name}_{approximate}", (gate_up, approximate))


silu_mul_op = define_op(OpSpec(
    name="silu_mul", schema="(Tensor gate_up) -> Tensor",
    reference=silu_mul, fake=_fake_silu_mul, samples=_silu_samples, tolerance=Tolerance(float32=2e-6),
))
gelu_mul_op = define_op(OpSpec(
    name="gelu_mul", schema="(Tensor gate_up, str approximate) -> Tensor",
    reference=gelu_mul, fake=_fake_gelu_mul, samples=_gelu_samples, tolerance=Tolerance(float32=2e-6),
))
