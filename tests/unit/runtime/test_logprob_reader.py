"""Log-probabilities of output and prompt tokens against torch's own, and ids that pad the vocabulary."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from camshaft.core.errors import InternalError
from camshaft.runtime import logprobs
from camshaft.runtime.model_engine import ModelEngine
from tests.unit.runtime import attention_model as model
from tests.unit.runtime.plans import arrival, ints, plan

V = model.VOCAB
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
PAGES = 30


@pytest.fixture(scope="module")
def engine():
    return model.engine()


@pytest.fixture
def runner(engine):
    return ModelEngine(engine, num_pages=(PAGES,))


def pages_of(row, count=3):
    return [(row, column, 1 + 3 * row + column) for column in range(count)]


def check(found, place, logits, token, num_top):
    """One token's entry against the log-softmax of its raw logits."""
    expected = torch.log_softmax(logits.double(), -1)
    order = logits.sort(descending=True, stable=True).indices.tolist()
    assert found.finite[place]
    assert found.logprobs[place] == pytest.approx(expected[token].item(), abs=1e-5)
    assert found.ranks[place] == 1 + order.index(token)
    assert found.top_ids[place, :num_top].tolist() == order[:num_top]
    np.testing.assert_allclose(found.top_logprobs[place, :num_top], expected[order[:num_top]], rtol=0, atol=1e-5)


def test_output_tokens_have_the_raw_logits_log_softmax(runner):
    """Greedy, sampled and edited rows beside one that asks for nothing; the most that any asks for comes for all."""
    options = [dict(num_logprobs=0), {}, dict(num_logprobs=4, temperature=2.0, seed=4),
               dict(num_logprobs=2, allowed_token_ids=ints(*range(20, V)), temperature=1.5, seed=8)]
    rows, sequences = range(len(options)), [list(PROMPT[:5 + row]) for row in range(len(options))]
    out = runner.submit(plan(0, arrivals=[arrival(row, **options[row]) for row in rows],
                             pages=[entry for row in rows for entry in pages_of(row)],
                             context=[(row, 0, sequences[row], 0) for row in rows])).result()
    for index in range(1, 6):
        found = out.logprobs
        assert found.top_ids.shape == found.top_logprobs.shape == (4, 4)
        assert [array.dtype for array in (found.logprobs, found.ranks, found.top_ids, found.top_logprobs, found.finite)
                ] == [np.float32, np.int32, np.int32, np.float32, np.bool_]
        for row in rows:
            token, num_top = int(out.token_ids[row]), options[row].get("num_logprobs")
            if num_top is not None:
                check(found, row, model.dense_logits(sequences[row])[-1], token, num_top)
            sequences[row].append(token)
        assert sequences[3][-1] >= 20
        out = runner.submit(plan(index, generation=[(row, len(sequences[row]) - 1, index) for row in rows])).result()
    assert out.scores is None


def test_a_step_nobody_asks_in_has_none(runner):
    runner.submit(plan(0, arrivals=[arrival(0, num_logprobs=1)], pages=pages_of(0), context=[(0, 0, [1], 0)])).result()
    out = runner.submit(plan(1, arrivals=[arrival(1)], pages=pages_of(1), context=[(1, 0, [1], 0)])).result()
    assert out.logprobs is None
    again = plan(2, arrivals=[arrival(0, 1)], pages=pages_of(0), epochs=[1], context=[(0, 0, [1], 0)])
    assert runner.submit(again).result().logprobs is None


@pytest.mark.parametrize("chunk", [1, 5, 7, 18, 19])
@pytest.mark.parametrize("slice_logits", [1, 3 * V, 1 << 23])
def test_prompt_tokens_are_scored_in_any_chunks(runner, monkeypatch, chunk, slice_logits):
    """Beside a generating row and one in prefill that wants no scores."""
    monkeypatch.setattr(logprobs, "SLICE_LOGITS", slice_logits)
    other = runner.submit(plan(0, arrivals=[arrival(5)], pages=pages_of(5), context=[(5, 0, PROMPT[:4], 0)])).result()
    tokens, dense, scored = [*PROMPT[:4], *other.token_ids.tolist()], model.dense_logits(PROMPT), 0
    for begin in range(0, len(PROMPT), chunk):
        piece = PROMPT[begin:begin + chunk]
        targets = PROMPT[begin + 1:begin + chunk + 1]
        is_last = begin + chunk >= len(PROMPT)
        out = runner.submit(plan(
            1, arrivals=[] if begin else [arrival(0, num_prompt_logprobs=3, num_logprobs=1), arrival(1)],
            pages=[] if begin else pages_of(0) + pages_of(1),
            generation=[(5, len(tokens) - 1, len(tokens) - 4)], scores={0: targets},
            context=[(0, begin, piece, 0 if is_last else None), (1, begin, piece, None)])).result()
        assert len(out.rows) == 1 + is_last
        assert (out.scores is None) == (not targets)
        for place, target in enumerate(targets):
            check(out.scores, place, dense[begin + place], target, 3)
        scored += len(targets)
        tokens.append(int(out.token_ids[0]))
    assert scored == len(PROMPT) - 1
    check(out.logprobs, 1, dense[-1], int(out.token_ids[1]), 1)
    assert tokens[4:] == model.dense_greedy(PROMPT[:4], len(tokens) - 4)
    assert out.token_ids[1] == model.dense_greedy(PROMPT, 1)[0]


def test_a_request_may_be_scored_alone(runner):
    """No token is sampled: the last step holds scores and no sampled row, or neither."""
    out = runner.submit(plan(0, arrivals=[arrival(0, num_prompt_logprobs=0)], pages=pages_of(0),
                             context=[(0, 0, PROMPT, None)], scores={0: PROMPT[1:]})).result()
    assert len(out.rows) == len(out.token_ids) == len(out.finite) == 0
    assert out.scores.top_ids.shape == (18, 0)
    for place, target in enumerate(PROMPT[1:]):
        check(out.scores, place, model.dense_logits(PROMPT)[place], target, 0)
    out = runner.submit(plan(1, context=[(0, 19, [4], None)], scores={})).result()
    assert out.scores is None
    assert out.logprobs is None


def test_a_score_that_is_not_finite_is_reported_alone(runner):
    whole = runner.graph

    def broken(*inputs):
        logits = whole.call(*inputs)
        logits[2, 7] = math.nan
        return logits

    runner.graph = dataclasses.replace(whole, call=broken)
    out = runner.submit(plan(0, arrivals=[arrival(0, num_prompt_logprobs=2, num_logprobs=2)], pages=pages_of(0),
                             context=[(0, 0, PROMPT[:5], 0)], scores={0: PROMPT[1:5]})).result()
    assert out.scores.finite.tolist() == [True, True, False, True]
    assert np.isfinite(out.scores.logprobs).all()
    assert out.finite.tolist() == out.logprobs.finite.tolist() == [True]


SCORED = plan(0, arrivals=[arrival(0, num_prompt_logprobs=1)], pages=pages_of(0), context=[(0, 0, PROMPT[:5], 0)],
              scores={0: PROMPT[1:5]})
WRONG = {
    "more scored than fed": dataclasses.replace(SCORED, score_lens=ints(5), score_targets=ints(1, 2, 3, 4, 5)),
    "fewer targets than scored": dataclasses.replace(SCORED, score_targets=ints(1)),
    "no targets": dataclasses.replace(SCORED, score_targets=None),
    "a target beyond the vocabulary": dataclasses.replace(SCORED, score_targets=ints(1, 2, 3, V)),
    "a negative count": dataclasses.replace(SCORED, score_lens=ints(-1), score_targets=ints()),
    "counts of other rows": dataclasses.replace(SCORED, score_lens=ints(2, 2)),
    "a row that wants none": dataclasses.replace(SCORED, arrivals=(arrival(0),)),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_scores_fail_in_the_handle(runner, kind):
    handle = runner.submit(WRONG[kind])
    with pytest.raises(InternalError, match="step plan refused"):
        handle.result()


def test_more_logits_than_an_engine_reckons_with_are_refused(engine):
    build = dataclasses.replace(engine.manifest.build, max_num_tokens=96)
    roomy = model.engine(build=build)
    prompt = [1] * 66
    handles = [ModelEngine(roomy, num_pages=(PAGES,)).submit(plan(
        0, arrivals=[arrival(0, num_prompt_logprobs=0)], pages=pages_of(0, 5), context=[(0, 0, prompt, None)],
        scores={0: prompt[:count]})) for count in (64, 65)]
    assert len(handles[0].result().scores.logprobs) == 64
    with pytest.raises(InternalError, match="logits of at most 64 tokens"):
        handles[1].result()


@pytest.mark.parametrize("options", [
    {}, dict(temperature=100.0, seed=1), dict(temperature=1.0, seed=2, top_k=10**6),
    dict(min_tokens=99, suppressed=[0]),
    dict(temperature=100.0, seed=1, allowed_token_ids=ints(*range(10, V))),
    dict(bias_token_ids=ints(V - 1), bias_values=np.array([100], np.float32)),
    dict(prompt=PROMPT, processors=(lambda token_ids, logits: torch.where(logits.isinf(), 99.0, logits),)),
])
def test_b34_ids_that_pad_the_vocabulary_are_never_sampled_and_still_weigh(engine, options):
    """The model likes them best; log-probabilities are over the whole vocabulary."""
    padded = dataclasses.replace(engine.manifest, num_token_ids=20)
    runner = ModelEngine(type(engine)(manifest=padded, graph_text=engine.graph_text, folder=None,
                                      tensors=dict(engine.tensors()), tokenizer_files={}, native=None),
                         num_pages=(PAGES,))
    whole = runner.graph

    def liked(*inputs):
        logits = whole.call(*inputs)
        logits[:, 20:] = 25.0
        return logits

    runner.graph = dataclasses.replace(whole, call=liked)
    step = plan(0, arrivals=[arrival(0, num_logprobs=3, **options)], pages=pages_of(0), context=[(0, 0, PROMPT, 0)])
    for index in range(20):
        out = runner.submit(step).result()
        assert out.finite.all()
        assert not out.failures
        assert out.token_ids[0] < 20
        assert out.logprobs.top_ids.tolist() == [[20, 21, 22]]
        assert out.logprobs.logprobs[0] < math.log(1 / 12)
        step = plan(1, generation=[(0, len(PROMPT) + index, index + 1)])


def test_b34_the_number_of_token_ids_can_be_given_and_is_bounded(engine):
    greedy = model.dense_logits(PROMPT)[-1]
    runner = ModelEngine(engine, num_pages=(PAGES,), num_token_ids=6)
    out = runner.submit(plan(0, arrivals=[arrival(0)], pages=pages_of(0), context=[(0, 0, PROMPT, 0)])).result()
    assert out.token_ids[0] == greedy[:6].argmax()
    with pytest.raises(InternalError, match=f"num_token_ids {V + 1}"):
        ModelEngine(engine, num_pages=(PAGES,), num_token_ids=V + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_copied_and_edits_of_them_leave_the_logits_alone(dtype):
    logits = torch.arange(12, dtype=dtype).view(4, 3)
    with torch.inference_mode():
        found = logprobs.copied_rows(logits, np.array([2, 0]))
        assert torch.equal(found, logits[[2, 0]])
        assert found.dtype == dtype
        found.fill_(-1.0)
    assert torch.equal(logits, torch.arange(12, dtype=dtype).view(4, 3))
