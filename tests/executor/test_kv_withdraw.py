"""Pages that led to non-finite logits: found by nobody any more, freed with their last holder, and only those."""

import numpy as np

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.ids import RequestId
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import PrefixScope

PAGE = 4
SCOPE = PrefixScope(model="m")
TOKENS = np.arange(20, dtype=np.int32)
FIRST, SECOND = RequestId(1), RequestId(2)


def make():
    spec = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32")
    return KVCacheManager((spec,), (13,), enable_block_reuse=True, enable_partial_reuse=True)


def run(kv, request_id, length, known):
    """Start on ``length`` tokens and compute ``known`` of them; returns the cached ones."""
    cached = kv.start(request_id, TOKENS[:length], SCOPE, True)
    assert kv.reserve(request_id, known) is not None
    kv.commit(request_id, TOKENS, known)
    kv.check_integrity()
    return cached


def withdraw(kv, request_id):
    kv.withdraw(request_id)
    kv.check_integrity()


def release(kv, request_id):
    kv.release(request_id)
    kv.check_integrity()


def test_withdrawn_pages_are_found_by_nobody_and_go_with_their_last_holder():
    kv = make()
    run(kv, FIRST, 20, 16)
    assert run(kv, SECOND, 20, 17) == 16
    withdraw(kv, FIRST)
    assert kv.match(TOKENS, SCOPE).num_tokens == 0
    release(kv, FIRST)
    assert kv.stats().num_cached == 0
    assert kv.stats().num_referenced == 5, "the other request goes on with what it holds"
    kv.commit(SECOND, TOKENS, 20)
    assert kv.match(TOKENS, SCOPE).num_tokens == 0, "nothing is shared behind a withdrawn page"
    release(kv, SECOND)
    assert kv.stats().num_free == kv.stats().num_pages


def test_what_is_computed_anew_is_shared_while_withdrawn_pages_are_still_held_and_after():
    kv = make()
    run(kv, FIRST, 20, 8)
    assert run(kv, SECOND, 20, 9) == 8
    withdraw(kv, FIRST)
    release(kv, FIRST)
    third, fourth = RequestId(3), RequestId(4)
    assert run(kv, third, 20, 16) == 0
    kv.vouch(third)
    withdraw(kv, SECOND)
    release(kv, SECOND)
    release(kv, third)
    assert run(kv, fourth, 20, 17) == 16
    release(kv, fourth)


def test_pages_that_gave_finite_logits_outlive_a_request_that_did_not():
    kv = make()
    run(kv, FIRST, 9, 9)
    kv.vouch(FIRST)
    release(kv, FIRST)
    assert run(kv, SECOND, 20, 16) == 9
    assert kv.match(TOKENS, SCOPE).num_tokens == 16
    withdraw(kv, SECOND)
    release(kv, SECOND)
    assert kv.match(TOKENS, SCOPE).num_tokens == 9


def test_the_source_of_a_copy_goes_too_but_not_before_the_copy_was_made():
    kv = make()
    run(kv, FIRST, 7, 7)
    release(kv, FIRST)
    assert kv.start(SECOND, TOKENS, SCOPE, True) == 7
    withdraw(kv, SECOND)
    assert kv.match(TOKENS, SCOPE).num_tokens == 0
    change = kv.reserve(SECOND, 8).updates[0]
    assert len(change.copy_from) == 1
    release(kv, SECOND)
    assert kv.stats().num_free == kv.stats().num_pages


def test_a_copy_vouches_for_the_tokens_it_took_only():
    kv = make()
    run(kv, FIRST, 8, 8)
    release(kv, FIRST)
    copier = np.array([0, 1, 2, 9], np.int32)
    assert kv.start(SECOND, copier, SCOPE, True) == 3
    kv.reserve(SECOND, 4)
    kv.commit(SECOND, copier, 4)
    kv.vouch(SECOND)
    release(kv, SECOND)
    third = RequestId(3)
    assert kv.start(third, TOKENS[:8], SCOPE, True) == 7
    withdraw(kv, third)
    release(kv, third)
    assert kv.match(TOKENS, SCOPE).num_tokens == 3, "what the copier computed itself"
