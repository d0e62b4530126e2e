"""Folders that lie, lack or overdo: whatever they hold, the answer is a model or an error in words, soon."""

import json
import os
import random

import pytest

from camshaft.api.tokenizer import Tokenizer
from camshaft.builder.build import build
from camshaft.core import env
from camshaft.core.errors import CamshaftError, CheckpointError, ModelNotFoundError, UserError
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.hub import resolve_model
from camshaft.frontend.weights import bind_weights, settle_head
from camshaft.models.registry import family_of
from camshaft.testing.tiny import tiny_tokenizer, write_tiny_llama

VALUES = (None, True, -1, 0, 3, 7, 2**31, 2**63, 10**400, 1.5, float("nan"), float("inf"), "", "x", [], [[1]], {})
SCALING = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}
GENERATION = {"eos_token_id": [0, 1], "bos_token_id": 1, "pad_token_id": 0, "do_sample": True, "temperature": 0.5,
              "top_p": 0.9, "top_k": 40}


@pytest.fixture
def folder(tmp_path):
    return write_tiny_llama(tmp_path / "model")


def read_all(folder):
    """Everything up to the export; returns nothing."""
    checkpoint = open_checkpoint(folder)
    family = family_of(checkpoint.config.architecture)
    config, tensors = settle_head(family, checkpoint.config, checkpoint.tensors)
    bind_weights(family, config, tensors)
    Tokenizer.from_files(checkpoint.tokenizer_files())


@pytest.mark.parametrize(("file", "added", "least_refused"), [
    ("config.json", {"rope_scaling": SCALING, "sliding_window": None}, 150), ("generation_config.json", GENERATION, 50),
    ("tokenizer_config.json", {"bos_token": {"content": "<|turn|>"}}, 0)])
def test_every_value_of_another_kind_is_taken_or_refused_in_words(folder, file, added, least_refused):
    path, refused = folder / file, 0
    data = json.loads(path.read_text()) | added
    for name in data:
        for value in VALUES:
            path.write_text(json.dumps(data | {name: value}))
            try:
                read_all(folder)
            except CamshaftError:
                refused += 1
    assert refused >= least_refused


def test_a_number_of_thousands_of_digits_is_a_damaged_file(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("320", "1" * 5000))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("changes", "named"), [
    ({"num_hidden_layers": 2**27}, "num_hidden_layers"), ({"vocab_size": 2**63}, "vocab_size"),
    ({"num_attention_heads": 128, "head_dim": None}, "head_dim"), ({"rope_theta": 10**400}, "rope_theta"),
])
def test_absurd_sizes_are_refused_before_anything_of_that_size_is_made(folder, changes, named):
    data = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(data | changes))
    with pytest.raises(CheckpointError, match=named):
        read_all(folder)


@pytest.mark.parametrize(("name", "value"), [("temperature", float("nan")), ("temperature", 1e9), ("top_p", 1.5),
                                             ("top_k", float("inf")), ("top_k", 1.5), ("top_k", 2**40)])
def test_sampling_defaults_out_of_bounds_are_named(folder, name, value):
    (folder / "generation_config.json").write_text(json.dumps(GENERATION | {name: value}))
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder)


def test_flipped_bytes_of_a_header_are_read_or_refused_in_words(folder):
    rng, path = random.Random(0), folder / "model.safetensors"
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    outcomes = []
    for _ in range(200):
        data = bytearray(raw)
        data[rng.randrange(length)] = rng.randrange(256)
        path.write_bytes(data)
        try:
            outcomes.append(bool(open_checkpoint(folder).tensors))
        except CamshaftError as error:
            outcomes.append(not str(error))
    assert set(outcomes) == {True, False}, "every file is read whole or refused in words, and both happen"


def test_a_token_id_that_would_take_gigabytes_is_refused():
    document = json.loads(tiny_tokenizer(300).to_str())
    document["model"]["vocab"]["!"] = 2**31
    with pytest.raises(CheckpointError, match="2147483648"):
        Tokenizer.from_files({"tokenizer.json": json.dumps(document).encode()})


def test_end_ids_beyond_the_vocabulary_are_left_out_with_a_warning(folder, caplog, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 320, 2**40]}))
    assert build(folder).manifest.generation.eos_token_ids == (0,)
    assert "[320, 1099511627776]" in caplog.text


def test_a_folder_where_a_file_should_be_is_said(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        open_checkpoint(folder)


def test_links_that_lead_nowhere_are_missing_files(folder):
    (folder / "model.safetensors").unlink()
    os.symlink(folder / "gone", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["x" * 5000, "~no_such_user_here/model", "/" + "y/" * 3000, "a\0b"])
def test_names_no_file_system_takes_are_no_models(name):
    with pytest.raises(ModelNotFoundError):
        resolve_model(name)


def test_a_user_without_a_home_has_a_cache_that_cannot_be_made(monkeypatch):
    for name in ("CAMSHAFT_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 123456)
    with pytest.raises(OSError, match="Not a directory"):
        env.cache_dir().mkdir(parents=True)
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", "~no_such_user_here/cache")
    with pytest.raises(UserError, match="CAMSHAFT_CACHE_DIR"):
        env.cache_dir()
