"""How many token ids of a model stand for something: a vocabulary is often padded beyond its tokenizer.

Owns reading that number off ``tokenizer.json``. Whether the file is sound is the tokenizer's to say, when it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from camshaft.config.model import GenerationDefaults


def count_token_ids(files: Mapping[str, bytes], generation: GenerationDefaults, vocab_size: int) -> int | None:
    """One more than the largest id that the tokenizer knows or that ends a sequence, at most ``vocab_size``.

    None where there is no tokenizer.json, or none that can be read: then every id of the model counts.
    """
    try:
        document = json.loads(files["tokenizer.json"])
    except (KeyError, ValueError, RecursionError):
        return None
    known = list(_ids(document)) if isinstance(document, dict) else []
    return min(max([*known, *generation.eos_token_ids]) + 1, vocab_size) if known else None


def _ids(document: dict[str, Any]) -> Iterator[int]:
    """Ids of the vocabulary (text to id, or a list in order) and of the added tokens."""
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        yield from range(len(vocabulary))
    found = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    added = document.get("added_tokens")
    found += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    yield from (index for index in found if isinstance(index, int) and index >= 0)
