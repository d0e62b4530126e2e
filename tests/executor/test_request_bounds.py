"""A request's values are held to what a step can carry before it queues: one bad request costs only itself."""

import dataclasses

import numpy as np
import pytest

from camshaft.core.errors import UserError
from camshaft.testing.executor_rig import ExecutorRig


def ids(*values, dtype=np.int32):
    return np.array(values, dtype)


def assert_refused(field, **edits):
    rig = ExecutorRig()  # 50 token ids
    request = rig.request([1, 2], 4)
    with pytest.raises(UserError) as refused:
        rig.submit(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **edits)))
    assert refused.value.field == field
    fine = rig.add([1, 2], 4)
    rig.run()
    assert rig.told[fine].end == "length"
    rig.check_drained()


@pytest.mark.parametrize(("field", "value"), [
    ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1),
    ("top_k", 2**31), ("top_p", 1.5), ("min_p", float("nan")), ("seed", -1), ("seed", 2**64), ("choice", 2**31),
    ("min_tokens", -1)])
def test_sampling_values_a_step_cannot_carry_are_refused_by_field(field, value):
    assert_refused(field, **{field: value})


@pytest.mark.parametrize(("field", "edits"), [
    ("suppressed_token_ids", {"suppressed_token_ids": ids(50)}),
    ("suppressed_token_ids", {"suppressed_token_ids": ids(-1)}),
    ("bad", {"bad_words": (ids(3), ids(4, 50))}), ("bad", {"bad_words": (ids(-1),)}),
    ("logit_bias", {"bias_token_ids": ids(50), "bias_values": ids(1, dtype=np.float32)}),
    ("logit_bias", {"bias_token_ids": ids(-1), "bias_values": ids(1, dtype=np.float32)}),
    ("allowed_token_ids", {"allowed_token_ids": ids(3, 50)}),
    ("allowed_token_ids", {"allowed_token_ids": ids(1, 2, dtype=np.int64)})])
def test_b30_ids_beyond_the_vocabulary_are_refused_wherever_they_stand(field, edits):
    assert_refused(field, **edits)


@pytest.mark.parametrize(("field", "edits"), [
    ("logprobs", {"num_logprobs": 10**9}), ("logprobs", {"num_logprobs": -1}), ("logprobs", {"num_logprobs": True}),
    ("prompt_logprobs", {"num_prompt_logprobs": 51}), ("prompt_logprobs", {"num_prompt_logprobs": -1}),
    ("repetition_penalty", {"repetition_penalty": 0.0}), ("repetition_penalty", {"repetition_penalty": float("inf")}),
    ("presence_penalty", {"presence_penalty": float("nan")}),
    ("frequency_penalty", {"frequency_penalty": -float("inf")}),
    ("no_repeat_ngram_size", {"no_repeat_ngram_size": -1}), ("no_repeat_ngram_size", {"no_repeat_ngram_size": 2**31}),
    ("bad", {"bad_words": (ids(),)}), ("bad", {"bad_words": [ids(1)]}), ("bad", {"bad_words": (ids(*[1] * 65537),)}),
    ("logit_bias", {"bias_token_ids": ids(3, 3), "bias_values": ids(1, 2, dtype=np.float32)}),
    ("logit_bias", {"bias_token_ids": ids(3), "bias_values": ids(1, 2, dtype=np.float32)}),
    ("logit_bias", {"bias_token_ids": ids(3), "bias_values": ids(1, dtype=np.float64)}),
    ("logit_bias", {"bias_token_ids": ids(3), "bias_values": ids(float("nan"), dtype=np.float32)}),
    ("allowed_token_ids", {"allowed_token_ids": ids()}),
    ("logits_processor", {"processors": ("not callable",)}), ("logits_processor", {"processors": [print]})])
def test_b32_numbers_without_bounds_are_refused_by_field(field, edits):
    assert_refused(field, **edits)


@pytest.mark.parametrize("priority", [2**31, -(2**31), 1.5, True])
def test_a_priority_is_a_whole_number(priority):
    with pytest.raises(UserError) as refused:
        ExecutorRig().add([1], 2, priority=priority)
    assert refused.value.field == "priority"


def test_the_widest_values_run():
    rig = ExecutorRig()
    request = rig.add([1, 2], 4, num_logprobs=50, num_prompt_logprobs=50, no_repeat_ngram_size=2**31 - 1,
                      bad_words=(ids(*range(50)),), bias_token_ids=ids(*range(50)),
                      bias_values=np.full(50, -100.0, np.float32), allowed_token_ids=ids(49), priority=2**31 - 1)
    rig.run()
    rig.check_told()
    assert len(rig.told[request].logprobs[0].top_ids) == 50
