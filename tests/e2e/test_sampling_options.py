"""Every sampling option end to end on a tiny model, against transformers' logits where numbers can be compared."""

import json
import threading
import time

import pytest
import torch

from camshaft import LLM, SamplingParams, UserError
from camshaft.testing.tiny import write_tiny_llama

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PROMPT = "What is the capital of France?"


@pytest.fixture(scope="module")
def llm(tiny_engine):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24}) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(tiny_llama):
    """``logits(ids) -> [T, V]`` of transformers' model, float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()

    def logits(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].float()

    return logits


@pytest.fixture(scope="module")
def three_ends(llm, tmp_path_factory):
    """A model with three end-of-sequence ids, all of them among the first greedy tokens after PROMPT."""
    tokens = llm.generate(PROMPT, SamplingParams(max_tokens=48, **GREEDY)).outputs[0].token_ids
    ends = list(dict.fromkeys(tokens))[2:5]
    folder = write_tiny_llama(tmp_path_factory.mktemp("ends") / "model", seed=7)
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": ends}))
    with LLM(folder, kv_cache={"max_bytes": 2**24}) as opened:
        yield opened, ends


def one(llm, prompt, **params):
    return llm.generate(prompt, SamplingParams(**params)).outputs[0]


def drained(llm):
    for _ in range(500):
        stats = llm.get_stats()
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        time.sleep(0.01)
    raise AssertionError(f"still busy: {stats}")


def greedy(logits, prompt, num_tokens, edit):
    """Tokens picked one by one from transformers' logits after ``edit(logits [V], prompt, output)``."""
    output = []
    for _ in range(num_tokens):
        output.append(int(edit(logits(prompt + output)[-1].clone(), prompt, output).argmax()))
    return output


def with_penalties(repetition=1.0, presence=0.0, frequency=0.0):
    def edit(logits, prompt, output):
        for token in set(prompt) | set(output):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        return logits

    return edit


def test_b35_a_repetition_penalty_counts_the_prompt_and_the_others_the_output_alone(llm, reference):
    prompt = llm.tokenizer.encode("Paris Paris Paris")
    plain = one(llm, prompt, max_tokens=24, **GREEDY).token_ids
    found = {}
    for name, ours, theirs in (("repetition", {"repetition_penalty": 2.0}, {"repetition": 2.0}),
                               ("presence", {"presence_penalty": 1.5}, {"presence": 1.5}),
                               ("frequency", {"frequency_penalty": 0.7}, {"frequency": 0.7}),
                               ("all", {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.2},
                                {"repetition": 1.3, "presence": 0.5, "frequency": -0.2})):
        found[name] = one(llm, prompt, max_tokens=24, **GREEDY, **ours).token_ids
        assert found[name] == greedy(reference, prompt, 24, with_penalties(**theirs)), name
        assert found[name] != plain, "a penalty that changes nothing proves nothing"


def test_b35_a_penalty_of_the_prompt_changes_the_first_token_already(llm, reference):
    first = one(llm, [5, 6, 7], max_tokens=1, **GREEDY).token_ids[0]
    prompt = [5, 6, 7, first, first]
    again = one(llm, prompt, max_tokens=1, **GREEDY, repetition_penalty=100.0).token_ids
    assert again == greedy(reference, prompt, 1, with_penalties(repetition=100.0))
    assert again[0] not in prompt


def test_no_run_of_tokens_comes_twice(llm):
    prompt = llm.tokenizer.encode(PROMPT)
    for size in (1, 2, 3):
        tokens = prompt + one(llm, prompt, max_tokens=60, **GREEDY, no_repeat_ngram_size=size).token_ids
        runs = [tuple(tokens[place:place + size]) for place in range(len(prompt) - size + 1, len(tokens) - size + 1)]
        assert len(runs) == len(set(runs)), size


def test_bad_words_and_ids_never_come(llm):
    plain = one(llm, PROMPT, max_tokens=40, **GREEDY)
    banned = plain.token_ids[3]
    assert banned not in one(llm, PROMPT, max_tokens=40, **GREEDY, bad_token_ids=[banned]).token_ids
    assert " France" in plain.text
    tokens = one(llm, PROMPT, max_tokens=40, **GREEDY, bad="France")
    assert "France" not in tokens.text
    spellings = [llm.tokenizer.encode(text) for text in ("France", " France")]
    for spelling in spellings:
        assert not any(tokens.token_ids[place:place + len(spelling)] == spelling for place in range(40))


def test_allowed_ids_and_biases(llm):
    allowed = [40, 41, 42, 300]
    tokens = one(llm, PROMPT, max_tokens=30, temperature=2.0, seed=1, ignore_eos=True, allowed_token_ids=allowed)
    assert set(tokens.token_ids) <= set(allowed)
    assert len(set(tokens.token_ids)) > 1
    assert one(llm, PROMPT, max_tokens=5, **GREEDY, logit_bias={77: 100.0}).token_ids == [77] * 5
    first = one(llm, PROMPT, max_tokens=1, **GREEDY).token_ids[0]
    assert one(llm, PROMPT, max_tokens=1, **GREEDY, logit_bias={first: -100}).token_ids != [first]


def test_nothing_left_to_pick_ends_that_request_alone(llm):
    impossible = SamplingParams(max_tokens=4, allowed_token_ids=[40], bad_token_ids=[40])
    good, bad = llm.generate([PROMPT, PROMPT], [SamplingParams(max_tokens=4, **GREEDY), impossible])
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 4
    assert bad.error is not None
    assert bad.outputs[0].finish_reason == "error"


def test_a_logits_processor_sees_prompt_and_output_and_decides(llm):
    seen = []

    def only_multiples_of_seven(token_ids, logits):
        seen.append(token_ids)
        keep = torch.arange(len(logits)) % 7 == 0
        return logits.masked_fill(~keep, -torch.inf)

    prompt = llm.tokenizer.encode(PROMPT)
    tokens = one(llm, prompt, max_tokens=6, **GREEDY, logits_processor=only_multiples_of_seven).token_ids
    assert [token % 7 for token in tokens] == [0] * 6
    assert seen[:6] == [prompt + tokens[:count] for count in range(6)]


def test_a_logits_processor_that_fails_ends_its_own_request_by_name(llm):
    def broken(token_ids, logits):
        if len(token_ids) > 5:
            raise RuntimeError("no more")
        return logits

    plain = SamplingParams(max_tokens=8, **GREEDY)
    outputs = llm.generate([[5, 6, 7]] * 3, [plain, SamplingParams(max_tokens=8, **GREEDY, logits_processor=[broken]),
                                            plain])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8, 3, 8]
    assert isinstance(outputs[1].error, UserError)
    assert outputs[1].error.field == "logits_processor"
    assert "no more" in str(outputs[1].error)
    for wrong in (lambda token_ids, logits: None, lambda token_ids, logits: logits[:3],
                  lambda token_ids, logits: logits * torch.nan):
        with pytest.raises(UserError, match="logits_processor"):
            one(llm, PROMPT, max_tokens=2, logits_processor=wrong)


def test_log_probabilities_are_those_of_the_raw_logits(llm, reference):
    prompt = llm.tokenizer.encode(PROMPT)
    params = {"max_tokens": 12, "temperature": 1.5, "seed": 5, "ignore_eos": True, "presence_penalty": 2.0}
    found = one(llm, prompt, **params, logprobs=3)
    expected = reference(prompt + found.token_ids).log_softmax(-1)[len(prompt) - 1:-1]
    assert len(found.logprobs) == len(found.token_ids) == 12
    assert found.token_ids == one(llm, prompt, **params).token_ids, "asking changes nothing"
    for token, entry, row in zip(found.token_ids, found.logprobs, expected, strict=True):
        top = row.topk(3)
        assert next(iter(entry)) == token
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        assert {each for each, one_of in entry.items() if one_of.rank <= 3} == set(top.indices.tolist())
        for each, one_of in entry.items():
            assert one_of.logprob == pytest.approx(float(row[each]), abs=1e-4)
    total = sum(entry[token].logprob for token, entry in zip(found.token_ids, found.logprobs, strict=True))
    assert found.cumulative_logprob == pytest.approx(total)
    only = one(llm, prompt, **params, logprobs=0)
    assert [list(entry) for entry in only.logprobs] == [[token] for token in only.token_ids]


@pytest.mark.parametrize("chunk", [3, 512])
def test_b13_a_prompt_is_scored_without_a_token_generated(tiny_engine, reference, chunk):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24}, scheduler={"context_chunk_tokens": chunk}) as llm:
        prompt = llm.tokenizer.encode("Your answer: Yes")
        output = llm.generate(prompt, SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1))
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        expected = reference(prompt).log_softmax(-1)[:-1]
        for token, entry, row in zip(prompt[1:], output.prompt_logprobs[1:], expected, strict=True):
            assert next(iter(entry)) == token
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert int(row.argmax()) in entry
        completion = output.outputs[0]
        assert (completion.token_ids, completion.logprobs, completion.finish_reason) == ([], [], "length")
        single = llm.generate([9], SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert single.prompt_logprobs == [None]
        assert llm.generate(prompt, SamplingParams(max_tokens=2)).finished


def test_b11_a_scored_prompt_with_prefix_reuse(tiny_llama, reference):
    prompt = list(range(20, 53))
    assert len(prompt) == 33
    with LLM(tiny_llama, page_size=32, kv_cache={"max_bytes": 2**24}) as llm:
        asked = SamplingParams(max_tokens=4, prompt_logprobs=1, **GREEDY)
        first, second = llm.generate(prompt, asked), llm.generate(prompt, asked)
        assert second.num_cached_tokens == 0, "every prompt token's logits were wanted"
        after = llm.generate(prompt, SamplingParams(max_tokens=4, **GREEDY))
        assert after.num_cached_tokens == 32, "a scored prompt leaves its pages to others"
    expected = reference(prompt).log_softmax(-1)[:-1]
    for output in (first, second):
        values = [entry[token].logprob for token, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        assert values == pytest.approx([float(row[token]) for token, row in zip(prompt[1:], expected, strict=True)],
                                       abs=1e-4)
        assert output.outputs[0].token_ids == after.outputs[0].token_ids


def test_b27_no_stop_of_any_kind_before_min_tokens(three_ends):
    llm, ends = three_ends
    free = one(llm, PROMPT, max_tokens=60, temperature=0.0, stop="e")
    assert len(free.token_ids) < 30
    held = one(llm, PROMPT, max_tokens=60, min_tokens=30, temperature=0.0, stop="e")
    assert len(held.token_ids) >= 30
    assert one(llm, "test/", max_tokens=50, min_tokens=50, temperature=0.0, stop=["e", " ", "\n"]
               ).finish_reason == "length"
    biased = one(llm, PROMPT, max_tokens=20, min_tokens=4, temperature=0.0, logit_bias={ends[0]: 100.0})
    assert (len(biased.token_ids), biased.token_ids[-1]) == (5, ends[0])


def test_b28_every_end_id_is_held_off_until_min_tokens(three_ends):
    llm, ends = three_ends
    free = one(llm, PROMPT, max_tokens=64, temperature=0.0)
    assert (free.finish_reason, free.stop_reason, free.token_ids[-1] in ends) == ("stop", None, True)
    held = one(llm, PROMPT, max_tokens=200, min_tokens=32, temperature=1.0, seed=3)
    assert not set(ends) & set(held.token_ids[:32])
    assert len(held.token_ids) >= 32


def test_b8_log_probabilities_are_as_many_as_tokens_with_several_end_ids(three_ends):
    llm, ends = three_ends
    found = one(llm, PROMPT, max_tokens=64, temperature=0.0, logprobs=1)
    assert found.token_ids[-1] in ends
    assert len(found.logprobs) == len(found.token_ids)


def test_b37_ignoring_end_ids_keeps_the_callers_stops(three_ends):
    llm, ends = three_ends
    past = one(llm, PROMPT, max_tokens=48, **GREEDY)
    assert len(past.token_ids) == 48
    assert set(ends) & set(past.token_ids[:-1])
    last = past.token_ids[past.token_ids.index(next(t for t in past.token_ids if t in ends)) + 3]
    stopped = one(llm, PROMPT, max_tokens=48, **GREEDY, stop_token_ids=[last])
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", last)


def test_b34_ids_without_a_token_are_never_sampled(tmp_path):
    folder = write_tiny_llama(tmp_path / "padded", seed=2, vocab_size=640)
    with LLM(folder, kv_cache={"max_bytes": 2**24}) as llm:
        known = llm.tokenizer.vocab_size
        assert known < 600
        params = SamplingParams(max_tokens=120, temperature=100.0, seed=9, ignore_eos=True, n=4)
        tokens = [token for each in llm.generate([5, 6], params).outputs for token in each.token_ids]
        assert len(tokens) == 480
        assert max(tokens) < known
        forced = llm.generate([5, 6], SamplingParams(max_tokens=3, **GREEDY, logit_bias={known: 100.0}))
        assert max(forced.outputs[0].token_ids) < known


def test_n_sequences_differ_and_do_not_depend_on_how_many_there_are(llm):
    params = {"max_tokens": 16, "temperature": 1.0, "seed": 21, "ignore_eos": True}
    three = llm.generate(PROMPT, SamplingParams(n=3, **params))
    assert [each.index for each in three.outputs] == [0, 1, 2]
    assert len({tuple(each.token_ids) for each in three.outputs}) == 3
    assert [each.token_ids for each in llm.generate(PROMPT, SamplingParams(n=2, **params)).outputs] == [
        each.token_ids for each in three.outputs[:2]]
    assert one(llm, PROMPT, **params).token_ids == three.outputs[0].token_ids
    assert three.num_generated_tokens == 48
    same = llm.generate(PROMPT, SamplingParams(n=2, max_tokens=8, **GREEDY)).outputs
    assert same[0].token_ids == same[1].token_ids, "greedy sequences are equal"


def test_the_sequences_of_a_request_share_its_prompt(tiny_engine):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24}) as llm:
        before = llm.get_stats()["kv"]
        llm.generate(list(range(5, 205)), SamplingParams(n=8, max_tokens=2, temperature=1.0, ignore_eos=True))
        assert llm.get_stats()["kv"]["num_cached"] - before["num_cached"] < 2 * (200 // 16 + 8)


def test_best_of_returns_the_likeliest_sequences(llm):
    params = {"max_tokens": 8, "temperature": 1.5, "seed": 4, "ignore_eos": True}
    every = llm.generate(PROMPT, SamplingParams(n=5, logprobs=0, **params)).outputs
    ranked = sorted(every, key=lambda each: -each.cumulative_logprob)
    chosen = llm.generate(PROMPT, SamplingParams(n=2, best_of=5, **params))
    assert [each.token_ids for each in chosen.outputs] == [each.token_ids for each in ranked[:2]]
    assert [each.index for each in chosen.outputs] == [0, 1]
    assert chosen.num_generated_tokens == 40
    streamed = list(llm.generate_async(PROMPT, SamplingParams(n=2, best_of=5, **params)))
    assert [[each.token_ids for each in output.outputs] for output in streamed] == [
        [each.token_ids for each in chosen.outputs]]


def test_a_stream_of_several_sequences_equals_its_final_output_with_log_probabilities(llm):
    params = SamplingParams(n=3, max_tokens=40, temperature=0.9, seed=3, ignore_eos=True, stop=["e", "世"], logprobs=2,
                            min_tokens=3)
    final = llm.generate(PROMPT, params)
    joined = [["", [], []] for _ in range(3)]
    for output in llm.generate_async(PROMPT, params):
        for each in output.outputs:
            joined[each.index][0] += each.text_diff
            joined[each.index][1] += each.token_ids_diff
            joined[each.index][2] += each.logprobs_diff
    assert joined == [[each.text, each.token_ids, each.logprobs] for each in final.outputs]
    assert all(len(each.token_ids) == len(each.logprobs) for each in final.outputs)


def test_b43_an_abort_ends_every_sequence(llm):
    result = llm.generate_async(PROMPT, SamplingParams(n=3, max_tokens=400, temperature=1.0, ignore_eos=True))
    for output in result:
        if all(len(each.token_ids) >= 2 for each in output.outputs):
            break
    final = result.result(timeout=30)
    assert [each.finish_reason for each in final.outputs] == ["cancelled"] * 3
    stats = drained(llm)
    assert stats["kv"]["num_free"] + stats["kv"]["num_cached"] == stats["kv"]["num_pages"]


def test_b44_an_abort_while_log_probabilities_stream(llm):
    result = llm.generate_async(PROMPT, SamplingParams(max_tokens=400, logprobs=1, prompt_logprobs=1, **GREEDY))
    for output in result:
        if len(output.outputs[0].token_ids) >= 3:
            break
    final = result.result(timeout=30).outputs[0]
    assert final.finish_reason == "cancelled"
    assert 3 <= len(final.token_ids) == len(final.logprobs)
    assert drained(llm)["num_running"] == 0
    assert one(llm, PROMPT, max_tokens=2, logprobs=1).finish_reason is not None


def test_b32_absurd_numbers_are_refused_and_the_engine_answers_on(llm):
    for absurd in ({"logprobs": 1_000_000_000}, {"n": 5_000_000}, {"prompt_logprobs": -1}):
        with pytest.raises(UserError, match=next(iter(absurd))):
            one(llm, PROMPT, **absurd)
    with pytest.raises(UserError, match="logprobs"):
        one(llm, PROMPT, logprobs=321)
    with pytest.raises(UserError, match="prompt"):
        one(llm, [10**9], max_tokens=2)
    with pytest.raises(UserError, match="max_tokens"):
        one(llm, [1] * 600, max_tokens=2**63 - 1)
    assert one(llm, PROMPT, max_tokens=2).finish_reason is not None


def test_token_ids_of_numpy_are_one_prompt(llm):
    import numpy as np

    prompt = list(np.array([5, 6, 7], dtype=np.int32))
    assert one(llm, prompt, max_tokens=4, **GREEDY).token_ids == one(llm, [5, 6, 7], max_tokens=4, **GREEDY).token_ids


def test_b33_legal_extremes_answer(llm):
    for extreme in ({"temperature": 1e-6}, {"temperature": 100.0}, {"top_p": 1e-9}, {"top_k": 10**6}, {"min_p": 1.0},
                    {"repetition_penalty": 0.01}, {"repetition_penalty": 100.0}):
        found = one(llm, PROMPT, **{"max_tokens": 4, "temperature": 1.0, "seed": 1, "ignore_eos": True, **extreme})
        assert len(found.token_ids) == 4, extreme
    cold = one(llm, PROMPT, max_tokens=8, temperature=1e-6, seed=1, ignore_eos=True)
    assert cold.token_ids == one(llm, PROMPT, max_tokens=8, **GREEDY).token_ids


def test_a_larger_priority_goes_first(tiny_engine):
    order, ready = [], threading.Event()

    def note(name):
        def processor(token_ids, logits):
            ready.wait(30)
            order.append(name)
            return logits

        return SamplingParams(max_tokens=2, **GREEDY, logits_processor=processor)

    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24},
             scheduler={"queue_policy": "priority", "max_batch_size": 1}) as llm:
        results = [llm.generate_async([5, 6], note(name), priority=priority)
                   for name, priority in (("first", 0), ("low", -1), ("plain", None), ("high", 7))]
        ready.set()
        for result in results:
            result.result(timeout=30)
        assert [order.index(name) for name in ("high", "plain", "low")] == sorted(
            order.index(name) for name in ("high", "plain", "low"))
        batch = llm.generate([[5], [6]], SamplingParams(max_tokens=1), priority=[1, 2])
        assert all(output.finished for output in batch)
        for wrong in ([1], "12", [1, 2.0], 2**31):
            with pytest.raises(UserError, match="priority"):
                llm.generate([[5], [6]], priority=wrong)


def test_a_priority_nobody_looks_at_is_refused(llm):
    with pytest.raises(UserError, match="queue_policy"):
        llm.generate(PROMPT, priority=1)
