"""Custom code on logits: what it is given, where it stands among the edits, and that its failures are its own."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from camshaft.core.errors import UserError
from camshaft.runtime.model_engine import ModelEngine
from tests.unit.runtime import attention_model as model
from tests.unit.runtime.plans import arrival, ints, plan

V = model.VOCAB
PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def runner():
    return ModelEngine(model.engine(), num_pages=(30,))


def pages_of(row):
    return [(row, 0, 1 + 2 * row), (row, 1, 2 + 2 * row)]


def run(runner, *processors, count=1, **options):
    """Outputs of a request with ``processors`` in row 1, beside plain rows 0 and 2."""
    mine = arrival(1, prompt=PROMPT, processors=processors, **options)
    outs = [runner.submit(plan(0, arrivals=[arrival(0), mine, arrival(2)],
                               pages=pages_of(0) + pages_of(1) + pages_of(2),
                               context=[(row, 0, PROMPT, 0) for row in range(3)])).result()]
    for index in range(1, count):
        outs.append(runner.submit(plan(index, generation=[(row, len(PROMPT) + index - 1, index) for row in range(3)])
                                  ).result())
    greedy = model.dense_greedy(PROMPT, count)
    assert [out.token_ids[0] for out in outs] == [out.token_ids[2] for out in outs] == greedy
    assert all(out.finite.all() for out in outs)
    return outs


def test_it_sees_prompt_output_and_edited_logits_and_may_keep_and_change_both(runner):
    seen, kept = [], []

    def spy(token_ids, logits):
        seen.append((list(token_ids), logits.clone()))
        kept.append(logits)
        token_ids.clear()
        logits[:] = -math.inf
        logits[len(seen)] = 0.0
        return logits

    outs = run(runner, spy, count=4, bias_token_ids=ints(9), bias_values=np.array([2.5], np.float32))
    assert [out.token_ids[1] for out in outs] == [1, 2, 3, 4]
    assert [tokens for tokens, _ in seen] == [PROMPT + [1, 2, 3][:index] for index in range(4)]
    for tokens, logits in seen:
        assert logits.dtype == torch.float32
        assert logits.shape == (V,)
        expected = model.dense_logits(tokens)[-1]
        expected[9] += 2.5
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    kept[0].add_(1)  # a tensor like any other, long after the step


def test_each_gets_what_the_one_before_it_gave(runner):
    def only(*tokens):
        return lambda token_ids, logits: logits.index_fill(0, torch.tensor([i for i in range(V) if i not in tokens]),
                                                           -math.inf)

    [out] = run(runner, only(6, 7, 8), only(8, 9))
    assert out.token_ids[1] == 8


def test_one_with_parameters_may_be_a_module(runner):
    layer = torch.nn.Linear(V, V)
    [out] = run(runner, lambda token_ids, logits: layer(logits))
    assert out.token_ids[1] == layer(model.dense_logits(PROMPT)[-1]).argmax()


def test_it_survives_preemption(runner):
    def shift(token_ids, logits):
        return logits.roll(sum(token_ids))

    outs = run(runner, shift, count=5)
    tokens = [int(out.token_ids[1]) for out in outs]
    again = runner.submit(plan(9, arrivals=[arrival(4, prompt=PROMPT, output=tokens[:3], processors=(shift,))],
                               pages=[(4, 0, 20)], context=[(4, 0, PROMPT + tokens[:3], 3)])).result()
    assert again.token_ids.tolist() == tokens[3:4]


def raising(token_ids, logits):
    raise KeyError("no such state")


def leaving(kind):
    def leave(token_ids, logits):
        raise kind

    return leave


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Shy:
    """Fails, and cannot be shown."""

    def __call__(self, token_ids, logits):
        raise ValueError("shy")

    def __repr__(self):
        raise RuntimeError("no looks")


class Stubborn(torch.Tensor):
    """No function of torch may be used on it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError("not with me")


WRONG = {
    "ends the program": (leaving(SystemExit), "SystemExit"),
    "is interrupted": (leaving(KeyboardInterrupt), "KeyboardInterrupt"),
    "closes": (leaving(GeneratorExit), "GeneratorExit"),
    "has no words": (leaving(Unspeakable), "raised Unspeakable"),
    "cannot be shown": (Shy(), "a Shy that cannot be shown.* ValueError: shy"),
    "a tensor of no device": (lambda token_ids, logits: logits.to("meta"), "NotImplementedError"),
    "a sparse tensor": (lambda token_ids, logits: logits.to_sparse(), r"torch\.sparse_coo"),
    "a tensor of its own": (lambda token_ids, logits: logits.as_subclass(Stubborn), "not with me"),
    "raises": (raising, "KeyError: 'no such state'"),
    "nothing": (lambda token_ids, logits: None, "returned NoneType"),
    "a list": (lambda token_ids, logits: logits.tolist(), "returned list"),
    "a row too many": (lambda token_ids, logits: logits[None], rf"shape \[1, {V}\]"),
    "a token too few": (lambda token_ids, logits: logits[1:], rf"shape \[{V - 1}\]"),
    "another dtype": (lambda token_ids, logits: logits.double(), r"torch\.float64"),
    "not a number": (lambda token_ids, logits: logits * math.nan, "no NaN"),
    "infinity": (lambda token_ids, logits: logits + math.inf, "no positive infinity"),
    "everything masked": (lambda token_ids, logits: logits - math.inf, "leave at least one token to pick"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_it_does_wrong_ends_its_own_request(runner, kind, temperature):
    processor, complaint = WRONG[kind]
    [out] = run(runner, processor, temperature=temperature)
    [(place, error)] = out.failures
    assert place == 1
    assert isinstance(error, UserError)
    assert error.field == "logits_processor"
    with pytest.raises(UserError, match=complaint):
        raise error
    if kind == "raises":
        assert isinstance(error.__cause__, KeyError)


def test_b36_it_is_not_asked_about_logits_that_are_broken(runner):
    whole = runner.graph
    runner.graph = dataclasses.replace(whole, call=lambda *inputs: whole.call(*inputs) * math.nan)
    out = runner.submit(plan(0, arrivals=[arrival(0, prompt=PROMPT, processors=(raising,))], pages=pages_of(0),
                             context=[(0, 0, PROMPT, 0)])).result()
    assert out.finite.tolist() == [False]
    assert not out.failures
