"""What a request asks of the engine: bad words as tokens, edits as arrays, priorities, bounds of the model."""

import json

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from camshaft.api.resolve import RequestResolver
from camshaft.api.tokenizer import Tokenizer
from camshaft.config.model import GenerationDefaults
from camshaft.config.sampling import SamplingParams
from camshaft.core.errors import UserError
from camshaft.executor.messages import PrefixScope
from camshaft.testing.tiny import tiny_tokenizer

SCOPE = PrefixScope(model="test")


def resolver(tokenizer, vocab_size=320, **options):
    return RequestResolver(tokenizer, GenerationDefaults(), vocab_size=vocab_size, scope=SCOPE, **options)


def sampling(tokenizer, **params):
    return resolver(tokenizer).prepare([1, 2], SamplingParams(**params), where="prompt").sampling


def words(tokenizer, **params):
    return {tuple(word.tolist()) for word in sampling(tokenizer, **params).bad_words}


@pytest.fixture(scope="module")
def byte_level():
    return Tokenizer(tiny_tokenizer(320), {})


@pytest.fixture(scope="module")
def metaspace():
    """A vocabulary whose tokenizer writes a space in front of every text."""
    vocab = {word: index for index, word in enumerate(["<unk>", "▁", "v", "a", "l", "▁val", "val", "\n"])}
    backend = Backend(models.WordLevel(vocab=vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split("\n", "isolated")])
    backend.decoder = decoders.Metaspace()
    return Tokenizer.from_files({"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(
        {}).encode()})


@pytest.mark.parametrize("word", ["valve", " valve"])
def test_a_bad_word_is_banned_with_and_without_a_space_in_front(byte_level, word):
    found = words(byte_level, bad=word)
    assert found == {tuple(byte_level.encode("valve")), tuple(byte_level.encode(" valve"))}
    assert len(found) == 2


def test_a_bad_word_is_banned_inside_a_text_where_the_tokenizer_puts_a_space_before_every_text(metaspace):
    assert metaspace.encode("val") == [5], "alone, the word has a space"
    assert {(5,), (6,)} <= words(metaspace, bad="val")


def test_bad_words_and_bad_ids_are_joined_without_doubles(byte_level):
    assert words(byte_level, bad_token_ids=[7, 9, 7]) == {(7,), (9,)}
    both = words(byte_level, bad=["valve", "valve"], bad_token_ids=[7])
    assert both == words(byte_level, bad="valve") | {(7,)}
    assert sampling(byte_level).bad_words == ()


def test_a_bad_word_of_spaces_is_itself(byte_level):
    assert tuple(byte_level.encode(" ")) in words(byte_level, bad=" ")


def test_a_word_needs_a_tokenizer_that_knows_it(byte_level):
    with pytest.raises(UserError, match="no tokenizer") as refused:
        sampling(None, bad="x", detokenize=False)
    assert refused.value.field == "bad"
    with pytest.raises(UserError, match="tokens the model knows"):
        resolver(byte_level, vocab_size=4).prepare([1], SamplingParams(bad="x"), where="prompt")


def test_edits_become_arrays(byte_level):
    def keep(token_ids, logits):
        return logits

    found = sampling(byte_level, logit_bias={9: 2, 3: -100}, allowed_token_ids=[9, 3, 9], presence_penalty=0.5,
                     frequency_penalty=-1, logits_processor=keep, logprobs=3, prompt_logprobs=2)
    assert dict(zip(found.bias_token_ids.tolist(), found.bias_values.tolist(), strict=True)) == {9: 2.0, 3: -100.0}
    assert found.allowed_token_ids.tolist() == [3, 9]
    assert (found.presence_penalty, found.frequency_penalty, found.processors) == (0.5, -1, (keep,))
    assert (found.num_logprobs, found.num_prompt_logprobs) == (3, 2)
    assert found.needs_history


def test_a_plain_request_needs_no_history(byte_level):
    found = sampling(byte_level, temperature=0.5, logit_bias={3: 1.0}, allowed_token_ids=[1], logprobs=1, min_tokens=3)
    assert not found.needs_history
    assert sampling(byte_level).num_logprobs is None


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_b32_no_more_log_probabilities_than_there_are_tokens(byte_level, field):
    with pytest.raises(UserError, match="at most the vocabulary's 320") as refused:
        sampling(byte_level, **{field: 321})
    assert refused.value.field == field
    sampling(byte_level, **{field: 320})


def test_a_priority_counts_only_where_the_queue_looks_at_it(byte_level):
    with pytest.raises(UserError, match="queue_policy") as refused:
        resolver(byte_level).prepare([1], SamplingParams(), where="prompt", priority=0)
    assert refused.value.field == "priority"
    ordered = resolver(byte_level, reads_priority=True)
    assert ordered.prepare([1], SamplingParams(), where="prompt", priority=-3).priority == -3
    assert ordered.prepare([1], SamplingParams(), where="prompt").priority == 0
    for wrong in (2**31, 1.0, True, "1"):
        with pytest.raises(UserError) as refused:
            ordered.prepare([1], SamplingParams(), where="prompt", priority=wrong)
        assert refused.value.field == "priority"
