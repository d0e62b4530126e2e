"""Choosing, explaining and binding implementations."""

import ctypes

import pytest
import torch

from camshaft.core.device import DeviceSpec
from camshaft.core.errors import EngineError, InternalError, UserError
from camshaft.kernels.dispatch import bind, choose, explain
from camshaft.kernels.op import OPS, Impl, Op, OpCall, OpSpec, TensorInfo, load_families

CPU = DeviceSpec(kind="cpu", name="test", features=(), num_threads=2, memory_bytes=1 << 30)
CUDA = DeviceSpec(kind="cuda", name="test", features=("sm_90",), num_threads=1, memory_bytes=1 << 30)


def _negate(x):
    return -x


def _only_float32(call):
    return None if call.args[0].dtype == torch.float32 else f"{call.args[0].dtype} is not float32"


def _factory(library):
    return lambda x: (library, x)


@pytest.fixture
def op(request):
    spec = OpSpec(name="test_negate_" + "".join(c if c.isalnum() else "_" for c in request.node.name),
                  schema="(Tensor x) -> Tensor", reference=_negate, fake=lambda x: x.new_empty(x.shape),
                  samples=lambda dtype, device, generator: ())
    op = Op(spec)
    op.add(Impl(name="native", device="cpu", fn=_factory, native=True, rank=10))
    op.add(Impl(name="picky", device="cpu", fn=_negate, supports=_only_float32, rank=5))
    op.add(Impl(name="card", device="cuda", fn=_negate, rank=50))
    return op


def call(dtype=torch.float32, device=CPU):
    return OpCall(device, (TensorInfo(dtype, (None, 8)),))


def test_the_best_supporting_implementation_wins(op):
    assert choose(op, call(), native=True).impl == "native"
    assert choose(op, call(), native=False).impl == "picky"
    assert choose(op, call(torch.bfloat16), native=False).impl == "ref"
    assert choose(op, call(device=CUDA), native=True).impl == "card"


def test_explain_lists_everyone_best_first_with_reasons(op):
    verdicts = explain(op, call(torch.float16), native=False)
    assert [(verdict.impl, verdict.ok) for verdict in verdicts] == [
        ("ref", True), ("card", False), ("native", False), ("picky", False)]
    reasons = {verdict.impl: verdict.reason for verdict in verdicts}
    assert reasons["native"] == "needs native code: no C compiler"
    assert reasons["picky"] == "torch.float16 is not float32"
    assert reasons["card"] == "runs on cuda, not on cpu"


def test_equal_ranks_go_by_name(op):
    op.add(Impl(name="a_twin", device="cpu", fn=_negate, rank=10))
    assert choose(op, call(), native=True).impl == "a_twin"


def test_forcing_an_implementation(op):
    assert choose(op, call(), native=True, forced="ref").impl == "ref"
    with pytest.raises(UserError, match="needs native code") as refused:
        choose(op, call(), native=False, forced="native")
    assert refused.value.field == f"kernels.{op.spec.name}"
    with pytest.raises(UserError, match="one of card, native, picky, ref"):
        choose(op, call(), native=True, forced="missing")


def test_a_call_nobody_serves_is_an_error_with_every_reason(op):
    op.impls["ref"] = Impl(name="ref", device="cuda", fn=_negate)
    with pytest.raises(UserError, match=r"native: needs native code.*picky: torch\.int32 is not float32"):
        choose(op, call(torch.int32), native=False)


def test_a_call_with_the_wrong_number_of_arguments_is_refused(op):
    verdicts = explain(op, OpCall(CPU, ()), native=True)
    assert not any(verdict.ok for verdict in verdicts)
    assert verdicts[0].reason.startswith(("takes 1 arguments, not 0", "runs on cuda"))


def test_bind_gives_plain_functions_and_builds_native_ones_once(op):
    x = torch.ones(2)
    assert bind(op, "picky", None) is _negate
    library = ctypes.CDLL(None)
    assert bind(op, "native", library)(x) == (library, x)
    with pytest.raises(EngineError, match="Build the engine again"):
        bind(op, "native", None)
    with pytest.raises(UserError, match="plugin"):
        bind(op, "gone", library)


def test_duplicate_implementations_are_loud(op):
    with pytest.raises(InternalError, match="already has an implementation 'picky'"):
        op.add(Impl(name="picky", device="cpu", fn=_negate))


@pytest.mark.parametrize(("dtype", "expected"), [
    (torch.float32, "native"), (torch.bfloat16, "native"), (torch.float16, "native"), (torch.float64, "ref")])
def test_the_dense_families_prefer_native_code_for_their_types(dtype, expected):
    load_families("cpu")
    x, weight = TensorInfo(dtype, (None, 64)), TensorInfo(dtype, (32, 64))
    assert choose(OPS.get("linear"), OpCall(CPU, (x, weight, None)), native=True).impl == expected
    assert choose(OPS.get("rms_norm"), OpCall(CPU, (x, TensorInfo(dtype, (64,)), 1e-5)), native=True).impl == expected
    assert choose(OPS.get("silu_mul"), OpCall(CPU, (x,)), native=True).impl == expected
    assert choose(OPS.get("linear"), OpCall(CPU, (x, weight, None)), native=False).impl == "ref"


@pytest.mark.parametrize(("x", "weight", "refusal"), [
    (torch.float32, torch.bfloat16, None), (torch.float32, torch.float16, None),
    (torch.bfloat16, torch.float32, "mixes torch.bfloat16 and torch.float32"),
    (torch.float16, torch.bfloat16, "mixes torch.bfloat16 and torch.float16")])
def test_products_take_narrower_weights_under_float32_and_refuse_other_mixtures_by_name(x, weight, refusal):
    load_families("cpu")
    mixed = OpCall(CPU, (TensorInfo(x, (None, 8)), TensorInfo(weight, (4, 8)), None))
    verdicts = {verdict.impl: verdict for verdict in explain(OPS.get("linear"), mixed, native=True)}
    assert verdicts["native"].ok is (refusal is None)
    assert refusal in (None, verdicts["native"].reason)


@pytest.mark.parametrize(("x", "weight", "refusal"), [
    (torch.bfloat16, torch.float32, None), (torch.float16, torch.float32, None),
    (torch.float32, torch.bfloat16, "mixes torch.bfloat16 and torch.float32"),
    (torch.float16, torch.bfloat16, "mixes torch.bfloat16 and torch.float16"),
    (torch.float64, torch.float32, "torch.float64 is not one of")])
def test_only_rms_norms_take_a_float32_weight_beside_16_bit_values(x, weight, refusal):
    load_families("cpu")

    def reason(name, *args):
        verdicts = explain(OPS.get(name), OpCall(CPU, args), native=True)
        return next(None if verdict.ok else verdict.reason for verdict in verdicts if verdict.impl == "native")

    x, weight = TensorInfo(x, (None, 8)), TensorInfo(weight, (8,))
    for found in (reason("rms_norm", x, weight, 1e-5), reason("add_rms_norm", x, x, weight, 1e-5)):
        assert found == refusal or (refusal and found.startswith(refusal))
    assert reason("layer_norm", x, weight, None, 1e-5) is not None


def test_a_choice_says_what_it_passed_over_and_why():
    op = load_families("cpu").get("rms_norm")
    x = TensorInfo(torch.float32, (None, 8))
    call = OpCall(CPU, (x, TensorInfo(torch.float32, (8,)), 1e-5))
    with_compiler, without = (choose(op, call, native=native) for native in (True, False))
    assert (with_compiler.impl, without.impl) == ("native", "ref")
    assert "passed over: ref (rank -100)" in with_compiler.reason
    assert "native (needs native code: no C compiler)" in without.reason
