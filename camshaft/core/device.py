"""Facts about the device at hand: kind, name, features, threads, memory.

Owns probing (explicit, never at import) and the comparison an engine makes when it is loaded.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path

_CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_tile",
                 "asimd", "asimddp", "sve", "bf16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device as builds and capability checks see it."""

    kind: str
    """``"cpu"`` or ``"cuda"``."""
    name: str
    features: tuple[str, ...]
    """CPU instruction sets that kernels care about, or ``("sm_90",)``."""
    num_threads: int
    memory_bytes: int
    """Total memory of the device."""


def _cpu_info() -> tuple[str, tuple[str, ...]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags |= set(value.split())
    return name, (platform.machine(), *(flag for flag in _CPU_FEATURES if flag in flags))


def probe_cpu() -> DeviceSpec:
    """The CPU this process may use: its affinity mask counts, not the machine's core count."""
    name, features = _cpu_info()
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceSpec(kind="cpu", name=name, features=features, num_threads=threads, memory_bytes=memory)


def probe_cuda() -> DeviceSpec:
    """The current CUDA device. Raises UserError where torch sees none."""
    import torch

    from camshaft.core.errors import UserError

    if not torch.cuda.is_available():
        raise UserError("device", "cuda", "a CUDA device that torch can see", "Use device='cpu', or a torch for CUDA")
    facts = torch.cuda.get_device_properties(torch.cuda.current_device())
    return DeviceSpec(kind="cuda", name=facts.name, features=(f"sm_{facts.major}{facts.minor}",),
                      num_threads=facts.multi_processor_count, memory_bytes=facts.total_memory)


def probe(kind: str) -> DeviceSpec:
    """The device of ``kind``: "cpu", "cuda", or "auto" (cuda where there is one)."""
    if kind == "auto":
        import torch

        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return probe_cuda() if kind == "cuda" else probe_cpu()
