"""How an engine is run: KV memory, scheduling, overlap. Nothing here changes what was built."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from camshaft.config.doc import Doc, check_bool, check_choice, check_int, check_range

CAPACITY_POLICIES = ("guaranteed_no_evict",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheConfig:
    """Memory and reuse of the paged KV cache."""

    max_bytes: Annotated[int | None, Doc("Absolute cap of the KV cache in bytes; never exceeded.")] = None
    memory_fraction: Annotated[float, Doc("Share of the memory that is free after the weights are loaded, used when "
                                          "max_bytes is not given.")] = 0.3
    enable_block_reuse: Annotated[bool, Doc("Keep pages of finished requests and share equal prefixes.")] = True
    enable_partial_reuse: Annotated[bool, Doc("Also share the leading part of a page, by copy on write.")] = True

    def __post_init__(self) -> None:
        if self.max_bytes is not None:
            check_int("kv_cache.max_bytes", self.max_bytes, 1)
        check_range("kv_cache.memory_fraction", self.memory_fraction, 0.001, 0.95)
        check_bool("kv_cache.enable_block_reuse", self.enable_block_reuse)
        check_bool("kv_cache.enable_partial_reuse", self.enable_partial_reuse)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Admission, batching and overlap of the executor."""

    capacity_policy: Annotated[str, Doc("Who may hold KV pages: guaranteed_no_evict admits a request only when its "
                                        "longest possible outcome fits.")] = "guaranteed_no_evict"
    max_batch_size: Annotated[int | None, Doc("Most requests in a step; default and upper bound: the engine's.")] = None
    max_num_tokens: Annotated[int | None, Doc("Most tokens in a step; default and upper bound: the engine's.")] = None
    context_chunk_tokens: Annotated[int | None, Doc("Most tokens of one prompt in a step; default: what the step has "
                                                    "room for.")] = None
    max_waiting: Annotated[int, Doc("Most requests waiting; one more is refused at once.")] = 65536
    overlap_depth: Annotated[int | None, Doc("Steps planned before the last result is read: 0 or 1; "
                                             "default 0 on a CPU, 1 on a GPU.")] = None

    def __post_init__(self) -> None:
        check_choice("scheduler.capacity_policy", self.capacity_policy, CAPACITY_POLICIES)
        for name in ("max_batch_size", "max_num_tokens", "context_chunk_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_int(f"scheduler.{name}", value, 1)
        check_int("scheduler.max_waiting", self.max_waiting, 1)
        if self.overlap_depth is not None:
            check_int("scheduler.overlap_depth", self.overlap_depth, 0, 1)
