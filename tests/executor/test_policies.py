"""Policies one by one, and all of them over life cycles of every kind: nobody can tell from their tokens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import UserError
from camshaft.executor.policies.base import CAPACITY_POLICIES, CHUNKING_POLICIES, check_policies, load_policies
from camshaft.testing.executor_rig import ExecutorRig, RigConfig

POLICIES = load_policies()
LIFE_CYCLES = {"full": ((None, 0),), "window": ((6, 0),), "full_and_window": ((None, 0), (5, 0)), "sinks": ((6, 3),),
               "two_windows": ((3, 0), (12, 0))}


def rig_of(*, depth=0, batch=4, tokens=16, chunk=None, policies=("fcfs", "guaranteed_no_evict",
                                                                 "first_come_first_served"), **fields):
    queue, capacity, chunking = policies
    scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=tokens, context_chunk_tokens=chunk,
                                overlap_depth=depth, queue_policy=queue, capacity_policy=capacity,
                                context_chunking_policy=chunking)
    return ExecutorRig(RigConfig(scheduler=scheduler, **{"page_size": 4, **fields}))


def finish(rig):
    rig.run()
    rig.check_told()
    rig.check_drained()
    assert {told.end for told in rig.told.values()} <= {"length", "stop"}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("life_cycles", list(LIFE_CYCLES))
@pytest.mark.parametrize("policies", list(itertools.product(POLICIES.queue, POLICIES.capacity, POLICIES.chunking)),
                         ids="-".join)
def test_every_request_gets_what_it_gets_alone(policies, life_cycles, depth):
    rig = rig_of(policies=policies, depth=depth, windows=LIFE_CYCLES[life_cycles], chunk=5, page_size=2,
                 num_pages=15, max_logits_rows=6)
    rng = np.random.default_rng(17)
    shared = rng.integers(0, 50, 5).tolist()
    for number in range(6):
        prompt = [*shared[:int(rng.integers(0, 5))], *rng.integers(0, 50, int(rng.integers(1, 5))).tolist()]
        rig.add(prompt, int(rng.integers(12, 18)), temperature=float(number % 2), priority=number % 3,
                num_logprobs=1 if number % 2 else None, num_prompt_logprobs=0 if number % 3 == 1 else None,
                repetition_penalty=1.2 if number % 4 == 0 else 1.0)
        rig.executor.step()
    finish(rig)
    if not CAPACITY_POLICIES.get(policies[1]).preempts:
        assert rig.executor.stats().counters.num_preemptions == 0
    elif policies[1] == "max_utilization" and LIFE_CYCLES[life_cycles][0][0] is None:
        assert rig.executor.stats().counters.num_preemptions > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_priorities_go_first_and_equals_in_order_of_arrival(depth):
    ends = []
    for queue in ("fcfs", "priority"):
        rig = rig_of(policies=(queue, "guaranteed_no_evict", "first_come_first_served"), depth=depth, batch=1)
        for priority in (0, 1, -1, 1, 0):
            rig.add([priority + 5], 3, priority=priority)
        order = []
        busy = True
        while busy:
            busy = rig.executor.step()
            order += [request for request, told in rig.told.items() if told.finals and request not in order]
        ends.append(order)
        finish(rig)
    assert ends == [[1, 2, 3, 4, 5], [2, 4, 1, 5, 3]]


def test_a_static_batch_runs_to_its_end_before_the_next_begins():
    rig = rig_of(policies=("fcfs", "static_batch", "first_come_first_served"), batch=3)
    first = [rig.add([start], 3 + 3 * start) for start in range(3)]
    later = [rig.add([start], 4) for start in range(3, 6)]
    while not all(rig.told[request].finals for request in first):
        assert not any(rig.told[request].token_ids for request in later)
        rig.executor.step()
    finish(rig)


def test_a_static_batch_is_gathered_over_the_steps_its_prompts_take():
    rig = rig_of(policies=("fcfs", "static_batch", "first_come_first_served"), batch=4, tokens=4)
    for start in range(4):
        rig.add([start] * 4, 8)
    running = []
    for _ in range(6):
        rig.executor.step()
        running.append(rig.executor.stats().num_running)
    assert max(running) == 4
    late = rig.add([9], 1)
    while not rig.told[1].finals:
        rig.executor.step()
    assert not rig.told[late].token_ids
    finish(rig)


def test_equal_progress_lets_a_short_prompt_pass_a_long_one():
    firsts = {}
    for chunking in ("equal_progress", "first_come_first_served"):
        rig = rig_of(policies=("fcfs", "guaranteed_no_evict", chunking), tokens=8, num_pages=64, batch=2)
        long, short = rig.add(list(range(48)), 4), rig.add([49] * 4, 4)
        while not (rig.told[long].token_ids or rig.told[short].token_ids):
            rig.executor.step()
        firsts[chunking] = "short" if rig.told[short].token_ids else "long"
        finish(rig)
    assert firsts == {"equal_progress": "short", "first_come_first_served": "long"}


@given(left=st.lists(st.integers(1, 40), max_size=6), budget=st.integers(1, 64), chunk=st.integers(1, 48),
       page_size=st.sampled_from([1, 4, 16]), name=st.sampled_from(POLICIES.chunking))
def test_shares_keep_their_contract(left, budget, chunk, page_size, name):
    policy = CHUNKING_POLICIES.get(name)(chunk_tokens=chunk, page_size=page_size)
    array = np.array(left, np.int32)
    shares = policy.shares(array, budget)
    assert shares.dtype == np.int32
    assert len(shares) == len(left)
    assert shares.sum() <= budget
    assert (shares >= 0).all()
    assert (shares <= np.minimum(array, chunk)).all()
    assert not len(left) or shares[0] > 0
    assert policy.takes_more(np.zeros(0, np.int32), budget)
    if name == "equal_progress" and not policy.takes_more(array, budget):
        assert shares.all() or shares.sum() > budget - page_size


@given(left=st.lists(st.integers(1, 200), min_size=1, max_size=6), budget=st.integers(96, 400))
def test_equal_shares_are_equal_and_whole_pages_where_they_do_not_end_the_prompt(left, budget):
    policy = CHUNKING_POLICIES.get("equal_progress")(chunk_tokens=budget, page_size=16)
    shares = policy.shares(np.array(left, np.int32), budget)
    unfinished = [int(share) for share, tokens in zip(shares, left, strict=True) if share < tokens]
    assert all(share % 16 == 0 for share in unfinished)
    assert not unfinished or max(unfinished) - min(unfinished) <= 16
    assert not unfinished or budget - shares.sum() < 16 * len(left)


@pytest.mark.parametrize("field", ["queue_policy", "capacity_policy", "context_chunking_policy"])
def test_unknown_policies_are_refused_by_field(field):
    with pytest.raises(UserError) as refused:
        check_policies(SchedulerConfig(**{field: "none_such"}))
    assert refused.value.field == f"scheduler.{field}"
    with pytest.raises(UserError, match=field):
        SchedulerConfig(**{field: ""})
