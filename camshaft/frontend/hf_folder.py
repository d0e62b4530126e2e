"""A Hugging Face model folder: config.json, generation_config.json, safetensors and tokenizer files.

Owns reading those files. Which fields matter is the model family's business; the tokenizer's contents are passed on.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

from camshaft.config.model import GenerationDefaults, ModelConfig
from camshaft.config.sampling import MAX_REPETITION_PENALTY, MIN_REPETITION_PENALTY
from camshaft.core.errors import CheckpointError
from camshaft.core.log import logger
from camshaft.frontend.checkpoint import TOKENIZER_FILES, Checkpoint
from camshaft.frontend.safetensors_files import folder_weights
from camshaft.models.config_fields import MAX_SIZE

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TEMPLATE, _SPECIAL_TOKENS = "chat_template.jinja", "special_tokens_map.json"
_UNSUPPORTED_GENERATION = MappingProxyType({
    "bad_words_ids": None, "begin_suppress_tokens": None, "encoder_no_repeat_ngram_size": 0,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "guidance_scale": 1.0, "num_beams": 1,
    "penalty_alpha": 0.0, "sequence_bias": None, "suppress_tokens": None, "typical_p": 1.0})
"""What a generation_config.json may ask for and gets a warning, with the value at which it changes nothing."""
_STORAGE_DTYPES = ("float32", "bfloat16", "float16")


class HfFolderCheckpoint(Checkpoint):
    """A folder as ``save_pretrained`` writes it. Opening reads headers; ``config`` is worked out on first use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config_data = _read_json(path / _CONFIG)
        self.tensors, weight_files = folder_weights(path)
        self.generation = _generation_defaults(path, self._config_data)
        extras = (_CONFIG, _GENERATION, *TOKENIZER_FILES, _TEMPLATE, _SPECIAL_TOKENS)
        self.files = (*(path / name for name in extras if (path / name).is_file()), *weight_files)

    @functools.cached_property
    def config(self) -> ModelConfig:  # type: ignore[override]
        """The model's shape. CheckpointError when the architecture or one of its settings is not supported."""
        from camshaft.models.registry import family_of

        data = self._config_data
        architectures = data.get("architectures")
        if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
            raise CheckpointError("config.json architectures", architectures, "a list with the model's class name",
                                  "The folder may hold a part of a model, such as an adapter")
        if data.get("quantization_config"):
            raise CheckpointError("config.json quantization_config", data["quantization_config"],
                                  "a checkpoint that is not quantised", "Use the original model, or a GGUF file")
        config = family_of(architectures[0]).config_from_hf(data)
        return dataclasses.replace(config, checkpoint_dtype=self._storage_dtype())

    def _storage_dtype(self) -> str:
        held: collections.Counter[str] = collections.Counter()
        for weight in self.tensors.values():
            held[str(weight.dtype).removeprefix("torch.")] += weight.num_bytes
        most = held.most_common(1)[0][0] if held else "float32"
        return most if most in _STORAGE_DTYPES else "float32"

    def tokenizer_files(self) -> dict[str, bytes]:
        """See :meth:`Checkpoint.tokenizer_files`. A template file of its own takes the place of the one inside."""
        tokenizer, settings = TOKENIZER_FILES
        if not (self.path / tokenizer).is_file():
            if (self.path / "tokenizer.model").is_file():
                logger.warning("%s has tokenizer.model but no tokenizer.json: only token ids work; convert it with "
                               "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder)", self.path)
            return {}
        merged: dict[str, Any] = {}
        for name in (_SPECIAL_TOKENS, settings):
            if (self.path / name).is_file():
                merged |= {key: value for key, value in _read_json(self.path / name).items() if value is not None}
        if (self.path / _TEMPLATE).is_file():
            merged["chat_template"] = _read_text(self.path / _TEMPLATE)
        elif isinstance(merged.get("chat_template"), list):
            merged["chat_template"] = _default_template(merged["chat_template"])
        return {tokenizer: _read_bytes(self.path / tokenizer),
                settings: json.dumps(merged, ensure_ascii=False).encode("utf-8")}


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(str(path), error.strerror, "a readable file", "Check its permissions") from error


def _read_text(path: Path) -> str:
    try:
        return _read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(str(path), str(error), "text in UTF-8", "Download the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), str(error), "a JSON file", "Download the file again") from error
    if not isinstance(data, dict):
        raise CheckpointError(str(path), type(data).__name__, "a JSON object", "Download the file again")
    return data


def _default_template(templates: list[Any]) -> str | None:
    """The template called "default" in the form that names several."""
    for entry in templates:
        if isinstance(entry, dict) and entry.get("name") == "default" and isinstance(entry.get("template"), str):
            return str(entry["template"])
    return None


def _token_ids(field: str, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise CheckpointError(field, value, "a token id, a list of them, or null")
    return tuple(dict.fromkeys(ids))


def _generation_defaults(folder: Path, config: dict[str, Any]) -> GenerationDefaults:
    """What ends and shapes generation: generation_config.json, else config.json.

    Sampling settings count only where the file turns sampling on (``do_sample``), as in transformers; what edits
    logits counts always.
    """
    own = _read_json(folder / _GENERATION) if (folder / _GENERATION).is_file() else {}
    _warn_of_unsupported(own)

    def ids(name: str) -> tuple[int, ...]:
        source, data = (_GENERATION, own) if own.get(name) is not None else (_CONFIG, config)
        return _token_ids(f"{source} {name}", data.get(name))

    def first(name: str) -> int | None:
        found = ids(name)
        return found[0] if found else None

    sampled = own if own.get("do_sample") is True else {}
    temperature, top_p, min_p = (_number(sampled, name, 0, bound) for name, bound in (
        ("temperature", 100), ("top_p", 1), ("min_p", 1)))
    return GenerationDefaults(
        eos_token_ids=ids("eos_token_id"), bos_token_id=first("bos_token_id"), pad_token_id=first("pad_token_id"),
        temperature=1.0 if sampled and temperature is None else temperature,
        top_k=_whole_number(sampled, "top_k"), top_p=top_p, min_p=min_p,
        repetition_penalty=_number(own, "repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        no_repeat_ngram_size=_whole_number(own, "no_repeat_ngram_size"))


def _warn_of_unsupported(own: dict[str, Any]) -> None:
    asked = {name: own[name] for name, neutral in _UNSUPPORTED_GENERATION.items()
             if own.get(name) not in (None, neutral)}
    if asked:
        logger.warning("%s asks for %s, which this version does not do: the model may answer differently than its "
                       "makers meant", _GENERATION, ", ".join(f"{name}={value!r}" for name, value in asked.items()))


def _number(data: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise CheckpointError(f"{_GENERATION} {name}", value, f"a number from {low} to {high}, or null")
    return value


def _whole_number(data: dict[str, Any], name: str) -> int | None:
    value = _number(data, name, 0, MAX_SIZE)
    if value is not None and value != int(value):
        raise CheckpointError(f"{_GENERATION} {name}", value, "a whole number, or null")
    return None if value is None else int(value)
