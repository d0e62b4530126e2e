"""``camshaft inspect``: what it shows of an engine, and that damage is told with a status of its own."""

import json

import pytest
from typer.testing import CliRunner

from camshaft.builder.build import build
from camshaft.cli.main import app
from camshaft.config.build import BuildConfig
from camshaft.core.errors import UserError
from camshaft.testing.tiny import write_tiny_llama


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspected")
    build(write_tiny_llama(folder / "model"), output=folder / "engine")
    return folder / "engine"


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_the_report_says_what_was_fused_which_kernels_run_and_why(engine):
    shown = inspect(engine)
    assert shown.exit_code == 0
    for wanted in ("LlamaForCausalLM", "2 × q_proj+k_proj+v_proj", "add_rms_norm", "paged_attention", "serves the call",
                   "256 requests", "MB of float32"):
        assert wanted in shown.output


def test_the_report_counts_the_bytes_of_each_type(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    asked = BuildConfig(device="cpu", quantization="w8a8")
    build(write_tiny_llama(tmp_path / "model"), asked, output=tmp_path / "engine")
    shown = inspect(tmp_path / "engine").output
    for wanted in ("MB of int8", "MB of float32", "quantize", "linear_w8a8"):
        assert wanted in shown


def test_json_is_the_manifest_and_graph_is_the_graph(engine):
    assert json.loads(inspect(engine, "--json").output)["model"]["hidden_size"] == 64
    assert json.loads(inspect(engine, "--graph").output)["nodes"][-1]["op"] == "output"


@pytest.mark.parametrize("flags", [("--verify", "--json"), ("--graph", "--json"), ("--verify", "--graph")])
def test_two_forms_at_once_are_refused_not_reduced_to_one(engine, flags):
    assert isinstance(inspect(engine, *flags).exception, UserError)


def test_a_checkpoint_in_an_engines_place_is_told_both_ways_on(tmp_path):
    error = inspect(write_tiny_llama(tmp_path / "model")).exception
    assert isinstance(error, UserError)
    assert "camshaft build" in error.remedy
    assert "--memory" in error.remedy


def test_verify_names_the_damaged_tensor(engine):
    assert inspect(engine, "--verify").exit_code == 0
    weights = engine / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    shown = inspect(engine, "--verify")
    assert shown.exit_code == 1
    assert shown.output.count("BAD") == 1
    assert "CRC-32" in shown.output


def test_a_folder_that_is_no_engine_is_refused(tmp_path):
    assert isinstance(inspect(tmp_path).exception, UserError)
