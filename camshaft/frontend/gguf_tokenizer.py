"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

Owns the two vocabularies GGUF files of decoders hold, byte-level BPE ("gpt2") and SentencePiece BPE ("llama"),
and the splitting rules their ``pre`` names stand for; an unknown name is refused, because guessing one
gives other token ids without a word. Where SentencePiece vocabularies take a leading space, every stretch of
text between special tokens gets one, as in llama.cpp, whose format this is. Reads no files and needs neither
transformers nor sentencepiece.
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import numpy as np

from camshaft.core.errors import CheckpointError

_T = TypeVar("_T")
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "\u2581"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_COMPOSED = ("qwen2",)
"""Splitting rules whose models compose characters (NFC) first, which their files do not say."""


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        _byte_level(use_regex=False)]}


def _digits() -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True},
                                                  _byte_level(use_regex=True)]}


def _splitter(pre: str) -> tuple[dict[str, Any], bool]:
    """The pre-tokenizer of a ``pre`` name, and whether whole words in the vocabulary bypass the merges."""
    if pre in ("gpt-2", "default"):
        return _byte_level(use_regex=True), False
    if pre in ("smollm", "starcoder", "refact"):
        return _digits(), False
    if pre in ("llama-bpe", "llama3", "llama-v3"):
        return _split(_LLAMA3), True
    if pre in ("qwen2", "deepseek-r1-qwen"):
        return _split(_QWEN2), False
    if pre == "tekken":
        return _split(_TEKKEN), True
    raise CheckpointError("tokenizer.ggml.pre", pre, "one of gpt-2, default, smollm, starcoder, refact, llama-bpe, "
                          "llama3, llama-v3, qwen2, deepseek-r1-qwen, tekken",
                          "Use the model's Hugging Face folder, or pass token ids (skip_tokenizer_init=True)")


def rebuild_tokenizer(metadata: dict[str, Any]) -> dict[str, bytes]:
    """Contents of the two files by name; empty when the metadata holds no tokenizer.

    Raises CheckpointError for a kind of vocabulary or splitting rule that is not known, and for one that
    contradicts itself.
    """
    model = _typed(metadata, "tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return {}
    tokens, types = _tokens(metadata)
    if model == "llama":
        tokens = _with_space_signs(tokens, types)
    if model == "gpt2":
        document = _byte_level_document(metadata, tokens)
    elif model == "llama":
        document = _sentencepiece_document(metadata, tokens, types)
    else:
        raise CheckpointError("tokenizer.ggml.model", model, "'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)",
                              "Use the model's Hugging Face folder, or pass token ids (skip_tokenizer_init=True)")
    special = {name: _special(metadata, tokens, key) for name, key in (
        ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))}
    starts = model == "llama" or _pre(metadata) in ("llama-bpe", "llama3", "llama-v3", "tekken")
    add_bos = _typed(metadata, "tokenizer.ggml.add_bos_token", starts)
    add_eos = _typed(metadata, "tokenizer.ggml.add_eos_token", False)
    document["added_tokens"] = _added_tokens(tokens, types, set(special.values()))
    document["post_processor"] = _post_processor(special["bos_token"] if add_bos else None,
                                                 special["eos_token"] if add_eos else None, tokens)
    settings = {"add_bos_token": add_bos, "add_eos_token": add_eos, "clean_up_tokenization_spaces": False,
                "tokenizer_class": "PreTrainedTokenizerFast", **special}
    template = _typed(metadata, "tokenizer.chat_template", "")
    if template:
        settings["chat_template"] = template
    return {"tokenizer.json": json.dumps(document, ensure_ascii=False).encode(),
            "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, indent=2).encode()}


def _typed(metadata: dict[str, Any], key: str, default: _T) -> _T:
    """A value of the default's own type, or the default."""
    found = metadata.get(key, default)
    if not isinstance(found, type(default)):
        raise _contradiction(key, found, f"a {type(default).__name__}")
    return found


def _contradiction(key: str, found: object, allowed: str) -> CheckpointError:
    return CheckpointError(key, found, allowed, "Convert the file again")


def _pre(metadata: dict[str, Any]) -> str:
    return _typed(metadata, "tokenizer.ggml.pre", "default")


def _tokens(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    tokens: list[str] = _typed(metadata, "tokenizer.ggml.tokens", [])
    if not tokens:
        raise _contradiction("tokenizer.ggml.tokens", None, "a list of strings")
    types = _per_token(metadata, "tokenizer.ggml.token_type", len(tokens))
    return tokens, [1] * len(tokens) if types is None else [int(kind) for kind in types]


def _with_space_signs(tokens: list[str], types: list[int]) -> list[str]:
    """Runs of spaces written as SentencePiece writes them: converters put plain spaces into user-defined tokens."""
    return [_SPACE * len(token) if kind == _USER_DEFINED and token and not token.strip(" ") else token
            for token, kind in zip(tokens, types, strict=True)]


def _per_token(metadata: dict[str, Any], key: str, count: int) -> list[float] | None:
    """One number for each token; None when the key is absent."""
    found = metadata.get(key)
    if found is None:
        return None
    if not isinstance(found, np.ndarray) or len(found) != count or not np.isfinite(found).all():
        raise _contradiction(key, found, f"one number for each of {count} tokens")
    numbers: list[float] = found.tolist()
    return numbers


def _special(metadata: dict[str, Any], tokens: list[str], key: str) -> str | None:
    name = f"tokenizer.ggml.{key}_token_id"
    found = metadata.get(name)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < len(tokens):
        raise _contradiction(name, found, f"a token id below {len(tokens)}")
    return tokens[found]


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise _contradiction("tokenizer.ggml.tokens", twice, "tokens that differ from each other")
    return vocabulary


def _document(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model, **parts}


def _bpe(vocabulary: dict[str, int], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges, **options}


def _byte_level_document(metadata: dict[str, Any], tokens: list[str]) -> dict[str, Any]:
    splitter, whole_words = _splitter(_pre(metadata))
    merges: list[str] = _typed(metadata, "tokenizer.ggml.merges", [])
    vocabulary = _vocabulary(tokens)
    normalizer = {"type": "NFC"} if _pre(metadata) in _COMPOSED else None
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise _contradiction("tokenizer.ggml.merges", merge, "two tokens of the vocabulary that make a third")
        pairs.append([left, right])
    return _document(_bpe(vocabulary, pairs, ignore_merges=whole_words), normalizer=normalizer,
                     pre_tokenizer=splitter, decoder=_byte_level(use_regex=True))


def _sentencepiece_document(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = _per_token(metadata, "tokenizer.ggml.scores", len(tokens))
    if scores is None:
        raise _contradiction("tokenizer.ggml.scores", None, f"one score for each of {len(tokens)} tokens")
    vocabulary = _vocabulary(tokens)
    unknown = _special(metadata, tokens, "unknown")
    if unknown is None and _UNKNOWN in types:
        unknown = tokens[types.index(_UNKNOWN)]
    prefix = _typed(metadata, "tokenizer.ggml.add_space_prefix", True)
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                                      {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(vocabulary, _merges_by_score(vocabulary, scores, types),
                 unk_token=unknown, fuse_unk=True, byte_fallback=True)
    return _document(model, normalizer={"type": "Sequence", "normalizers": normalizers},
                     decoder={"type": "Sequence", "decoders": decoders})


def _merges_by_score(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[list[str]]:
    """Every way to make a token of two others, best score first: SentencePiece merges by score, BPE by rank.

    User-defined tokens go before all others, the longest first: their text is never anything else. Tokens that never
    come out of merging (control, unknown, bytes) take no part.
    """
    usable = {token: index for token, index in vocabulary.items() if types[index] not in (_UNKNOWN, _CONTROL, _BYTE)}

    def rank(token: str) -> tuple[int, float, int]:
        index = usable[token]
        return (0, -len(token), index) if types[index] == _USER_DEFINED else (1, -scores[index], index)

    merges: list[list[str]] = []
    for token in sorted(usable, key=rank):
        ways = []
        for cut in range(1, len(token)):
            left = usable.get(token[:cut])
            right = None if left is None else usable.get(token[cut:])
            if right is not None:
                ways.append((left, right, cut))
        merges += [[token[:cut], token[cut:]] for _, _, cut in sorted(ways)]
    return merges


def _added_tokens(tokens: list[str], types: list[int], named: set[str | None]) -> list[dict[str, Any]]:
    """Tokens that are matched whole in the text.

    Those that hold the space sign are matched after normalising, but for runs of it that merging makes anyway.
    """
    added, known = [], set(tokens)
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind == _CONTROL or (kind == _UNKNOWN and token in named)
        if special or kind == _USER_DEFINED:
            merged = not token.strip(_SPACE) and token[:-1] in known
            added.append({"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                          "normalized": not special and _SPACE in token and not merged, "special": special})
    return added


def _post_processor(bos: str | None, eos: str | None, tokens: list[str]) -> dict[str, Any] | None:
    if bos is None and eos is None:
        return None

    def template(*sequences: tuple[str, int]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for name, kind in sequences:
            parts += [{"SpecialToken": {"id": bos, "type_id": kind}}] if bos is not None else []
            parts += [{"Sequence": {"id": name, "type_id": kind}}]
            parts += [{"SpecialToken": {"id": eos, "type_id": kind}}] if eos is not None else []
        return parts

    return {"type": "TemplateProcessing", "single": template(("A", 0)), "pair": template(("A", 0), ("B", 1)),
            "special_tokens": {token: {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
                               for token in (bos, eos) if token is not None}}
