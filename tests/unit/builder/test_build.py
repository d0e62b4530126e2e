"""The recipe end to end on a tiny checkpoint: what lands in the engine, and what is refused."""

import dataclasses
import shutil
import weakref

import pytest
import torch

from camshaft.builder.build import build
from camshaft.config.build import BuildConfig
from camshaft.core import device as devices
from camshaft.core.errors import ModelNotFoundError, UserError
from camshaft.engine.artifact import Engine
from camshaft.frontend.hf_folder import HfFolderCheckpoint
from camshaft.ir.text import dump_graph, parse_graph
from camshaft.testing.tiny import write_tiny_llama

CFG = BuildConfig(device="cpu", max_batch_size=4, max_num_tokens=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("build") / "model", seed=3)


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Builds here are about the recipe: without a compiler they take a tenth of the time."""
    monkeypatch.setenv("CAMSHAFT_CC", "none")


@pytest.fixture(scope="module")
def in_memory(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAMSHAFT_CC", "none")
        return build(model, CFG)


def test_everything_is_resolved_and_recorded(in_memory):
    manifest = in_memory.manifest
    assert manifest.build == dataclasses.replace(CFG, dtype="float32", weight_dtype="float32", device="cpu",
                                                 max_seq_len=512)
    assert (manifest.model.num_layers, manifest.model.vocab_size) == (2, 320)
    assert manifest.life_cycles[0].layers == (0, 1)
    assert [record["name"] for record in manifest.history] == [
        "cleanup", "fuse_linear", "fuse_pointwise", "quantize", "narrow_weights", "narrow_attention", "page_attention",
        "select_kernels"]
    counts = {}
    for entry in manifest.kernels:
        assert entry["why"]
        counts[entry["op"]] = counts.get(entry["op"], 0) + entry["count"]
    assert counts == {"add_rms_norm": 4, "kv_write": 2, "linear": 9, "paged_attention": 2, "rms_norm": 1, "rope": 2,
                      "rope_cos_sin": 1, "silu_mul": 2}
    assert manifest.native is None
    assert manifest.device.features == ()
    assert manifest.activation_peak_bytes > 16 * 256 * 4
    assert set(in_memory.tokenizer_files()) == {"tokenizer.json", "tokenizer_config.json"}


def test_graph_and_weights_belong_together(in_memory):
    graph = parse_graph(in_memory.graph_text)
    assert dump_graph(graph) == in_memory.graph_text
    assert {node.target for node in graph.nodes if node.op == "get_attr"} == set(in_memory.tensors())
    joined = in_memory.tensor("model.layers.1.self_attn.q_proj+k_proj+v_proj.weight")
    assert joined.shape == (128, 64)


def test_joined_weights_hold_the_checkpoints_numbers(in_memory, model):
    tensors = HfFolderCheckpoint(model).tensors
    expected = torch.cat([tensors[f"model.layers.0.mlp.{part}_proj.weight"].read() for part in ("gate", "up")])
    assert torch.equal(in_memory.tensor("model.layers.0.mlp.gate_proj+up_proj.weight"), expected)


def test_a_folder_holds_the_same_engine_and_needs_nothing_else(in_memory, model, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    built = build(copy, CFG, output=tmp_path / "engine")
    shutil.rmtree(copy)
    loaded = Engine.load(tmp_path / "engine")
    assert built.manifest.self_contained
    for engine in (built, loaded):
        assert engine.graph_text == in_memory.graph_text
        assert engine.manifest.weights_id == in_memory.manifest.weights_id
        assert all(torch.equal(tensor, in_memory.tensor(name)) for name, tensor in engine.tensors().items())


def test_a_cache_engine_points_at_unchanged_tensors(model, tmp_path):
    engine = build(model, CFG, output=tmp_path / "engine", allow_pointers=True)
    files = {name: entry.file for name, entry in engine.manifest.tensors.items()}
    assert files["model.layers.0.self_attn.o_proj.weight"].startswith(str(model.resolve()))
    assert not files["model.layers.0.mlp.gate_proj+up_proj.weight"].startswith("/")
    assert not engine.manifest.self_contained


def test_tensors_are_read_one_at_a_time(model, tmp_path, monkeypatch):
    alive, most = weakref.WeakSet(), 0

    def counting(weight):
        def read():
            nonlocal most
            tensor = weight.read().clone()
            alive.add(tensor.untyped_storage())
            most = max(most, sum(storage.nbytes() for storage in alive))
            return tensor

        return dataclasses.replace(weight, read=read, span=None)

    class Counting(HfFolderCheckpoint):
        def __init__(self, path):
            super().__init__(path)
            self.tensors = {name: counting(weight) for name, weight in self.tensors.items()}

    monkeypatch.setattr("camshaft.frontend.hf_folder.HfFolderCheckpoint", Counting)
    build(model, CFG, output=tmp_path / "engine")
    largest = 320 * 64 * 4
    assert largest <= most <= 2 * largest


def test_dtype_skips_and_forced_kernels_are_honoured(model):
    engine = build(model, dataclasses.replace(CFG, dtype="bfloat16", skip_passes=("fuse_linear",),
                                              kernels=("linear=ref",), page_size=32))
    assert {engine.tensor(name).dtype for name in engine.tensors() if "proj" in name} == {torch.bfloat16}
    assert "model.layers.0.self_attn.q_proj.weight" in engine.tensors()
    assert [entry for entry in engine.manifest.kernels if entry["op"] == "linear"] == [
        {"op": "linear", "kernel": "ref", "count": 15, "why": "forced"}]
    assert (engine.manifest.life_cycles[0].dtype, engine.manifest.life_cycles[0].page_size) == ("bfloat16", 32)


def test_weights_id_names_the_weights_wherever_they_lie(in_memory, model, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    assert build(copy, CFG).manifest.weights_id == in_memory.manifest.weights_id
    ids = {build(copy, dataclasses.replace(CFG, **changes)).manifest.weights_id
           for changes in ({}, {"quantization": "w8a16"}, {"quantization": "w8a8"}, {"weight_dtype": "bfloat16"})}
    assert len(ids) == 4
    path = copy / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert build(copy, CFG).manifest.weights_id != in_memory.manifest.weights_id


@pytest.mark.parametrize(("changes", "field"), [
    ({"skip_passes": ("page_attention",)}, "skip_passes"), ({"skip_passes": ("no_such",)}, "skip_passes"),
    ({"kernels": ("linear=no_such",)}, "kernels.linear"), ({"kernels": ("no_such=ref",)}, "op"),
    ({"max_seq_len": 513}, "max_seq_len"),
])
def test_settings_that_cannot_be_met(model, changes, field):
    with pytest.raises(UserError) as caught:
        build(model, dataclasses.replace(CFG, **changes))
    assert caught.value.field == field


def test_weights_that_do_not_fit_the_device(model, monkeypatch):
    small = dataclasses.replace(devices.probe_cpu(), memory_bytes=1000)
    monkeypatch.setattr(devices, "probe", lambda kind: small)
    with pytest.raises(UserError, match=r"weights.*cpu device"):
        build(model, CFG)


def test_8_bit_weights_fit_where_fp32_ones_do_not(model, in_memory, monkeypatch):
    held = sum(tensor.nbytes for tensor in in_memory.tensors().values())
    small = dataclasses.replace(devices.probe_cpu(), memory_bytes=held // 2)
    monkeypatch.setattr(devices, "probe", lambda kind: small)
    with pytest.raises(UserError, match="8-bit weights"):
        build(model, CFG)
    asked = dataclasses.replace(CFG, quantization="w8a8", weight_dtype="bfloat16")
    assert sum(tensor.nbytes for tensor in build(model, asked).tensors().values()) <= held // 2


@pytest.mark.parametrize("kind", ["w8a16", "fp8"])
def test_a_quantised_engine_survives_being_saved(model, tmp_path, kind):
    asked = dataclasses.replace(CFG, quantization=kind)
    saved, kept = build(model, asked, output=tmp_path / "engine"), build(model, asked)
    loaded = Engine.load(tmp_path / "engine")
    assert {entry["op"] for entry in loaded.manifest.kernels} >= {f"linear_{kind}"}
    assert loaded.manifest.build.quantization == kind
    for name, tensor in kept.tensors().items():
        assert torch.equal(loaded.tensor(name), tensor), name
        assert torch.equal(saved.tensor(name), tensor), name


def test_an_engine_is_no_checkpoint(model, tmp_path):
    build(model, CFG, output=tmp_path / "engine")
    with pytest.raises(UserError, match="built engine"):
        build(tmp_path / "engine", CFG)


def test_nothing_there(tmp_path):
    with pytest.raises(ModelNotFoundError):
        build(tmp_path / "missing", CFG)


def test_an_output_that_holds_something_else(model, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="output"):
        build(model, CFG, output=tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_checkpoint_without_tokenizer_builds(model, tmp_path):
    copy = tmp_path / "model"
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("tokenizer*"))
    assert build(copy, CFG).tokenizer_files() == {}


