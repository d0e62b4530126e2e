"""Every implementation of every op against its contract, on every dtype and sample."""

import itertools

import pytest
import torch

from camshaft.core.errors import UserError
from camshaft.kernels.op import OPS, Impl, Op, OpSpec, Sample, load_families
from camshaft.testing import parity

load_families("cpu")
OPS_UNDER_TEST = [op for op in OPS if not op.spec.name.startswith("test_")]
CASES = [pytest.param(op, impl, dtype, sample.name, id=f"{op.spec.name}-{impl}-{str(dtype)[6:]}-{sample.name}")
         for op in OPS_UNDER_TEST for impl in sorted(op.impls) if op.impls[impl].device in ("cpu", "any")
         for dtype in op.spec.dtypes for sample in parity.samples_of(op.spec.name, dtype, "cpu")]


@pytest.mark.parametrize(("op", "impl", "dtype", "name"), CASES)
def test_implementation_keeps_the_contract(op, impl, dtype, name, library):
    sample = parity.sample_of(op, dtype, name)
    verdict = parity.verdict_of(op, impl, sample, library)
    if not verdict.ok:
        pytest.skip(verdict.reason)
    parity.check_impl(op, impl, sample, library)


@pytest.mark.parametrize("op", OPS_UNDER_TEST, ids=lambda op: op.spec.name)
def test_torch_accepts_the_op(op):
    samples = parity.samples_of(op.spec.name, torch.float32, "cpu")
    for sample in samples:
        parity.check_op(op, sample)
    parity.check_op(op, samples[1], full=True)


@pytest.mark.parametrize("op", OPS_UNDER_TEST, ids=lambda op: op.spec.name)
def test_every_op_is_sampled_where_implementations_break(op):
    samples = parity.samples_of(op.spec.name, torch.float32, "cpu")
    tensors = [argument for sample in samples for argument in sample.args if isinstance(argument, torch.Tensor)]
    assert any(tensor.numel() == 0 for tensor in tensors)
    assert any(not tensor.is_contiguous() for tensor in tensors)
    assert any(tensor.shape[0] == 1 for tensor in tensors if tensor.dim())
    assert len({sample.name for sample in samples}) == len(samples)


@pytest.mark.parametrize(("name", "heads_at", "num_kv_heads_at"), [
    ("attention", (0, 1), (1, 1)), ("paged_attention", (0, 1), (1, 2)), ("rope", (0, 1), (1, 1))])
def test_attention_is_sampled_with_as_many_kv_heads_as_heads_with_eight_and_with_one(name, heads_at, num_kv_heads_at):
    found = set()
    for sample in parity.samples_of(name, torch.float32, "cpu"):
        heads, kv_heads = (sample.args[place].shape[dim] for place, dim in (heads_at, num_kv_heads_at))
        found.add("all" if heads == kv_heads else kv_heads)
    assert found >= {"all", 8, 1}


NUMBERS = itertools.count()


def _double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.fixture
def doubler():
    """An op outside the registry whose implementations the test brings."""
    spec = OpSpec(name=f"test_double_{next(NUMBERS)}", schema="(Tensor x) -> Tensor", reference=_double,
                  fake=lambda x: x.new_empty(x.shape), samples=lambda dtype, device, generator: ())
    return Op(spec)


def _mutating(x):
    x[0, 0] += 1
    return (x - torch.tensor([[1.0, 0.0], [0.0, 0.0]])) * 2


def _unwritten(x):
    out = torch.empty_like(x)
    out[:1] = x[:1] * 2
    if not torch.are_deterministic_algorithms_enabled():
        out[1:] = x[1:] * 2
    return out


@pytest.mark.parametrize(("broken", "complaint"), [
    (lambda x: x * 2.001, "off by 0.0005"),
    (lambda x: (x * 2).half(), r"dtype"),
    (lambda x: (x * 2).t().contiguous().t(), "contiguous"),
    (lambda x: (x * 2)[:1], "shape"),
    (lambda x: (x * 2, x), "2 results, the contract has 1"),
    (lambda x: torch.full_like(x, float("nan")), "off by inf"),
    (lambda x: x * 2 + next(NUMBERS) % 2 * 1e-5, "not deterministic"),
    (_unwritten, "leaves values unwritten"),
    (_mutating, "argument x was written"),
])
def test_a_broken_implementation_is_caught(doubler, broken, complaint):
    doubler.add(Impl(name="broken", device="cpu", fn=broken))
    sample = Sample("square", (torch.tensor([[1.0, 2.0], [3.0, 4.0]]),))
    parity.check_impl(doubler, "ref", sample, None)
    with pytest.raises(parity.ParityError, match=complaint):
        parity.check_impl(doubler, "broken", sample, None)


def test_copies_stay_views_of_one_tensor():
    whole = torch.arange(12.0).view(3, 4)
    left, right, scale = parity.private_copy((whole[:, :2], whole[:, 2:], 0.5))
    left[0, 0] = 99.0
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert left.stride() == (4, 1)
    assert torch.equal(right, whole[:, 2:])
    assert whole[0, 0] == 0.0
    assert scale == 0.5


def test_relative_error_wants_the_same_non_finite_values():
    nan, inf = float("nan"), float("inf")
    assert parity.relative_error(torch.tensor([1.0, nan, inf]), torch.tensor([2.0, nan, inf])) == 0.5
    assert parity.relative_error(torch.tensor([1.0, nan]), torch.tensor([1.0, inf])) == inf
    assert parity.relative_error(torch.tensor([1.0, -inf]), torch.tensor([1.0, inf])) == inf
    assert parity.relative_error(torch.tensor([0.25]), torch.tensor([0.0])) == 0.25


def test_prepared_weights_reach_the_implementation(doubler):
    doubler.add(Impl(name="prepared", device="cpu", fn=lambda x: x, prepare={"x": _double}))
    parity.check_impl(doubler, "prepared", Sample("row", (torch.ones(1, 3),)), None)


def test_an_unknown_sample_is_named():
    with pytest.raises(UserError, match="no_such"):
        parity.sample_of(OPS.get("linear"), torch.float32, "no_such")
