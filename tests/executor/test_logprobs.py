"""Log-probabilities and prompt scores on their way through the executor: chunks, limits, reuse, ends, failures."""

import dataclasses

import numpy as np
import pytest

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import NonFiniteLogitsError, RequestTooLargeError, UserError
from camshaft.testing.executor_rig import ExecutorRig, RigConfig


def rig_of(*, depth=0, batch=4, tokens=16, chunk=None, capacity="guaranteed_no_evict", **fields):
    scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=tokens, context_chunk_tokens=chunk,
                                overlap_depth=depth, capacity_policy=capacity)
    return ExecutorRig(RigConfig(scheduler=scheduler, **fields))


@pytest.fixture(params=[0, 1])
def depth(request):
    return request.param


def finish(rig):
    rig.run()
    rig.check_told()
    rig.check_drained()


PROMPT = list(range(13))


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("logits_rows", [4, 6, 64])
def test_scores_and_log_probabilities_are_those_of_the_request_alone(depth, chunk, logits_rows):
    rig = rig_of(depth=depth, chunk=chunk, max_logits_rows=logits_rows)
    requests = [rig.add(PROMPT, 5, num_logprobs=2, num_prompt_logprobs=3), rig.add([9] * 7, 6, num_logprobs=0),
                rig.add([8] * 7, 6), rig.add(list(reversed(PROMPT)), 4, num_prompt_logprobs=0)]
    finish(rig)
    told = [rig.told[request] for request in requests]
    assert [(len(each.logprobs), len(each.prompt_logprobs)) for each in told] == [(5, 12), (6, 0), (0, 0), (0, 12)]
    assert [len(each.top_ids) for each in told[0].prompt_logprobs] == [3] * 12
    assert [each.token_id for each in told[0].prompt_logprobs] == PROMPT[1:]
    assert [each.token_id for each in told[0].logprobs] == told[0].token_ids
    assert [each.top_ids for each in told[1].logprobs] == [()] * 6


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("length", [1, 2, 4, 5, 64])
def test_b13_a_request_for_scores_alone_gets_one_a_token_but_the_first_and_no_output(depth, chunk, length):
    rig = rig_of(depth=depth, chunk=chunk)
    request = rig.add(np.arange(length) % 50, 0, num_prompt_logprobs=1)
    beside = rig.add([3, 4], 5)
    finish(rig)
    told = rig.told[request]
    assert (told.token_ids, told.end, len(told.prompt_logprobs)) == ([], "length", length - 1)
    assert told.num_cached_tokens == 0
    assert rig.told[beside].end == "length"
    assert rig.executor.stats().counters.num_finished == 2


def test_scores_alone_need_no_room_for_output():
    rig = rig_of(max_seq_len=16)
    rig.add([1] * 16, 0, num_prompt_logprobs=0)
    with pytest.raises(RequestTooLargeError, match="16"):
        rig.add([1] * 17, 0, num_prompt_logprobs=0)
    with pytest.raises(RequestTooLargeError, match="15"):
        rig.add([1] * 16, 1)
    finish(rig)


def test_nothing_is_generated_only_for_scores():
    with pytest.raises(UserError) as refused:
        rig_of().add([1, 2], 0)
    assert refused.value.field == "max_tokens"


def test_a_scored_prompt_reads_no_cache_waits_for_none_and_leaves_one(depth):
    rig = rig_of(depth=depth)
    rig.add([*PROMPT, 20], 3)
    scored = rig.add([*PROMPT, 21], 3, num_prompt_logprobs=0)
    rig.executor.step()
    assert rig.executor.stats().num_running == 2, "it waits for nobody's prefix"
    finish(rig)
    assert rig.told[scored].num_cached_tokens == 0
    again = rig.add([*PROMPT, 21, *rig.told[scored].token_ids], 2)
    finish(rig)
    assert rig.told[again].num_cached_tokens >= 15


def test_scores_prove_pages_chunk_by_chunk():
    rig = rig_of(chunk=4)
    rig.add(np.arange(40), 4, num_prompt_logprobs=0)
    for _ in range(3):
        rig.executor.step()
    follower = rig.add([*range(11), 48], 2)
    finish(rig)
    assert rig.told[follower].num_cached_tokens >= 8


def test_a_step_never_needs_more_logits_rows_than_it_has():
    rig = rig_of(batch=4, max_logits_rows=4, num_pages=64)  # the fake engine refuses more
    rig.add([5], 40)
    rig.add([6], 40)
    rig.add([7], 40)
    scored = rig.add(PROMPT, 2, num_prompt_logprobs=1)
    for _ in range(8):
        rig.executor.step()
    assert 0 < len(rig.told[scored].prompt_logprobs) < 12, "one at a time beside the others"
    finish(rig)
    assert rig.engine.violations == []


def test_scores_that_take_turns_do_not_hold_up_other_prompts():
    rig = rig_of(batch=4, tokens=32, max_logits_rows=4)
    rig.add(np.arange(30), 2, num_prompt_logprobs=1)
    beside = rig.add([5] * 20, 2)
    for _ in range(2):
        rig.executor.step()
    assert rig.told[beside].token_ids
    finish(rig)


@pytest.mark.parametrize("max_tokens", [0, 18])
def test_a_preempted_request_hears_no_score_twice(depth, max_tokens):
    rig = rig_of(depth=depth, capacity="max_utilization", num_pages=13, chunk=3)
    for start in range(4):
        rig.add(np.arange(start, start + 10), 20, num_prompt_logprobs=2, num_logprobs=1)
    late = [rig.add(np.arange(start, start + 30), max_tokens, num_prompt_logprobs=1) for start in (10, 15)]
    finish(rig)
    assert rig.executor.stats().counters.num_preemptions > 0
    assert [len(rig.told[request].prompt_logprobs) for request in late] == [29, 29]


def test_b44_cancel_in_flight_while_log_probabilities_stream(depth):
    for steps in range(1, 9):
        rig = rig_of(depth=depth, chunk=4)
        gone = rig.add(PROMPT, 20, num_logprobs=1, num_prompt_logprobs=1)
        kept = rig.add([4, 5, 6], 9, num_logprobs=3)
        for _ in range(steps):
            rig.executor.step()
        heard = len(rig.told[gone].token_ids), len(rig.told[gone].prompt_logprobs)
        rig.executor.abort(gone)
        finish(rig)
        told = rig.told[gone]
        assert told.end == "cancelled"
        assert (len(told.token_ids), len(told.prompt_logprobs)) == heard
        assert len(told.logprobs) == len(told.token_ids)
        assert len(rig.told[kept].logprobs) == 9


def test_b36_a_request_whose_logits_are_not_finite_ends_alone_with_what_it_asked_for(depth):
    rig = rig_of(depth=depth, chunk=4)
    rig.engine.spoiling_token = 49
    scored = rig.add([*range(8), 49, *range(10, 16)], 4, num_prompt_logprobs=1, num_logprobs=1)
    only_scored = rig.add([*range(20, 30), 49, 1], 0, num_prompt_logprobs=0)
    fine = rig.add([*range(8), 48], 6, num_prompt_logprobs=1, num_logprobs=1)
    finish(rig)
    for request in (scored, only_scored):
        error = rig.told[request].finals[0].error
        assert isinstance(error, NonFiniteLogitsError)
        assert "this request alone" in str(error)
        assert rig.told[request].token_ids == []
    assert rig.told[fine].end == "length"
    assert rig.executor.stats().counters.num_failed == 2
    again = rig.add([*range(20, 30), 48], 2)
    finish(rig)
    assert rig.told[again].num_cached_tokens <= 10, "no page with NaN was left"


def test_a_failing_processor_ends_its_request_alone(depth):
    rig = rig_of(depth=depth)

    def processor(token_ids, logits):
        return logits

    bad, good = rig.add([1, 2], 8, processors=(processor,)), rig.add([3, 4], 8, num_logprobs=1)
    rig.executor.step()
    rig.executor.step()
    rig.engine.failing_processor_rows = {0}
    finish(rig)
    told = rig.told[bad]
    assert isinstance(told.finals[0].error, RuntimeError)
    assert "processor" in str(told.finals[0].error)
    assert 0 < len(told.token_ids) < 8
    assert rig.told[good].end == "length"
    assert rig.executor.stats().alive


@pytest.mark.parametrize("missing", ["logprobs", "scores"])
def test_results_without_what_was_asked_for_are_refused(missing):
    rig = rig_of()
    submit = rig.engine.submit

    class Lacking:
        def __init__(self, handle):
            self.handle = handle

        def result(self):
            return dataclasses.replace(self.handle.result(), **{missing: None})

    rig.engine.submit = lambda plan: Lacking(submit(plan))
    request = rig.add([1, 2], 3, num_logprobs=1, num_prompt_logprobs=1)
    rig.run()
    assert "step 0" in str(rig.told[request].finals[0].error)


@pytest.mark.parametrize("capacity", ["guaranteed_no_evict", "max_utilization"])
@pytest.mark.parametrize("count", range(1, 10))
def test_b48_every_batch_size_gets_what_each_gets_alone(depth, capacity, count):
    rig = rig_of(depth=depth, batch=8, tokens=24, capacity=capacity)
    rng = np.random.default_rng(count)
    for number in range(count):
        rig.add(rng.integers(0, 50, int(rng.integers(1, 12))), 12, temperature=float(number % 2),
                num_logprobs=number % 3, num_prompt_logprobs=1 if number % 4 == 0 else None)
    finish(rig)
    assert {told.end for told in rig.told.values()} == {"length"}
