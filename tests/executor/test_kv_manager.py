"""The manager's promises one by one: sharing, copy on write, eviction, accounting, refusals."""

import numpy as np
import pytest

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError, UserError
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import PrefixScope

PAGE = 4
SCOPE = PrefixScope(model="m")


def make(usable=8, *, reuse=True, partial=True, kinds=("full",), usable_each=None):
    specs = tuple(LifeCycleSpec(kind=kind, layers=(0,), num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32")
                  for kind in kinds)
    counts = usable_each or (usable,) * len(kinds)
    return KVCacheManager(specs, tuple(count + 1 for count in counts), enable_block_reuse=reuse,
                          enable_partial_reuse=partial)


def text(*tokens):
    return np.array(tokens, np.int32)


def count_up(length, first=0):
    return np.arange(first, first + length, dtype=np.int32)


def run(kv, request_id, tokens, *, scope=SCOPE, reuse=True):
    """Start, reserve and commit a whole sequence; returns (cached tokens, change of the first life cycle)."""
    cached = kv.start(request_id, tokens, scope, reads=reuse, leaves=reuse)
    reservation = kv.reserve(request_id, len(tokens))
    assert reservation is not None
    kv.commit(request_id, tokens, len(tokens))
    kv.check_integrity()
    return cached, reservation.updates[0]


def serve(kv, request_id, tokens, **options):
    """A whole life; returns like ``run``."""
    result = run(kv, request_id, tokens, **options)
    kv.release(request_id)
    kv.check_integrity()
    return result


# Plain pages


def test_a_request_gets_pages_in_column_order_and_never_the_trash_page():
    kv = make(3)
    assert kv.start(1, count_up(9), SCOPE, reads=True, leaves=True) == 0
    change = kv.reserve(1, 9).updates[0]
    assert change.columns.tolist() == [0, 1, 2]
    assert sorted(change.pages.tolist()) == [1, 2, 3]
    assert change.columns.dtype == change.pages.dtype == change.copy_from.dtype == np.int32
    assert kv.held_pages(1).tolist() == [3]
    assert kv.columns(1) == 3
    assert kv.available_pages().tolist() == [0]


def test_a_reservation_names_only_what_is_new():
    kv = make()
    kv.start(1, count_up(5), SCOPE, reads=True, leaves=True)
    kv.reserve(1, 5)
    again = kv.reserve(1, 8).updates[0]
    assert len(again.columns) == len(again.copy_from) == 0
    grown = kv.reserve(1, 9).updates[0]
    assert grown.columns.tolist() == [2]


def test_no_room_is_none_and_changes_nothing():
    kv = make(2)
    kv.start(1, count_up(4), SCOPE, reads=True, leaves=True)
    kv.reserve(1, 4)
    kv.start(2, count_up(4, 50), SCOPE, reads=True, leaves=True)
    before = kv.stats()
    assert kv.reserve(2, 8) is None
    assert (kv.stats(), kv.columns(2)) == (before, 0)
    assert kv.reserve(2, 4) is not None


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (PAGE, 1), (PAGE + 1, 2)])
def test_pages_for(tokens, pages):
    assert make().pages_for(tokens) == pages


def test_what_can_ever_be_held_is_bounded_by_the_smallest_pool():
    kv = make(kinds=("full", "full"), usable_each=(5, 3))
    assert kv.usable_pages().tolist() == kv.available_pages().tolist() == [5, 3]
    assert kv.worst_pages(3 * PAGE, 1).tolist() == [3, 3]
    assert kv.can_ever_hold(3 * PAGE, 1)
    assert not kv.can_ever_hold(3 * PAGE + 1, 1)


def test_released_pages_are_free_at_once_without_reuse():
    kv = make(reuse=False)
    serve(kv, 1, count_up(10))
    assert kv.stats().num_free == kv.stats().num_pages == 8
    assert kv.match(count_up(10), SCOPE).num_tokens == 0


# Sharing


def test_whole_pages_are_shared_between_running_requests():
    kv = make()
    _, first = run(kv, 1, count_up(10))
    cached, second = run(kv, 2, np.concatenate([count_up(8), text(90, 91, 92)]))
    assert cached == 8
    assert second.pages[:2].tolist() == first.pages[:2].tolist()
    assert second.pages[2] not in first.pages
    assert kv.stats().num_referenced == 4


def test_match_reports_what_start_takes_and_changes_nothing():
    kv = make()
    serve(kv, 1, count_up(10))
    run(kv, 2, np.concatenate([count_up(4), text(70)]))
    before = kv.stats()
    found = kv.match(np.concatenate([count_up(9), text(80, 81)]), SCOPE)
    assert (found.num_tokens, found.num_partial_tokens) == (9, 1)
    assert (found.num_pages.tolist(), found.num_pages_unreferenced.tolist()) == ([2], [1])
    assert kv.stats() == before
    room = kv.available_pages()
    assert kv.start(3, np.concatenate([count_up(9), text(80, 81)]), SCOPE, reads=True, leaves=True) == 9
    assert kv.available_pages() == room - found.num_pages_unreferenced - 1
    assert kv.held_pages(3).tolist() == [3]


def test_one_token_is_always_left_to_compute():
    kv = make()
    serve(kv, 1, count_up(8))
    cached, change = run(kv, 2, count_up(8))
    assert cached == 7
    assert len(change.copy_from) == 1
    assert kv.match(count_up(1), SCOPE).num_tokens == 0


def test_a_request_that_opts_out_neither_reads_nor_leaves_pages():
    kv = make()
    serve(kv, 1, count_up(8))
    cached, _ = run(kv, 2, count_up(8), reuse=False)
    assert cached == 0
    kv.release(2)
    serve(kv, 3, count_up(8, 50), reuse=False)
    assert kv.match(count_up(8, 50), SCOPE).num_tokens == 0
    assert kv.stats().num_cached == 2


def test_b47_scopes_never_share_pages():
    scopes = [PrefixScope(model="m"), PrefixScope(model="n"), PrefixScope(model="m", adapter=1),
              PrefixScope(model="m", adapter=12), PrefixScope(model="m", adapter=1, salt="2"),
              PrefixScope(model="m", salt="1"), PrefixScope(model="m1"), PrefixScope(model="", salt="m"),
              PrefixScope(model="m", salt="s\x00"), PrefixScope(model="m\x00s"), PrefixScope(model="m", salt="\ud800")]
    kv = make(100)
    for number, scope in enumerate(scopes):
        assert kv.match(count_up(9), scope).num_tokens == 0
        assert serve(kv, number, count_up(9), scope=scope)[0] == 0
    assert kv.stats().num_cached == 3 * len(scopes)
    for scope in scopes:
        assert kv.match(count_up(9), scope).num_tokens == 8


def test_the_same_page_computed_twice_is_cached_once():
    kv = make()
    for request_id in (1, 2):
        kv.start(request_id, count_up(9), SCOPE, reads=True, leaves=True)
        kv.reserve(request_id, 9)
    for request_id in (1, 2):
        kv.commit(request_id, count_up(9), 9)
        kv.check_integrity()
    kv.release(1)
    kv.release(2)
    kv.check_integrity()
    assert (kv.stats().num_cached, kv.stats().num_free) == (3, 5)


@pytest.mark.parametrize("length", [2 * PAGE, 2 * PAGE + 2], ids=["full last page", "unfinished last page"])
def test_what_follows_a_page_computed_twice_is_cached_at_release(length):
    kv = make(12)
    tails = {1: count_up(6, 50), 2: count_up(6, 70)}
    for request_id in (1, 2):
        kv.start(request_id, count_up(5), SCOPE, reads=True, leaves=True)
        kv.reserve(request_id, length)
    for request_id, tail in tails.items():
        kv.commit(request_id, np.concatenate([count_up(4), tail]), length)
    assert kv.match(np.concatenate([count_up(4), tails[2]]), SCOPE).num_tokens == 4
    kv.release(2)
    kv.check_integrity()
    assert kv.match(np.concatenate([count_up(4), tails[2], text(0)]), SCOPE).num_tokens == length
    kv.release(1)
    kv.check_integrity()
    assert kv.match(np.concatenate([count_up(4), tails[1], text(0)]), SCOPE).num_tokens == length


def test_a_page_is_shared_only_when_committed():
    kv = make()
    kv.start(1, count_up(9), SCOPE, reads=True, leaves=True)
    kv.reserve(1, 9)
    assert kv.match(count_up(9), SCOPE).num_tokens == 0
    kv.commit(1, count_up(9), 3)
    assert kv.match(count_up(9), SCOPE).num_tokens == 0
    kv.commit(1, count_up(9), 5)
    assert kv.match(count_up(9), SCOPE).num_tokens == 4


# Copy on write


def test_a_request_that_diverges_inside_a_page_copies_it():
    kv = make()
    _, first = serve(kv, 1, count_up(8))
    cached, second = run(kv, 2, np.concatenate([count_up(6), text(90, 91, 92)]))
    assert cached == 6
    assert second.copy_from.tolist() == [first.pages[1]]
    assert second.copy_to.tolist() == [second.pages[1]]
    assert second.columns.tolist() == [0, 1, 2]
    assert second.pages[1] != first.pages[1]
    assert len(kv.reserve(2, 13).updates[0].copy_from) == 0, "a copy is carried once"


def test_the_unfinished_last_page_is_kept_up_to_its_committed_tokens():
    kv = make()
    _, first = serve(kv, 1, count_up(7))
    assert kv.stats().num_cached == 2
    cached, second = run(kv, 2, count_up(12))
    assert cached == 7
    assert second.copy_from.tolist() == [first.pages[1]]


def test_a_last_page_that_is_the_beginning_of_a_cached_one_is_not_kept():
    kv = make()
    serve(kv, 1, count_up(8))
    serve(kv, 2, count_up(6))
    assert kv.stats().num_cached == 2


def test_without_partial_reuse_only_whole_pages_are_kept_and_shared():
    kv = make(partial=False)
    serve(kv, 1, count_up(7))
    assert kv.stats().num_cached == 1
    cached, change = run(kv, 2, count_up(7))
    assert cached == 4
    assert len(change.copy_from) == 0


def test_the_closest_page_is_copied_from():
    kv = make(20)
    serve(kv, 1, text(1, 1, 9, 9, 0))
    _, close = serve(kv, 2, text(1, 1, 1, 9, 0))
    serve(kv, 3, text(1, 2, 2, 2, 0))
    cached, change = run(kv, 4, text(1, 1, 1, 1, 1))
    assert cached == 3
    assert change.copy_from.tolist() == [close.pages[0]]


def test_start_does_not_evict_a_page_that_another_request_copies_from():
    kv = make(4)
    _, old = serve(kv, 1, count_up(4))
    serve(kv, 2, count_up(4, 50))
    kv.start(3, np.concatenate([count_up(2), text(9)]), SCOPE, reads=True, leaves=True)
    first = kv.reserve(3, 3).updates[0]
    assert first.copy_from.tolist() == [old.pages[0]]
    run(kv, 4, count_up(3, 70))
    assert kv.start(5, np.concatenate([count_up(2, 50), text(9)]), SCOPE, reads=True, leaves=True) == 0, (
        "its target would be that page")
    kv.check_integrity()
    second = kv.reserve(5, 3).updates[0]
    assert len(second.copy_from) == 0
    assert not set(first.copy_from.tolist()) & set(second.copy_to.tolist())


def test_a_page_needed_by_another_row_of_the_step_is_copied_before_it_is_written():
    kv = make(3)
    _, old = serve(kv, 1, count_up(4))
    kv.start(2, np.concatenate([count_up(2), text(9)]), SCOPE, reads=True, leaves=True)
    kv.start(3, count_up(5, 50), SCOPE, reads=True, leaves=True)
    other = kv.reserve(3, 5).updates[0]
    kv.check_integrity()
    source = old.pages[0]
    assert source in other.pages, "no other page was left"
    assert other.copy_from.tolist() == [source]
    mine = kv.reserve(2, 3).updates[0]
    assert len(mine.copy_from) == 0
    assert mine.pages.tolist() == other.copy_to.tolist()
    for request_id in (2, 3):
        kv.release(request_id)
    kv.check_integrity()


def test_a_request_that_needs_every_page_is_not_held_up_by_the_page_it_copies_from():
    kv = make(4)
    serve(kv, 1, count_up(3))
    prompt = np.concatenate([count_up(2), count_up(10, 50)])
    found = kv.match(prompt, SCOPE)
    assert found.num_partial_tokens == 2
    assert kv.available_pages() - found.num_pages_unreferenced >= kv.pages_for(16) - found.num_pages
    kv.start(2, prompt, SCOPE, reads=True, leaves=True)
    reservation = kv.reserve(2, 16)
    assert reservation is not None
    change = reservation.updates[0]
    assert sorted(change.pages.tolist()) == [1, 2, 3, 4]
    assert len(change.copy_from) == 1
    kv.check_integrity()
    kv.release(2)
    kv.check_integrity()


def test_a_request_that_ends_before_its_first_step_leaves_nothing():
    kv = make(4)
    serve(kv, 1, count_up(6))
    before = kv.stats()
    kv.start(2, np.concatenate([count_up(5), text(9)]), SCOPE, reads=True, leaves=True)
    assert kv.stats().num_free == before.num_free - 1
    kv.commit(2, count_up(5), 5)
    kv.release(2)
    kv.check_integrity()
    after = kv.stats()
    assert (after.num_free, after.num_cached, after.num_referenced) == (before.num_free, before.num_cached, 0)
    assert kv.match(np.concatenate([count_up(5), text(9, 9)]), SCOPE).num_tokens == 5


# Eviction


def test_the_leaf_used_longest_ago_goes_first_and_its_parent_keeps_its_own_age():
    kv = make(6, partial=False)
    serve(kv, 1, count_up(8))
    serve(kv, 2, count_up(4, 50))
    serve(kv, 3, np.concatenate([count_up(4), count_up(4, 70)]))
    cached = {"trunk": count_up(5), "first": count_up(9), "second": count_up(5, 50),
              "third": np.concatenate([count_up(4), count_up(5, 70)])}
    run(kv, 9, count_up(8, 90))
    gone = []
    for pages in range(3, 7):
        assert kv.reserve(9, pages * PAGE) is not None
        kv.check_integrity()
        gone.append({name for name, tokens in cached.items()
                     if kv.match(tokens, SCOPE).num_tokens < len(tokens) - 1})
    assert gone == [{"first"}, {"first", "second"}, {"first", "second", "third"},
                    {"first", "second", "third", "trunk"}]
    assert kv.stats().num_evictions == 4


def test_pages_in_use_are_never_evicted():
    kv = make(4)
    run(kv, 1, count_up(8))
    serve(kv, 2, count_up(4, 50))
    kv.start(3, count_up(9, 70), SCOPE, reads=True, leaves=True)
    assert kv.reserve(3, 9) is None
    assert kv.reserve(3, 8) is not None
    assert kv.match(count_up(9), SCOPE).num_tokens == 8


def test_clearing_drops_all_that_nobody_uses():
    kv = make()
    serve(kv, 1, count_up(8, 50))
    run(kv, 2, count_up(8))
    kv.clear_cache()
    kv.check_integrity()
    assert (kv.stats().num_cached, kv.stats().num_referenced, kv.stats().num_evictions) == (0, 2, 0)
    assert kv.match(count_up(9, 50), SCOPE).num_tokens == 0
    assert kv.match(count_up(9), SCOPE).num_tokens == 8


def test_stats_count_reuse():
    kv = make()
    serve(kv, 1, count_up(8))
    serve(kv, 2, count_up(10))
    serve(kv, 3, count_up(4, 60))
    stats = kv.stats()
    assert (stats.num_hits, stats.num_reused_tokens) == (1, 8)
    assert stats.num_pages == stats.num_free + stats.num_cached == 8


# Call order and books


@pytest.mark.parametrize("call", [
    lambda kv: kv.start(1, count_up(3), SCOPE, reads=True, leaves=True),
    lambda kv: kv.reserve(7, 4),
    lambda kv: kv.held_pages(7),
    lambda kv: kv.commit(7, count_up(3), 3),
    lambda kv: kv.release(7),
    lambda kv: (kv.release(1), kv.release(1)),
    lambda kv: kv.commit(1, count_up(8), 2),
    lambda kv: kv.commit(1, count_up(4), 5),
    lambda kv: kv.commit(1, count_up(20), 9),
], ids=["started twice", "unknown reserve", "unknown held", "unknown commit", "unknown release", "released twice",
        "fewer computed", "more computed than tokens", "more computed than pages"])
def test_calls_out_of_order_are_refused(call):
    kv = make()
    run(kv, 1, count_up(3))
    with pytest.raises(InternalError):
        call(kv)


def test_tokens_of_a_pending_copy_cannot_be_committed():
    kv = make()
    serve(kv, 1, count_up(8))
    assert kv.start(2, count_up(8), SCOPE, reads=True, leaves=True) == 7
    with pytest.raises(InternalError):
        kv.commit(2, count_up(8), 8)


def test_pools_that_do_not_fit_the_life_cycles_are_refused():
    spec = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32")
    other = LifeCycleSpec(kind="full", layers=(1,), num_kv_heads=1, head_dim=4, page_size=2 * PAGE, dtype="float32")
    for specs, counts in (((), ()), ((spec,), (4, 4)), ((spec, other), (4, 4)), ((spec,), (0,))):
        with pytest.raises(InternalError):
            KVCacheManager(specs, counts, enable_block_reuse=True, enable_partial_reuse=True)


def test_an_unknown_life_cycle_is_refused_by_name():
    with pytest.raises(UserError, match=r"convolution.*full"):
        make(kinds=("convolution",))


def corrupt_count(kv):
    kv._ledger.queues[0].num_cached += 1


def corrupt_reference(kv):
    kv._sequences[2].nodes[0].refs[0] += 1


def corrupt_leak(kv):
    kv._ledger.pools[0].take()


def corrupt_double(kv):
    kv._sequences[2].pages[0][-1] = kv._sequences[2].pages[0][0]


def corrupt_content(kv):
    kv._sequences[2].nodes[0].content = text(8, 8, 8, 8).tobytes()


def corrupt_queue(kv):
    kv._ledger.queues[0].pop()


def corrupt_prefix(kv):
    node = kv._sequences[2].nodes[1]
    kv._sequences[2].nodes[0] = None
    kv._ledger.unpin(node.parent, 0, passed=False)


def corrupt_copies(kv):
    kv._sequences[2].copy.node.num_copies = 2


@pytest.mark.parametrize("corrupt", [corrupt_count, corrupt_reference, corrupt_leak, corrupt_double, corrupt_content,
                                     corrupt_queue, corrupt_prefix, corrupt_copies])
def test_the_integrity_check_notices(corrupt):
    kv = make()
    serve(kv, 1, count_up(12))
    serve(kv, 3, count_up(4, 80))
    run(kv, 2, np.concatenate([count_up(10), text(9)]))
    kv.check_integrity()
    corrupt(kv)
    with pytest.raises(InternalError):
        kv.check_integrity()
