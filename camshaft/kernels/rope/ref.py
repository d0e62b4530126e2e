"""Contracts of rotary position embedding (Su et al. 2021), in readable torch, as Hugging Face lays out Llama:
lane i of the first half turns with lane i of the second."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, Tolerance, define_op


def rope_cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> torch.Tensor:
    """positions [T] int64, inv_freq [D/2] -> fp32 [T, D]: D/2 cosines, then D/2 sines, each times ``scaling``.

    Angles are fp32 products whatever the caller's precision: that rounding is part of what models were trained with.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq.to(torch.float32)
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * scaling


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    half = cos_sin.shape[-1] // 2
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    cos, sin = cos_sin.to(wide.dtype)[:, None].chunk(2, dim=-1)
    first, second, rest = wide[..., :half], wide[..., half:2 * half], wide[..., 2 * half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)


def rope(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn q [T, Hq, Dh] and k [T, Hkv, Dh] by the angles of cos_sin [T, D]; lanes from D on stay. Contiguous."""
    return _rotate(q, cos_sin), _rotate(k, cos_sin)


def _fake_rope_cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor, scaling: float) -> torch.Tensor:
    return inv_freq.new_empty((positions.shape[0], 2 * inv_freq.shape[0]), dtype=torch.float32)


def _fake_rope(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _table_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    """(T, D): none, one, far positions, an odd number of frequencies, every second position."""
    for tokens, dim in ((0, 8), (1, 64), (33, 6), (300, 128)):
        positions = torch.randint(0, 131072, (tokens,), generator=generator).to(device)
        inv_freq = (10000.0 ** (-torch.arange(0, dim, 2).float() / dim)).to(device)
        yield Sample(f"{tokens}x{dim}", (positions, inv_freq, 1.0))
    yield Sample("scaled", (torch.arange(5, device=device), torch.tensor([1.0, 0.1], device=device), 1.25))
    yield Sample("strided", (torch.arange(10, device=device)[::2], torch.tensor([1.0, 0.1], device=device), 1.0))


def _rope_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    """(T, Hq, Hkv, Dh, D) as views of one merged product, as the fused graph makes them; then contiguous."""
    for tokens, heads, kv_heads, size, dim in ((0, 2, 1, 8, 8), (1, 9, 3, 64, 64), (5, 4, 4, 32, 16), (3, 8, 1, 20, 12),
                                               (7, 3, 1, 66, 66), (130, 9, 3, 64, 64), (6, 32, 8, 16, 16)):
        merged = torch.randn(tokens, (heads + 2 * kv_heads) * size, generator=generator).to(device, dtype)
        q, k, _ = torch.split(merged, [heads * size, kv_heads * size, kv_heads * size], dim=-1)
        q, k = q.view(tokens, heads, size), k.view(tokens, kv_heads, size)
        angles = torch.rand(tokens, dim // 2, generator=generator) * 6
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
        name = f"{tokens}x{heads}x{kv_heads}x{size}_{dim}"
        yield Sample(name, (q, k, table))
        yield Sample(f"{name}_contiguous", (q.contiguous(), k.contiguous(), table))
    yield Sample("lanes_apart", (torch.randn(4, 16, 2, generator=generator).to(device, dtype).transpose(1, 2),
                                 torch.randn(4, 16, 1, generator=generator).to(device, dtype).transpose(1, 2),
                                 torch.randn(4, 16, generator=generator).to(device)))


rope_cos_sin_op = define_op(OpSpec(
    name="rope_cos_sin", schema="(Tensor positions, Tensor inv_freq, float scaling) -> Tensor",
    reference=rope_cos_sin, fake=_fake_rope_cos_sin, samples=_table_samples, dtypes=(torch.float32,),
    tolerance=Tolerance(float32=1e-6),
))
rope_op = define_op(OpSpec(
    name="rope", schema="(Tensor q, Tensor k, Tensor cos_sin) -> (Tensor, Tensor)",
    reference=rope, fake=_fake_rope, samples=_rope_samples, tolerance=Tolerance(float32=2e-6),
))
