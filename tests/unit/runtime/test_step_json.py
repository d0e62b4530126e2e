"""Plans and outputs survive being written as JSON, whatever their fields hold: strategies come from the dataclasses."""

import dataclasses
import json
import math
import types
import typing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from camshaft.core.errors import UserError
from camshaft.runtime.step import LogitsProcessor, RowSampling, StepOutput, StepPlan
from camshaft.runtime.step_json import from_json, to_json

PLAIN = {int: st.integers(-2**63, 2**64 - 1), float: st.floats(allow_nan=False), bool: st.booleans(),
         str: st.text(max_size=5)}


def arrays(hint):
    dtype = np.dtype(typing.get_args(typing.get_args(hint)[1])[0])
    if dtype.kind == "f":
        values = st.floats(width=8 * dtype.itemsize, allow_nan=False)
    elif dtype.kind == "b":
        values = st.booleans()
    else:
        values = st.integers(int(np.iinfo(dtype).min), int(np.iinfo(dtype).max))
    shapes = st.one_of(st.tuples(st.integers(0, 4)), st.tuples(st.integers(0, 3), st.integers(0, 3)))

    def filled(shape):
        count = math.prod(shape)
        return st.lists(values, min_size=count, max_size=count).map(
            lambda flat: np.array(flat, dtype=dtype).reshape(shape))

    return shapes.flatmap(filled)


def strategy(hint):
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hasattr(origin, "__value__"):  # newer numpy declares NDArray by a type statement
        return strategy(origin.__value__[parts])
    if origin in (types.UnionType, typing.Union):
        return st.none() | strategy(next(part for part in parts if part is not type(None)))
    if origin is np.ndarray:
        return arrays(hint)
    if origin is tuple:
        if LogitsProcessor in parts or Exception in parts or any(Exception in typing.get_args(p) for p in parts):
            return st.just(())
        if parts[-1] is Ellipsis:
            return st.lists(strategy(parts[0]), max_size=2).map(tuple)
        return st.tuples(*map(strategy, parts))
    return PLAIN[hint] if hint in PLAIN else records(hint)


def records(kind):
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{field.name: strategy(hints[field.name]) for field in dataclasses.fields(kind)})


def assert_same(left, right):
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_same(one, other)
    elif dataclasses.is_dataclass(left):
        for field in dataclasses.fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right


def again(record):
    text = json.dumps(to_json(record), allow_nan=False)
    return from_json(type(record), json.loads(text))


@settings(max_examples=60, deadline=None)
@given(records(StepPlan))
def test_a_plan_comes_back_equal(plan):
    assert_same(plan, again(plan))


@settings(max_examples=60, deadline=None)
@given(records(StepOutput))
def test_an_output_comes_back_equal(output):
    assert_same(output, again(output))


def output(**changes):
    nothing = np.zeros(0, np.int32)
    return StepOutput(**{"step": 1, "rows": nothing, "epochs": nothing, "token_ids": nothing,
                         "finite": np.zeros(0, np.bool_), **changes})


def test_numbers_that_json_lacks_come_back():
    values = np.array([np.nan, np.inf, -np.inf, 1.5], np.float32)
    found = from_json(StepOutput, json.loads(json.dumps(to_json(output(finite=values)), allow_nan=False)))
    assert np.array_equal(found.finite, values, equal_nan=True)


def test_an_error_comes_back_with_its_words():
    ((place, error),) = again(output(failures=((3, ValueError("too hot")),))).failures
    assert (place, str(error)) == (3, "ValueError: too hot")


def test_code_cannot_be_written_down():
    sampling = RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, min_tokens=0,
                           suppressed_token_ids=np.zeros(0, np.int32), processors=(lambda ids, logits: logits,))
    with pytest.raises(UserError, match="processors"):
        to_json(sampling)


@pytest.mark.parametrize("change", [
    {"rows": {"int32": [1], "int64": [1]}}, {"rows": {"object": ["x"]}}, {"rows": {"float99": [1]}}, {"step": "one"},
    {"step": True}, {"tokens": 3}, {"rows": [1, 2]}, {"failures": [[1]]}, {"rows": {"int32": [2**40]}},
    {"rows": {"int32": [1], "shape": [2, 2]}}])
def test_another_shape_is_refused(change):
    data = {**to_json(output()), **change}
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_json(StepOutput, data)
