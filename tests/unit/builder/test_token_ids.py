"""How many ids a tokenizer knows, from its file, whatever the file holds."""

import json

import pytest

from camshaft.builder.token_ids import count_token_ids
from camshaft.config.model import GenerationDefaults

NO_ENDS = GenerationDefaults(eos_token_ids=())


def document(vocab, *added):
    return {"model": {"vocab": vocab}, "added_tokens": [{"id": index, "content": "x"} for index in added]}


def count(content, generation=NO_ENDS, vocab_size=100):
    return count_token_ids({"tokenizer.json": json.dumps(content).encode()}, generation, vocab_size)


@pytest.mark.parametrize(("content", "expected"), [
    (document({"a": 0, "b": 7}), 8), (document({"a": 0, "b": 7}, 9, 3), 10), (document([["a", 0.0]] * 4), 4),
    (document([["a", 0.0], ["b", -1.0]], 5), 6), (document({"a": 500}), 100),
])
def test_b34_ids_end_with_the_largest_of_vocabulary_and_added_tokens(content, expected):
    assert count(content) == expected


def test_b34_what_ends_a_sequence_can_be_sampled():
    assert count(document({"a": 4}), GenerationDefaults(eos_token_ids=(2, 60))) == 61


@pytest.mark.parametrize("content", [
    {}, [], 3, None, {"model": 1, "added_tokens": 2}, document({}), document({"a": "0", "b": None, "c": -4}),
    {"added_tokens": [1, {"id": "2"}, {}]},
])
def test_a_file_that_says_nothing_leaves_the_whole_vocabulary(content):
    assert count(content) is None


def test_no_file_and_a_broken_one_leave_the_whole_vocabulary():
    assert count_token_ids({}, NO_ENDS, 100) is None
    for data in (b"", b"{", b"\xff\xfe", b"[" * 100000):
        assert count_token_ids({"tokenizer.json": data}, NO_ENDS, 100) is None
