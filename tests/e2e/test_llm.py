"""The LLM API on a tiny model: arity, streams, stops, errors, aborts, shutdown."""

import asyncio
import gc
import threading
import time
import weakref

import pytest

from camshaft import LLM, SamplingParams, UserError
from camshaft.core.errors import RequestTooLargeError
from camshaft.runtime.model_engine import ModelEngine

LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_engine):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24}) as opened:
        yield opened


def drained(llm):
    """Statistics once nothing runs any more."""
    for _ in range(500):
        stats = llm.get_stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        time.sleep(0.01)
    raise AssertionError(f"still busy: {stats}")


def test_the_answer_has_the_arity_of_the_input(llm):
    params = SamplingParams(max_tokens=4)
    assert llm.generate("a valve", params).outputs[0].token_ids
    assert llm.generate([5, 6, 7], params).prompt_token_ids == [5, 6, 7]
    assert [o.prompt_token_ids for o in llm.generate([[5, 6], [7]], params)] == [[5, 6], [7]]
    assert len(llm.generate(["a", "b", "c"], params)) == 3
    assert llm.generate({"prompt": "a valve"}, params).prompt == "a valve"
    assert llm.generate({"prompt_token_ids": [9]}, params).prompt is None
    assert llm.generate([], params) == []


def test_one_set_of_parameters_a_prompt(llm):
    short, longer = SamplingParams(max_tokens=2, ignore_eos=True), SamplingParams(max_tokens=5, ignore_eos=True)
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], [short, longer])] == [2, 5]
    with pytest.raises(UserError, match="one a prompt"):
        llm.generate(["a", "b"], [short])


@pytest.mark.parametrize("prompt", ["", [[]], {"prompt_token_ids": []}])
def test_b40_an_empty_prompt_is_refused_and_nothing_breaks(llm, prompt):
    with pytest.raises(UserError, match="at least one token"):
        llm.generate(prompt)
    assert llm.generate("still alive", SamplingParams(max_tokens=2)).finished


@pytest.mark.parametrize("prompt", [[10**6], [-1], [1.5], [True], 7, b"bytes", {"prompt": [1]}, {"text": "a"}, None])
def test_malformed_prompts_are_refused_by_name(llm, prompt):
    with pytest.raises(UserError):
        llm.generate(prompt)


@pytest.mark.parametrize("params", [{"max_tokens": 3}, {}, "greedy", 7, [{}], [None]])
def test_sampling_parameters_of_another_kind_are_refused_by_name(llm, params):
    for call in (llm.generate, llm.generate_async):
        with pytest.raises(UserError, match=r"sampling_params=.*SamplingParams"):
            call("a", params)


@pytest.mark.parametrize("messages", ["hi", b"hi", 7, None, {"role": "user", "content": "hi"}])
def test_a_conversation_of_another_kind_is_refused_as_it_was_given(llm, messages):
    with pytest.raises(UserError, match=r"messages=.*expected a list of messages") as refused:
        llm.chat(messages)
    assert refused.value.value == messages


def test_one_bad_prompt_is_named_and_nothing_of_the_batch_runs(llm):
    before = llm.get_stats()["counters"]["num_finished"]
    with pytest.raises(UserError, match=r"prompts\[1\]"):
        llm.generate(["good", "", "good"])
    assert llm.get_stats()["counters"]["num_finished"] == before


def test_b39_a_request_that_can_never_fit_is_refused_with_the_numbers(llm, tiny_engine):
    with pytest.raises(RequestTooLargeError, match="at most 511 prompt tokens"):
        llm.generate([5] * 512, SamplingParams(max_tokens=32))
    cut = llm.generate([5] * 510, SamplingParams(max_tokens=32, ignore_eos=True)).outputs[0]
    assert (len(cut.token_ids), cut.finish_reason) == (2, "length"), "what fits is generated"
    page = 2 * 2 * 2 * 16 * 16 * 4
    with LLM(tiny_engine, kv_cache={"max_bytes": page * 9}) as small:
        with pytest.raises(RequestTooLargeError, match="KV"):
            small.generate([5] * 200, SamplingParams(max_tokens=8))
        assert small.generate([5] * 50, SamplingParams(max_tokens=8)).finished


@pytest.mark.parametrize("params", [{"stop_token_ids": [10**6], "min_tokens": 1}, {"end_id": 320}])
def test_b30_ids_outside_the_vocabulary_are_refused(llm, params):
    with pytest.raises(UserError, match="319"):
        llm.generate("a", SamplingParams(**params))
    assert llm.generate("still alive", SamplingParams(max_tokens=2)).finished


def test_a_stream_equals_its_final_output(llm):
    for stop in (None, "e"):
        params = SamplingParams(max_tokens=48, temperature=0.8, seed=3, ignore_eos=True, stop=stop)
        final = llm.generate("The camshaft", params).outputs[0]
        parts = list(llm.generate_async("The camshaft", params))
        assert "".join(part.outputs[0].text_diff for part in parts) == final.text
        assert [t for part in parts for t in part.outputs[0].token_ids_diff] == final.token_ids
        assert parts[-1].outputs[0].finish_reason == final.finish_reason
        assert parts[-1].outputs[0].stop_reason == final.stop_reason


def test_b4_deltas_of_broken_and_whole_characters_join_to_the_full_decode(llm):
    params = SamplingParams(max_tokens=120, temperature=5.0, seed=8, ignore_eos=True, n=2)
    length, joined, tokens = [0, 0], ["", ""], [[], []]
    for output in llm.generate_async("A 世界", params):
        for each in output.outputs:
            assert len(each.text) >= length[each.index]
            length[each.index] = len(each.text)
            joined[each.index] += each.text_diff
            tokens[each.index] += each.token_ids_diff
    assert joined == [llm.tokenizer.decode(ids) for ids in tokens]
    assert "�" in joined[0]
    assert "�" in joined[1]


def test_a_stop_string_cuts_text_and_tokens(llm):
    params = {"max_tokens": 64, "temperature": 0.0, "ignore_eos": True}
    full = llm.generate("What is", SamplingParams(**params)).outputs[0]
    middle = full.text[len(full.text) // 2:][:3]
    cut = llm.generate("What is", SamplingParams(**params, stop=[middle])).outputs[0]
    assert cut.text == full.text[:full.text.index(middle)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", middle)
    assert cut.token_ids == full.token_ids[:len(cut.token_ids)]
    assert len(cut.token_ids) < len(full.token_ids)
    kept = llm.generate("What is", SamplingParams(**params, stop=middle, include_stop_str_in_output=True)).outputs[0]
    assert kept.text == cut.text + middle


def test_stop_ids_end_with_their_reason_and_min_tokens_holds_them_off(llm):
    params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    full = llm.generate([5, 6, 7], SamplingParams(**params)).outputs[0].token_ids
    stop = next(token for index, token in enumerate(full) if index >= 4 and token not in full[:index])
    stopped = llm.generate([5, 6, 7], SamplingParams(**params, stop_token_ids=[stop])).outputs[0]
    assert stopped.token_ids == full[:full.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    held = llm.generate([5, 6, 7], SamplingParams(**params, stop_token_ids=[stop], min_tokens=20)).outputs[0]
    assert stop not in held.token_ids[:20]
    assert len(held.token_ids) >= 20


def test_b43_an_abort_ends_the_request_and_frees_its_pages(llm):
    result = llm.generate_async("forever", LONG)
    for output in result:
        if len(output.outputs[0].token_ids) >= 3:
            break
    final = result.result(timeout=30)
    assert final.outputs[0].finish_reason == "cancelled"
    assert 3 <= len(final.outputs[0].token_ids) < 400
    stats = drained(llm)
    assert stats["kv"]["num_free"] + stats["kv"]["num_cached"] == stats["kv"]["num_pages"]


def test_async_requests_are_awaitable_iterable_and_cancelled_with_their_task(llm):
    async def main():
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        alone = await llm.generate_async("One", params)
        pieces = []
        async for output in llm.generate_async("One", params):
            pieces += output.outputs[0].token_ids_diff
        assert pieces == alone.outputs[0].token_ids
        both = await asyncio.gather(*(llm.generate_async(p, params) for p in ("One", "Two")))
        assert both[0].outputs[0].token_ids == pieces
        forever = llm.generate_async("forever", LONG)
        task = asyncio.ensure_future(forever.aresult())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.to_thread(forever.result, 30)).outputs[0].finish_reason == "cancelled"

    asyncio.run(main())
    drained(llm)


def test_chat_renders_the_models_own_template(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answer = llm.chat(messages, SamplingParams(max_tokens=4))
    assert answer.prompt_token_ids == llm.apply_chat_template(messages)
    assert llm.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False).startswith("<|turn|>user\n")
    assert len(llm.chat([messages, messages], SamplingParams(max_tokens=2))) == 2


def test_many_threads_share_one_engine(llm):
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    expected = {n: llm.generate([5 + n, 9], params).outputs[0].token_ids for n in range(8)}
    found = {}

    def ask(n):
        found[n] = llm.generate([5 + n, 9], params).outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == expected


def test_shutdown_ends_what_runs_and_refuses_what_comes(tiny_engine):
    llm = LLM(tiny_engine, kv_cache={"max_bytes": 2**24})
    running = llm.generate_async("forever", LONG)
    llm.shutdown()
    llm.shutdown()
    assert running.snapshot().finished
    with pytest.raises(UserError, match="shut down"):
        llm.generate("more")


def test_shutdown_gives_weights_and_kv_memory_back_while_the_llm_is_kept(tiny_engine, monkeypatch):
    made = []
    real = ModelEngine.__init__

    def spy(self, *args, **options):
        real(self, *args, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(ModelEngine, "__init__", spy)
    llm = LLM(tiny_engine, kv_cache={"max_bytes": 2**24})
    assert llm.generate([5, 6], SamplingParams(max_tokens=2)).finished
    assert made[0]() is not None
    llm.shutdown()
    gc.collect()
    assert made[0]() is None
    assert llm.get_stats()["num_running"] == 0


def test_unknown_options_are_refused_with_a_suggestion(tiny_engine):
    with pytest.raises(UserError, match="max_seq_len"):
        LLM(tiny_engine, max_seq_length=100)
    with pytest.raises(UserError, match="max_bytes"):
        LLM(tiny_engine, kv_cache={"max_byte": 1})
