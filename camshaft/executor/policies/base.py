"""What a scheduling policy decides, and the registries of those there are.

Owns three contracts and the scan of this folder. A policy is one file with one class under a name of its own;
it knows what its methods are handed, and neither requests, pages nor steps.

Shapes: C life cycles of the KV cache, N prompts being fed.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import importlib
import pkgutil
from typing import ClassVar

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.registry import Registry
from camshaft.executor.messages import GenerationRequest
from camshaft.runtime.step import Int32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What admitting a request would take out of ``Load.available``, in pages; what it shares with others counts once.

    Neither exceeds the whole cache: such a request is refused before it waits.
    """

    longest: Int32Array
    """[C] in its longest outcome."""
    soon: Int32Array
    """[C] to compute its prompt and begin its output."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the cache has left, and what of it the requests with a row will still want, in pages."""

    available: Int32Array
    """[C] free, or cached for nobody."""
    longest: Int32Array
    """[C] in their longest outcomes."""
    soon: Int32Array
    """[C] to finish their prompts and to go on by a page."""
    num_rows: int
    """Requests with a row, those that have ended but are named by a step in flight included."""


class QueuePolicy(abc.ABC):
    """Orders requests, waiting ones for admission and running ones for their pages."""

    reads_priority: ClassVar[bool] = False
    """Whether ``GenerationRequest.priority`` counts; callers that give one are refused otherwise."""

    @abc.abstractmethod
    def precedence(self, request: GenerationRequest) -> int:
        """Place of the request: smaller goes first, and of equals who came first. Constant for its whole life."""


class CapacityPolicy(abc.ABC):
    """Decides who may hold pages. One object serves one executor, so it may remember."""

    preempts: ClassVar[bool] = False
    """Whether running requests may lack pages; those that do call on ``victim``. Without it, ``admits`` must keep
    ``Load.longest`` within ``Load.available`` in every life cycle."""

    @abc.abstractmethod
    def admits(self, demand: Demand, load: Load) -> bool:
        """Whether a request of this demand may join. Nobody overtakes one that may not.

        Must be true when ``load.num_rows`` is 0: the queue stops otherwise.
        """

    def admission_ended(self, num_rows: int) -> None:  # noqa: B027 - a policy without memory has nothing to note
        """Nobody more is admitted in this step, as nobody waits, no row is free, or the next one was refused."""

    def victim(self, rows: Int32Array) -> int | None:
        """Which of the running ``rows``, first in precedence first, gives its pages back as others lack them.

        It is computed again later. None: nobody, who lacks pages waits. One row alone must never be given.
        """
        return None


class ChunkingPolicy(abc.ABC):
    """Shares a step's tokens among prompts. ``chunk_tokens`` bounds each share, ``page_size`` is the cache's."""

    def __init__(self, *, chunk_tokens: int, page_size: int) -> None:
        self.chunk_tokens = chunk_tokens
        self.page_size = page_size

    @abc.abstractmethod
    def takes_more(self, left: Int32Array, budget: int) -> bool:
        """Whether one more prompt would get tokens beside those with ``left`` [N] to feed. ``budget`` is not 0.

        Must be true when N is 0.
        """

    @abc.abstractmethod
    def shares(self, left: Int32Array, budget: int) -> Int32Array:
        """[N] tokens for each prompt, first in precedence first: at most ``budget`` together, and its ``left`` each.

        The first is not 0 when N is not; a share of 0 leaves its prompt out of the step.
        """


QUEUE_POLICIES: Registry[type[QueuePolicy]] = Registry("scheduler.queue_policy")
CAPACITY_POLICIES: Registry[type[CapacityPolicy]] = Registry("scheduler.capacity_policy")
CHUNKING_POLICIES: Registry[type[ChunkingPolicy]] = Registry("scheduler.context_chunking_policy")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNames:
    """Names of every policy there is, sorted."""

    queue: tuple[str, ...]
    capacity: tuple[str, ...]
    chunking: tuple[str, ...]


@functools.cache
def load_policies() -> PolicyNames:
    """Import every policy file of this folder."""
    package = importlib.import_module("camshaft.executor.policies")
    for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"camshaft.executor.policies.{module}")
    return PolicyNames(queue=QUEUE_POLICIES.names(), capacity=CAPACITY_POLICIES.names(),
                       chunking=CHUNKING_POLICIES.names())


def check_policies(config: SchedulerConfig) -> None:
    """Raise UserError, listing the known names, where ``config`` names a policy that does not exist."""
    load_policies()
    QUEUE_POLICIES.get(config.queue_policy)
    CAPACITY_POLICIES.get(config.capacity_policy)
    CHUNKING_POLICIES.get(config.context_chunking_policy)
