"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizers they were made from."""

import io
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from camshaft.core.errors import CheckpointError
from camshaft.frontend.gguf import GgufCheckpoint
from camshaft.frontend.gguf_tokenizer import rebuild_tokenizer

# The command that made it is in the file: transformers takes ten seconds for it, and the ids do not change.
GOLDEN = json.loads((Path(__file__).parent / "gguf_tokenizer_golden.json").read_text(encoding="utf-8"))["cases"]
SPACE = "▁"


def load(files):
    return Tokenizer.from_buffer(files["tokenizer.json"])


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf):
    return load(GgufCheckpoint(smollm2_gguf).tokenizer_files())


def test_default_model_ids_equal_transformers(smollm2):
    assert len(GOLDEN) > 45
    for case in GOLDEN:
        assert smollm2.encode(case["text"]).ids == case["ids"], case["text"]


def test_b7_decode_gives_back_what_was_encoded(smollm2):
    for case in GOLDEN:
        assert smollm2.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_every_digit_of_smollm_stands_alone(smollm2):
    """As in the model's own tokenizer.json; transformers' GGUF conversion leaves this rule out."""
    assert smollm2.encode("½ Ⅷ").tokens == ["Â½", "Ġ", "â", "ħ", "§"]


def test_settings_of_the_default_model(smollm2_gguf):
    settings = json.loads(GgufCheckpoint(smollm2_gguf).tokenizer_files()["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (settings["add_bos_token"], settings["add_eos_token"]) == (False, False)
    assert settings["chat_template"].startswith("{% for message in messages %}")


def byte_level_metadata(pre, tokens=(), merges=(), **more):
    """All 256 byte tokens, then ``tokens``; ids are positions."""
    from tokenizers.pre_tokenizers import ByteLevel

    spelled = [*sorted(ByteLevel.alphabet()), *tokens]
    kinds = np.array([3 if token.startswith("<|") else 1 for token in spelled])
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": spelled,
            "tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": list(merges), **more}


def words(pre, text):
    """How a ``pre`` name cuts a text, put back into readable characters."""
    tokenizer = load(rebuild_tokenizer(byte_level_metadata(pre)))
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(("pre", "expected"), [
    ("gpt-2", ["I", "'LL", " take", " 12345", " don", "'t", "  ", " ok", "\n\n", "x"]),
    ("default", ["I", "'LL", " take", " 12345", " don", "'t", "  ", " ok", "\n\n", "x"]),
    ("smollm", ["I", "'", "LL", " take", " ", "1", "2", "3", "4", "5", " don", "'t", "  ", " ok", "\n\n", "x"]),
    ("llama-bpe", ["I", "'LL", " take", " ", "123", "45", " don", "'t", "  ", " ok", "\n\n", "x"]),
    ("qwen2", ["I", "'LL", " take", " ", "1", "2", "3", "4", "5", " don", "'t", "  ", " ok", "\n\n", "x"]),
    ("tekken", ["I", "'LL", " take", " ", "1", "2", "3", "4", "5", " don", "'t", "  ", " ok", "\n\n", "x"]),
])
def test_splitting_rules(pre, expected):
    if pre in ("gpt-2", "default"):  # contractions in capitals are none to GPT-2
        expected = ["I", "'", "LL", *expected[2:]]
    if pre in ("gpt-2", "default", "smollm"):  # and the last of several line ends stays with what follows
        expected = [*expected[:-2], "\n", "\n", "x"]
    assert words(pre, "I'LL take 12345 don't   ok\n\nx") == expected


def test_tekken_cuts_at_a_change_to_capitals():
    assert words("tekken", "camelCase HTTPServer") == ["camel", "Case", " HTTPServer"]
    assert words("llama-bpe", "camelCase") == ["camelCase"]


def test_whole_words_bypass_the_merges_of_llama3():
    """Llama 3 has words in its vocabulary that its merges never make."""
    tokens = ["ab", "abc"]
    for pre, expected in (("llama-bpe", ["abc"]), ("gpt-2", ["ab", "c"])):
        tokenizer = load(rebuild_tokenizer(byte_level_metadata(pre, tokens, ["a b"])))
        assert tokenizer.encode("abc", add_special_tokens=False).tokens == expected


@pytest.mark.parametrize(("pre", "flag", "expected"), [
    ("llama-bpe", None, 1), ("llama-bpe", False, 0), ("gpt-2", None, 0), ("gpt-2", True, 1)])
def test_beginning_of_sequence(pre, flag, expected):
    metadata = byte_level_metadata(pre, ["<|begin|>", "<|end|>"], **{
        "tokenizer.ggml.bos_token_id": 256, "tokenizer.ggml.eos_token_id": 257})
    if flag is not None:
        metadata["tokenizer.ggml.add_bos_token"] = flag
    tokenizer = load(rebuild_tokenizer(metadata))
    assert tokenizer.encode("hi").ids.count(256) == expected
    assert tokenizer.encode("hi", add_special_tokens=False).ids.count(256) == 0
    metadata["tokenizer.ggml.add_eos_token"] = True
    assert load(rebuild_tokenizer(metadata)).encode("hi").ids[-1] == 257


CORPUS = ("The quick brown fox jumps over the lazy dog.  Two spaces, don't!\n"
          "def f(x):\n    return x + 1\n日本語 text, naïve café. 12345 67890\n") * 40


@pytest.fixture(scope="module")
def sentencepiece_model():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # its generated wrapper, not ours
        spm = pytest.importorskip("sentencepiece")
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, vocab_size=420, model_type="bpe",
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            character_coverage=1.0, user_defined_symbols=["<tool>"], minloglevel=2)
        return spm.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(model, **more):
    def kind(index):
        for value, holds in ((2, model.is_unknown), (3, model.is_control), (6, model.is_byte)):
            if holds(index):
                return value
        return 4 if model.id_to_piece(index) == "<tool>" else 1

    indices = range(model.get_piece_size())
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in indices],
            "tokenizer.ggml.scores": np.array([model.get_score(i) for i in indices], np.float32),
            "tokenizer.ggml.token_type": np.array([kind(i) for i in indices]), "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0, **more}


TEXTS = ["The quick brown fox", "the fox don't jump", " leading", "two  spaces   here", "trailing  ", "日本語 naïve",
         "Ωμέγα 🙂", "def f(x):\n    return 12345", "tab\there", "  ", "lazylazy dogdog.", "over,over"]


def test_sentencepiece_ids_equal_the_library(sentencepiece_model):
    tokenizer = load(rebuild_tokenizer(sentencepiece_metadata(sentencepiece_model)))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_model.encode(text), text
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(text).ids == [1, *ids]
    assert any(sentencepiece_model.is_byte(i) for i in tokenizer.encode("🙂").ids)


def test_sentencepiece_without_a_prefix_space(sentencepiece_model):
    metadata = sentencepiece_metadata(sentencepiece_model, **{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = load(rebuild_tokenizer(metadata))
    assert tokenizer.encode("fox", add_special_tokens=False).tokens[0] != SPACE + "fox"
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_user_defined_tokens_are_matched_whole_and_shown(sentencepiece_model):
    tokenizer = load(rebuild_tokenizer(sentencepiece_metadata(sentencepiece_model)))
    ids = tokenizer.encode("fox<tool>", add_special_tokens=False).ids
    assert tokenizer.token_to_id("<tool>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "fox<tool>"
    assert tokenizer.decode(tokenizer.encode("fox</s>").ids, skip_special_tokens=True) == "fox"


def test_text_after_a_special_token_gets_its_own_leading_space(sentencepiece_model):
    tokenizer = load(rebuild_tokenizer(sentencepiece_metadata(sentencepiece_model)))
    found = tokenizer.encode("<s>fox</s>dog", add_special_tokens=False).ids
    assert found == [1, *sentencepiece_model.encode("fox"), 2, *sentencepiece_model.encode("dog")]


def test_runs_of_spaces_among_user_defined_tokens(sentencepiece_model):
    """Gemma's files hold them with plain spaces. Text is cut as by its own tokenizer.json: a literal sign is a space,
    too, and the longest runs are made first, whatever their scores.
    """
    plain = sentencepiece_metadata(sentencepiece_model, **{"tokenizer.ggml.add_space_prefix": False})
    runs = [" " * length for length in (2, 3, 4) if SPACE * length not in plain["tokenizer.ggml.tokens"]]
    assert len(runs) >= 2
    metadata = {**plain, "tokenizer.ggml.tokens": [*plain["tokenizer.ggml.tokens"], *runs],
                "tokenizer.ggml.scores": np.append(plain["tokenizer.ggml.scores"], [-1000.0] * len(runs)),
                "tokenizer.ggml.token_type": np.append(plain["tokenizer.ggml.token_type"], [4] * len(runs))}
    tokenizer = load(rebuild_tokenizer(metadata))
    for text, cut in (("x   y", ["x", SPACE * 3, "y"]), (f"x {SPACE} y", ["x", SPACE * 3, "y"]),
                      ("x      y", ["x", SPACE * 4, SPACE * 2, "y"])):
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found.tokens == cut
        assert tokenizer.decode(found.ids) == text.replace(SPACE, " ")


def test_qwen_composes_characters_first():
    """Its tokenizer.json says NFC; a GGUF file says only which splitting rule it has."""
    for pre, expected in (("qwen2", 2), ("gpt-2", 3)):
        assert len(load(rebuild_tokenizer(byte_level_metadata(pre))).encode("e\u0301").ids) == expected


def test_no_tokenizer_in_the_file():
    assert rebuild_tokenizer({}) == {}
    assert rebuild_tokenizer({"tokenizer.ggml.model": "no_vocab"}) == {}


BROKEN = {
    "unknown pre": (byte_level_metadata("jais-2"), r"tokenizer\.ggml\.pre='jais-2'.*llama-bpe.*skip_tokenizer_init"),
    "unknown model": ({**byte_level_metadata("gpt-2"), "tokenizer.ggml.model": "t5"}, r"ggml\.model='t5'"),
    "no tokens": ({"tokenizer.ggml.model": "gpt2"}, r"ggml\.tokens.*a list of strings"),
    "token twice": (byte_level_metadata("gpt-2", ["ab", "ab"]), r"tokens='ab'.*differ"),
    "merge of nothing": (byte_level_metadata("gpt-2", [], ["a b"]), r"merges='a b'"),
    "types too short": ({**byte_level_metadata("gpt-2"), "tokenizer.ggml.token_type": np.ones(3)}, "each of 256"),
    "no scores": ({**byte_level_metadata("gpt-2"), "tokenizer.ggml.model": "llama"}, r"scores.*each of 256"),
    "end beyond": (byte_level_metadata("gpt-2", **{"tokenizer.ggml.eos_token_id": 9999}), r"eos_token_id=9999.*256"),
    "flag of words": (byte_level_metadata("gpt-2", **{"tokenizer.ggml.add_bos_token": "yes"}), "add_bos_token='yes'"),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_contradictions_are_refused_by_name(case):
    metadata, message = BROKEN[case]
    with pytest.raises(CheckpointError, match=message):
        rebuild_tokenizer(metadata)
