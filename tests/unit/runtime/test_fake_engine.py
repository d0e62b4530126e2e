"""The fake engine yields what a request yields alone, and refuses every kind of wrong plan."""

import numpy as np
import pytest

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.errors import InternalError
from camshaft.testing.fake_engine import FakeModelEngine
from camshaft.testing.fake_logits import expected_tokens
from tests.unit.runtime.plans import arrival, ints, plan, sampling

V = 50


FULL = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=4, dtype="float32")


def engine(**changes):
    sizes = dict(life_cycles=(FULL,), num_pages=(12,), num_rows=4, max_seq_len=32, vocab_size=V)
    return FakeModelEngine(**{**sizes, **changes})


def started(fake):
    """Row 0 holds pages 1 and 2 with a six-token prompt and has sampled once."""
    out = fake.submit(plan(0, arrivals=[arrival(0)], pages=[(0, 0, 1), (0, 1, 2)],
                           context=[(0, 0, [1, 2, 3, 4, 5, 6], 0)])).result()
    return int(out.token_ids[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_chunks_and_generation_equal_the_request_alone(temperature):
    fake = engine()
    options = dict(temperature=temperature, seed=9)
    out = [fake.submit(plan(0, arrivals=[arrival(2, **options)], pages=[(2, 0, 7)], context=[(2, 0, [3, 1], None)])),
           fake.submit(plan(1, pages=[(2, 1, 3)], context=[(2, 2, [4, 1, 5], 0)])),
           fake.submit(plan(2, generation=[(2, 5, 1)])), fake.submit(plan(3, generation=[(2, 6, 2)]))]
    tokens = np.concatenate([handle.result().token_ids for handle in out]).tolist()
    assert tokens == expected_tokens(ints(3, 1, 4, 1, 5), 3, sampling=sampling(**options), vocab_size=V)


def test_outputs_depend_on_history_seed_and_suppression():
    def alone(prompt, **options):
        return expected_tokens(ints(*prompt), 12, sampling=sampling(**options), vocab_size=V)

    greedy = alone([1, 2])
    assert len(set(greedy)) >= 8
    assert greedy != alone([2, 1])
    assert alone([1, 2], temperature=1.0, seed=1) != alone([1, 2], temperature=1.0, seed=2)
    kept = alone([1, 2], min_tokens=4, suppressed=greedy[:4])
    assert not set(kept[:4]) & set(greedy[:4])


def test_shared_prefix_and_copy_on_write_are_accepted():
    fake = engine()
    started(fake)
    out = fake.submit(plan(1, generation=[(0, 6, 1)], arrivals=[arrival(1)], pages=[(1, 0, 1), (1, 1, 5)],
                           copies=[(2, 5)], context=[(1, 5, [9, 9], 0)])).result()
    alone = expected_tokens(ints(1, 2, 3, 4, 5, 9, 9), 1, sampling=sampling(), vocab_size=V)
    assert out.token_ids.tolist()[1:] == alone
    assert out.rows.tolist() == [0, 1]


REFUSED = {
    "repeats a row": dict(generation=[(0, 6, 1), (0, 6, 1)]),
    "skips a position": dict(generation=[(0, 7, 1)]),
    "stale epoch": dict(generation=[(0, 6, 1)], epochs=[3]),
    "off output index": dict(generation=[(0, 6, 2)]),
    "unknown token": dict(arrivals=[arrival(1)], pages=[(1, 0, 3)], context=[(1, 0, [V], 0)]),
    "trash page": dict(arrivals=[arrival(1)], pages=[(1, 0, 0)], context=[(1, 0, [1], 0)]),
    "page beyond the pool": dict(arrivals=[arrival(1)], pages=[(1, 0, 12)], context=[(1, 0, [1], 0)]),
    "no page": dict(arrivals=[arrival(1)], context=[(1, 0, [1], 0)]),
    "writes a page another holds": dict(generation=[(0, 6, 1)], arrivals=[arrival(1)], pages=[(1, 0, 1)],
                                        context=[(1, 0, [1, 2, 3, 4], 0)]),
    "continues a shared page": dict(arrivals=[arrival(1)], pages=[(1, 0, 1), (1, 1, 2)], context=[(1, 5, [6], 0)]),
    "shares an unwritten page": dict(arrivals=[arrival(1)], pages=[(1, 0, 9), (1, 1, 3)], context=[(1, 4, [6], 0)]),
    "mixes sequences": dict(arrivals=[arrival(1)], pages=[(1, 0, 2), (1, 1, 3)], context=[(1, 2, [6, 6, 6], 0)]),
    "copies nothing": dict(arrivals=[arrival(1)], pages=[(1, 0, 5)], copies=[(9, 5)], context=[(1, 2, [6], 0)]),
    "copies to a held page": dict(arrivals=[arrival(1)], pages=[(1, 0, 5)], copies=[(1, 2)], context=[(1, 0, [6], 0)]),
    "overwrites a copy source": dict(arrivals=[arrival(1)], pages=[(1, 0, 5), (1, 1, 1)], copies=[(1, 5), (2, 1)],
                                     context=[(1, 5, [6], 0)]),
    "row that never came": dict(context=[(3, 0, [1], 0)]),
    "context after generation": dict(context=[(0, 6, [1], 1)]),
    "arrives with an old epoch": dict(arrivals=[arrival(0, epoch=0)], pages=[(0, 0, 3)], context=[(0, 0, [1], 0)]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_wrong_plans_are_refused(reason):
    fake = engine()
    started(fake)
    with pytest.raises(InternalError, match="fake engine"):
        fake.submit(plan(1, **REFUSED[reason]))
    assert len(fake.violations) == 1


def test_a_held_page_rewritten_with_equal_content_is_still_refused():
    fake = engine()
    started(fake)
    fake.submit(plan(1, arrivals=[arrival(1)], pages=[(1, 0, 1)], context=[(1, 0, [1, 2, 3, 4], 0)]))
    with pytest.raises(InternalError, match="while this one held it"):
        fake.submit(plan(2, generation=[(0, 6, 1)]))


def test_failures_and_poison_are_delivered_as_asked():
    fake = engine()
    started(fake)
    fake.fail_at = 1
    with pytest.raises(RuntimeError, match="step 1"):
        fake.submit(plan(1, generation=[(0, 6, 1)]))
    fake.fail_on_result, fake.poison_rows = True, {0}
    handle = fake.submit(plan(1, generation=[(0, 6, 1)]))
    with pytest.raises(RuntimeError, match="step 1"):
        handle.result()
    fake.poison_rows = {0}
    out = fake.submit(plan(2, generation=[(0, 7, 2)])).result()
    assert not out.finite[0]
    assert fake.violations == []
