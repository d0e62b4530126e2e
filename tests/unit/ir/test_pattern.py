"""The matcher: captures, repeated names, single use, commutation, defaults."""

import pytest

from camshaft.ir.pattern import Call, Item, Var, match
from tests.passes.graphs import Builder


@pytest.fixture
def b():
    return Builder()


@pytest.fixture
def x(b):
    return b.call("aten.embedding.default", b.weight("table", 11, 8), b.token_ids)


def test_captures_nodes_and_constants(b, x):
    norm = b.call("camshaft.rms_norm", x, b.weight("w", 8), 1e-6)
    found = match(Call("camshaft.rms_norm", (Var("x"), Var("w"), Var("eps")), name="norm"), norm)
    assert found is not None
    assert (found["x"], found["w"].target, found["eps"], found["norm"]) == (x, "w", 1e-6, norm)


def test_another_op_or_constant_does_not_match(b, x):
    silu = b.call("aten.silu.default", x)
    assert match(Call("aten.gelu.default", (Var("x"),)), silu) is None
    sliced = b.call("aten.slice.Tensor", x, 1, 0, 4)
    assert match(Call("aten.slice.Tensor", (Var("x"), 1, 0, 4)), sliced) is not None
    assert match(Call("aten.slice.Tensor", (Var("x"), 1, 0, 5)), sliced) is None
    assert match(Call("aten.slice.Tensor", (Var("x"), True, 0, 4)), sliced) is None


def test_a_name_used_twice_must_be_the_same_node(b, x):
    y = b.call("aten.silu.default", x)
    pattern = Call("aten.add.Tensor", (Var("a"), Var("a")))
    assert match(pattern, b.call("aten.add.Tensor", x, x)) is not None
    assert match(pattern, b.call("aten.add.Tensor", x, y)) is None


def test_commutative_tries_both_orders(b, x):
    y = b.call("aten.silu.default", x)
    product = b.call("aten.mul.Tensor", x, y)
    gate = Call("aten.silu.default", (Var("g"),))
    assert match(Call("aten.mul.Tensor", (gate, Var("u"))), product) is None
    found = match(Call("aten.mul.Tensor", (gate, Var("u")), commutative=True), product)
    assert found is not None
    assert found["u"] is x


def test_single_use(b, x):
    y = b.call("aten.silu.default", x)
    outer = b.call("aten.silu.default", y)
    pattern = Call("aten.silu.default", (Call("aten.silu.default", (Var("x"),), single_use=True),))
    assert match(pattern, outer) is not None
    b.call("aten.add.Tensor", y, y)
    assert match(pattern, outer) is None


def test_items_of_a_split(b, x):
    parts = b.call("aten.split_with_sizes.default", x, [3, 5], -1)
    second = b.call("getitem", parts, 1)
    split = Call("aten.split_with_sizes.default", (Var("x"), Var("sizes"), -1))
    found = match(Item(1, split), second)
    assert found is not None
    assert found["sizes"] == [3, 5]
    assert match(Item(0, split), second) is None


def test_arguments_left_out_of_a_pattern_must_have_their_defaults(b, x):
    pattern = Call("aten.add.Tensor", (Var("a"), Var("b")))
    scaled = b.call("aten.add.Tensor", x, x)
    assert match(pattern, scaled) is not None
    scaled.kwargs = {"alpha": 2}
    assert match(pattern, scaled) is None
    gelu = b.call("aten.gelu.default", x)
    assert match(Call("aten.gelu.default", (Var("x"), Var("how"))), gelu) == {"x": x, "how": "none"}
