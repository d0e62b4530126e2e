"""Counters of an executor. Owns counting and the snapshot; formats and exports nothing."""

from __future__ import annotations

import dataclasses

from camshaft.executor.kv.manager import KvStats


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """Sums since the start; written by the executor's thread alone."""

    num_steps: int = 0
    num_context_tokens: int = 0
    """Prompt tokens computed; after a preemption, those of the prompt and the output that are computed again."""
    num_cached_tokens: int = 0
    """The same, served from shared pages."""
    num_generated_tokens: int = 0
    """Output tokens delivered."""
    num_finished: int = 0
    """Requests that ended with "stop" or "length"."""
    num_cancelled: int = 0
    num_failed: int = 0
    num_preemptions: int = 0
    """How often a running request gave its pages back, to be computed again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorStats:
    """A consistent snapshot."""

    alive: bool
    """False once a failure or a shutdown has stopped the executor."""
    num_waiting: int
    num_running: int
    """Requests with a row, those whose last step is still in flight included."""
    seconds_since_step: float
    """Age of the step loop's last turn: the heartbeat of a busy executor."""
    counters: Counters
    kv: KvStats
