"""Logits processors that turn on the LLM that runs them: each ends its own request, and nothing waits for ever."""

import asyncio
import contextlib

import pytest

from camshaft import LLM, SamplingParams, UserError
from camshaft.core.errors import CamshaftError

SHORT = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@pytest.fixture
def llm(tiny_engine):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**22}, scheduler={"max_waiting": 4}) as opened:
        yield opened


def processed(llm, act):
    """A result whose processor calls ``act`` before every token."""
    def processor(token_ids, logits):
        act()
        return logits

    return llm.generate_async([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, logits_processor=processor))


async def awaited(llm):
    return await llm.generate_async([4], SHORT)


WAITS = {
    "generate": lambda llm: llm.generate([4], SHORT),
    "a batch beyond the queue": lambda llm: llm.generate([[4]] * 40, SHORT),
    "chat": lambda llm: llm.chat([{"role": "user", "content": "a"}], SHORT),
    "result": lambda llm: llm.generate_async([4], SHORT).result(),
    "iteration": lambda llm: list(llm.generate_async([4], SHORT)),
    "await": lambda llm: asyncio.run(awaited(llm)),
}


@pytest.mark.parametrize("way", WAITS)
def test_a_processor_that_waits_for_its_own_engine_is_refused_and_never_hangs(llm, way):
    with pytest.raises(UserError, match="waits for an answer"):
        processed(llm, lambda: WAITS[way](llm)).result(timeout=30)
    assert llm.generate([7], SHORT).finished


def test_a_processor_may_start_a_request_read_counters_and_abort(llm):
    started = []
    first = processed(llm, lambda: started.append((llm.generate_async([4], SHORT), llm.get_stats())))
    assert len(first.result(timeout=30).outputs[0].token_ids) == 3
    assert [len(result.result(timeout=30).outputs[0].token_ids) for result, _ in started] == [2, 2, 2]
    started.clear()
    first = processed(llm, lambda: first.abort())
    assert first.result(timeout=30).outputs[0].finish_reason == "cancelled"


def test_a_processor_may_ask_another_llm(llm, tiny_engine):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**22}) as other:
        assert processed(llm, lambda: other.generate([4], SHORT)).result(timeout=60).finished


def test_a_processor_that_shuts_its_llm_down_leaves_nobody_waiting(llm):
    beside = llm.generate_async([5], SamplingParams(max_tokens=400, ignore_eos=True))
    first = processed(llm, llm.shutdown)
    for result in (first, beside):
        with contextlib.suppress(CamshaftError):  # a timeout is none
            result.result(timeout=30)
        assert result.finished
    with pytest.raises(UserError, match="shut down"):
        llm.generate([7], SHORT)
