"""The same greedy tokens however a request is run: alone, batched, chunked, prefix-cached, overlapped, streamed."""

import numpy as np
import pytest

from camshaft import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts():
    """Sixteen prompts of 1 to 200 tokens, half of them sharing a 40-token prefix."""
    rng = np.random.default_rng(11)
    lengths = [1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 150, 200]
    drawn = [rng.integers(3, 300, size=length).tolist() for length in lengths]
    shared = rng.integers(3, 300, size=40).tolist()
    return [shared + tokens[:-40] if len(tokens) > 40 and i % 2 else tokens for i, tokens in enumerate(drawn)]


@pytest.fixture(scope="module")
def expected(tiny_engine, prompts):
    """Each prompt run alone: one request at a time, no reuse, whole prompt in one step."""
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24, "enable_block_reuse": False},
             scheduler={"overlap_depth": 0}) as llm:
        tokens = [llm.generate(prompt, GREEDY).outputs[0].token_ids for prompt in prompts]
    assert min(len(set(each)) for each in tokens) >= 8, "a model that repeats itself proves nothing"
    return tokens


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("overlap_depth", [0, 1])
@pytest.mark.parametrize("reuse", [False, True], ids=["no-reuse", "reuse"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 512])
def test_greedy_tokens_do_not_depend_on_how_they_run(tiny_engine, prompts, expected, chunk, reuse, overlap_depth):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24, "enable_block_reuse": reuse},
             scheduler={"context_chunk_tokens": chunk, "overlap_depth": overlap_depth}) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected, "a mixed batch of 16"
        again = llm.generate(prompts, GREEDY)
        assert tokens_of(again) == expected, "the same batch once more"
        cached = sum(output.num_cached_tokens for output in again)
        assert (cached > 0) == reuse
        streams = [llm.generate_async(prompt, GREEDY) for prompt in prompts[-3:]]
        streamed = [[token for output in stream for token in output.outputs[0].token_ids_diff] for stream in streams]
        assert streamed == expected[-3:], "streamed"


def test_a_pool_too_small_for_all_only_makes_them_wait(tiny_engine, prompts, expected):
    with LLM(tiny_engine, kv_cache={"max_bytes": 2 * 2 * 2 * 16 * 16 * 4 * 20}) as llm:
        assert tokens_of(llm.generate(prompts, GREEDY)) == expected
        stats = llm.get_stats()
        assert stats["num_running"] == 0
        assert stats["kv"]["num_free"] + stats["kv"]["num_cached"] == stats["kv"]["num_pages"]


def test_a_seed_fixes_sampled_tokens_whatever_runs_beside_them(tiny_engine, prompts):
    sampled = SamplingParams(max_tokens=24, temperature=0.9, top_k=50, top_p=0.95, seed=1234, ignore_eos=True)
    with LLM(tiny_engine, kv_cache={"max_bytes": 2**24}) as llm:
        alone = llm.generate(prompts[5], sampled).outputs[0].token_ids
        beside = tokens_of(llm.generate(prompts, sampled))[5]
        other = llm.generate(prompts[5], SamplingParams(max_tokens=24, temperature=0.9, seed=99, ignore_eos=True))
    assert alone == beside
    assert alone != other.outputs[0].token_ids
