"""Life cycles: which cached tokens of a sequence a group of layers still reads.

Owns reach, the one question in which full attention, sliding windows and sinks differ. Everything else
(what a prefix match must find, what may be dropped while running, how eviction may cut the prefix
tree) follows from the answer, so a new kind is one class here and no change to the manager. How many pages a kind
holds at worst is ``LifeCycleSpec.worst_pages``'s, which a build needs too.
"""

from __future__ import annotations

import abc

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.core.registry import Registry


class LifeCycle(abc.ABC):
    """Reach of one group of layers, in page columns (column i holds positions from ``i * page_size``)."""

    def __init__(self, spec: LifeCycleSpec) -> None:
        self.page_size = spec.page_size

    @property
    @abc.abstractmethod
    def whole_prefix(self) -> bool:
        """Whether every earlier token is read until the end: nothing is dropped, only leaves may be evicted."""

    @abc.abstractmethod
    def out_of_reach(self, num_tokens: int) -> range:
        """Page columns that no token at a position >= ``num_tokens`` reads any more.

        A sequence may continue from ``num_tokens`` cached tokens exactly when every other column holding
        some of them has its page. ``start`` is constant (the sinks before it stay) and ``stop`` never falls
        as ``num_tokens`` grows.
        """


LIFE_CYCLES: Registry[type[LifeCycle]] = Registry("KV life cycle")


@LIFE_CYCLES.register("full")
class FullAttention(LifeCycle):
    """Every token is read until its request ends."""

    @property
    def whole_prefix(self) -> bool:
        """Always."""
        return True

    def out_of_reach(self, num_tokens: int) -> range:
        """Nothing ever is."""
        return range(0)


@LIFE_CYCLES.register("window")
class SlidingWindow(LifeCycle):
    """A token at position p reads ``p - window + 1`` to p, and the first ``sinks`` tokens (Xiao et al., 2023)."""

    def __init__(self, spec: LifeCycleSpec) -> None:
        super().__init__(spec)
        if spec.window is None:
            raise InternalError("a sliding window without a width")
        self._window = spec.window
        self._sink_columns = -(-spec.sinks // self.page_size)

    @property
    def whole_prefix(self) -> bool:
        """Never: what lies before the window and after the sinks is not read."""
        return False

    def out_of_reach(self, num_tokens: int) -> range:
        """Columns after those with sinks whose last position lies before ``num_tokens - window + 1``."""
        lowest = max(num_tokens - self._window + 1, 0)
        return range(self._sink_columns, max(lowest // self.page_size, self._sink_columns))


def make_life_cycle(spec: LifeCycleSpec) -> LifeCycle:
    """The life cycle ``spec.kind`` names; an unknown kind raises UserError listing the known ones."""
    return LIFE_CYCLES.get(spec.kind)(spec)
