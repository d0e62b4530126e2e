"""The executor driven step by step: intake, ends, aborts, failures, shutdown; and on its own thread."""

import dataclasses
import queue
import threading

import numpy as np
import pytest

from camshaft.config.build import BuildConfig
from camshaft.config.runtime import SchedulerConfig, resolve_scheduler
from camshaft.core.errors import (
    EngineDeadError,
    InternalError,
    NonFiniteLogitsError,
    QueueFullError,
    RequestTooLargeError,
    UserError,
)
from camshaft.core.ids import RequestId
from camshaft.executor.loop import Executor
from camshaft.executor.policies.base import CAPACITY_POLICIES, load_policies
from camshaft.testing.executor_rig import ExecutorRig, RigConfig, Told


def rig_of(*, depth=0, batch=4, tokens=16, chunk=None, max_waiting=64, **fields):
    scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=tokens, context_chunk_tokens=chunk,
                                overlap_depth=depth, max_waiting=max_waiting)
    return ExecutorRig(RigConfig(scheduler=scheduler, **fields))


@pytest.fixture(params=[0, 1])
def depth(request):
    return request.param


def finish(rig):
    rig.run()
    rig.check_told()
    rig.check_drained()


def test_many_requests_get_the_tokens_they_would_get_alone(depth):
    rig = rig_of(depth=depth, chunk=5)
    rng = np.random.default_rng(0)
    for size in (1, 3, 4, 5, 8, 17, 30):
        rig.add(rng.integers(0, 50, size), int(rng.integers(1, 20)), temperature=float(size % 2))
    finish(rig)
    assert {told.end for told in rig.told.values()} == {"length"}
    assert rig.executor.stats().counters.num_finished == 7


def test_one_sink_call_a_step(depth):
    rig = rig_of(depth=depth)
    for start in range(4):
        rig.add([start, start, 1], 6)
    steps = rig.run()
    assert 0 < rig.num_sink_calls <= steps + 1


def test_stop_id_ends_the_request_and_is_its_last_token(depth):
    rig = rig_of(depth=depth)
    probe = rig.request([7, 8, 9], 12)
    rig.requests[probe.id] = probe
    tokens, _ = rig.expected(probe.id)
    del rig.requests[probe.id]
    stop = next(token for token in tokens[3:] if token not in tokens[:3])
    ended = rig.add([7, 8, 9], 12, stop=[stop])
    finish(rig)
    final = rig.told[ended].finals[0]
    assert (final.finish_reason, final.stop_token_id, final.token_ids[-1]) == ("stop", stop, stop)


@pytest.mark.parametrize("num_stops", [3, 20])
def test_no_stop_before_min_tokens(depth, num_stops):
    # every token stops: without the minimum the first one would, and what the runtime suppresses is no stop
    rig = rig_of(depth=depth, vocab_size=num_stops)
    request = rig.request([1, 2], 9, stop=range(num_stops), min_tokens=4)
    rig.submit(request)
    finish(rig)
    told = rig.told[request.id]
    assert (len(told.token_ids), told.end) == (5, "stop")


def test_length_at_max_seq_len(depth):
    rig = rig_of(depth=depth, max_seq_len=12)
    request = rig.add([1] * 9, 40)
    finish(rig)
    assert (len(rig.told[request].token_ids), rig.told[request].end) == (3, "length")


def test_num_cached_tokens_comes_with_the_first_increment(depth):
    rig = rig_of(depth=depth)
    first = rig.add(list(range(12)), 3)
    rig.run()
    second = rig.add([*range(12), 40], 3)
    finish(rig)
    assert rig.told[first].num_cached_tokens == 0
    assert rig.told[second].num_cached_tokens == 12
    assert rig.executor.stats().counters.num_cached_tokens == 12


def test_b39_a_request_that_never_fits_is_refused_and_blocks_nobody():
    rig = rig_of(num_pages=51, page_size=16, max_seq_len=4096)
    with pytest.raises(RequestTooLargeError) as refusal:
        rig.add([1] * 1002, 16)
    text = str(refusal.value)
    assert all(number in text for number in ("1002", "16", "4096", "800"))
    served = rig.add([1, 2, 3], 4)
    finish(rig)
    assert rig.told[served].end == "length"


@pytest.mark.parametrize(("prompt", "options"), [([1] * 64, {}), ([1] * 60, {"min_tokens": 5})])
def test_what_max_seq_len_cannot_hold_is_refused(prompt, options):
    rig = rig_of(max_seq_len=64)
    with pytest.raises(RequestTooLargeError, match="64"):
        rig.add(prompt, 8, **options)
    with pytest.raises(RequestTooLargeError, match="64"):
        rig.executor.check_fits(num_prompt_tokens=len(prompt), max_tokens=8, **options)


def test_the_largest_request_that_fits_runs(depth):
    rig = rig_of(depth=depth, num_pages=5, page_size=4)  # 16 tokens; the last one generated is never cached
    request = rig.add([1] * 10, 7)
    finish(rig)
    assert len(rig.told[request].token_ids) == 7
    with pytest.raises(RequestTooLargeError):
        rig.add([1] * 10, 8)


def test_b40_an_empty_prompt_is_refused():
    rig = rig_of()
    with pytest.raises(UserError, match="prompt"):
        rig.add([], 4)
    assert not rig.executor.step()


@pytest.mark.parametrize(("field", "value"), [
    ("prompt_token_ids", np.array([50], np.int32)), ("prompt_token_ids", np.array([-1], np.int32)),
    ("prompt_token_ids", np.array([[1]], np.int32)), ("prompt_token_ids", np.array([1], np.int64)),
    ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 9), ("stop_token_ids", frozenset({50}))])
def test_invalid_requests_are_refused_by_field(field, value):
    rig = rig_of()
    with pytest.raises(UserError, match=field):
        rig.submit(dataclasses.replace(rig.request([1], 8), **{field: value}))


def test_b41_two_live_requests_never_share_an_id(depth):
    rig = rig_of(depth=depth)
    request = rig.request([1, 2, 3], 6)
    rig.submit(request)
    other = dataclasses.replace(rig.request([4, 5], 6), id=request.id)
    with pytest.raises(InternalError, match="live"):
        rig.executor.submit(other)
    rig.executor.step()
    with pytest.raises(InternalError, match="live"):
        rig.executor.submit(other)
    finish(rig)


def test_requests_that_belong_together_are_accepted_all_or_none():
    rig = rig_of(max_waiting=3)
    first, second, bad = rig.request([1, 2], 3), rig.request([3], 3), rig.request([4], 3)
    with pytest.raises(UserError, match="max_tokens"):
        rig.executor.submit(first, second, dataclasses.replace(bad, max_tokens=-1))
    with pytest.raises(QueueFullError, match="0 requests wait and 4 more come"):
        rig.executor.submit(*(rig.request([start], 3) for start in range(4)))
    assert not rig.executor.step()
    rig.executor.submit(first, second)
    assert rig.executor.stats().num_waiting == 2


@pytest.mark.parametrize("steps", range(6))
def test_b43_abort_in_any_state_leaves_nothing_running(depth, steps):
    rig = rig_of(depth=depth, batch=2, tokens=4, chunk=3)
    requests = [rig.add([start, 1, 2, 3, 4], 8) for start in range(4)]
    for _ in range(steps):
        rig.executor.step()
    for request in requests:
        rig.executor.abort(request)
        rig.executor.abort(request)
    rig.executor.abort(RequestId(12345))
    rig.executor.step()
    assert [rig.told[request].end for request in requests] == ["cancelled"] * 4
    finish(rig)
    assert rig.executor.stats().counters.num_cancelled == 4


def test_abort_after_the_end_is_ignored(depth):
    rig = rig_of(depth=depth)
    request = rig.add([1], 2)
    rig.run()
    rig.executor.abort(request)
    finish(rig)
    assert rig.told[request].end == "length"


def test_intake_is_bounded():
    rig = rig_of(batch=1, max_waiting=2)
    rig.add([1], 5)
    rig.executor.step()
    rig.add([2], 5)
    rig.add([3], 5)
    with pytest.raises(QueueFullError, match="2"):
        rig.add([4], 5)
    finish(rig)
    assert len(rig.told) == 3


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_row_with_non_finite_logits_ends_alone_and_leaves_no_pages(depth, chunk):
    rig = rig_of(depth=depth, chunk=chunk)
    bad, good = rig.add([1] * 8, 8), rig.add([2] * 8, 8)
    rig.engine.poison_rows = {0}
    finish(rig)
    assert isinstance(rig.told[bad].finals[0].error, NonFiniteLogitsError)
    assert rig.told[good].end == "length"
    again = rig.add([1] * 8, 2)
    finish(rig)
    assert rig.told[again].num_cached_tokens == 0


@pytest.mark.parametrize("aborts", [False, True])
def test_pages_that_hold_nan_ahead_of_its_cause_are_never_shared(depth, aborts):
    rig = rig_of(depth=depth, chunk=7)
    rig.engine.spoiling_token = 49
    spoiled = [*range(10), 49, *range(20, 32)]
    bad, good = rig.add(spoiled, 4), rig.add([*range(10), 40], 2)
    for _ in range(2):
        rig.executor.step()
    if aborts:
        rig.executor.abort(bad)
    late = rig.add([*range(10), 41], 2)
    finish(rig)
    assert rig.told[bad].end == ("cancelled" if aborts else "NonFiniteLogitsError")
    assert (rig.told[good].end, rig.told[late].end) == ("length", "length")
    assert rig.told[late].num_cached_tokens >= 8, "what the good one left is shared"
    assert rig.kv.match(np.array(spoiled, np.int32), rig.requests[bad].scope).num_tokens == 10


@pytest.mark.parametrize("on_result", [False, True])
@pytest.mark.parametrize("step", [0, 2, 5])
def test_a_failing_step_ends_every_request_with_the_cause(depth, step, on_result):
    rig = rig_of(depth=depth, batch=2)
    rig.engine.fail_at, rig.engine.fail_on_result = step, on_result
    requests = [rig.add([start, 2, 3], 20) for start in range(5)]
    rig.run()
    for request in requests:
        error = rig.told[request].finals[0].error
        assert isinstance(error, EngineDeadError)
        assert "injected failure" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    rig.check_told()
    rig.check_drained()
    with pytest.raises(EngineDeadError, match="injected"):
        rig.add([1], 2)
    assert not rig.executor.stats().alive
    rig.executor.shutdown()


def test_who_was_cancelled_in_the_failing_turn_hears_that_only(depth):
    rig = rig_of(depth=depth)
    gone, left = rig.add([1], 20), rig.add([2], 20)
    rig.executor.step()
    rig.executor.abort(gone)
    rig.engine.fail_at = 1
    rig.run()
    assert (rig.told[gone].end, rig.told[left].end) == ("cancelled", "EngineDeadError")
    rig.check_told()
    rig.check_drained()


@pytest.mark.parametrize("abort_after", [None, 7])
def test_only_tokens_that_are_known_enter_the_prefix_cache(depth, abort_after):
    rig = rig_of(depth=depth, chunk=3, page_size=1)
    commit, committed = rig.kv.commit, []

    def checked(request_id, tokens, num_computed):
        truth = [*rig.requests[request_id].prompt_token_ids.tolist(), *rig.expected(request_id)[0]]
        assert tokens[:num_computed].tolist() == truth[:num_computed]
        committed.append(num_computed)
        commit(request_id, tokens, num_computed)

    rig.kv.commit = checked
    requests = [rig.add([start] * 5, 9, stop=[3, 4]) for start in range(3)]
    for _ in range(abort_after or 0):
        rig.executor.step()
    for request in requests if abort_after else ():
        rig.executor.abort(request)
    finish(rig)
    assert max(committed) > 5


def test_a_failing_sink_stops_the_executor_and_gives_pages_back(depth):
    rig = rig_of(depth=depth)

    def sink(increments):
        raise OSError("nobody listens")

    executor = Executor(rig.engine, rig.kv, limits=rig.limits, scheduler=rig.config.scheduler, sink=sink)
    executor.submit(rig.request([1, 2], 4))
    while executor.step():
        pass
    with pytest.raises(EngineDeadError, match="nobody listens"):
        executor.submit(rig.request([1, 2], 4))
    rig.kv.check_integrity()
    assert rig.kv.stats().num_referenced == 0


def test_results_of_another_step_cannot_land():
    rig = rig_of(depth=1)

    class Stale:
        def __init__(self, handle):
            self.handle = handle

        def result(self):
            return dataclasses.replace(self.handle.result(), step=99)

    submit = rig.engine.submit
    rig.engine.submit = lambda plan: Stale(submit(plan))
    request = rig.add([1, 2], 4)
    rig.run()
    assert "step 99" in str(rig.told[request].finals[0].error)


def test_shutdown_without_a_thread_cancels_what_is_live(depth):
    rig = rig_of(depth=depth, batch=1)
    requests = [rig.add([start, 5], 9) for start in range(3)]
    for _ in range(3):
        rig.executor.step()
    rig.executor.shutdown()
    rig.executor.shutdown()
    assert [rig.told[request].end for request in requests] == ["cancelled"] * 3
    rig.check_told()
    rig.check_drained()
    with pytest.raises(EngineDeadError, match="shut down"):
        rig.add([1], 2)


def started(rig):
    """An executor on its own thread, its increments in a queue."""
    executor, news = unstarted(rig)
    executor.start()
    return executor, news


def unstarted(rig):
    news = queue.SimpleQueue()
    return Executor(rig.engine, rig.kv, limits=rig.limits, scheduler=rig.config.scheduler, sink=news.put), news


def wait_for_ends(rig, news, count):
    while sum(bool(told.finals) for told in rig.told.values()) < count:
        rig.hear(news.get(timeout=30))


def register(rig, executor, prompt, max_tokens):
    request = rig.request(prompt, max_tokens)
    rig.requests[request.id], rig.told[request.id] = request, Told()
    executor.submit(request)
    return request.id


def test_thread_serves_many_submitters(depth):
    rig = rig_of(depth=depth)
    executor, news = started(rig)
    lock = threading.Lock()

    def submitter(base):
        for offset in range(5):
            with lock:
                request = rig.request([base, offset], 6)
                rig.requests[request.id], rig.told[request.id] = request, Told()
            executor.submit(request)

    threads = [threading.Thread(target=submitter, args=(base,)) for base in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_for_ends(rig, news, 20)
    executor.shutdown()
    rig.check_told()
    assert {told.end for told in rig.told.values()} == {"length"}
    assert executor.stats().kv.num_referenced == 0


def test_thread_sleeps_idle_and_wakes_for_the_next_request(depth):
    rig = rig_of(depth=depth)
    checked = threading.Event()
    check = rig.kv.check_integrity

    def noted():
        check()
        checked.set()

    rig.kv.check_integrity = noted
    executor, news = started(rig)
    assert checked.wait(30)
    register(rig, executor, [1, 2], 3)
    wait_for_ends(rig, news, 1)
    executor.shutdown()
    rig.check_told()
    assert not any(thread.name == "camshaft-executor" for thread in threading.enumerate())


def test_thread_failure_reaches_every_request_and_shutdown_returns(depth):
    rig = rig_of(depth=depth, batch=1)
    rig.engine.fail_at = 3
    executor, news = unstarted(rig)
    for start in range(3):
        register(rig, executor, [start], 30)
    executor.start()
    wait_for_ends(rig, news, 3)
    executor.shutdown()
    assert {told.end for told in rig.told.values()} == {"EngineDeadError"}


class HangingRunner:
    """A runner whose steps do not come back until told."""

    def __init__(self):
        self.entered, self.resume = threading.Event(), threading.Event()

    def submit(self, plan):
        self.entered.set()
        self.resume.wait(30)
        raise RuntimeError("came back late")


def test_shutdown_leaves_a_hanging_step_behind_and_still_tells_everyone():
    rig = rig_of()
    rig.engine = HangingRunner()
    executor, news = started(rig)
    request = register(rig, executor, [1, 2], 4)
    assert rig.engine.entered.wait(30)
    executor.shutdown(timeout=0.05)
    rig.hear(news.get(timeout=30))
    assert rig.told[request].end == "EngineDeadError"
    rig.engine.resume.set()
    executor._thread.join(30)
    assert news.empty()


def test_executor_starts_once():
    executor, _ = started(rig_of())
    with pytest.raises(InternalError, match="before"):
        executor.start()
    executor.shutdown()


def test_scheduler_configuration_resolves_against_the_engine():
    build = BuildConfig(device="cpu", max_batch_size=8, max_num_tokens=64)
    resolved = resolve_scheduler(SchedulerConfig(context_chunk_tokens=500), build)
    assert (resolved.max_batch_size, resolved.max_num_tokens, resolved.context_chunk_tokens) == (8, 64, 64)
    assert resolved.overlap_depth == 0
    assert resolve_scheduler(SchedulerConfig(), dataclasses.replace(build, device="cuda")).overlap_depth == 1
    for wrong in ({"max_batch_size": 9}, {"max_num_tokens": 65}, {"max_num_tokens": 4, "max_batch_size": 8}):
        with pytest.raises(UserError, match="scheduler"):
            resolve_scheduler(SchedulerConfig(**wrong), build)


def test_a_policy_is_whatever_is_registered_and_nothing_else():
    load_policies()
    assert SchedulerConfig().capacity_policy in CAPACITY_POLICIES.names()
    scheduler = SchedulerConfig(max_batch_size=4, max_num_tokens=16, overlap_depth=0, capacity_policy="first_of_mine")
    with pytest.raises(UserError, match="guaranteed_no_evict") as refused:
        ExecutorRig(RigConfig(scheduler=scheduler))
    assert refused.value.field == "scheduler.capacity_policy"
