"""Text to ids and back, special tokens, and the bytes of a token."""

import json
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from camshaft.api.tokenizer import Tokenizer
from camshaft.core.errors import CheckpointError, UserError
from camshaft.frontend.gguf import GgufCheckpoint
from camshaft.testing.tiny import tiny_tokenizer

SPACE = "▁"


def files_of(backend, **config):
    return {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


def byte_level(**config):
    return Tokenizer.from_files(files_of(tiny_tokenizer(320), **config))


def byte_fallback(**config):
    """A SentencePiece-like vocabulary: control tokens, 256 byte tokens, a few words."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, "a", "b", SPACE + "a", "é"]
    backend = Backend(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[(SPACE, "a")],
                                 unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer.from_files(files_of(backend, bos_token="<s>", eos_token="</s>", **config))


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return Tokenizer.from_files(GgufCheckpoint(smollm2_gguf).tokenizer_files())


@pytest.fixture(scope="module")
def known_bytes(smollm2):
    """The vocabulary itself lacks some bytes (control signs, starts of unused planes): those cannot come back."""
    spelled = {smollm2.token_bytes(index) for index in range(smollm2.vocab_size)}
    return {byte for byte in range(256) if bytes([byte]) in spelled}


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_b7_decode_of_encode_is_the_text(smollm2, known_bytes, text):
    assert len(known_bytes) > 200
    text = "".join(char for char in text if known_bytes.issuperset(char.encode()))
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["<|user|>This is a test<|end|>\n<|assistant|>", "don't I'm", "a<|im_end|> b",
                                  "hello . world !", "I’m “here”"])
def test_b7_nothing_is_added_or_dropped_around_special_tokens_and_apostrophes(smollm2, text):
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=30), skip=st.booleans())
def test_byte_level_decode_equals_the_library(smollm2_gguf, smollm2, ids, skip):
    backend = smollm2._backend
    assert smollm2.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.sampled_from([0, 1, 2, 259, 260, 261, 262, 263]), max_size=12), skip=st.booleans())
def test_byte_fallback_decode_equals_the_library(ids, skip):
    tokenizer = byte_fallback()
    assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer._backend.decode(ids, skip_special_tokens=skip)


def test_byte_fallback_characters():
    tokenizer = byte_fallback()
    ids = tokenizer.encode("a 🙂b", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a 🙂b"
    assert [tokenizer.token_bytes(index) for index in ids] == [b" a", b" ", *(bytes([b]) for b in "🙂".encode()), b"b"]
    assert tokenizer.decode(ids[:4]) == "a �"


def test_metaspace_decoder():
    words = [SPACE + "hi", SPACE, "x", SPACE + SPACE]
    backend = Backend(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer.from_files(files_of(backend))
    for ids in ([0], [0, 0], [1, 0], [2, 0], [3, 2], []):
        assert tokenizer.decode(ids) == backend.decode(ids)
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    assert Tokenizer.from_files(files_of(backend)).decode([0, 0]) == " hi hi"


def test_no_decoder_joins_words_with_spaces():
    backend = Backend(models.WordLevel({"hello": 0, "world": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer.from_files(files_of(backend))
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_an_unknown_decoder_is_refused_by_name():
    backend = Backend(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"decoder='WordPiece'.*skip_tokenizer_init"):
        Tokenizer.from_files(files_of(backend))


def test_special_tokens():
    tokenizer = byte_fallback()
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 264
    assert tokenizer.id_to_token(259) == SPACE
    assert tokenizer.decode([1, 262, 2]) == "a"
    assert tokenizer.decode([1, 262, 2], skip_special_tokens=False) == "<s> a</s>"


def test_a_special_token_only_the_settings_name_is_special_too():
    """Where a plain word of the vocabulary is named as the end, it is matched whole and skipped like the others."""
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1, "<end>": 2}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer.from_files(files_of(backend, eos_token={"content": "<end>", "lstrip": False}))
    assert tokenizer.special_ids == {2}
    assert tokenizer.encode("ab<end>") == [0, 1, 2]
    assert tokenizer.decode([0, 2, 1]) == "ab"


def test_flags_of_a_special_token_survive_its_being_named():
    backend = tiny_tokenizer(300)
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    tokenizer = Tokenizer.from_files(files_of(backend, mask_token="<mask>"))
    assert tokenizer.encode("a   <mask>")[-1] == backend.token_to_id("<mask>")
    assert len(tokenizer.encode("a   <mask>")) == 2


@pytest.mark.parametrize(("config", "expected"), [
    ({}, ["<s>", 1]), ({"add_bos_token": False}, ["", 0]), ({"add_bos_token": True}, ["<s>", 1])])
def test_explicit_flags_replace_the_post_processor(config, expected):
    backend = tiny_tokenizer(300)
    backend.add_special_tokens(["<s>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = Tokenizer.from_files(files_of(backend, bos_token="<s>", **config))
    ids = tokenizer.encode("hi")
    assert ids.count(bos) == expected[1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected[0] + "hi"
    assert tokenizer.encode("hi", add_special_tokens=False).count(bos) == 0


def test_end_of_sequence_flag():
    tokenizer = byte_fallback(add_eos_token=True, add_bos_token=True)
    assert tokenizer.encode("a") == [1, 262, 2]


def test_special_tokens_may_hold_any_sign():
    backend = tiny_tokenizer(300)
    backend.add_special_tokens(["<a:1> $A"])
    tokenizer = Tokenizer.from_files(files_of(backend, bos_token="<a:1> $A", add_bos_token=True))
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokenizer.encode("hi"), skip_special_tokens=False) == "<a:1> $Ahi"


def test_training_settings_of_the_file_do_not_touch_prompts():
    backend = tiny_tokenizer(300)
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ids = Tokenizer.from_files(files_of(backend)).encode("one two three four five six")
    assert 3 < len(ids) < 50


def test_clean_up_leaves_byte_pair_text_alone():
    """As transformers 5: the setting is destructive for BPE and ignored there."""
    tokenizer = byte_level(clean_up_tokenization_spaces=True)
    assert tokenizer.decode(tokenizer.encode("hello . I 'm")) == "hello . I 'm"


def test_ids_without_a_token_have_no_text():
    tokenizer = byte_level()
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.token_bytes(-1) == b""
    ids = tokenizer.encode("hi")
    assert tokenizer.decode([10**6, *ids, 10**6]) == "hi"
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.token_to_id("no such token") is None


def test_lone_surrogates_are_refused():
    with pytest.raises(UserError, match="lone surrogates"):
        byte_level().encode("a\ud800b")


@pytest.mark.parametrize(("files", "kind", "message"), [
    ({}, UserError, "tokenizer=None.*token ids"),
    ({"tokenizer.json": b"{"}, CheckpointError, r"tokenizer\.json.*tokenizers package"),
    ({"tokenizer.json": b"\xff"}, CheckpointError, r"tokenizer\.json"),
    ({"tokenizer_config.json": b"["}, CheckpointError, r"tokenizer_config\.json.*valid JSON"),
    ({"tokenizer_config.json": b"[]"}, CheckpointError, r"tokenizer_config\.json.*JSON object"),
    ({"tokenizer_config.json": b'{"bos_token": "<none>", "add_bos_token": true}'}, CheckpointError,
     r"'<none>'.*special token that tokenizer\.json knows"),
])
def test_broken_files(files, kind, message):
    whole = {"tokenizer.json": tiny_tokenizer(300).to_str().encode()} if "tokenizer_config.json" in files else {}
    with pytest.raises(kind, match=message):
        Tokenizer.from_files({**whole, **files})


def test_threads_share_one_tokenizer(smollm2):
    texts = [f"Thread {index} says don't <|im_end|> 日本 {index * 7}" for index in range(8)]
    expected = [smollm2.encode(text) for text in texts]
    wrong = []

    def work(index):
        for _ in range(50):
            if smollm2.encode(texts[index]) != expected[index] or \
                    smollm2.decode(expected[index], skip_special_tokens=False) != texts[index]:
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
