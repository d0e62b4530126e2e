"""Free lists, eviction order and the full-attention life cycle."""

import random

import pytest

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.executor.kv.evict import EvictionQueue
from camshaft.executor.kv.lifecycle import FullAttention, make_life_cycle
from camshaft.executor.kv.pool import PagePool
from camshaft.executor.kv.prefix import Node


def test_every_page_but_the_trash_page_is_handed_out_once():
    pool = PagePool(6)
    assert sorted(pool.take() for _ in range(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    with pytest.raises(InternalError):
        pool.take()


def test_a_pool_of_the_trash_page_alone_is_empty_and_one_without_is_refused():
    assert (PagePool(1).num_usable, PagePool(1).free_pages()) == (0, [])
    with pytest.raises(InternalError):
        PagePool(1).take()
    with pytest.raises(InternalError):
        PagePool(0)


@pytest.mark.parametrize("page", [-1, 0, 2, 4, 99])
def test_only_pages_that_are_out_come_back(page):
    pool = PagePool(4)
    assert pool.take() == 1
    with pytest.raises(InternalError):
        pool.give(page)
    pool.give(1)
    with pytest.raises(InternalError):
        pool.give(1)
    assert sorted(pool.free_pages()) == [1, 2, 3]


def test_free_pages_agree_with_a_set_over_random_use():
    dice, pool, out = random.Random(0), PagePool(20), set()
    for _ in range(500):
        if out and (dice.random() < 0.5 or not pool.num_free):
            page = dice.choice(sorted(out))
            out.discard(page)
            pool.give(page)
        else:
            page = pool.take()
            assert page not in out
            out.add(page)
        assert set(pool.free_pages()) == set(range(1, 20)) - out
        assert pool.num_free == 19 - len(out)


def test_a_torn_free_list_is_noticed():
    pool = PagePool(5)
    pool._next[2] = 1
    with pytest.raises(InternalError, match="torn"):
        pool.free_pages()
    pool = PagePool(5)
    pool.num_free = 3
    with pytest.raises(InternalError, match="counts 3"):
        pool.free_pages()


def node(last_used, page=1):
    made = Node(None, b"", b"", [page])
    made.last_used = last_used
    return made


def test_the_least_recently_used_goes_first_and_equals_in_order_of_offer():
    queue = EvictionQueue(0, leaves_only=True)
    nodes = [node(age) for age in (3, 1, 2, 1)]
    for one in nodes:
        queue.offer(one)
    order = []
    while (popped := queue.pop()) is not None:
        popped.pages[0] = 0
        order.append(nodes.index(popped))
    assert order == [1, 3, 2, 0]


@pytest.mark.parametrize("spoil", [
    lambda one: one.refs.__setitem__(0, 1),
    lambda one: one.pages.__setitem__(0, 0),
    lambda one: one.children.append(node(0)),
    lambda one: setattr(one, "num_copies", 1),
], ids=["held", "dropped", "has a child", "copied from"])
def test_a_page_that_may_not_go_is_neither_offered_nor_popped(spoil):
    queue = EvictionQueue(0, leaves_only=True)
    before, after = node(1), node(2)
    spoil(before)
    queue.offer(before)
    queue.offer(after)
    spoil(after)
    assert queue.pop() is None


def test_inner_pages_may_go_where_later_ones_do_not_need_them():
    queue = EvictionQueue(0, leaves_only=False)
    inner = node(1)
    inner.children.append(node(2))
    queue.offer(inner)
    assert queue.pop() is inner


def test_a_page_used_again_waits_its_new_turn():
    queue = EvictionQueue(0, leaves_only=True)
    first, second = node(1), node(2)
    queue.offer(first)
    queue.offer(second)
    first.last_used = 3
    queue.offer(first)
    assert queue.pop() is second
    assert queue.pop() is first


def test_stale_entries_do_not_pile_up():
    queue = EvictionQueue(0, leaves_only=True)
    queue.num_cached = 10
    nodes = [node(0) for _ in range(10)]
    for time in range(1000):
        nodes[time % 10].last_used = time
        queue.offer(nodes[time % 10])
        assert len(queue._heap) <= 2 * queue.num_cached + 64
    assert queue.ready_nodes() == set(nodes)
    assert queue.pop() is nodes[0]


def test_full_attention_reads_everything_until_the_end():
    spec = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=16, dtype="float32")
    cycle = make_life_cycle(spec)
    assert isinstance(cycle, FullAttention)
    assert cycle.whole_prefix
    assert list(cycle.out_of_reach(100_000)) == []
    assert [spec.worst_pages(count, 1) for count in (0, 1, 16, 17)] == [0, 1, 1, 2]
