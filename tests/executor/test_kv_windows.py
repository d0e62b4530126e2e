"""Life cycles that give pages back: reach, room, sharing and eviction of windows with sinks."""

import dataclasses

import numpy as np
import pytest

from camshaft.config.kv import LifeCycleSpec
from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import InternalError
from camshaft.executor.kv.lifecycle import make_life_cycle
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import PrefixScope
from camshaft.testing.executor_rig import ExecutorRig, RigConfig

PAGE = 4
SCOPE = PrefixScope(model="m")
FULL = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32")


def window(width, sinks=0):
    return dataclasses.replace(FULL, kind="window", window=width, sinks=sinks)


def make(*specs, usable=20, partial=False):
    return KVCacheManager(specs, (usable + 1,) * len(specs), enable_block_reuse=True, enable_partial_reuse=partial)


def count_up(length, first=0):
    return np.arange(first, first + length, dtype=np.int32)


def grow(kv, request_id, tokens, stop, *, step=PAGE, proven=True):
    """Compute tokens of a started request up to ``stop``, ``step`` at a time; only at the end are all proven."""
    for end in range(min(kv._sequences[request_id].num_computed + step, stop), stop + step, step):
        assert kv.reserve(request_id, min(end, stop)) is not None
        kv.advance(request_id, min(end, stop))
        if proven:
            kv.commit(request_id, tokens[:min(end, stop)], min(end, stop))
        kv.check_integrity()
    kv.commit(request_id, tokens[:stop], stop)
    kv.check_integrity()


def serve(kv, request_id, tokens, *, reads=True, leaves=True, **how):
    cached = kv.start(request_id, tokens, SCOPE, reads=reads, leaves=leaves)
    grow(kv, request_id, tokens, len(tokens), **how)
    kv.release(request_id)
    kv.check_integrity()
    return cached


# Reach


@pytest.mark.parametrize("sinks", [0, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 9, 17])
def test_a_column_is_out_of_reach_exactly_when_no_later_token_reads_it(width, sinks):
    cycle = make_life_cycle(window(width, sinks))
    for num_tokens in range(50):
        gone = cycle.out_of_reach(num_tokens)
        for column in range(15):
            positions = range(column * PAGE, (column + 1) * PAGE)
            read = any(position < sinks or position > reader - width
                       for reader in range(num_tokens, num_tokens + 70) for position in positions if position <= reader)
            assert (column in gone) == (not read), (num_tokens, column)


@pytest.mark.parametrize("sinks", [0, 1, 4, 5])
@pytest.mark.parametrize("width", [1, 3, 4, 5, 9])
@pytest.mark.parametrize("step_tokens", [1, 2, 4, 7])
def test_the_worst_case_is_met_and_never_exceeded(width, sinks, step_tokens):
    spec = window(width, sinks)
    cycle = make_life_cycle(spec)
    for num_tokens in (1, 3, 4, 5, 9, 60):
        most = 0
        for computed in range(num_tokens):
            columns = range(-(-min(computed + step_tokens, num_tokens) // PAGE))
            most = max(most, sum(column not in cycle.out_of_reach(computed) for column in columns))
        assert most <= spec.worst_pages(num_tokens, step_tokens)
        assert num_tokens < 60 or most == spec.worst_pages(num_tokens, step_tokens)


@pytest.mark.parametrize("fields", [dict(kind="window"), dict(kind="window", window=0),
                                    dict(kind="window", window=4, sinks=-1), dict(window=4), dict(sinks=1)])
def test_a_life_cycle_with_fields_of_another_kind_is_refused(fields):
    with pytest.raises(ValueError, match="life cycle"):
        dataclasses.replace(FULL, **fields)


# Room


def test_a_sequence_ten_times_its_window_holds_a_constant_number_of_pages():
    kv, tokens = make(window(8), usable=4), count_up(80)
    kv.start(1, tokens, SCOPE, reads=False, leaves=False)
    held = []
    for stop in range(1, 81):
        assert kv.reserve(1, stop) is not None
        kv.advance(1, stop)
        held.append(int(kv.held_pages(1)[0]))
        assert held[-1] == kv.stats().num_referenced == 4 - kv.stats().num_free
    assert set(held[8:]) == {2, 3}
    assert max(held) <= kv.worst_pages(80, 1)[0] == 3
    assert kv.columns(1) == 20


def test_sinks_stay_while_the_window_moves_on():
    kv, tokens = make(window(4, sinks=5)), count_up(40)
    kv.start(1, tokens, SCOPE, reads=False, leaves=False)
    pages = kv.reserve(1, 12).updates[0].pages.tolist()
    kv.advance(1, 12)
    free = set(kv._ledger.pools[0].free_pages())
    assert not free & {*pages[:2]}
    assert pages[2] not in free, "position 9, which the next token reads, lies there"
    kv.reserve(1, 16)
    kv.advance(1, 15)
    assert pages[2] in kv._ledger.pools[0].free_pages()


def test_a_page_given_back_can_be_reserved_by_another_request_at_once():
    kv = make(window(4), usable=2)
    kv.start(1, count_up(8), SCOPE, reads=False, leaves=False)
    first = kv.reserve(1, 8).updates[0].pages.tolist()
    kv.start(2, count_up(4), SCOPE, reads=False, leaves=False)
    assert kv.reserve(2, 4) is None
    kv.advance(1, 7)
    assert kv.reserve(2, 4).updates[0].pages.tolist() == first[:1]


def test_advancing_less_than_before_changes_nothing_and_beyond_the_pages_is_refused():
    kv = make(window(4))
    kv.start(1, count_up(20), SCOPE, reads=False, leaves=False)
    kv.reserve(1, 16)
    kv.advance(1, 16)
    before = kv.stats()
    kv.advance(1, 3)
    assert kv.stats() == before
    with pytest.raises(InternalError):
        kv.advance(1, 17)


def test_what_two_requests_share_for_a_while_counts_towards_one_of_them():
    """When the first moves on, its share does not become room: the other still holds the page."""
    kv, tokens = make(window(6)), count_up(40)
    kv.start(1, tokens, SCOPE, reads=True, leaves=True)
    grow(kv, 1, tokens, 9)
    match = kv.match(tokens[:9], SCOPE)
    assert (match.num_tokens, match.num_pages.tolist(), match.num_pages_unreferenced.tolist()) == (8, [0], [0])
    assert kv.start(2, tokens[:9], SCOPE, reads=True, leaves=True) == 8
    assert kv.stats().num_referenced == 3
    assert (kv.held_pages(1).tolist(), kv.held_pages(2).tolist()) == ([2], [1]), "the first had passed the first page"
    grow(kv, 1, tokens, 20)
    assert kv.held_pages(1).tolist() == [2]
    assert kv.held_pages(2).tolist() == [1], "and the second page, which it holds alone now, counts for nobody"
    assert kv.stats().num_referenced == 4
    left = kv.available_pages() - (kv.worst_pages(40, PAGE) - kv.held_pages(1)) - (
        kv.worst_pages(12, PAGE) - kv.held_pages(2))
    assert left <= kv.usable_pages() - kv.worst_pages(40, PAGE) - kv.worst_pages(12, PAGE)
    kv.release(2)
    kv.release(1)
    kv.check_integrity()
    assert kv.stats().num_referenced == 0


# Sharing


def test_a_prefix_whose_early_window_pages_are_gone_is_resumed():
    kv, tokens = make(FULL, window(6)), count_up(41)
    serve(kv, 1, tokens[:40], proven=False)
    cached = {node.num_tokens and bool(node.pages[1]) for node in kv._ledger.tree.nodes()}
    assert cached == {True, False}, "what was given back before it was proven never was cached"
    assert kv.match(tokens, SCOPE).num_tokens == 40
    assert kv.match(tokens[:20], SCOPE).num_tokens == 0, "nothing there to go on from"
    assert kv.start(2, tokens, SCOPE, reads=True, leaves=True) == 40
    change = kv.reserve(2, 41).updates
    assert change[0].columns.tolist() == list(range(11))
    assert change[1].columns.tolist() == [8, 9, 10], "columns out of reach are not announced"
    assert change[1].pages.min() > 0


@pytest.mark.parametrize("specs", [(window(6),), (window(3), window(9, sinks=2))])
def test_windows_alone_share_the_end_of_a_prefix_whose_middle_is_gone(specs):
    kv, tokens = make(*specs), count_up(41)
    serve(kv, 1, tokens[:40], proven=False)
    assert any(not any(node.pages) for node in kv._ledger.tree.nodes()), "blank nodes lead there"
    assert kv.match(tokens, SCOPE).num_tokens == 40
    kv.clear_cache()
    kv.check_integrity()
    assert len(kv._ledger.tree) == 0, "blank nodes go with what they lead to"


def test_a_match_goes_back_to_where_every_life_cycle_can_go_on():
    kv, tokens = make(FULL, window(6)), count_up(24)
    serve(kv, 1, tokens)
    path = kv._ledger.tree.walk(kv._ledger.tree.root(SCOPE), tokens.tobytes())
    kv._ledger.drop(path[3], 1)
    kv.check_integrity()
    for length in range(2, 25):
        found = kv.match(tokens[:length], SCOPE).num_tokens // PAGE
        most = (length - 1) // PAGE
        gone = make_life_cycle(window(6)).out_of_reach(most * PAGE)
        assert found == (most if most <= 3 or 3 in gone else 3)


def test_a_request_that_computes_a_prefix_again_gives_the_tree_the_window_pages_it_lacks():
    kv, tokens = make(FULL, window(6)), count_up(41)
    serve(kv, 1, tokens[:40], proven=False)
    assert kv.match(tokens[:21], SCOPE).num_tokens == 0
    assert serve(kv, 2, tokens[:21]) == 0
    assert kv.match(tokens[:21], SCOPE).num_tokens == 20
    assert kv.match(tokens[:13], SCOPE).num_tokens == 12, "also those it passed while it ran"


def test_a_request_may_leave_pages_without_reading_any():
    kv, tokens = make(FULL, window(6)), count_up(21)
    serve(kv, 1, tokens[:12])
    assert serve(kv, 2, tokens[:20], reads=False) == 0
    assert kv.match(tokens, SCOPE).num_tokens == 20
    assert serve(kv, 3, count_up(9, 50), leaves=False) == 0
    assert kv.match(count_up(9, 50), SCOPE).num_tokens == 0
    assert serve(kv, 4, tokens, leaves=False) == 20


# Eviction


def test_a_window_page_goes_while_the_full_page_of_its_tokens_stays():
    kv, tokens = make(FULL, window(6), usable=10), count_up(16)
    serve(kv, 1, tokens)
    lone = KVCacheManager((FULL, window(6)), (21, 6), enable_block_reuse=True, enable_partial_reuse=False)
    serve(lone, 1, tokens)
    serve(lone, 2, count_up(12, 50))
    assert lone.stats().num_evictions > 0
    assert all(node.pages[0] for node in lone._ledger.tree.nodes())
    assert not all(node.pages[1] for node in lone._ledger.tree.nodes())


def test_pages_that_everyone_has_passed_go_before_those_a_sequence_ended_with():
    kv = KVCacheManager((window(6),), (9,), enable_block_reuse=True, enable_partial_reuse=False)
    ended, long = count_up(9), count_up(24, 50)
    serve(kv, 1, ended)
    kv.start(2, long, SCOPE, reads=True, leaves=True)
    grow(kv, 2, long, 24)
    assert kv.stats().num_free == 0
    kv.start(3, count_up(8, 90), SCOPE, reads=True, leaves=True)
    assert kv.reserve(3, 8) is not None
    kv.check_integrity()
    assert kv.match(ended, SCOPE).num_tokens == 8, "used longest ago, but a sequence may go on from there"
    assert kv.stats().num_evictions == 2


# Through the executor

SETS = {"window": ((6, 0),), "full and window": ((None, 0), (6, 0)), "window with sinks": ((7, 5),),
        "two windows": ((3, 0), (9, 2)), "all": ((1, 0), (None, 0), (5, 3))}


@pytest.mark.parametrize("windows", SETS.values(), ids=SETS)
@pytest.mark.parametrize("depth", [0, 1])
def test_every_answer_is_what_the_request_gets_alone(windows, depth):
    random = np.random.default_rng(len(windows) + depth)
    rig = ExecutorRig(RigConfig(windows=windows, num_pages=20, scheduler=SchedulerConfig(
        max_batch_size=4, max_num_tokens=8, overlap_depth=depth)))
    for _ in range(40):
        prompt = [7] * int(random.integers(0, 20)) + random.integers(0, 3, int(random.integers(1, 8))).tolist()
        rig.add(prompt, int(random.integers(1, 20)))
        for _ in range(int(random.integers(0, 12))):
            rig.executor.step()
    rig.run()
    rig.check_told()
    rig.check_drained()
    assert rig.executor.stats().kv.num_reused_tokens > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_generation_longer_than_the_pool_runs_in_a_window(depth):
    rig = ExecutorRig(RigConfig(windows=((6, 3),), num_pages=10, max_seq_len=200, scheduler=SchedulerConfig(
        max_batch_size=2, max_num_tokens=8, overlap_depth=depth)))
    rig.add([1, 2, 3, 4, 5], 190)
    held = []
    while rig.executor.step():
        rig.kv.check_integrity()
        held.append(rig.kv.stats().num_referenced)
    rig.check_told()
    rig.check_drained()
    assert max(held) <= 9 < 195 // PAGE


def test_the_fake_engine_notices_a_page_given_back_too_early(monkeypatch):
    rig = ExecutorRig(RigConfig(windows=((8, 0),), num_pages=9, block_reuse=False, scheduler=SchedulerConfig(
        max_batch_size=3, max_num_tokens=8, overlap_depth=0)))
    (cycle,) = rig.kv._cycles
    reach = cycle.out_of_reach
    monkeypatch.setattr(cycle, "out_of_reach", lambda num_tokens: reach(num_tokens + 2 * PAGE))
    for first in (1, 2, 3):
        rig.add([first] * 6, 30)
    rig.run()
    assert any("did not write" in rule or "written by another" in rule for rule in rig.engine.violations)
