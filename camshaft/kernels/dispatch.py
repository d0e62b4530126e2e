"""Which implementation serves a call, and why: the one place where implementations are ranked.

Owns ``explain``, ``choose`` and ``bind``. Capability checks themselves live in each implementation's
``supports``; recording a choice in an engine is ``passes/select_kernels.py``.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

from camshaft.core.errors import EngineError, UserError
from camshaft.kernels.op import Impl, Op, OpCall


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One implementation's standing for one call. ``reason`` says why it cannot serve, or that it can."""

    impl: str
    ok: bool
    reason: str
    rank: int


def _refusal(impl: Impl, op: Op, call: OpCall, native: bool) -> str | None:
    if impl.device not in ("any", call.device.kind):
        return f"runs on {impl.device}, not on {call.device.kind}"
    if impl.native and not native:
        return "needs native code: no C compiler"
    if len(call.args) != len(op.arg_names):
        return f"takes {len(op.arg_names)} arguments, not {len(call.args)}"
    return impl.supports(call)


def explain(op: Op, call: OpCall, *, native: bool) -> tuple[Verdict, ...]:
    """Every implementation's verdict on ``call``: those that can serve first, best first; ties go by name.

    ``native`` says whether a compiled library is at hand.
    """
    verdicts = []
    for impl in op.impls.values():
        refusal = _refusal(impl, op, call, native)
        verdicts.append(Verdict(impl.name, refusal is None, refusal or f"serves the call, rank {impl.rank}", impl.rank))
    return tuple(sorted(verdicts, key=lambda verdict: (not verdict.ok, -verdict.rank, verdict.impl)))


def choose(op: Op, call: OpCall, *, native: bool, forced: str | None = None) -> Verdict:
    """The best implementation for ``call``, or the ``forced`` one; the reason says what was passed over, and why.

    Raises UserError where the forced name is unknown or cannot serve the call, or where none can.
    """
    verdicts = explain(op, call, native=native)
    if forced is None:
        if not verdicts[0].ok:
            raise UserError(f"kernels.{op.spec.name}", call, "a call that some implementation serves",
                            "; ".join(f"{verdict.impl}: {verdict.reason}" for verdict in verdicts))
        best, *others = verdicts
        passed_over = ", ".join(f"{other.impl} ({f'rank {other.rank}' if other.ok else other.reason})"
                                for other in others)
        return dataclasses.replace(best, reason=f"{best.reason}; passed over: {passed_over}") if others else best
    for verdict in verdicts:
        if verdict.impl == forced:
            if not verdict.ok:
                raise UserError(f"kernels.{op.spec.name}", forced, f"one that serves this call ({verdict.reason})",
                                "Force another implementation, or leave the choice open")
            return dataclasses.replace(verdict, reason="forced")
    raise UserError(f"kernels.{op.spec.name}", forced, "one of " + ", ".join(sorted(op.impls)))


def bind(op: Op, impl_name: str, library: ctypes.CDLL | None) -> Callable[..., Any]:
    """The plain function of an implementation: arguments positional, in schema order; no dispatcher in between.

    Raises UserError for an unknown name, EngineError where native code is needed and ``library`` is None.
    """
    impl = op.impls.get(impl_name)
    if impl is None:
        raise UserError(f"kernels.{op.spec.name}", impl_name, "one of " + ", ".join(sorted(op.impls)),
                        "The engine may come from a newer version or need a plugin")
    if not impl.native:
        return impl.fn
    if library is None:
        raise EngineError(f"kernel {impl_name} of {op.spec.name}", found="no native library",
                          needed="the engine's compiled kernels", remedy="Build the engine again on this machine")
    bound: Callable[..., Any] = impl.fn(library)
    return bound
