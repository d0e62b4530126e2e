"""Whether an engine's graph and its KV life cycles mean the same cache.

Owns the comparison. The two are written together, in two files; a graph that read more than the cache keeps, or
other pages than it allocates, would read and write foreign memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import EngineCorruptError
from camshaft.ir import nodes
from camshaft.ir.program import LIFE_CYCLE_INPUTS, STEP_INPUTS, pool_input


def check_cache(graph: fx.Graph, life_cycles: tuple[LifeCycleSpec, ...]) -> None:
    """Raise EngineCorruptError where the graph has inputs, pools or windows that the life cycles do not give it."""
    cycles = {pool_input(layer): c for c, spec in enumerate(life_cycles) for layer in spec.layers}
    known = {*STEP_INPUTS, *(f"{kind}_{c}" for kind in LIFE_CYCLE_INPUTS for c in range(len(life_cycles))), *cycles}
    for node in graph.nodes:
        if node.op == "placeholder":
            name = str(node.target)
            _require(name in known, f"no input {name}", "the graph's inputs")
            if name in cycles:
                _check_pool(name, node.meta.get("result"), life_cycles[cycles[name]])
        elif nodes.is_call(node, "camshaft.kv_write"):
            _, _, pool, slots = nodes.arguments(node)
            _check_place(pool, slots, LIFE_CYCLE_INPUTS[0], cycles)
        elif nodes.is_call(node, "camshaft.paged_attention"):
            _, pool, table, _, _, _, window, _, sinks = nodes.arguments(node)
            spec = life_cycles[_check_place(pool, table, LIFE_CYCLE_INPUTS[1], cycles)]
            _require(spec.window is None or (window, sinks) == (spec.window, spec.sinks),
                     f"window {spec.window} and {spec.sinks} sinks", f"{window} and {sinks}, those of {node.name}")


def _check_pool(name: str, result: object, spec: LifeCycleSpec) -> None:
    shape = ",".join(map(str, spec.pool_shape(1)[2:]))
    _require(not isinstance(result, str) or (result.startswith(f"{spec.dtype}[") and result.endswith(f",{shape}]")),
             f"pages of {spec.dtype} [{shape}] for {name}", str(result))


def _check_place(pool: object, place: object, kind: str, cycles: Mapping[str, int]) -> int:
    """The life cycle of a call's pool, which its slots or its page table must be of too."""
    cycle = cycles.get(str(pool.target)) if isinstance(pool, fx.Node) else None
    found = str(place.target) if isinstance(place, fx.Node) else str(place)
    if cycle is None or found != f"{kind}_{cycle}":
        raise _corrupt(f"{found} for the pool {pool}", "pools and places of one life cycle")
    return cycle


def _require(holds: bool, found: str, needed: str) -> None:
    if not holds:
        raise _corrupt(found, needed)


def _corrupt(found: str, needed: str) -> EngineCorruptError:
    return EngineCorruptError("KV life cycles", found=found, needed=needed, remedy="Build the engine again")
