"""What a pass is, and how passes are found.

Owns the ``Pass`` contract, what a pass is told (``PassContext``) and the scan of this folder: a new pass is a
new file. Ordering and verification are ``pipeline.py``.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import inspect
import pkgutil
from typing import ClassVar

from camshaft.config.build import BuildConfig
from camshaft.core.device import DeviceSpec
from camshaft.ir.program import Program

STAGES = ("cleanup", "fuse", "quantize", "lower", "select")
"""In running order. Passes of the last two are mandatory: an engine cannot be run without them."""
MANDATORY_STAGES = ("lower", "select")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """What the build was asked for and where it will run."""

    build: BuildConfig
    """Resolved: no "auto" left."""
    device: DeviceSpec
    native: bool
    """Whether a compiled kernel library goes into the engine."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """How many places were rewritten, and notes for whoever reads ``camshaft inspect``."""

    matches: int
    notes: tuple[str, ...] = ()


class Pass(abc.ABC):
    """One rewrite of a program. Running it again on its own result changes nothing and matches nothing.

    ``after`` names passes that run earlier where they run at all; ``needs`` names passes without which this
    one cannot run (they run earlier too).
    """

    name: ClassVar[str]
    stage: ClassVar[str]
    after: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Rewrite ``program`` in place. Every node made carries its result; the program stays valid."""


def load_passes() -> tuple[Pass, ...]:
    """One instance of every pass in this folder, by name."""
    package = importlib.import_module("camshaft.passes")
    found: dict[str, Pass] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"camshaft.passes.{info.name}")
        for thing in vars(module).values():
            own = isinstance(thing, type) and issubclass(thing, Pass) and thing.__module__ == module.__name__
            if own and not inspect.isabstract(thing):
                found[thing.name] = thing()
    return tuple(found[name] for name in sorted(found))
