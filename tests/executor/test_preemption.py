"""Preemption under max_utilization: who goes, what is kept of them, and that nobody can tell from their tokens."""

import itertools

import numpy as np
import pytest

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import InternalError
from camshaft.executor.policies.base import CAPACITY_POLICIES, CapacityPolicy
from camshaft.testing.executor_rig import ExecutorRig, RigConfig


def rig_of(*, depth=0, batch=4, tokens=16, chunk=None, capacity="max_utilization", queue="fcfs", **fields):
    scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=tokens, context_chunk_tokens=chunk,
                                overlap_depth=depth, capacity_policy=capacity, queue_policy=queue)
    return ExecutorRig(RigConfig(scheduler=scheduler, **{"num_pages": 13, "page_size": 4, **fields}))


@pytest.fixture(params=[0, 1])
def depth(request):
    return request.param


def preemptions(rig):
    return rig.executor.stats().counters.num_preemptions


def finish(rig):
    rig.run()
    rig.check_told()
    rig.check_drained()


def prompts(count, length=8):
    return np.random.default_rng(3).integers(0, 50, (count, length)).tolist()


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_preempted_get_the_tokens_they_would_get_alone(depth, chunk, reuse):
    rig = rig_of(depth=depth, chunk=chunk, block_reuse=reuse)
    for number, prompt in enumerate(prompts(6)):
        rig.add(prompt, 20, temperature=float(number % 2))
    finish(rig)
    assert preemptions(rig) > 0
    assert {told.end for told in rig.told.values()} == {"length"}


def test_a_guarantee_preempts_nobody_where_utilization_does(depth):
    for capacity, expected in (("guaranteed_no_evict", False), ("static_batch", False), ("max_utilization", True)):
        rig = rig_of(depth=depth, capacity=capacity)
        for prompt in prompts(4):
            rig.add(prompt, 20)
        finish(rig)
        assert (preemptions(rig) > 0) == expected


def test_more_run_at_once_than_a_guarantee_would_admit():
    running = {}
    for capacity in ("guaranteed_no_evict", "max_utilization"):
        rig = rig_of(capacity=capacity)
        for prompt in prompts(4, 4):
            rig.add(prompt, 40, stop=range(50), min_tokens=2)
        rig.executor.step()
        running[capacity] = rig.executor.stats().num_running
        finish(rig)
    assert running == {"guaranteed_no_evict": 1, "max_utilization": 4}


def test_the_first_is_never_preempted_and_ends_first(depth):
    rig = rig_of(depth=depth)
    first, *others = [rig.add(prompt, 24) for prompt in prompts(4)]
    heard = {request: 0 for request in (first, *others)}
    for step in itertools.count():
        busy = rig.executor.step()
        told = len(rig.told[first].token_ids)
        assert told > heard[first] or rig.told[first].finals or step <= depth, "the first one waited"
        heard[first] = told
        if rig.told[first].finals:
            assert not any(rig.told[other].finals for other in others)
            break
        assert busy
    finish(rig)
    assert preemptions(rig) > 0


def test_one_alone_uses_the_whole_pool_and_keeps_it(depth):
    rig = rig_of(depth=depth)
    request = rig.add([1] * 8, 41)  # 48 positions: every page
    finish(rig)
    assert len(rig.told[request].token_ids) == 41
    assert preemptions(rig) == 0


def test_a_page_that_an_ended_request_still_holds_is_waited_for():
    rig = rig_of(depth=1, num_pages=5, batch=2)
    rig.add([1] * 7, 3)
    rig.add([2] * 3, 11)
    finish(rig)
    assert {told.end for told in rig.told.values()} == {"length"}


@pytest.mark.parametrize("edits", [{"repetition_penalty": 1.3}, {"presence_penalty": 0.5}, {"no_repeat_ngram_size": 3},
                                   {"bad_words": (np.array([3, 4], np.int32),)}])
def test_b35_the_history_of_the_preempted_is_prompt_and_output_so_far(depth, edits):
    rig = rig_of(depth=depth)  # the fake engine compares each history with what the row feeds, and samples by it
    for prompt in prompts(5):
        rig.add(prompt, 20, temperature=1.0, **edits)
    finish(rig)
    assert preemptions(rig) > 0
    assert {told.end for told in rig.told.values()} == {"length"}


def test_the_preempted_find_their_pages_in_the_cache(depth):
    computed = {}
    for reuse in (True, False):
        rig = rig_of(depth=depth, block_reuse=reuse)
        for prompt in prompts(3, 12):
            rig.add(prompt, 20)
        finish(rig)
        assert preemptions(rig) > 0
        computed[reuse] = rig.executor.stats().counters.num_context_tokens
    assert computed[True] < computed[False]


@pytest.mark.parametrize("min_tokens", [0, 13, 17])
def test_stops_and_minimum_count_on_over_a_preemption(depth, min_tokens):
    rig = rig_of(depth=depth, vocab_size=7)
    for prompt in np.random.default_rng(5).integers(0, 7, (6, 8)).tolist():
        rig.add(prompt, 20, stop=[3], min_tokens=min_tokens)
    finish(rig)
    assert min_tokens == 0 or preemptions(rig) > 0
    assert "stop" in {told.end for told in rig.told.values()}


def preempt_some(rig, requests):
    """Step until a request that has output waits; returns it."""
    for _ in range(500):
        rig.executor.step()
        waiting = [request for request in requests if request in set(rig.executor._batch.waiting)
                   and rig.told[request].token_ids]
        if waiting:
            return waiting[0]
    raise AssertionError("nobody was preempted")


def test_cancel_while_preempted(depth):
    rig = rig_of(depth=depth)
    requests = [rig.add(prompt, 24) for prompt in prompts(4)]
    gone = preempt_some(rig, requests)
    rig.executor.abort(gone)
    rig.executor.step()
    assert rig.told[gone].end == "cancelled"
    finish(rig)
    assert [told.end for told in rig.told.values()].count("length") == 3


def test_shutdown_while_preempted(depth):
    rig = rig_of(depth=depth)
    requests = [rig.add(prompt, 24) for prompt in prompts(4)]
    preempt_some(rig, requests)
    rig.executor.shutdown()
    assert {told.end for told in rig.told.values()} == {"cancelled"}
    rig.check_told()
    rig.check_drained()


def test_the_preempted_come_back_before_the_newer(depth):
    rig = rig_of(depth=depth)
    requests = [rig.add(prompt, 24) for prompt in prompts(4)]
    gone = preempt_some(rig, requests)
    newer = rig.add([9] * 4, 2)
    while not rig.told[newer].token_ids:
        assert rig.executor.step()
    assert rig.told[gone].finals or gone not in set(rig.executor._batch.waiting)
    finish(rig)


def test_the_least_important_are_preempted_first(depth):
    rig = rig_of(depth=depth, queue="priority")
    low = rig.add(prompts(1)[0], 24, priority=-1)
    for _ in range(4):
        rig.executor.step()
    high = [rig.add(prompt, 24, priority=1) for prompt in prompts(3)[1:]]
    assert preempt_some(rig, [low]) == low
    while not all(rig.told[request].finals for request in high):
        assert rig.executor.step()
    assert not rig.told[low].finals
    finish(rig)


def test_nothing_of_a_failing_request_comes_back(depth):
    rig = rig_of(depth=depth)
    requests = [rig.add(prompt, 24) for prompt in prompts(4)]
    rig.engine.spoiling_token = 49
    bad = rig.add([1, 49, 2, 3], 24)
    finish(rig)
    assert rig.told[bad].end == "NonFiniteLogitsError"
    assert preemptions(rig) > 0
    assert {rig.told[request].end for request in requests} <= {"length", "NonFiniteLogitsError"}


def test_a_policy_that_preempts_who_does_not_run_is_a_bug_and_ends_everything(monkeypatch):
    class TakesAnyone(CapacityPolicy):
        preempts = True

        def admits(self, demand, load):
            return True

        def victim(self, rows):
            return int(rows[-1]) + 100

    monkeypatch.setitem(CAPACITY_POLICIES._entries, "takes_anyone", TakesAnyone)
    rig = rig_of(capacity="takes_anyone")
    requests = [rig.add(prompt, 24) for prompt in prompts(4)]
    rig.run()
    assert {rig.told[request].end for request in requests} == {"EngineDeadError"}
    assert isinstance(rig.told[requests[0]].finals[0].error.__cause__, InternalError)
