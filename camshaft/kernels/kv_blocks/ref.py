"""Contract of ``kv_write``, in readable torch. Owns the layout of a page: ``[2, Hkv, page, D]``, keys first."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, define_op


def kv_write(k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Store k, v [T, Hkv, D] in kv_pool [P, 2, Hkv, page, D], cast to its dtype.

    Token t goes to slot ``slot_mapping[t]`` (int64), which is page * page_size + offset. Slots are distinct,
    except that padding may share slots of page 0, whose content nothing reads.
    """
    page_size = kv_pool.shape[3]
    pages, offsets = slot_mapping // page_size, slot_mapping % page_size
    kv_pool[pages, 0, :, offsets] = k.to(kv_pool.dtype)
    kv_pool[pages, 1, :, offsets] = v.to(kv_pool.dtype)


def _fake(k: torch.Tensor, v: torch.Tensor, kv_pool: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    return None


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    """(name, T, Hkv, D, page size): none, one, every slot of some pages, many tokens, an odd head size."""
    cases = (("empty", 0, 2, 8, 4), ("one", 1, 3, 64, 16), ("full_pages", 8, 2, 16, 4), ("many", 301, 1, 32, 16),
             ("odd", 13, 5, 20, 8), ("eight_heads", 6, 8, 16, 16))
    for name, tokens, heads, size, page_size in cases:
        merged = torch.randn(tokens + 1, 3 * heads, size, generator=generator).to(device, dtype)[:tokens]
        k, v = merged[:, heads:2 * heads], merged[:, 2 * heads:]
        num_pages = tokens // page_size + 3
        pool = torch.randn(num_pages, 2, heads, page_size, size, generator=generator).to(device, dtype)
        slots = torch.randperm(num_pages * page_size, generator=generator)[:tokens]
        yield Sample(name, (k, v, pool, slots.to(device)))
        if tokens > 1:
            yield Sample(f"{name}_contiguous", (k.contiguous(), v.contiguous(), pool.clone(), slots.to(device)))


kv_write_op = define_op(OpSpec(
    name="kv_write",
    schema="(Tensor k, Tensor v, Tensor(a!) kv_pool, Tensor slot_mapping) -> ()",
    reference=kv_write, fake=_fake, samples=_samples, mutates=("kv_pool",),
))
