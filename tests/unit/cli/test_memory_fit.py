"""What fits: arithmetic on given sizes, and the command on a tiny checkpoint, of which no tensor is read."""

import json
import math

import pytest
import torch
from typer.testing import CliRunner

from camshaft.builder.build import build
from camshaft.builder.memory import MemoryNeeds, WeightChoice, memory_needs
from camshaft.cli.main import app
from camshaft.cli.memory import MemoryConfig, advice, fit, parse_bytes
from camshaft.config.build import BuildConfig
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import ModelConfig, RopeConfig
from camshaft.config.runtime import KvCacheConfig
from camshaft.core.errors import UserError
from camshaft.testing.tiny import write_tiny, write_tiny_llama

ALL = KvCacheConfig(memory_fraction=0.95)
MODEL = ModelConfig(architecture="LlamaForCausalLM", vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=1,
                    num_heads=1, num_kv_heads=1, head_dim=8, max_position=1024, norm_eps=1e-5, rope=RopeConfig())
FULL = LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=8, page_size=16, dtype="float32")


def needs(*, weights=1000, life_cycles=(FULL,), choices=()):
    return MemoryNeeds(model=MODEL, build=BuildConfig(dtype="float32", device="cpu", max_seq_len=1024),
                       weight_bytes=weights, activation_peak_bytes=24, life_cycles=life_cycles, choices=choices)


@pytest.mark.parametrize(("text", "expected"), [("141GB", 141 * 10**9), ("80GiB", 80 * 2**30), ("512M", 512 * 10**6),
                                                ("1.5 kB", 1500), ("1024", 1024), ("2TiB", 2**41)])
def test_amounts_of_memory(text, expected):
    assert parse_bytes("device_memory", text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-3GB", "0", "12XB", "1e9", "much", "9" * 400 + "GB", "9" * 5000])
def test_an_amount_that_is_none_is_refused_by_name(text):
    with pytest.raises(UserError, match="device_memory"):
        MemoryConfig(device_memory=text)


def test_requests_are_counted_in_whole_pages_of_what_is_left():
    assert FULL.page_bytes == 1024
    kv_cache = KvCacheConfig(max_bytes=1024 * 7)  # one page is never used, six hold three requests of two pages
    found = fit(needs(), 1024 + 1024 * 10, kv_cache, seq_len=17)
    assert (found.left_bytes, found.kv_budget_bytes, found.request_bytes) == (10240, 7168, 2048)
    assert (found.num_requests, found.num_tokens, found.fits) == (3, 51, True)
    shared = fit(needs(), 1024 + 1024 * 10, KvCacheConfig(memory_fraction=0.3), seq_len=16)
    assert (shared.kv_budget_bytes, shared.num_requests) == (3072, 2)


def test_a_window_holds_no_more_than_it_reads():
    window = LifeCycleSpec(kind="window", layers=(0,), num_kv_heads=1, head_dim=8, page_size=16, dtype="float32",
                           window=32)
    whole, cut = (fit(needs(life_cycles=(spec,)), 10**9, ALL, seq_len=1024) for spec in (FULL, window))
    assert whole.request_bytes == 64 * 1024
    assert cut.request_bytes <= whole.request_bytes
    narrow = MemoryNeeds(model=MODEL, build=BuildConfig(dtype="float32", device="cpu", max_seq_len=1024,
                                                        max_num_tokens=16, max_batch_size=4),
                         weight_bytes=1, activation_peak_bytes=1, life_cycles=(window,), choices=())
    longest, half = (fit(narrow, 10**9, ALL, seq_len=seq_len).request_bytes for seq_len in (1024, 512))
    assert longest == half < 10 * 1024


def test_narrow_weights_are_advised_also_where_only_shorter_requests_would_fit_beside_them():
    choices = tuple(WeightChoice(dtype="float32", weight_dtype="float32", quantization=name, num_bytes=num_bytes)
                    for name, num_bytes in (("none", 10**6), ("w8a16", 250_000)))
    given = needs(weights=10**6, choices=choices)
    found = fit(given, 300_000, ALL, seq_len=1024)
    assert found.left_bytes < 0 < 300_000 - 250_000 < found.request_bytes
    told = list(advice(given, found, ALL))
    assert told[0].startswith("--dtype float32 --quantization w8a16")
    assert told[1].startswith("a lower --max-seq-len")
    assert not [words for words in advice(given, fit(given, 200_000, ALL, seq_len=1024), ALL) if "w8a16" in words]


def test_what_does_not_fit_is_told_what_would_help():
    smaller = WeightChoice(dtype="float32", weight_dtype="float32", quantization="w8a16", num_bytes=250)
    given = needs(weights=10**6, choices=(smaller, WeightChoice(dtype="float32", weight_dtype="float32",
                                                                quantization="none", num_bytes=10**6)))
    found = fit(given, 900_000, ALL, seq_len=16)
    assert not found.fits
    told = list(advice(given, found, ALL))
    assert told[0].startswith("--dtype float32 --quantization w8a16")
    assert "more memory" in told[-1]
    tight = fit(needs(), 1024 + 64 * 1024 * 2, KvCacheConfig(memory_fraction=0.1))
    told = list(advice(needs(), tight, KvCacheConfig(memory_fraction=0.1)))
    assert told[0].startswith("--kv-memory-fraction 0.52")
    assert fit(needs(), 1024 + 64 * 1024 * 2, KvCacheConfig(memory_fraction=0.52)).fits
    assert list(advice(needs(), fit(needs(), 10**9, ALL), ALL)) == []


def test_a_request_longer_than_the_engine_takes_is_refused():
    with pytest.raises(UserError, match="seq_len"):
        fit(needs(), 10**9, ALL, seq_len=1025)


@pytest.mark.parametrize(("kind", "tied"), [
    ({}, False), ({"dtype": "bfloat16"}, True), ({"weight_dtype": "bfloat16"}, True), ({"quantization": "w8a8"}, False),
    ({"quantization": "w8a16", "weight_dtype": "bfloat16"}, True)])
def test_headers_alone_say_what_a_build_takes(tmp_path, monkeypatch, kind, tied):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    model = write_tiny_llama(tmp_path / "model", tie_word_embeddings=tied, num_hidden_layers=1, tokenizer=False)
    config = BuildConfig(device="cpu", **kind)
    built = build(model, config).manifest
    found = memory_needs(model, config)
    assert found.weight_bytes == sum(
        math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize for tensor in built.tensors.values())
    assert found.activation_peak_bytes == built.activation_peak_bytes
    assert (found.life_cycles, found.build) == (built.life_cycles, built.build)
    asked = (found.build.dtype, found.build.weight_dtype, found.build.quantization.replace("w8a8", "w8a16"))
    assert [choice.num_bytes for choice in found.choices
            if (choice.dtype, choice.weight_dtype, choice.quantization) == asked] == [found.weight_bytes]


@pytest.mark.parametrize("kind", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"weight_dtype": "bfloat16"}])
def test_norms_that_stay_float32_are_counted_as_such_in_every_choice(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    model = write_tiny(tmp_path / "model", "gemma3", tokenizer=False)
    config = BuildConfig(device="cpu", **kind)
    found = memory_needs(model, config)
    built = build(model, config).manifest.tensors.values()
    assert found.weight_bytes == sum(
        math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize for tensor in built)
    choices = {(choice.dtype, choice.weight_dtype, choice.quantization): choice.num_bytes for choice in found.choices}
    assert choices[found.build.dtype, found.build.weight_dtype, "none"] == found.weight_bytes
    assert choices == {(choice.dtype, choice.weight_dtype, choice.quantization): choice.num_bytes
                       for choice in memory_needs(model, BuildConfig(device="cpu", dtype="float32")).choices}


def test_no_tensor_is_read_even_where_a_tied_head_lies_beside_its_embedding(tmp_path, monkeypatch):
    model = write_tiny_llama(tmp_path / "model", tokenizer=False)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": True}))

    def refuse(self, tensor):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr("camshaft.frontend.safetensors_files._MappedFile.read", refuse)
    assert memory_needs(model, BuildConfig(device="cpu")).model.tie_word_embeddings


def test_a_device_that_is_not_here_can_be_asked_about(tmp_path):
    model = write_tiny_llama(tmp_path / "model", tokenizer=False, num_hidden_layers=1, torch_dtype="bfloat16")
    found = memory_needs(model, BuildConfig(device="cuda"))
    assert (found.build.device, found.build.dtype) == ("cuda", "bfloat16")
    assert {choice.quantization for choice in found.choices} == {"none"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("memory") / "model", num_hidden_layers=1)


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_the_command_says_fits_or_not_with_its_status(model, tmp_path):
    shown = inspect(model, "--memory", "--seq-len", 100)
    assert (shown.exit_code, "Fits." in shown.output) == (0, True), shown.output
    small = inspect(model, "--memory", "--device-memory", "1MB")
    assert (small.exit_code, "Does not fit" in small.output) == (1, True)
    data = json.loads(inspect(model, "--memory", "--json", "--device-memory", "1GB").output)
    assert data["fit"]["fits"] is True
    assert data["weight_bytes"] in [choice["num_bytes"] for choice in data["weight_choices"]]
    assert data["kv"][0]["token_bytes"] == 2 * 2 * 16 * 4


def test_an_engine_is_asked_as_it_is_built(model, tmp_path, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    config = BuildConfig(device="cpu", max_seq_len=64)
    built = build(model, config, output=tmp_path / "engine").manifest
    found = memory_needs(tmp_path / "engine", BuildConfig())
    assert found.weight_bytes == memory_needs(model, config).weight_bytes
    assert (found.build, found.choices) == (built.build, ())
    with pytest.raises(UserError, match="already built"):
        memory_needs(tmp_path / "engine", config)


@pytest.mark.parametrize("flags", [("--seq-len", 3), ("--device-memory", "1GB"), ("--dtype", "float32"),
                                   ("--kv-max-bytes", 5), ("--memory", "--graph"), ("--memory", "--verify")])
def test_options_that_would_do_nothing_are_refused(model, flags):
    assert isinstance(inspect(model, *flags).exception, UserError)
