"""The same tokens and log-probabilities for every family and scheduling policy, where pages are few."""

import numpy as np
import pytest

from camshaft import LLM, SamplingParams
from camshaft.testing.tiny import TINY_FAMILIES, write_tiny

PAGE_BYTES_A_LAYER = 2 * 2 * 16 * 16 * 4
NUM_LAYERS = {"llama": 2, "qwen2": 2, "qwen3": 2, "gemma3": 3}
POLICIES = [
    pytest.param({"capacity_policy": capacity, "queue_policy": queue, "context_chunking_policy": chunking,
                  "overlap_depth": int(queue == "priority")}, id=f"{capacity}-{queue}-{chunking}")
    for capacity in ("guaranteed_no_evict", "max_utilization", "static_batch") for queue in ("fcfs", "priority")
    for chunking in ("first_come_first_served", "equal_progress")]

GREEDY = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}
PARAMS = [
    SamplingParams(**GREEDY), SamplingParams(**GREEDY, logprobs=2, prompt_logprobs=1),
    SamplingParams(**GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(**GREEDY, n=2, no_repeat_ngram_size=2, logprobs=0),
    SamplingParams(max_tokens=50, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True, n=3, repetition_penalty=1.1),
    SamplingParams(**GREEDY, bad_token_ids=[40, 41], logit_bias={50: 3.0}, min_tokens=30, stop="e", logprobs=1),
    SamplingParams(max_tokens=0, prompt_logprobs=1),
]
LENGTHS = (3, 12, 20, 9, 5, 14, 38)


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def family(request, tmp_path_factory):
    """Name and engine of a tiny model, its prompts, and what each gives when it runs alone."""
    from camshaft.builder.build import build
    from camshaft.config.build import BuildConfig

    folder = tmp_path_factory.mktemp(request.param)
    engine = folder / "engine"
    build(write_tiny(folder / "model", request.param, seed=7), BuildConfig(max_batch_size=16, max_num_tokens=64),
          output=engine)
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 300, size=18).tolist()
    prompts = [(shared if length > 18 else []) + rng.integers(3, 300, size=length - 18 * (length > 18)).tolist()
               for length in LENGTHS]
    with LLM(engine, kv_cache={"max_bytes": 2**23, "enable_block_reuse": False}) as llm:
        alone = [llm.generate(prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
    varied = [len(set(each.token_ids)) >= 8 for output in alone[:-1] for each in output.outputs]
    assert sum(varied) >= len(varied) - 1, "a model that repeats itself proves nothing"
    return request.param, engine, prompts, alone


def scores(entries):
    """Token ids, ranks and values of log-probability entries, apart."""
    found = [entry for entry in entries or () if entry is not None]
    return ([list(entry) for entry in found], [[each.rank for each in entry.values()] for entry in found],
            [each.logprob for entry in found for each in entry.values()])


def check_same(found, expected):
    assert [each.token_ids for each in found.outputs] == [each.token_ids for each in expected.outputs]
    assert [each.text for each in found.outputs] == [each.text for each in expected.outputs]
    assert [each.finish_reason for each in found.outputs] == [each.finish_reason for each in expected.outputs]
    pairs = [(each.logprobs, other.logprobs) for each, other in zip(found.outputs, expected.outputs, strict=True)]
    for ours, theirs in [*pairs, (found.prompt_logprobs, expected.prompt_logprobs)]:
        assert (ours is None) == (theirs is None)
        assert scores(ours)[:2] == scores(theirs)[:2]
        assert scores(ours)[2] == pytest.approx(scores(theirs)[2], abs=1e-4)


@pytest.mark.parametrize("policies", POLICIES)
def test_nothing_a_policy_does_changes_an_answer(family, policies):
    name, engine, prompts, alone = family
    priority = None if policies["queue_policy"] == "fcfs" else [0, 3, -1, 3, 2, 0, 1]
    # the longest request needs five pages of these, and one is spare
    with LLM(engine, kv_cache={"max_bytes": PAGE_BYTES_A_LAYER * NUM_LAYERS[name] * 7}, scheduler=policies) as llm:
        outputs = llm.generate(prompts, PARAMS, priority=priority)
        stats = llm.get_stats()
    for found, expected in zip(outputs, alone, strict=True):
        check_same(found, expected)
    preempted = stats["counters"]["num_preemptions"]
    if policies["capacity_policy"] == "max_utilization":
        assert preempted >= 3, "sequences were to lose their pages and be run again"
    else:
        assert preempted == 0


def test_b48_any_number_of_requests_at_once_gives_what_each_gives_alone(family):
    _, engine, prompts, alone = family
    with LLM(engine, kv_cache={"max_bytes": 2**23}, scheduler={"max_batch_size": 4}) as llm:
        for count in range(1, len(prompts) + 1):
            for found, expected in zip(llm.generate(prompts[:count], PARAMS[:count]), alone[:count], strict=True):
                check_same(found, expected)
