"""The front and what it makes of increments: several sequences, log-probabilities, the choice among best_of, ends."""

import threading
import time

import pytest

from camshaft.api.front import Front
from camshaft.api.resolve import RequestResolver
from camshaft.api.tokenizer import Tokenizer
from camshaft.config.model import GenerationDefaults
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import InternalError, QueueFullError, UserError
from camshaft.executor.messages import Increment, PrefixScope, TokenLogprob
from camshaft.testing.tiny import tiny_tokenizer


def scored(token, logprob, top=()):
    """One token's log-probability as the executor tells it; ``top`` is (id, log-probability) pairs, likeliest first."""
    ids = [each for each, _ in top]
    return TokenLogprob(token_id=token, logprob=logprob, rank=ids.index(token) + 1 if token in ids else 99,
                        top_ids=tuple(ids), top_logprobs=tuple(value for _, value in top))


class Desk:
    """A front with a hand-played executor behind it."""

    def __init__(self, tokenizer):
        self.requests, self.aborted, self.room = [], [], 100
        self.tokenizer = tokenizer
        self.resolver = RequestResolver(tokenizer, GenerationDefaults(), vocab_size=320,
                                        scope=PrefixScope(model="test"))
        self.front = Front(tokenizer)
        self.front.start(self.accept, self.aborted.append)

    def accept(self, *requests):
        if len(self.requests) + len(requests) > self.room:
            raise QueueFullError("full")
        self.requests += requests

    def submit(self, prompt=(5, 6), **params):
        return self.front.submit(self.resolver.prepare(list(prompt) if isinstance(prompt, tuple) else prompt,
                                                       SamplingParams(**params), where="prompt"))

    def say(self, which, *tokens, **fields):
        """An increment of the request that came ``which``-th."""
        self.front.sink([Increment(id=self.requests[which].id, token_ids=tokens, **fields)])

    def settle(self):
        """Wait until all that was said is applied."""
        self.front.stop()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_tokenizer(320), {})


@pytest.fixture
def desk(tokenizer):
    opened = Desk(tokenizer)
    yield opened
    opened.front.stop()


def test_each_sequence_is_a_request_with_the_same_seed_and_a_choice_of_its_own(desk):
    desk.submit(n=3, prompt_logprobs=1, temperature=1.0)
    samplings = [request.sampling for request in desk.requests]
    assert [sampling.choice for sampling in samplings] == [0, 1, 2]
    assert len({sampling.seed for sampling in samplings}) == 1
    assert len({request.id for request in desk.requests}) == 3
    assert [sampling.num_prompt_logprobs for sampling in samplings] == [1, None, None], "the prompt is scored once"


def test_sequences_stream_beside_each_other_and_the_request_ends_with_the_last(desk, tokenizer):
    result = desk.submit(n=2, max_tokens=8)
    word, other = tokenizer.encode("valve"), tokenizer.encode("spring")
    seen = {0: ["", []], 1: ["", []]}
    desk.say(0, *word, num_cached_tokens=1)
    desk.say(1, *other, num_cached_tokens=2, finish_reason="length")
    desk.say(0, *word, finish_reason="length")
    for output in result:
        for completion in output.outputs:
            seen[completion.index][0] += completion.text_diff
            seen[completion.index][1] += completion.token_ids_diff
    final = result.result(timeout=5)
    assert seen == {0: ["valvevalve", word * 2], 1: ["spring", other]}
    assert [(each.text, each.token_ids) for each in final.outputs] == [tuple(each) for each in seen.values()]
    assert final.num_generated_tokens == 2 * len(word) + len(other)
    assert final.num_cached_tokens == 1
    assert desk.aborted == []


def test_a_stop_string_ends_its_own_sequence_alone(desk, tokenizer):
    result = desk.submit(n=2, stop="lv")
    word = tokenizer.encode("valve")
    desk.say(1, *word)
    desk.say(0, *tokenizer.encode("spring"))
    desk.say(1, *word)
    desk.say(0, finish_reason="length")
    final = result.result(timeout=5)
    assert [each.text for each in final.outputs] == ["spring", "va"]
    assert [each.finish_reason for each in final.outputs] == ["length", "stop"]
    assert desk.aborted == [desk.requests[1].id]


def test_b43_an_abort_reaches_every_sequence_that_runs(desk):
    result = desk.submit(n=3)
    result.abort()
    assert desk.aborted == [request.id for request in desk.requests]
    for which in range(3):
        desk.say(which, finish_reason="cancelled")
    assert [each.finish_reason for each in result.result(timeout=5).outputs] == ["cancelled"] * 3


def test_when_one_sequence_fails_the_request_fails_and_the_others_are_aborted(desk):
    result = desk.submit(n=3)
    desk.say(2, 7, finish_reason="length")
    desk.say(1, error=UserError("logits_processor", "boom", "one that returns logits"))
    desk.say(0, 7)
    with pytest.raises(UserError, match="logits_processor"):
        result.result(timeout=5)
    desk.settle()
    assert desk.aborted == [desk.requests[0].id]
    assert [each.finish_reason for each in result.snapshot().outputs] == ["error", "error", "length"]
    assert result.snapshot().outputs[0].token_ids == []


def test_a_request_is_submitted_whole_or_not_at_all(desk):
    desk.room = 2
    with pytest.raises(QueueFullError):
        desk.submit(n=3)
    assert desk.requests == []
    later = desk.submit(n=2)
    for which in range(2):
        desk.say(which, 7, finish_reason="length")
    assert [each.token_ids for each in later.result(timeout=5).outputs] == [[7], [7]]


def test_best_of_gives_the_likeliest_sequences_at_the_end_and_only_then(desk):
    result = desk.submit(n=2, best_of=3, temperature=1.0)
    assert [request.sampling.num_logprobs for request in desk.requests] == [0, 0, 0]
    outputs = []
    reader = threading.Thread(target=lambda: outputs.extend(result))
    reader.start()
    desk.say(0, 10, logprobs=(scored(10, -3.0),))
    desk.say(1, 11, 12, logprobs=(scored(11, -0.5), scored(12, -0.25)), finish_reason="length")
    desk.say(2, 13, logprobs=(scored(13, -1.0),), finish_reason="length")
    while result.snapshot().num_generated_tokens < 4:
        time.sleep(0.001)
    time.sleep(0.02)
    assert outputs == [], "until the end nobody knows which sequences are returned"
    desk.say(0, 14, logprobs=(scored(14, -0.5),), finish_reason="length")
    reader.join(timeout=5)
    assert len(outputs) == 1
    found = outputs[0].outputs
    assert [(each.index, each.token_ids, each.cumulative_logprob) for each in found] == [
        (0, [11, 12], -0.75), (1, [13], -1.0)]
    assert [each.token_ids_diff for each in found] == [[11, 12], [13]]
    assert [each.logprobs for each in found] == [None, None], "nobody asked for them"
    assert outputs[0].num_generated_tokens == 5


def test_an_aborted_best_of_still_returns_n_sequences(desk):
    result = desk.submit(n=1, best_of=2, temperature=1.0)
    desk.say(0, 10, logprobs=(scored(10, -3.0),))
    desk.say(1, 11, logprobs=(scored(11, -1.0),))
    desk.say(0, finish_reason="cancelled")
    desk.say(1, finish_reason="cancelled")
    final = result.result(timeout=5)
    assert [(each.token_ids, each.finish_reason) for each in final.outputs] == [([11], "cancelled")]


def test_best_of_needs_something_to_choose_among(desk):
    for params in ({"temperature": 0.0}, {}):
        with pytest.raises(UserError, match="greedy") as refused:
            desk.submit(n=1, best_of=2, **params)
        assert refused.value.field == "best_of"
    desk.submit(n=2, best_of=2)
    assert len(desk.requests) == 2


def test_b8_log_probabilities_are_as_many_as_tokens_also_where_a_stop_cuts(desk, tokenizer):
    result = desk.submit(logprobs=1, stop="lv", stop_token_ids=[300])
    word = tokenizer.encode("valve") + tokenizer.encode(" and more")
    desk.say(0, *word, logprobs=tuple(scored(token, -1.0, [(token, -1.0)]) for token in word))
    final = result.result(timeout=5).outputs[0]
    assert (final.text, final.stop_reason) == ("va", "lv")
    assert 0 < len(final.token_ids) < len(word)
    assert [next(iter(entry)) for entry in final.logprobs] == final.token_ids
    assert final.cumulative_logprob == -float(len(final.token_ids))
    ended = desk.submit(logprobs=0, stop_token_ids=[300])
    desk.say(1, 9, 300, logprobs=(scored(9, -1.0), scored(300, -2.0)), finish_reason="stop", stop_token_id=300)
    final = ended.result(timeout=5).outputs[0]
    assert (len(final.token_ids), len(final.logprobs), final.cumulative_logprob) == (2, 2, -3.0)


def test_b10_a_token_is_shown_as_its_own_bytes_alone(desk, tokenizer):
    tokens = tokenizer.encode("\n\n1. 世x")
    pieces = [tokenizer.token_bytes(token) for token in tokens]
    assert any(b"\xe4" in piece or b"\x96" in piece for piece in pieces)
    result = desk.submit(prompt="\n\n1. 世x", max_tokens=4, prompt_logprobs=0, logprobs=0)
    desk.say(0, *tokens, logprobs=tuple(scored(token, -1.0) for token in tokens), finish_reason="length",
             prompt_logprobs=tuple(scored(token, -1.0) for token in tokens[1:]))
    final = result.result(timeout=5)
    expected = [piece.decode(errors="replace") for piece in pieces]
    assert [entry[token].decoded_token for token, entry in zip(tokens, final.outputs[0].logprobs, strict=True)
            ] == expected
    assert final.prompt_logprobs[0] is None
    assert [entry[token].decoded_token for token, entry in zip(tokens[1:], final.prompt_logprobs[1:], strict=True)
            ] == expected[1:]
    assert "�" in expected
    assert final.outputs[0].text == "\n\n1. 世x"


def test_an_entry_holds_the_token_itself_first_then_the_likeliest_in_order(desk):
    result = desk.submit(logprobs=2)
    desk.say(0, 10, 11, finish_reason="length", logprobs=(
        scored(10, -5.0, [(20, -0.1), (21, -2.0)]), scored(11, -1.0, [(22, -0.5), (11, -1.0)])))
    first, second = result.result(timeout=5).outputs[0].logprobs
    assert [(token, each.logprob, each.rank) for token, each in first.items()] == [
        (10, -5.0, 99), (20, -0.1, 1), (21, -2.0, 2)]
    assert [(token, each.rank) for token, each in second.items()] == [(11, 2), (22, 1)]


def test_without_text_tokens_have_none_either(desk):
    result = desk.submit(logprobs=0, detokenize=False)
    desk.say(0, 10, finish_reason="length", logprobs=(scored(10, -5.0),))
    completion = result.result(timeout=5).outputs[0]
    assert completion.logprobs[0][10].decoded_token is None
    assert completion.text == ""


def test_b44_an_abort_while_log_probabilities_stream_keeps_what_came(desk):
    result = desk.submit(n=2, logprobs=1)
    desk.say(0, 10, logprobs=(scored(10, -1.0, [(10, -1.0)]),))
    result.abort()
    desk.say(0, finish_reason="cancelled")
    desk.say(1, finish_reason="cancelled")
    final = result.result(timeout=5)
    assert [(each.token_ids, len(each.logprobs), each.finish_reason) for each in final.outputs] == [
        ([10], 1, "cancelled"), ([], 0, "cancelled")]


def test_tokens_without_the_log_probabilities_asked_for_are_our_own_fault_and_end_that_request(desk):
    result, beside = desk.submit(logprobs=1), desk.submit()
    desk.say(0, 10)
    desk.say(1, 10, finish_reason="length")
    with pytest.raises(InternalError, match="0 log-probabilities came with 1 tokens"):
        result.result(timeout=5)
    assert beside.result(timeout=5).outputs[0].token_ids == [10]
    desk.settle()
    assert desk.aborted == [desk.requests[0].id]


def test_a_prompt_is_scored_while_it_is_computed_and_without_a_token_generated(desk):
    result = desk.submit(prompt=(5, 6, 7), max_tokens=0, prompt_logprobs=1)
    desk.say(0, prompt_logprobs=(scored(6, -1.0, [(9, -0.5)]),))
    desk.say(0, prompt_logprobs=(scored(7, -2.0, [(7, -2.0)]),), finish_reason="length")
    final = result.result(timeout=5)
    assert final.prompt_logprobs[0] is None
    assert [list(entry) for entry in final.prompt_logprobs[1:]] == [[6, 9], [7]]
    assert (final.outputs[0].token_ids, final.outputs[0].text, final.outputs[0].finish_reason) == ([], "", "length")


def test_shutdown_fails_a_request_of_several_sequences_once(desk):
    result = desk.submit(n=2)
    desk.settle()
    with pytest.raises(InternalError, match="shut down"):
        result.result(timeout=5)
