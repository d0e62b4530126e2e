"""Where a request's sampling values come from: its own, else the checkpoint's, else the default."""

import pytest

from camshaft.api.resolve import RequestResolver
from camshaft.config.model import GenerationDefaults
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import UserError
from camshaft.core.ids import RequestId
from camshaft.executor.messages import PrefixScope


@pytest.fixture
def asked():
    """What the executor is asked for a request of these parameters under these checkpoint defaults."""

    def ask(params, **defaults):
        resolver = RequestResolver(None, GenerationDefaults(**defaults), vocab_size=100,
                                   scope=PrefixScope(model="test"))
        prepared = resolver.prepare([1, 2], SamplingParams(detokenize=False, **params), where="prompt")
        return prepared.sequences([RequestId(1)])[0]

    return ask


@pytest.mark.parametrize(("name", "own", "checkpoint", "default"), [
    ("temperature", 0.0, 0.6, 0.0), ("top_k", 0, 20, 0), ("top_p", 1.0, 0.9, 1.0), ("min_p", 0.0, 0.05, 0.0),
    ("repetition_penalty", 1.0, 1.05, 1.0), ("no_repeat_ngram_size", 0, 3, 0)])
def test_own_value_then_the_checkpoints_then_the_default(asked, name, own, checkpoint, default):
    assert getattr(asked({}).sampling, name) == default
    assert getattr(asked({}, **{name: checkpoint}).sampling, name) == checkpoint
    assert getattr(asked({name: own}, **{name: checkpoint}).sampling, name) == own


def test_ends_are_the_checkpoints_unless_replaced_or_ignored_and_the_callers_always(asked):
    ends = {"eos_token_ids": (7, 8)}
    assert asked({}, **ends).stop_token_ids == {7, 8}
    assert asked({"stop_token_ids": [5]}, **ends).stop_token_ids == {5, 7, 8}
    assert asked({"end_id": 9}, **ends).stop_token_ids == {9}
    assert asked({"ignore_eos": True, "stop_token_ids": [5]}, **ends).stop_token_ids == {5}
    assert asked({"ignore_eos": True, "end_id": 9}, **ends).stop_token_ids == set()


@pytest.mark.parametrize("params", [
    {"end_id": 100}, {"stop_token_ids": [3, 100]}, {"bad_token_ids": [100]}, {"allowed_token_ids": [1, 100]},
    {"logit_bias": {100: -100.0}}])
def test_b30_an_id_beyond_the_vocabulary_is_refused_by_the_name_it_was_given_under(asked, params):
    with pytest.raises(UserError) as refused:
        asked(params)
    assert refused.value.field == next(iter(params))


def test_a_seed_is_kept_and_otherwise_drawn_anew(asked):
    assert asked({"seed": 2**64 - 1}).sampling.seed == 2**64 - 1
    assert asked({}).sampling.seed != asked({}).sampling.seed
