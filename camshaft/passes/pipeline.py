"""The order of passes, and running them: each verified, counted and recorded.

Owns ordering by stage and ``after``, and what may be skipped. Knows no rewrite.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from camshaft.core.errors import InternalError, UserError
from camshaft.ir.program import PassRecord, Program
from camshaft.ir.verify import verify
from camshaft.passes.base import MANDATORY_STAGES, STAGES, Pass, PassContext, load_passes

Observer = Callable[[str, Program], None]


def order_passes(passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Stage by stage, then by ``after`` and ``needs``, ties by name.

    Raises InternalError for an unknown stage or name, a duplicate, a cycle, or an order against the stages.
    """
    known = {step.name: step for step in passes}
    if len(known) != len(passes):
        raise InternalError(f"two passes share a name: {sorted(step.name for step in passes)}")
    for step in passes:
        if step.stage not in STAGES:
            raise InternalError(f"pass {step.name!r} has the unknown stage {step.stage!r}")
        for earlier in (*step.after, *step.needs):
            if earlier not in known:
                raise InternalError(f"pass {step.name!r} comes after {earlier!r}, which does not exist")
            if STAGES.index(known[earlier].stage) > STAGES.index(step.stage):
                raise InternalError(f"pass {step.name!r} comes after {earlier!r} of a later stage")
    ordered: list[Pass] = []
    waiting = sorted(passes, key=lambda step: (STAGES.index(step.stage), step.name))
    while waiting:
        done = {step.name for step in ordered}
        ready = next((step for step in waiting if done.issuperset((*step.after, *step.needs))), None)
        if ready is None:
            raise InternalError(f"passes wait for each other: {', '.join(step.name for step in waiting)}")
        ordered.append(ready)
        waiting.remove(ready)
    return tuple(sorted(ordered, key=lambda step: STAGES.index(step.stage)))


def select_passes(skip: Sequence[str], passes: Sequence[Pass] | None = None) -> tuple[Pass, ...]:
    """The passes to run, in order. Raises UserError for a name in ``skip`` that is unknown or cannot be left out."""
    ordered = order_passes(load_passes() if passes is None else passes)
    optional = [step.name for step in ordered if step.stage not in MANDATORY_STAGES]
    for name in skip:
        if name not in optional:
            near = difflib.get_close_matches(name, optional, n=1)
            mandatory = any(step.name == name for step in ordered)
            raise UserError("skip_passes", name, "passes that may be skipped: " + ", ".join(optional),
                            "An engine cannot run without this one" if mandatory
                            else f"Did you mean {near[0]!r}?" if near else "")
    kept = tuple(step for step in ordered if step.name not in skip)
    for step in kept:
        missing = [name for name in step.needs if name in skip]
        if missing:
            raise UserError("skip_passes", missing[0], f"no such name: {step.name} needs it", f"Skip {step.name} too")
    return kept


def run_passes(program: Program, ctx: PassContext, *, passes: Sequence[Pass] | None = None,
               observe: Observer | None = None) -> None:
    """Run the optimiser on ``program`` in place and record what it did in ``program.history``.

    ``observe`` is called after each pass with its name and the program as it left it.
    """
    checked: set[Any] = set()
    verify(program, checked)
    for step in select_passes(ctx.build.skip_passes, passes):
        result = step.run(program, ctx)
        try:
            verify(program, checked)
        except InternalError as error:
            raise InternalError(f"after pass {step.name!r}: {error}") from error
        program.history.append(PassRecord(step.name, result.matches, result.notes))
        if observe is not None:
            observe(step.name, program)
