"""Admission: order, exact room, shared and pinned pages, waiting for a prefix that is being computed."""

from pathlib import Path

import pytest

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import UserError
from camshaft.executor import policies
from camshaft.executor.messages import PrefixScope
from camshaft.executor.policies.base import CAPACITY_POLICIES, CapacityPolicy, load_policies
from camshaft.testing.executor_rig import ExecutorRig, RigConfig

PROMPT = list(range(12))  # three pages of four


def rig_of(*, depth=0, batch=4, tokens=32, chunk=None, policy="guaranteed_no_evict", **fields):
    scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=tokens, context_chunk_tokens=chunk,
                                overlap_depth=depth, capacity_policy=policy)
    return ExecutorRig(RigConfig(scheduler=scheduler, **fields))


def step(rig, count=1):
    for _ in range(count):
        rig.executor.step()
    return rig.executor.stats()


def finish(rig):
    rig.run()
    rig.check_told()
    rig.check_drained()
    assert {told.end for told in rig.told.values()} <= {"length", "cancelled"}


@pytest.fixture(params=[0, 1])
def depth(request):
    return request.param


def test_admits_only_what_fits_beside_the_longest_outcome_of_all(depth):
    rig = rig_of(depth=depth, num_pages=7)  # 6 pages of 4
    rig.add([1] * 4, 9)  # 3 pages at most
    rig.add([2] * 4, 10)  # 4 pages at most: 13 tokens
    stats = step(rig)
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    finish(rig)


def test_fills_the_pool_exactly(depth):
    rig = rig_of(depth=depth, num_pages=7)
    rig.add([1] * 4, 9)
    rig.add([2] * 4, 9)
    stats = step(rig)
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    finish(rig)


def test_nothing_overtakes_the_head_of_the_queue():
    rig = rig_of(num_pages=7)
    rig.add([1] * 4, 9)
    large = rig.add([2] * 16, 9)
    small = rig.add([3], 1)
    step(rig, 3)
    assert not rig.told[small].finals
    finish(rig)
    assert len(rig.told[large].token_ids) == 9


def test_batch_size_is_a_limit(depth):
    rig = rig_of(depth=depth, batch=2)
    for start in range(5):
        rig.add([start], 6)
    assert step(rig).num_running == 2
    finish(rig)


def test_shared_pages_count_once():
    rig = rig_of(num_pages=8)  # 7 pages
    rig.add([*PROMPT, 20], 8)  # 5 pages at most
    step(rig, 2)
    rig.add([*PROMPT, 21], 8)  # 5 more, 3 of them shared: 2 are left
    assert step(rig).num_running == 2
    finish(rig)
    assert rig.told[2].num_cached_tokens == 12


def test_pages_that_a_match_would_pin_count_as_taken():
    rig = rig_of(num_pages=8)
    rig.add(PROMPT, 1)
    rig.run()  # three pages stay cached, four are free
    assert rig.kv.available_pages().tolist() == [7]
    rig.add([30], 16)  # 4 pages: three cached pages are left
    step(rig)
    rig.add([*PROMPT, 9], 8)  # 3 cached, to be pinned, and 2 more: there is no room for those
    assert step(rig).num_waiting == 1
    finish(rig)


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_prefix_being_computed_is_waited_for_and_shared(depth, chunk):
    rig = rig_of(depth=depth, chunk=chunk)
    for tail in range(3):
        rig.add([*PROMPT, 30 + tail], 4)
    assert step(rig).num_running == 1
    finish(rig)
    assert [rig.told[number].num_cached_tokens for number in (1, 2, 3)] == [0, 12, 12]
    assert rig.executor.stats().counters.num_context_tokens == 13 + 1 + 1


@pytest.mark.parametrize("difference", ["request", "computing", "cache", "scope", "tokens"])
def test_nothing_is_waited_for_that_could_not_be_shared(difference):
    rig = rig_of(block_reuse=difference != "cache")
    rig.add([*PROMPT, 30], 4, reuse=difference != "computing")
    rig.add([*(reversed(PROMPT) if difference == "tokens" else PROMPT), 31], 4, reuse=difference != "request",
            scope=PrefixScope(model="fake", salt="mine" if difference == "scope" else ""))
    assert step(rig).num_running == 2
    finish(rig)


def test_the_wait_for_a_prefix_ends_with_the_request_that_computes_it(depth):
    rig = rig_of(depth=depth, chunk=1)
    first, second = rig.add([*PROMPT, 30], 4), rig.add([*PROMPT, 31], 4)
    step(rig, 2)
    assert rig.executor.stats().num_running == 1
    rig.executor.abort(first)
    step(rig, 2)
    finish(rig)
    assert rig.told[second].end == "length"
    assert rig.executor.stats().counters.num_cancelled == 1


def test_a_refused_head_is_not_matched_again_while_nothing_changes():
    rig = rig_of(num_pages=7)
    rig.add([1] * 4, 12)
    rig.add([2] * 8, 12)
    step(rig, 2)
    matched = []
    match = rig.kv.match
    rig.kv.match = lambda *args: matched.append(args) or match(*args)
    step(rig, 6)
    assert not matched
    finish(rig)
    assert len(matched) == 1


def test_a_refused_head_enters_as_soon_as_one_of_several_ends(depth):
    rig = rig_of(depth=depth, num_pages=7)
    rig.add([1] * 4, 3)
    rig.add([2] * 4, 13)
    head = rig.add([3] * 4, 5)
    while not rig.told[1].finals:
        rig.executor.step()
    step(rig, 2 + depth)
    assert rig.told[head].token_ids
    assert not rig.told[2].finals
    finish(rig)


def test_a_policy_is_a_class_under_a_name(monkeypatch):
    class OneAtATime(CapacityPolicy):
        def admits(self, demand, load):
            return load.num_rows == 0

    monkeypatch.setitem(CAPACITY_POLICIES._entries, "one_at_a_time", OneAtATime)
    rig = rig_of(policy="one_at_a_time")
    for start in range(3):
        rig.add([start, 1], 5)
    while rig.executor.step():
        assert rig.executor.stats().num_running <= 1
    finish(rig)


def test_the_policies_are_the_files_of_their_folder_and_unknown_names_are_loud():
    names = load_policies()
    files = {path.stem for path in Path(policies.__file__).parent.glob("*.py")} - {"__init__", "base"}
    assert sorted([*names.capacity, *names.queue, *names.chunking]) == sorted(files)
    assert {"guaranteed_no_evict", "max_utilization", "static_batch"} <= set(names.capacity)
    with pytest.raises(UserError, match="guaranteed_no_evict"):
        CAPACITY_POLICIES.get("guaranteed_no_evicts")
