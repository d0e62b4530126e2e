"""Hugging Face folders: configuration, generation defaults, tokenizer files; and the tiny checkpoints of the tests."""

import json

import pytest
import torch

from camshaft.core.errors import CheckpointError, ModelNotFoundError
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_checkpoint
from camshaft.testing.tiny import CHAT_TEMPLATE, EOS_TOKEN, SPECIAL_TOKENS, tiny_tokenizer, write_tiny_llama


def edit_json(path, **changes):
    data = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**data, **changes}), encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    return write_tiny_llama(tmp_path / "model")


def test_a_folder_opens_with_everything_that_identifies_it(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.architecture == "LlamaForCausalLM"
    assert checkpoint.config.checkpoint_dtype == "float32"
    assert {path.name for path in checkpoint.files} == {"config.json", "generation_config.json", "model.safetensors",
                                                        "tokenizer.json", "tokenizer_config.json"}
    assert checkpoint.generation.eos_token_ids == (0,)


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", "bfloat16"), ("float16", "float16")])
def test_the_storage_type_is_the_tensors_not_the_configs(tmp_path, dtype, expected):
    folder = write_tiny_llama(tmp_path, torch_dtype=dtype)
    edit_json(folder / "config.json", torch_dtype="float32")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.checkpoint_dtype == expected
    assert str(checkpoint.tensors["model.norm.weight"].dtype) == f"torch.{expected}"


@pytest.mark.parametrize(("own", "config", "expected"), [
    ({"eos_token_id": 3}, {"eos_token_id": 0}, (3,)),
    ({"eos_token_id": [3, 5, 3]}, {"eos_token_id": 0}, (3, 5)),
    ({"eos_token_id": None}, {"eos_token_id": [7, 8]}, (7, 8)),
    ({"eos_token_id": None}, {"eos_token_id": None}, ()),
])
def test_end_tokens_are_one_or_several_from_either_file(folder, own, config, expected):
    edit_json(folder / "generation_config.json", **own)
    edit_json(folder / "config.json", **config)
    assert open_checkpoint(folder).generation.eos_token_ids == expected


def test_without_generation_config_the_config_decides(folder):
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", bos_token_id=4)
    generation = open_checkpoint(folder).generation
    assert (generation.eos_token_ids, generation.bos_token_id) == ((0,), 4)


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, (None, None, None)),
    ({"temperature": 0.6, "top_p": 0.9}, (None, None, None)),
    ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, (0.6, None, 0.9)),
    ({"do_sample": True, "top_k": 20}, (1.0, 20, None)),
])
def test_sampling_defaults_count_only_where_sampling_is_on(folder, changes, expected):
    edit_json(folder / "generation_config.json", **changes)
    generation = open_checkpoint(folder).generation
    assert (generation.temperature, generation.top_k, generation.top_p) == expected


@pytest.mark.parametrize(("do_sample", "expected"), [(True, 0.05), (False, None)])
def test_min_p_is_a_sampling_default_too(folder, do_sample, expected):
    edit_json(folder / "generation_config.json", do_sample=do_sample, min_p=0.05)
    assert open_checkpoint(folder).generation.min_p == expected


@pytest.mark.parametrize("do_sample", [True, False])
def test_what_edits_logits_counts_whether_sampling_is_on_or_not(folder, do_sample):
    edit_json(folder / "generation_config.json", do_sample=do_sample, repetition_penalty=1.05, no_repeat_ngram_size=3)
    generation = open_checkpoint(folder).generation
    assert (generation.repetition_penalty, generation.no_repeat_ngram_size) == (1.05, 3)


@pytest.mark.parametrize(("setting", "warned"), [
    ({"penalty_alpha": 0.6}, True), ({"suppress_tokens": [5]}, True), ({"num_beams": 4}, True),
    ({"num_beams": 1}, False), ({"penalty_alpha": None}, False), ({}, False)])
def test_generation_settings_that_nothing_obeys_are_named(folder, caplog, setting, warned):
    edit_json(folder / "generation_config.json", **setting)
    open_checkpoint(folder)
    assert (next(iter(setting), "asks for") in caplog.text) == warned


@pytest.mark.parametrize(("file", "changes", "named"), [
    ("generation_config.json", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("generation_config.json", {"eos_token_id": [1, -2]}, "eos_token_id"),
    ("generation_config.json", {"do_sample": True, "temperature": "hot"}, "temperature"),
    ("generation_config.json", {"repetition_penalty": 0}, "repetition_penalty"),
    ("generation_config.json", {"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size"),
    ("config.json", {"architectures": None}, "architectures"),
    ("config.json", {"architectures": ["T5Model"]}, "T5Model"),
    ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
])
def test_a_setting_that_cannot_be_honoured_is_named(folder, file, changes, named):
    edit_json(folder / file, **changes)
    with pytest.raises(CheckpointError, match=named):
        open_checkpoint(folder).config  # noqa: B018


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff\xfe\x00"])
def test_a_damaged_json_file_is_named(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file):
        open_checkpoint(folder)


def test_paths_that_hold_no_model_say_so(tmp_path):
    with pytest.raises(ModelNotFoundError, match="existing folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def tokenizer_settings(folder):
    files = open_checkpoint(folder).tokenizer_files()
    assert files["tokenizer.json"] == (folder / "tokenizer.json").read_bytes()
    return json.loads(files["tokenizer_config.json"])


def test_tokenizer_files_carry_template_and_special_tokens(folder):
    settings = tokenizer_settings(folder)
    assert settings["chat_template"] == CHAT_TEMPLATE
    assert settings["eos_token"] == EOS_TOKEN


def test_a_template_file_takes_the_place_of_the_one_inside(folder):
    (folder / "chat_template.jinja").write_text("{{ 'päper' }}", encoding="utf-8")
    assert tokenizer_settings(folder)["chat_template"] == "{{ 'päper' }}"
    assert folder / "chat_template.jinja" in open_checkpoint(folder).files


def test_of_several_templates_the_default_one_counts(folder):
    edit_json(folder / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "T"},
                                                               {"name": "default", "template": "D"}])
    assert tokenizer_settings(folder)["chat_template"] == "D"


def test_special_tokens_may_lie_in_their_own_file(folder):
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    edit_json(folder / "special_tokens_map.json", eos_token="<|over|>", bos_token="<|turn|>")
    settings = tokenizer_settings(folder)
    assert (settings["eos_token"], settings["bos_token"]) == ("<|over|>", "<|turn|>")


def test_a_model_without_tokenizer_gives_none_and_a_foreign_one_is_named(tmp_path, caplog):
    folder = write_tiny_llama(tmp_path, tokenizer=False)
    assert open_checkpoint(folder).tokenizer_files() == {}
    assert not caplog.records
    (folder / "tokenizer.model").write_bytes(b"\n")
    assert open_checkpoint(folder).tokenizer_files() == {}
    assert "tokenizer.model" in caplog.text


def test_the_tiny_tokenizer_decodes_what_it_encodes():
    tokenizer = tiny_tokenizer(320)
    text = "It's the engine's — 発動機 🙂\n\tvalve"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.get_vocab_size() <= 320


def test_the_same_seed_writes_the_same_bytes_and_another_seed_others(tmp_path):
    first, second, other = (write_tiny_llama(tmp_path / str(number), seed=seed) / "model.safetensors"
                            for number, seed in enumerate((3, 3, 4)))
    assert first.read_bytes() == second.read_bytes() != other.read_bytes()


def test_shards_and_storage_types_make_the_same_program(tmp_path):
    whole = open_checkpoint(write_tiny_llama(tmp_path / "whole"))
    parts = open_checkpoint(write_tiny_llama(tmp_path / "parts", num_shards=4))
    left, right = (program_from_checkpoint(checkpoint, torch.bfloat16) for checkpoint in (whole, parts))
    assert left.weights.keys() == right.weights.keys()
    for name, weight in left.weights.items():
        assert torch.equal(weight.read(), right.weights[name].read())
        assert weight.read().dtype == weight.dtype
    assert left.weights["lm_head.weight"].span is None
    assert whole.tensors["lm_head.weight"].span is not None
