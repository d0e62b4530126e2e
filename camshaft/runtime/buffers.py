"""KV memory of a runtime: how many pages fit, and the pools that hold them.

Owns sizing and allocation. Who gets which page is the executor's business.
"""

from __future__ import annotations

import bisect
import math
import os
from pathlib import Path

import numpy as np
import torch

from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec, reserved_ahead
from camshaft.config.runtime import KvCacheConfig
from camshaft.core.errors import UserError
from camshaft.engine.artifact import Engine

_CGROUP_FILES = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "inactive_file"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes",
     "sys/fs/cgroup/memory/memory.stat", "total_inactive_file"),
)
"""Limit, use, statistics file, and the statistic that counts reclaimable file cache; version 2, then 1."""

_CACHE_LINE_BYTES = 64


def kv_pages_for(engine: Engine, kv_cache: KvCacheConfig, device: torch.device) -> tuple[int, ...]:
    """Pages of each life cycle, the trash page included, so that all of them stay within the budget.

    The budget is ``max_bytes``, never exceeded, or ``memory_fraction`` of what is free once the weights and
    a step's activations are in place. Raises UserError, with the numbers, where not even one page fits.

    Life cycles share it in proportion to what a sequence of the reference length holds in each, but none gets less
    than the longest request needs, or, where the budget is too small for that, the longest one that fits. The
    reference length is ``max_seq_len``, at most four times the largest window.
    """
    if kv_cache.max_bytes is not None:
        field, asked, budget = "kv_cache.max_bytes", float(kv_cache.max_bytes), kv_cache.max_bytes
        free = free_bytes(device)
        if budget > free:
            raise UserError(field, budget, f"at most the {free} bytes that are free on this {device.type} device",
                            "Lower it, or leave it out for a share of what is free")
    else:
        field, asked = "kv_cache.memory_fraction", kv_cache.memory_fraction
        budget = int(max(0, free_bytes(device) - _still_to_come(engine, device)) * kv_cache.memory_fraction)
    life_cycles = engine.manifest.life_cycles
    page_bytes = sum(spec.page_bytes for spec in life_cycles)
    pages = budget // page_bytes
    if pages < 2:
        raise UserError(field, int(asked) if asked.is_integer() else asked,
                        f"two pages (one of them spare) of {page_bytes} bytes at least; it gives {budget} bytes",
                        f"Raise it, or set kv_cache.max_bytes to {2 * page_bytes} or more")
    return share_pages(life_cycles, budget, engine.manifest.build)


def share_pages(life_cycles: tuple[LifeCycleSpec, ...], budget: int, build: BuildConfig) -> tuple[int, ...]:
    """Pages of each life cycle for ``budget`` bytes, which two pages of each fit."""
    windows = [spec.window for spec in life_cycles if spec.window is not None]
    reference = min([build.longest_sequence, *([4 * max(windows)] if windows else [])])
    weights = [spec.worst_pages(reference, 1) for spec in life_cycles]
    page_bytes = [spec.page_bytes for spec in life_cycles]
    room = budget - sum(page_bytes)  # the trash pages
    longest = bisect.bisect_right(
        range(1, build.longest_sequence + 1), room,
        key=lambda length: sum(pages * size for pages, size in zip(pages_needed(life_cycles, length, build), page_bytes,
                                                                   strict=True)))
    least = pages_needed(life_cycles, longest, build)
    open_cycles = set(range(len(life_cycles)))
    chosen = least.copy()
    while open_cycles:
        left = room - sum(chosen[c] * page_bytes[c] for c in range(len(least)) if c not in open_cycles)
        whole = sum(weights[c] * page_bytes[c] for c in open_cycles)
        short = {c for c in open_cycles if left * weights[c] // whole < least[c]}
        if not short:
            for c in open_cycles:
                chosen[c] = left * weights[c] // whole
            break
        open_cycles -= short
    return tuple(1 + pages for pages in chosen)


def pages_needed(life_cycles: tuple[LifeCycleSpec, ...], num_tokens: int, build: BuildConfig) -> list[int]:
    """Most pages of each life cycle that a request of ``num_tokens`` holds, whatever the scheduler's settings."""
    return [spec.worst_pages(num_tokens, reserved_ahead(build.max_num_tokens, spec.page_size))
            for spec in life_cycles]


def describe_kv(engine: Engine, num_pages: tuple[int, ...]) -> str:
    """One line saying what a choice of pages amounts to."""
    life_cycles, build = engine.manifest.life_cycles, engine.manifest.build
    num_bytes = sum(spec.page_bytes * pages for spec, pages in zip(life_cycles, num_pages, strict=True))
    parts: dict[str, int] = {}
    for spec, pages in zip(life_cycles, num_pages, strict=True):
        kept = "tokens" if spec.window is None else f"tokens in windows of {spec.window}"
        parts[kept] = min(parts.get(kept, spec.page_size * (pages - 1)), spec.page_size * (pages - 1))
    needs = pages_needed(life_cycles, build.longest_sequence, build)
    short = any(pages - 1 < need for pages, need in zip(num_pages, needs, strict=True))
    note = f"; fewer than the engine's longest request ({build.longest_sequence})" if short else ""
    held = " and ".join(f"{count} {kept}" for kept, count in parts.items())
    return f"KV cache: {num_bytes / 2**20:.0f} MiB, {held} in pages of {life_cycles[0].page_size}{note}"


def _still_to_come(engine: Engine, device: torch.device) -> int:
    """Memory that is spoken for but not yet counted as used: activations, and weights that are only mapped."""
    pending = engine.manifest.activation_peak_bytes
    if device.type != "cpu" or engine.folder is not None:
        pending += sum(tensor.nbytes for tensor in engine.tensors().values())
    return pending


def free_bytes(device: torch.device, *, root: Path = Path("/")) -> int:
    """Bytes that can still be allocated on ``device``; on Linux a control group's limit counts too."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available: float = math.inf
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for limit_file, used_file, stat_file, reclaimable in _CGROUP_FILES:
        limit, used = _read(root / limit_file).strip(), _read(root / used_file).strip()
        if limit.isdigit() and used.isdigit():
            stats = dict(line.split(maxsplit=1) for line in _read(root / stat_file).splitlines() if " " in line)
            available = min(available, max(0, int(limit) - int(used) + int(stats.get(reclaimable, 0))))
    if math.isinf(available):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(available)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def allocate_pools(life_cycles: tuple[LifeCycleSpec, ...], num_pages: tuple[int, ...],
                   device: torch.device) -> tuple[torch.Tensor, ...]:
    """A zeroed pool ``[layers, pages, 2, kv heads, page size, head dim]`` a life cycle.

    Zeros matter: a kernel may read a page's unused slots and multiply them by nothing.
    On a CPU the operating system hands pages of memory out, zeroed, at first touch.
    """
    return tuple(_zeros(spec.pool_shape(pages), getattr(torch, spec.dtype), device)
                 for spec, pages in zip(life_cycles, num_pages, strict=True))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy asks for zeroed memory (calloc), which costs nothing until it is touched; torch writes every byte.
    num_bytes = math.prod(shape) * dtype.itemsize
    untouched = torch.from_numpy(np.zeros(num_bytes + _CACHE_LINE_BYTES, dtype=np.uint8))
    start = -untouched.data_ptr() % _CACHE_LINE_BYTES
    return untouched[start:start + num_bytes].view(dtype).view(shape)
