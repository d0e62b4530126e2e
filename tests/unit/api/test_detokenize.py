"""Streaming text: whole characters, exact stops, and always the same text as decoding at once."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from camshaft.api.detokenize import IncrementalDetokenizer
from camshaft.api.tokenizer import Tokenizer
from camshaft.frontend.gguf import GgufCheckpoint

SPACE = "▁"
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", SPACE + "a", "ab", "é",
         "世", "</", "think", ">", ",", "c", SPACE + SPACE]
ID = {word: index for index, word in enumerate(WORDS)}


def from_words(decoder):
    backend = Backend(models.BPE(vocab=ID, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer.from_files({"tokenizer.json": backend.to_str().encode(),
                                 "tokenizer_config.json": json.dumps({"eos_token": "</s>"}).encode()})


FALLBACK = from_words(decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)]))
METASPACE = from_words(decoders.Metaspace())


def ids_of(*words):
    return [ID[word] for word in words]


def bytes_of(text):
    return [ID[f"<0x{byte:02X}>"] for byte in text.encode()]


def stream(tokenizer, ids, **options):
    """Deltas of every push of one token, then of finish; with the number of tokens kept."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    texts, num_kept, stopped = [], 0, None
    for token in ids:
        delta = detokenizer.push([token])
        texts.append(delta.text)
        num_kept += delta.num_tokens_kept
        stopped = delta.stopped
    texts.append(detokenizer.finish().text)
    return texts, num_kept, stopped


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return Tokenizer.from_files(GgufCheckpoint(smollm2_gguf).tokenizer_files())


def in_parts(ids, cuts):
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[start:stop] for start, stop in itertools.pairwise(edges)]


def check_streaming_equals_decoding(tokenizer, ids, cuts, skip):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = ""
    for part in in_parts(ids, cuts):
        delta = detokenizer.push(part)
        assert delta.num_tokens_kept == len(part)
        assert delta.stopped is None
        text += delta.text
        assert "�" in tokenizer.decode(ids, skip_special_tokens=skip) or "�" not in delta.text
    assert text + detokenizer.finish().text == tokenizer.decode(ids, skip_special_tokens=skip)


CUTS = st.lists(st.integers(0, 100), max_size=8)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=25), cuts=CUTS, skip=st.booleans())
def test_b4_concatenated_deltas_equal_the_full_decode(smollm2, ids, cuts, skip):
    check_streaming_equals_decoding(smollm2, ids, cuts, skip)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from("aé世🙂👩‍👧 \n'<|im_end|>"), max_size=20), cuts=CUTS)
def test_b4_real_text_streams_without_replacement_signs(smollm2, text, cuts):
    check_streaming_equals_decoding(smollm2, smollm2.encode(text), cuts, skip=False)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, len(WORDS) + 2), max_size=25), cuts=CUTS, skip=st.booleans(),
       tokenizer=st.sampled_from([FALLBACK, METASPACE]))
def test_b4_byte_fallback_and_metaspace_vocabularies(tokenizer, ids, cuts, skip):
    check_streaming_equals_decoding(tokenizer, ids, cuts, skip)


def test_b3_characters_over_several_tokens_come_out_whole():
    texts, _, _ = stream(FALLBACK, [*bytes_of("你"), *bytes_of("🙂")])
    assert texts == ["", "", "你", "", "", "", "🙂", ""]


def test_b3_an_unfinished_character_becomes_a_replacement_sign_only_at_the_end():
    texts, _, _ = stream(FALLBACK, [ID["a"], *bytes_of("你")[:2]])
    assert texts == ["a", "", "", "�"]


def test_b4_text_already_sent_is_never_sent_again():
    texts, _, _ = stream(FALLBACK, [ID["a"], ID["世"], bytes_of("世")[0], ID["a"], ID["b"]])
    assert texts == ["a", "世", "", "�a", "b", ""]


def test_b1_nothing_of_a_stop_string_is_streamed_before_it_is_certain(smollm2):
    ids = smollm2.encode("ABC DEFGHIJ KLM")
    detokenizer = IncrementalDetokenizer(smollm2, stop=("DEFGHIJ",))
    seen = ""
    num_kept = 0
    for token in ids:
        delta = detokenizer.push([token])
        seen, num_kept = seen + delta.text, num_kept + delta.num_tokens_kept
        assert "D" not in seen
        if delta.stopped:
            break
    assert (seen, delta.stopped) == ("ABC ", "DEFGHIJ")
    assert "DEFGHIJ" in smollm2.decode(ids[:num_kept])
    assert "DEFGHIJ" not in smollm2.decode(ids[:num_kept - 1])
    assert detokenizer.push(ids).num_tokens_kept == 0
    assert detokenizer.finish().text == ""


def test_b2_only_a_true_prefix_of_a_stop_is_held_back():
    texts, _, _ = stream(FALLBACK, ids_of("</", "think", ">", "b", "a"), stop=("b,c",))
    assert texts == ["</", "think", ">", "", "ba", ""]


def test_a_held_prefix_comes_out_when_the_output_ends():
    texts, num_kept, stopped = stream(FALLBACK, ids_of("a", "b", ","), stop=("b,c",))
    assert (texts, num_kept, stopped) == (["a", "", "", "b,"], 3, None)


def test_the_stop_is_cut_or_kept_and_later_tokens_do_not_count():
    ids = ids_of("a", "b", "ab", "c")
    assert stream(FALLBACK, ids, stop=("ba",)) == (["a", "", "", "", ""], 3, "ba")
    assert stream(FALLBACK, ids, stop=("ba",), include_stop=True) == (["a", "", "ba", "", ""], 3, "ba")
    delta = IncrementalDetokenizer(FALLBACK, stop=("ba",)).push(ids)
    assert (delta.text, delta.stopped, delta.num_tokens_kept) == ("a", "ba", 3)


def test_the_stop_completed_first_wins_and_of_several_the_longest():
    assert stream(FALLBACK, ids_of("a", "b", "c"), stop=("abc", "b")) == (["", "a", "", ""], 2, "b")
    assert stream(FALLBACK, ids_of("a", "b"), stop=("b", "ab")) == (["", "", ""], 2, "ab")


def test_overlapping_starts_are_followed():
    texts, num_kept, stopped = stream(FALLBACK, ids_of("a", "a", "b", "a", "a", "b", "c"), stop=("aabaac", "abc"))
    assert ("".join(texts), num_kept, stopped) == ("aaba", 7, "abc")


@pytest.mark.parametrize("min_tokens", range(6))
def test_b27_no_stop_before_min_tokens(min_tokens):
    """"," comes as tokens 2 and 4; a stop needs at least ``min_tokens`` tokens."""
    texts, num_kept, stopped = stream(FALLBACK, ids_of("a", ",", "b", ",", "c"), stop=(",",), min_tokens=min_tokens)
    expected = {0: ("a", 2), 1: ("a", 2), 2: ("a", 2), 3: ("a,b", 4), 4: ("a,b", 4)}.get(min_tokens, ("a,b,c", 5))
    assert ("".join(texts), num_kept) == expected
    assert stopped == ("," if min_tokens < 5 else None)


def test_b27_a_passed_over_stop_is_not_held_back():
    texts, _, _ = stream(FALLBACK, ids_of("a", ",", "b"), stop=(",",), min_tokens=10)
    assert texts == ["a", ",", "b", ""]


def test_skipped_special_tokens_count_and_leave_no_text():
    ids = ids_of("<s>", "a", "</s>", "b")
    assert stream(FALLBACK, ids) == (["", "a", "", "b", ""], 4, None)
    assert stream(FALLBACK, ids, skip_special_tokens=False)[0] == ["<s>", "a", "</s>", "b", ""]
    assert stream(FALLBACK, ids, stop=("ab",)) == (["", "", "", "", ""], 4, "ab")
    assert stream(FALLBACK, ids, stop=("</s>",), skip_special_tokens=False) == (["<s>", "a", "", "", ""], 3, "</s>")


def first_stop(text, stops):
    """Reference: end and text of the stop that is completed first, the longest of those."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


@settings(max_examples=400, deadline=None)
@given(words=st.lists(st.sampled_from(["a", "b", "ab", ",", "c", "é", "</"]), max_size=14),
       stops=st.lists(st.text("abc,é<", min_size=1, max_size=4), min_size=1, max_size=3), cuts=CUTS,
       include=st.booleans())
def test_stops_equal_a_search_of_the_whole_text(words, stops, cuts, include):
    ids, text = ids_of(*words), "".join(words)
    detokenizer = IncrementalDetokenizer(FALLBACK, stop=tuple(stops), include_stop=include)
    shown, num_kept, stopped = "", 0, None
    for part in in_parts(ids, cuts):
        delta = detokenizer.push(part)
        shown, num_kept, stopped = shown + delta.text, num_kept + delta.num_tokens_kept, delta.stopped
        rest = text[len(shown):]
        assert stopped or text.startswith(shown)
        assert stopped or len("".join(words[:num_kept])) - len(shown) < max(map(len, stops)) or not rest
    shown += detokenizer.finish().text
    found = first_stop(text, stops)
    if found is None:
        assert (shown, num_kept, stopped) == (text, len(ids), None)
        return
    end, stop = found
    assert (shown, stopped) == (text[:end] if include else text[:end - len(stop)], stop)
    assert len("".join(words[:num_kept - 1])) < end <= len("".join(words[:num_kept]))
