"""Requests that come and go at random moments, consumers that give up, an engine that dies: nothing is left behind."""

import asyncio
import random
import time

import pytest

from camshaft import LLM, SamplingParams
from camshaft.core.errors import EngineDeadError


def params(max_tokens):
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


@pytest.fixture(params=[0, 1])
def llm(tiny_engine, request):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**22}, scheduler={"overlap_depth": request.param}) as opened:
        yield opened


def check_drained(llm):
    """Wait until nothing runs; then every page is free or cached."""
    for _ in range(3000):
        stats = llm.get_stats()
        if not (stats["num_running"] + stats["num_waiting"] + len(llm._parts.front._live)):
            break
        time.sleep(0.005)
    kv = stats["kv"]
    assert kv["num_free"] + kv["num_cached"] == kv["num_pages"]
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)


def test_b43_aborts_at_random_moments_leave_nothing(llm):
    rng = random.Random(3)
    for start in range(100):
        results = [llm.generate_async([3 + (3 * start + i) % 250] * rng.randint(1, 60), params(rng.randint(1, 30)))
                   for i in range(3)]
        time.sleep(rng.choice((0.0, 0.0, 0.004)))
        for result in results:
            result.abort()
    check_drained(llm)


def test_consumers_that_are_cancelled_or_raise_abort_their_requests(llm):
    async def consume(first, error):
        async for _ in llm.generate_async([first] * 5, params(400)):
            if error is not None:
                raise error

    async def main():
        tasks = [asyncio.ensure_future(consume(3 + i, None)) for i in range(30)]
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}
        with pytest.raises(KeyError):
            await consume(40, KeyError("the caller's own"))
        assert llm.generate([5, 6], params(3)).finished, "a blocking call inside a running loop"

    asyncio.run(main())
    check_drained(llm)


def test_a_prefix_in_the_making_is_waited_for_and_then_shared(llm):
    shared = [7] * 100
    first, second = (llm.generate_async([*shared, tail], params(4)) for tail in (5, 6))
    assert second.result(30).num_cached_tokens >= 96
    first.result(30)
    other = [8] * 100
    first, second = (llm.generate_async([*other, tail], params(4)) for tail in (5, 6))
    first.abort()
    assert len(second.result(30).outputs[0].token_ids) == 4
    check_drained(llm)


def test_a_step_that_fails_is_heard_by_all_and_ends_the_engine(llm):
    def submit(plan):
        raise RuntimeError("injected")

    results = [llm.generate_async([5 + i], params(400)) for i in range(40)]
    llm._parts.executor._runner.submit = submit
    for result in results:
        with pytest.raises(EngineDeadError, match="injected"):
            result.result(30)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="injected"):
            llm.generate("more")
    assert not llm.get_stats()["alive"]
    llm.shutdown()
    llm.shutdown()
