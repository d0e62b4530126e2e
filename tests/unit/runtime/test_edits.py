"""Token edits against a plain float64 re-implementation, whatever the history, the interruptions and the neighbours."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from camshaft.core.errors import InternalError, UserError
from camshaft.runtime.edits import RowEdits, apply_edits, edits_asked
from camshaft.runtime.model_engine import ModelEngine
from camshaft.runtime.step import RowArrival
from tests.unit.runtime import attention_model as model
from tests.unit.runtime.plans import arrival, ints, plan, sampling

V = model.VOCAB
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
PAGES = 30


def plain_edits(logits, wanted, prompt, output):
    """The contract of ``RowSampling`` word for word, one id at a time; processors aside."""
    history, found = [*prompt, *output], []
    bias = dict(zip(wanted.bias_token_ids.tolist(), wanted.bias_values.tolist(), strict=True))
    n = wanted.no_repeat_ngram_size
    grams = {tuple(history[i:i + n]) for i in range(len(history) - n + 1)} if n else set()
    for token, logit in enumerate(logits):
        value = float(logit) + bias.get(token, 0.0)
        if wanted.allowed_token_ids is not None and token not in wanted.allowed_token_ids:
            value = -math.inf
        if token in history:
            value = value / wanted.repetition_penalty if value > 0 else value * wanted.repetition_penalty
        value -= (token in output) * wanted.presence_penalty + output.count(token) * wanted.frequency_penalty
        after = [*history, token]
        bad = any(after[-len(word):] == word.tolist() for word in wanted.bad_words)
        repeats = n and len(after) >= n and tuple(after[-n:]) in grams
        early = len(output) < wanted.min_tokens and token in wanted.suppressed_token_ids
        found.append(-math.inf if bad or repeats or early else value)
    return found


def random_sampling(dice, vocab):
    """Some of all edits, over tokens that histories are likely to hold."""
    def some(count):
        return dice.sample(range(vocab), count)

    biased = some(dice.randint(1, 5))
    options = dict(
        repetition_penalty=dice.choice([0.5, 1.3, 2.0]), presence_penalty=dice.uniform(-2, 2),
        frequency_penalty=dice.uniform(-2, 2), no_repeat_ngram_size=dice.randint(1, 4),
        bad_words=tuple(ints(*(dice.randrange(vocab) for _ in range(dice.randint(1, 3)))) for _ in range(8)),
        bias_token_ids=ints(*biased), bias_values=np.array([dice.uniform(-9, 9) for _ in biased], np.float32),
        allowed_token_ids=ints(*some(vocab - 2)), min_tokens=dice.randint(1, 6))
    kept = {name: value for name, value in options.items() if dice.random() < 0.6}
    if "bias_token_ids" not in kept or "bias_values" not in kept:
        kept.pop("bias_token_ids", None), kept.pop("bias_values", None)
    return sampling(suppressed=some(2), **kept)


def edits_of(wanted, prompt, output=()):
    history = ints(*prompt, *output) if wanted.needs_history else ints()
    return RowEdits(RowArrival(row=0, epoch=0, sampling=wanted, history=history, num_prompt_tokens=len(prompt)), 12)


@pytest.mark.parametrize("seed", range(40))
def test_edits_are_those_of_the_contract_and_a_resumed_row_goes_on_where_it_was(seed):
    """Three rows at once, over so few tokens that n-grams and bad words do come; each step also from scratch."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    wanted = [random_sampling(dice, 12) for _ in range(3)]
    prompts = [[dice.randrange(12) for _ in range(dice.randint(1, 9))] for _ in wanted]
    grown, outputs = [edits_of(*pair) for pair in zip(wanted, prompts, strict=True)], [[], [], []]
    for index in range(12):
        logits = 4 * torch.randn(3, 12, generator=generator)
        expected = torch.tensor([plain_edits(*row) for row in zip(logits, wanted, prompts, outputs, strict=True)])
        together, resumed = logits.clone(), logits.clone()
        apply_edits(together, grown, [index] * 3)
        torch.testing.assert_close(together, expected.float(), rtol=2e-6, atol=2e-6)
        for row, made in enumerate(zip(wanted, prompts, outputs, strict=True)):
            apply_edits(resumed[row:row + 1], [edits_of(*made)], [index])
        assert torch.equal(together, resumed)
        for row, edits in enumerate(grown):
            outputs[row].append(dice.randrange(12))
            edits.append(outputs[row][-1])


def test_a_row_without_edits_asks_for_none():
    assert edits_asked(sampling(temperature=0.7, seed=1, min_tokens=3)) == ()
    assert edits_asked(sampling(suppressed=[1])) == ()
    assert edits_asked(sampling(suppressed=[1], min_tokens=2, repetition_penalty=1.1)) == ("repetition_penalty",
                                                                                          "min_tokens")


def test_b35_repetition_penalty_counts_the_prompt_and_the_others_the_output_alone():
    for option, of_prompt, of_output in (("repetition_penalty", 3.0, 3.0), ("presence_penalty", 6.0, 4.0),
                                         ("frequency_penalty", 6.0, 2.0)):
        logits = torch.full((1, 12), 6.0)
        apply_edits(logits, [edits_of(sampling(**{option: 2.0}), [7, 8], [9, 9])], [2])
        assert [logits[0, token].item() for token in (7, 9, 10)] == [of_prompt, of_output, 6.0]


def test_b35_a_negative_logit_is_multiplied():
    logits = torch.full((1, 12), -6.0)
    apply_edits(logits, [edits_of(sampling(repetition_penalty=2.0), [7])], [0])
    assert logits[0, 6:9].tolist() == [-6.0, -12.0, -6.0]


@pytest.fixture(scope="module")
def engine():
    return model.engine()


@pytest.fixture
def runner(engine):
    return ModelEngine(engine, num_pages=(PAGES,))


def pages_of(row, count=6):
    return [(row, column, 1 + 6 * row + column) for column in range(count)]


def start(runner, row, prompt, output=(), *, epoch=0, **options):
    """Admit a request, or one that was preempted after ``output``; returns its step's result."""
    wanted = sampling(**options)
    history = dict(prompt=prompt, output=output) if wanted.needs_history else {}
    tokens = [*prompt, *output]
    return runner.submit(plan(0, arrivals=[arrival(row, epoch, **history, **options)], pages=pages_of(row),
                              epochs=[epoch], context=[(row, 0, tokens, len(output))])).result()


def generate(runner, prompt, count, *, row=0, preempt_at=(), **options):
    """Tokens of one request alone, interrupted before the output tokens ``preempt_at``."""
    tokens, epoch = [], 0
    while len(tokens) < count:
        if not tokens or len(tokens) in preempt_at:
            out = start(runner, row, prompt, tokens, epoch=(epoch := epoch + 1), **options)
        else:
            place = len(prompt) + len(tokens) - 1
            out = runner.submit(plan(1, generation=[(row, place, len(tokens))], epochs=[epoch])).result()
        assert out.finite.all()
        assert not out.failures
        tokens += out.token_ids.tolist()
    return tokens


EDITS = {
    "repetition": dict(repetition_penalty=1.7),
    "presence and frequency": dict(presence_penalty=1.5, frequency_penalty=0.8),
    "n-grams": dict(no_repeat_ngram_size=2),
    "bad words": dict(bad_words=(ints(14), ints(8, 12), ints(3, 8, 8))),
    "bias": dict(bias_token_ids=ints(3, 11), bias_values=np.array([-100, 5.5], np.float32)),
    "allowed": dict(allowed_token_ids=ints(*range(1, V, 3))),
    "all": dict(repetition_penalty=1.2, frequency_penalty=0.4, no_repeat_ngram_size=3, bad_words=(ints(5), ints(9, 9)),
                bias_token_ids=ints(2), bias_values=np.array([3], np.float32), min_tokens=9, suppressed=range(0, V, 4),
                allowed_token_ids=ints(*range(0, V - 3))),
}


@pytest.mark.parametrize("kind", EDITS)
def test_greedy_output_is_that_of_edited_dense_logits(runner, kind):
    wanted, expected = sampling(**EDITS[kind]), []
    for _ in range(24):
        logits = model.dense_logits(PROMPT + expected)[-1]
        expected.append(int(np.argmax(plain_edits(logits.double(), wanted, PROMPT, expected))))
    assert expected != model.dense_greedy(PROMPT, 24)
    assert generate(runner, PROMPT, 24, **EDITS[kind]) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EDITS)
def test_the_same_edited_tokens_on_a_gpu(engine, runner, kind):
    options = dict(EDITS[kind], num_logprobs=2)
    elsewhere = ModelEngine(engine, num_pages=(PAGES,), device=torch.device("cuda"))
    assert generate(elsewhere, PROMPT, 20, preempt_at=(7,), **options) == generate(runner, PROMPT, 20, **options)


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_edits_survive_preemption(runner, kind, temperature):
    options = dict(EDITS[kind], temperature=temperature, seed=11)
    assert generate(runner, PROMPT, 20, preempt_at=(1, 2, 9, 19), **options) == generate(
        runner, PROMPT, 20, row=1, **options)


def test_a_rows_edits_do_not_depend_on_its_neighbours(runner):
    """Every kind of edit in one step beside plain rows, against each alone."""
    options = [dict(edits, temperature=0.9, seed=5) for edits in EDITS.values()]
    options[3:3] = [dict(temperature=0.9, seed=5)]
    alone = [generate(runner, PROMPT[:9], 8, **row) for row in options]
    got = [[] for _ in options[:4]], [[] for _ in options[4:]]
    for outputs, batch in zip(got, (options[:4], options[4:]), strict=True):
        rows = range(len(batch))
        out = runner.submit(plan(
            0, arrivals=[arrival(row, prompt=PROMPT[:9] if sampling(**batch[row]).needs_history else (), **batch[row])
                         for row in rows],
            pages=[entry for row in rows for entry in pages_of(row)],
            context=[(row, 0, PROMPT[:9], 0) for row in rows])).result()
        for index in range(8):
            for row in rows:
                outputs[row].append(int(out.token_ids[row]))
            if index < 7:
                out = runner.submit(plan(1, generation=[(row, 9 + index, index + 1) for row in rows])).result()
    assert [*got[0], *got[1]] == alone


def test_a_minimum_that_is_reached_leaves_no_edits_behind(runner):
    start(runner, 0, PROMPT, min_tokens=1, suppressed=[3])
    assert runner._rows.edits
    runner.submit(plan(1, generation=[(0, len(PROMPT), 1)])).result()
    assert not runner._rows.edits


def test_a_row_with_nothing_left_to_pick_fails_alone(runner):
    only = dict(allowed_token_ids=ints(5), bad_words=(ints(5),))
    out = runner.submit(plan(
        0, arrivals=[arrival(0), arrival(1, prompt=[1, 2], **only), arrival(2, prompt=[1, 2], repetition_penalty=1.5)],
        pages=pages_of(0) + pages_of(1) + pages_of(2),
        context=[(row, 0, [1, 2], 0) for row in range(3)])).result()
    assert out.finite.tolist() == [True, True, True]
    [(place, error)] = out.failures
    assert place == 1
    assert isinstance(error, UserError)
    assert error.field == "allowed_token_ids and bad"
    assert out.token_ids[0] == model.dense_greedy([1, 2], 1)[0]


def with_logits(runner, change):
    """``runner``, whose model gives what ``change`` makes of the logits."""
    whole = runner.graph
    runner.graph = dataclasses.replace(whole, call=lambda *inputs: change(whole.call(*inputs)))
    return runner


@pytest.mark.parametrize("kind", EDITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b36_broken_logits_are_reported_alone_even_where_an_edit_masks_them(runner, kind, bad):
    def broken(logits):
        logits[0, 0] = bad
        return logits

    rows = [dict(EDITS[kind]), dict(EDITS[kind]), {}]
    needs = [PROMPT if sampling(**options).needs_history else () for options in rows]
    out = with_logits(runner, broken).submit(plan(
        0, arrivals=[arrival(row, prompt=needs[row], **options) for row, options in enumerate(rows)],
        pages=pages_of(0) + pages_of(1) + pages_of(2), context=[(row, 0, PROMPT, 0) for row in range(3)])).result()
    assert out.finite.tolist() == [False, True, True]
    assert not out.failures


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_logits_are_edited_in_float32(dtype):
    """A penalty a half type cannot hold apart decides between two tokens."""
    built = model.engine()
    manifest = dataclasses.replace(built.manifest, build=dataclasses.replace(built.manifest.build,
                                                                             dtype=str(dtype).removeprefix("torch.")))
    built.manifest = manifest

    def level(logits):
        logits[:] = 0
        logits[:, 7], logits[:, 9] = 100.0, 100.0
        return logits.to(dtype)

    runner = with_logits(ModelEngine(built, num_pages=(PAGES,)), level)
    assert start(runner, 0, [7, 1]).token_ids.tolist() == [7]
    assert start(runner, 0, [7, 1], epoch=1, repetition_penalty=1.0001).token_ids.tolist() == [9]
    found = start(runner, 0, [1], epoch=2, temperature=1e-6, seed=3, num_logprobs=2).logprobs
    assert found.top_ids.tolist() == [[7, 9]]


WRONG = {
    "biased id beyond the vocabulary": arrival(0, bias_token_ids=ints(V), bias_values=np.ones(1, np.float32)),
    "negative id": arrival(0, allowed_token_ids=ints(-1)),
    "bad word beyond the vocabulary": arrival(0, prompt=[1], bad_words=(ints(1, V),)),
    "history beyond the vocabulary": arrival(0, prompt=[1, V], repetition_penalty=2.0),
    "suppressed id beyond the vocabulary": arrival(0, min_tokens=1, suppressed=[V]),
    "no history": arrival(0, repetition_penalty=2.0),
    "bias without values": arrival(0, bias_token_ids=ints(1)),
    "an empty word": arrival(0, prompt=[1], bad_words=(ints(),)),
    "more log-probabilities than tokens": arrival(0, num_logprobs=V + 1),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arrivals_fail_in_the_handle(runner, kind):
    handle = runner.submit(plan(0, arrivals=[WRONG[kind]], pages=pages_of(0), context=[(0, 0, [1], 0)]))
    with pytest.raises(InternalError, match="step plan refused"):
        handle.result()


def test_a_history_of_another_length_is_refused(runner):
    handle = runner.submit(plan(0, arrivals=[arrival(0, prompt=[1], repetition_penalty=2.0)], pages=pages_of(0),
                                context=[(0, 0, [1], 1)]))
    with pytest.raises(InternalError, match="output token 1 of a row whose history holds 0"):
        handle.result()
