"""Fuses element-wise neighbours: residual add with the norm after it, activation with the product it gates."""

from __future__ import annotations

from types import MappingProxyType

from torch import fx

from camshaft.ir import nodes
from camshaft.ir.pattern import Call, Captures, Item, Var, match
from camshaft.ir.program import Program
from camshaft.passes.base import Pass, PassContext, PassResult

_SUM = Call("aten.add.Tensor", (Var("x"), Var("residual")), name="sum")
_NORMS = MappingProxyType({
    "camshaft.add_rms_norm": Call("camshaft.rms_norm", (_SUM, Var("weight"), Var("eps"))),
    "camshaft.add_layer_norm": Call("camshaft.layer_norm", (_SUM, Var("weight"), Var("bias"), Var("eps"))),
})
_HALVES = Call("aten.split_with_sizes.default", (Var("gate_up"), Var("sizes"), -1))
_UP = Item(1, _HALVES, single_use=True)


def _gated(activation: str, *extra: Var) -> Call:
    gate = Item(0, _HALVES, single_use=True)
    return Call("aten.mul.Tensor", (Call(activation, (gate, *extra), single_use=True), _UP), commutative=True)


_ACTIVATIONS = MappingProxyType({
    "camshaft.silu_mul": _gated("aten.silu.default"),
    "camshaft.gelu_mul": _gated("aten.gelu.default", Var("approximate")),
})


class FusePointwise(Pass):
    """``norm(x + residual)`` becomes one op that also returns the sum; ``act(gate) * up`` becomes one op."""

    name = "fuse_pointwise"
    stage = "fuse"
    after = ("fuse_linear",)

    def run(self, program: Program, ctx: PassContext) -> PassResult:
        """Try every pattern at every node, in graph order."""
        counts: dict[str, int] = {}
        for node in list(program.graph.nodes):
            for op, pattern in _NORMS.items():
                found = match(pattern, node)
                if found is not None and _fuse_norm(program, op, node, found):
                    counts[op] = counts.get(op, 0) + 1
            for op, pattern in _ACTIVATIONS.items():
                found = match(pattern, node)
                if found is not None and _fuse_activation(program, op, node, found):
                    counts[op] = counts.get(op, 0) + 1
        nodes.erase_dead(program)
        return PassResult(matches=sum(counts.values()),
                          notes=tuple(f"{count} × {op.removeprefix('camshaft.')}" for op, count in counts.items()))


def _fuse_norm(program: Program, op: str, norm: fx.Node, found: Captures) -> bool:
    """The fused op takes the add's place: whoever reads the sum may come before the norm."""
    total, x, residual = found["sum"], found["x"], found["residual"]
    if not (isinstance(x, fx.Node) and isinstance(residual, fx.Node)):
        return False
    infos = [nodes.info_of(program, node) for node in (x, residual, total)]
    if len({(info.dtype, info.shape) for info in infos}) > 1:
        return False
    weights = [found["weight"]] if op == "camshaft.add_rms_norm" else [found["weight"], found["bias"]]
    names = [nodes.weight_name(weight) for weight in weights]
    if any(name is None and weight is not None for name, weight in zip(names, weights, strict=True)):
        return False
    placed = [nodes.weight_node(program, name) if name is not None else None for name in names]
    with program.graph.inserting_before(total):
        fused = nodes.add_call(program, op, (x, residual, *placed, found["eps"]))
        normed = nodes.add_call(program, "getitem", (fused, 0))
        summed = nodes.add_call(program, "getitem", (fused, 1))
    norm.replace_all_uses_with(normed)
    program.graph.erase_node(norm)
    total.replace_all_uses_with(summed)
    program.graph.erase_node(total)
    return True


def _fuse_activation(program: Program, op: str, product: fx.Node, found: Captures) -> bool:
    """Only where the two halves are equal and make up the whole."""
    sizes, gate_up = found["sizes"], found["gate_up"]
    if len(sizes) != 2 or sizes[0] != sizes[1]:
        return False
    extra = (found["approximate"],) if "approximate" in found else ()
    with program.graph.inserting_before(product):
        fused = nodes.add_call(program, op, (gate_up, *extra))
    product.replace_all_uses_with(fused)
    program.graph.erase_node(product)
    return True
