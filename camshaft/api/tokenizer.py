"""Text to token ids and back, over the ``tokenizers`` library.

Owns reading tokenizer.json and tokenizer_config.json, special tokens, and the bytes each token stands for.
Chat templates are ``chat_template``, streaming ``detokenize``. Nothing here imports transformers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from camshaft.core.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_MAX_IDS = 2**24
"""Bound of token ids: one absurd id would otherwise take memory for all ids below it."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PieceRules:
    """How the decoder of a tokenizer.json turns the spelling of a token into bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    space: str = ""
    """A sign in tokens that stands for a space."""
    glue: str = ""
    """Written before every token."""
    strip: str = ""
    """What the start of the text loses: "one" space, or "sign": every space sign of the first token."""


def _printable_bytes() -> dict[int, int]:
    """GPT-2's alphabet: every byte as one printable character; for ``str.translate`` into Latin-1.

    The other characters of Latin-1 stand for nothing and become one that Latin-1 cannot encode.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in plain]
    return dict.fromkeys(other, 0xFFFF) | {256 + index: byte for index, byte in enumerate(other)}


def _piece_rules(decoder: dict[str, Any] | None) -> _PieceRules:
    if decoder is None:
        return _PieceRules(glue=" ", strip="one")
    kind = decoder.get("type")
    if kind == "ByteLevel":
        return _PieceRules(byte_level=True)
    if kind == "Metaspace":
        never = decoder.get("prepend_scheme", "always") == "never" or decoder.get("add_prefix_space") is False
        return _PieceRules(space=decoder.get("replacement", "\u2581"), strip="" if never else "sign")
    if kind != "Sequence":
        raise _unknown_decoder(decoder)
    rules = _PieceRules()
    for step in decoder.get("decoders", ()):
        rules = _add_step(rules, step)
    return rules


def _add_step(rules: _PieceRules, step: dict[str, Any]) -> _PieceRules:
    kind = step.get("type")
    if kind == "Replace" and step.get("content") == " " and list(step.get("pattern", {})) == ["String"]:
        return dataclasses.replace(rules, space=step["pattern"]["String"])
    if kind == "ByteFallback":
        return dataclasses.replace(rules, byte_fallback=True)
    if kind == "ByteLevel":
        return dataclasses.replace(rules, byte_level=True)
    if kind == "Metaspace":
        inner = _piece_rules(step)
        return dataclasses.replace(rules, space=inner.space, strip=inner.strip)
    if kind == "Strip" and (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0):
        return dataclasses.replace(rules, strip="one")
    if kind == "Fuse" or (kind == "Strip" and not step.get("start") and not step.get("stop")):
        return rules
    raise _unknown_decoder(step)


def _unknown_decoder(decoder: dict[str, Any]) -> UserError:
    return UserError("tokenizer.json decoder", decoder.get("type"),
                     "ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse and Strip",
                     "Pass token ids instead of text (skip_tokenizer_init=True)")


def read_settings(files: dict[str, bytes]) -> dict[str, Any]:
    """tokenizer_config.json as a dict; empty when there is none. Raises CheckpointError for a broken one."""
    name = "tokenizer_config.json"
    if name not in files:
        return {}
    try:
        found = json.loads(files[name])
    except ValueError as error:
        raise CheckpointError(name, f"{len(files[name])} bytes", f"valid JSON ({error})",
                              "Download the model again") from None
    if not isinstance(found, dict):
        raise CheckpointError(name, found, "a JSON object", "Download the model again")
    return found


def named_special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token``, … of a tokenizer_config.json as text; names without a token are left out."""
    named = {}
    for name in _SPECIAL_NAMES:
        token = settings.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            named[name] = text
    return named


class Tokenizer:
    """A model's tokenizer. Nothing changes after construction, so threads may share it."""

    def __init__(self, backend: Backend, settings: dict[str, Any]) -> None:
        # Padding and truncation belong to training; applied here they would add or drop tokens of a prompt.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._rules = _piece_rules(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
        if settings.get("clean_up_tokenization_spaces") and type(backend.model).__name__ == "WordPiece":
            raise UserError("clean_up_tokenization_spaces", True, "off: cleaned text cannot be streamed",
                            "Set it to false in tokenizer_config.json")
        self.special_tokens = named_special_tokens(settings)
        matched = {token.content for token in backend.get_added_tokens_decoder().values()}
        backend.add_special_tokens([text for text in self.special_tokens.values()
                                    if text not in matched and backend.token_to_id(text) is not None])
        self._apply_bos_eos(settings)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._pieces = self._all_pieces(frozenset(added))

    @classmethod
    def from_files(cls, files: dict[str, bytes]) -> Tokenizer:
        """Read the files of a checkpoint or an engine by name.

        Raises UserError when there is no tokenizer.json, CheckpointError when a file is broken.
        """
        from tokenizers import Tokenizer as Backend

        if "tokenizer.json" not in files:
            raise UserError("tokenizer", None, "a model with tokenizer.json; this one has none",
                            "Pass token ids instead of text (skip_tokenizer_init=True), or add the file")
        try:
            backend = Backend.from_buffer(files["tokenizer.json"])
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception for whatever it cannot read
            raise CheckpointError("tokenizer.json", f"{len(files['tokenizer.json'])} bytes",
                                  f"a file the tokenizers package can read ({error})",
                                  "Update tokenizers, or pass token ids (skip_tokenizer_init=True)") from None
        return cls(backend, read_settings(files))

    def _apply_bos_eos(self, settings: dict[str, Any]) -> None:
        """Explicit add_bos_token and add_eos_token replace the post-processor, as in transformers 5."""
        if "add_bos_token" not in settings and "add_eos_token" not in settings:
            return
        from tokenizers.processors import TemplateProcessing

        around: dict[str, dict[str, Any]] = {}
        for name in ("bos", "eos"):
            text = self.special_tokens.get(f"{name}_token")
            if text is None or not settings.get(f"add_{name}_token"):
                continue
            index = self._backend.token_to_id(text)
            if index is None:
                raise CheckpointError("tokenizer_config.json", text, "a special token that tokenizer.json knows",
                                      "Download the model again")
            around[name] = {"id": name, "ids": [index], "tokens": [text]}
        words = [word for word in ("bos", "$A", "eos") if word == "$A" or word in around]
        self._backend.post_processor = TemplateProcessing(single=words, special_tokens=list(around.values()))

    def _all_pieces(self, added: frozenset[int]) -> list[bytes]:
        """The bytes of every token id, in order; ids without a token have none."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        highest = max(vocabulary.values(), default=-1)
        if highest >= _MAX_IDS:
            raise CheckpointError("tokenizer.json", highest, f"token ids below {_MAX_IDS}", "Download the model again")
        pieces = [b""] * (highest + 1)
        alphabet = _printable_bytes() if self._rules.byte_level else {}
        for text, index in vocabulary.items():
            pieces[index] = self._piece(text, alphabet) if index not in added else self._added_piece(text)
        return pieces

    def _piece(self, text: str, alphabet: dict[int, int]) -> bytes:
        rules = self._rules
        if rules.byte_level:
            try:
                return text.translate(alphabet).encode("latin-1")
            except UnicodeEncodeError:
                return text.encode()
        if rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return self._added_piece(text)

    def _added_piece(self, text: str) -> bytes:
        rules = self._rules
        return (rules.glue + (text.replace(rules.space, " ") if rules.space else text)).encode()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included; a model's own vocabulary may be padded beyond it."""
        return len(self._pieces)

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        return self.special_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self.token_to_id(self.eos_token)

    def token_to_id(self, token: str | None) -> int | None:
        """Id of a token by its spelling in the vocabulary; None when it has none."""
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        """Spelling of a token id; None when it has none."""
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Special tokens spelled out in the text count as themselves."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError("text", text[error.start:error.end], "Unicode text without lone surrogates",
                            "Decode the input with errors='replace'") from None
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text; empty for an id without a token. May be part of a character."""
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else b""

    def first_bytes(self, token_id: int) -> bytes:
        """The same for the first token that adds to a text: where a tokenizer writes a space there, it is taken off."""
        piece, strip = self.token_bytes(token_id), self._rules.strip
        if strip == "one":
            return piece[1:] if piece[:1] == b" " else piece
        if strip == "sign":
            return piece.replace(b" ", b"")
        return piece

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Bytes that make no character become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        shown = [index for index in ids if index not in skipped and self.token_bytes(index)]
        if not shown:
            return ""
        rest = b"".join([self._pieces[index] for index in shown[1:]])
        return (self.first_bytes(shown[0]) + rest).decode("utf-8", errors="replace")
