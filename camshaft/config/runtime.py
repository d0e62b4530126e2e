"""How an engine is run: KV memory, scheduling, overlap. Nothing here changes what was built."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from camshaft.config.build import BuildConfig
from camshaft.config.doc import INT32_MAX, Doc, check_bool, check_int, check_range
from camshaft.core.errors import InternalError, UserError


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
            check_int("kv_cache.max_bytes", self.max_bytes, 1, 2**63 - 1)
        check_range("kv_cache.memory_fraction", self.memory_fraction, 0.001, 0.95)
        check_bool("kv_cache.enable_block_reuse", self.enable_block_reuse)
        check_bool("kv_cache.enable_partial_reuse", self.enable_partial_reuse)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """What a step may hold, resolved."""

    max_batch_size: int
    max_num_tokens: int
    context_chunk_tokens: int
    overlap_depth: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Admission, batching and overlap of the executor."""

    capacity_policy: Annotated[str, Doc("Who may hold KV pages: guaranteed_no_evict admits a request only when its "
                                        "longest possible outcome fits; max_utilization when its prompt does, and "
                                        "takes the newest request's pages back where they run out, to compute it "
                                        "again later; static_batch runs one batch to its end before the next.")] = \
        "guaranteed_no_evict"
    queue_policy: Annotated[str, Doc("Who is admitted first: fcfs, in order of arrival; priority, the larger priority "
                                     "first.")] = "fcfs"
    context_chunking_policy: Annotated[str, Doc("How prompts share a step's tokens: first_come_first_served, or "
                                                "equal_progress, in equal parts.")] = "first_come_first_served"
    max_batch_size: Annotated[int | None, Doc("Most requests in a step; default and upper bound: the engine's.")] = None
    max_num_tokens: Annotated[int | None, Doc("Most tokens in a step; default and upper bound: the engine's.")] = None
    context_chunk_tokens: Annotated[int | None, Doc("Most tokens of one prompt in a step; default: what the step has "
                                                    "room for.")] = None
    max_waiting: Annotated[int, Doc("Most requests waiting; one more is refused at once.")] = 65536
    overlap_depth: Annotated[int | None, Doc("Steps planned before the last result is read: 0 or 1; "
                                             "default 0 on a CPU, 1 on a GPU.")] = None

    def __post_init__(self) -> None:
        # which names there are is the registry's to say, so that a policy of one's own can be asked for
        for kind in ("capacity", "queue", "context_chunking"):
            policy = getattr(self, f"{kind}_policy")
            if not isinstance(policy, str) or not policy:
                raise UserError(f"scheduler.{kind}_policy", policy, f"the name of a {kind.replace('_', ' ')} policy")
        for name in ("max_batch_size", "max_num_tokens", "context_chunk_tokens"):
            value = getattr(self, name)
            if value is not None:
                check_int(f"scheduler.{name}", value, 1, INT32_MAX)
        check_int("scheduler.max_waiting", self.max_waiting, 1)
        if self.overlap_depth is not None:
            check_int("scheduler.overlap_depth", self.overlap_depth, 0, 1)

    def step_limits(self) -> StepLimits:
        """The limits of a resolved configuration (``resolve_scheduler``). Raises InternalError for another."""
        if self.max_batch_size is None or self.max_num_tokens is None or self.overlap_depth is None:
            raise InternalError("the scheduler configuration is not resolved")
        if self.max_num_tokens < self.max_batch_size:
            raise InternalError("max_num_tokens below max_batch_size: running rows could starve")
        return StepLimits(max_batch_size=self.max_batch_size, max_num_tokens=self.max_num_tokens,
                          context_chunk_tokens=min(self.context_chunk_tokens or self.max_num_tokens,
                                                   self.max_num_tokens),
                          overlap_depth=self.overlap_depth)


def resolve_scheduler(cfg: SchedulerConfig, build: BuildConfig) -> SchedulerConfig:
    """Replace every None of ``cfg`` from the engine's resolved ``build``; its limits are upper bounds.

    ``context_chunk_tokens`` becomes max_num_tokens where it is not given or larger.
    """
    for name, bound in (("max_batch_size", build.max_batch_size), ("max_num_tokens", build.max_num_tokens)):
        value = getattr(cfg, name)
        if value is not None and value > bound:
            raise UserError(f"scheduler.{name}", value, f"at most the engine's {bound}", "Lower it, or build with more")
    max_num_tokens = cfg.max_num_tokens or build.max_num_tokens
    max_batch_size = cfg.max_batch_size or min(build.max_batch_size, max_num_tokens)
    if max_batch_size > max_num_tokens:
        raise UserError("scheduler.max_batch_size", max_batch_size, f"at most max_num_tokens ({max_num_tokens})",
                        "Every running request needs one token a step")
    depth = cfg.overlap_depth
    if depth is None:
        depth = 0 if build.device == "cpu" else 1
    return dataclasses.replace(cfg, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens,
                               context_chunk_tokens=min(cfg.context_chunk_tokens or max_num_tokens, max_num_tokens),
                               overlap_depth=depth)
