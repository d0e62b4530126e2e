"""Engines come back as they were written; whatever was cut, edited or swapped is a typed error."""

import _ctypes
import ctypes
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from camshaft.core.errors import (
    EngineCorruptError,
    EngineDeviceError,
    EngineError,
    EngineVersionError,
    InternalError,
    UserError,
)
from camshaft.engine import storage
from camshaft.engine.artifact import Engine, EngineWriter, is_engine_folder, verify_engine
from camshaft.engine.manifest import DeviceRequirement
from camshaft.ir.weight import FileSpan, Weight, constant
from tests.unit.engine.parts import parts, tensors, write


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "engine")
    return tmp_path / "engine"


def rewrite_manifest(folder, change):
    """Edit engine.json and seal it again, as a hostile or foreign writer would."""
    data = json.loads((folder / "engine.json").read_bytes())["manifest"]
    change(data)
    rest = b'"manifest": ' + json.dumps(data).encode() + b"}\n"
    (folder / "engine.json").write_bytes(b'{"sha256": "' + storage.sha256_of(rest).encode() + b'",\n' + rest)


@pytest.mark.parametrize("saved", [True, False])
def test_round_trip(tmp_path, saved):
    target = tmp_path / "engine" if saved else None
    made = write(target)
    engines = [made, Engine.load(target)] if saved else [made]
    for engine in engines:
        assert engine.folder == target
        assert engine.graph_text == "one line a node\n"
        assert engine.tokenizer_files() == parts().tokenizer_files
        assert engine.library() is None
        assert engine.manifest.model == parts().model
        assert engine.manifest.build == parts().build
        assert engine.manifest.generation == parts().generation
        assert engine.manifest.life_cycles == parts().life_cycles
        assert engine.tensors().keys() == tensors().keys()
        for name, value in tensors().items():
            assert engine.tensor(name).dtype == value.dtype
            assert torch.equal(engine.tensor(name), value)
    assert engines[0].manifest == engines[-1].manifest


def test_weights_file_is_aligned_and_readable_by_the_safetensors_library(folder):
    read = load_file(folder / "weights.safetensors")
    for name, value in tensors().items():
        assert torch.equal(read[name], value)
    assert all(entry.offset % storage.ALIGNMENT == 0 for entry in Engine.load(folder).manifest.tensors.values())


def test_loaded_tensors_are_private_views_of_one_mapping(folder):
    before = (folder / "weights.safetensors").read_bytes()
    engine = Engine.load(folder)
    storages = {engine.tensor(name).untyped_storage().data_ptr() for name in tensors() if engine.tensor(name).numel()}
    assert len(storages) == 1
    engine.tensor("a.weight").zero_()
    assert (folder / "weights.safetensors").read_bytes() == before
    assert torch.equal(Engine.load(folder).tensor("a.weight"), tensors()["a.weight"])


def test_loading_maps_and_does_not_copy(tmp_path):
    size = 64 << 20
    write(tmp_path / "engine", weights={"big": constant(torch.zeros(size, dtype=torch.uint8), "big")})

    def private_bytes():
        with open("/proc/self/smaps_rollup", encoding="ascii") as file:
            fields = dict(line.split(":") for line in file if ": " in line)
        return 1024 * int(fields["Anonymous"].split()[0])

    before = private_bytes()
    engine = Engine.load(tmp_path / "engine")
    assert int(engine.tensor("big").sum()) == 0
    assert private_bytes() - before < size // 4


def test_every_flipped_byte_is_found(folder, tmp_path):
    copy = tmp_path / "copy"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        places = range(len(data)) if len(data) < 100 else range(0, len(data), max(1, len(data) // 60))
        for place in places:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            (copy / path.relative_to(folder)).write_bytes(
                data[:place] + bytes([data[place] ^ 0x41]) + data[place + 1:])
            if path.name == "weights.safetensors" and not in_tensor(folder, place):
                assert Engine.load(copy).tensor("a.weight").shape == (3, 5)
            else:
                with pytest.raises(EngineError):
                    Engine.load(copy)


def in_tensor(folder, place):
    entries = Engine.load(folder).manifest.tensors
    return any(entry.offset <= place < entry.offset + tensors()[name].nbytes for name, entry in entries.items())


def test_every_truncated_or_missing_file_is_found(folder, tmp_path):
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        for length in (None, 0, 1, len(data) // 2, len(data) - 1):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folder, copy)
            broken = copy / path.relative_to(folder)
            broken.unlink() if length is None else broken.write_bytes(data[:length])
            with pytest.raises(EngineCorruptError):
                Engine.load(copy)


@given(junk=st.binary(max_size=300))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_junk_manifests_are_refused(folder, junk):
    (folder / "engine.json").write_bytes(junk)
    with pytest.raises(EngineError):
        Engine.load(folder)


HOSTILE = {
    "leaves by ..": lambda data: data["graph"].update(file="../graph.json"),
    "absolute graph": lambda data: data["graph"].update(file="/etc/hostname"),
    "absolute tensor": lambda data: data["tensors"]["a.weight"].update(file="/etc/hostname"),
    "negative offset": lambda data: data["tensors"]["a.weight"].update(offset=-64),
    "negative size": lambda data: data["tensors"]["a.weight"].update(shape=[-3, -5]),
    "huge size": lambda data: data["tensors"]["a.weight"].update(shape=[1 << 60, 5]),
    "odd offset": lambda data: data["tensors"]["a.weight"].update(offset=data["tensors"]["a.weight"]["offset"] + 1),
    "words for numbers": lambda data: data["tensors"]["a.weight"].update(shape=["3", "5"]),
    "unknown type": lambda data: data["tensors"]["a.weight"].update(dtype="object"),
    "missing field": lambda data: data.pop("life_cycles"),
    "unknown field": lambda data: data["model"].update(surprise=1),
    "list for object": lambda data: data.update(model=[]),
    "nul in a name": lambda data: data["graph"].update(file="a\0b"),
    "no name": lambda data: data["graph"].update(file=""),
    "number for a name": lambda data: data["graph"].update(file=3),
    "a window of half a token": lambda data: data["life_cycles"][0].update(kind="window", window=1.5),
    "a window in words": lambda data: data["life_cycles"][0].update(kind="window", window="8"),
    "sinks without a window": lambda data: data["life_cycles"][0].update(sinks=3),
    "fewer than no sinks": lambda data: data["life_cycles"][0].update(kind="window", window=8, sinks=-1),
    "heads of no size": lambda data: data["life_cycles"][0].update(head_dim=0),
    "no heads": lambda data: data["life_cycles"][0].update(num_kv_heads=0),
    "pages of another size": lambda data: data["life_cycles"][0].update(page_size=32),
    "a cache of no known type": lambda data: data["life_cycles"][0].update(dtype="int3"),
    "a layer twice": lambda data: data["life_cycles"].append(data["life_cycles"][0]),
    "no life cycle": lambda data: data.update(life_cycles=[]),
    "unknown quantization": lambda data: data["build"].update(quantization="w3a3"),
    "unresolved length": lambda data: data["build"].update(max_seq_len=None),
    "unresolved type": lambda data: data["build"].update(dtype="auto"),
    "unknown device": lambda data: data["device"].update(kind="abacus"),
    "a feature that is a number": lambda data: data["device"].update(features=[3]),
    "more token ids than the vocabulary": lambda data: data.update(num_token_ids=33),
    "no token ids": lambda data: data.update(num_token_ids=0),
    "half a token id": lambda data: data.update(num_token_ids=1.5),
    "sampling in words": lambda data: data["generation"].update(top_k="x"),
    "truth for a number": lambda data: data.update(activation_peak_bytes=True),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_sealed_but_hostile_manifests_are_refused(folder, kind):
    rewrite_manifest(folder, HOSTILE[kind])
    with pytest.raises(EngineCorruptError):
        Engine.load(folder)


def test_a_link_out_of_the_engine_is_refused(folder, tmp_path):
    shutil.move(folder / "graph.json", tmp_path / "graph.json")
    os.symlink(tmp_path / "graph.json", folder / "graph.json")
    with pytest.raises(EngineCorruptError, match="leaves the engine"):
        Engine.load(folder)


def test_other_version_and_other_device_have_their_own_errors(folder, tmp_path):
    write(tmp_path / "amx", device=DeviceRequirement(kind="cpu", features=("amx_of_the_future",)))
    with pytest.raises(EngineDeviceError, match="amx_of_the_future") as caught:
        Engine.load(tmp_path / "amx")
    assert caught.value.remedy
    rewrite_manifest(folder, lambda data: data.update(format_version=99))
    with pytest.raises(EngineVersionError, match="99"):
        Engine.load(folder)


def test_an_engine_of_the_first_format_is_called_old_and_not_corrupt(folder):
    def first_format(data):
        del data["num_token_ids"], data["model"]["windows"]
        data.update(format_version=1)

    rewrite_manifest(folder, first_format)
    with pytest.raises(EngineVersionError, match="found 1, needed"):
        Engine.load(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_engine_on_a_cpu_machine_is_a_device_error(tmp_path):
    write(tmp_path / "gpu", device=DeviceRequirement(kind="cuda", features=("sm_90",)))
    with pytest.raises(EngineDeviceError, match="cuda"):
        Engine.load(tmp_path / "gpu")


def test_what_is_no_engine_is_refused_in_words(tmp_path):
    (tmp_path / "model.engine").write_bytes(b"ftrt\x00")
    (tmp_path / "model.pt").write_bytes(pickle.dumps({"a": 1}))
    (tmp_path / "notes.md").write_bytes(b"x")
    (tmp_path / "trtllm").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "trtllm" / "rank0.engine").write_bytes(b"ftrt")
    for name, words in {"model.engine": "native TensorRT", "model.pt": "pickle", "notes.md": "a file",
                        "trtllm": "TensorRT-LLM", "absent": "nothing", "empty": "no engine.json"}.items():
        with pytest.raises(EngineError, match=words):
            Engine.load(tmp_path / name)


def test_verify_reports_every_part(folder):
    assert all(check.problem is None for check in verify_engine(folder))
    assert {check.part for check in verify_engine(folder)} >= {"engine.json", "graph.json", *tensors()}
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[Engine.load(folder).manifest.tensors["b.half"].offset] ^= 1
    (folder / "weights.safetensors").write_bytes(data)
    (folder / "tokenizer" / "tokenizer.json").unlink()
    bad = {check.part for check in verify_engine(folder) if check.problem}
    assert bad == {"b.half", "tokenizer/tokenizer.json"}


def checkpoint_weight(path):
    """A weight whose bytes lie in a checkpoint file, as a frontend would describe it."""
    value = torch.arange(32, dtype=torch.float32).reshape(4, 8)
    save_file({"x": value}, path)
    data = path.read_bytes()
    offset = 8 + int.from_bytes(data[:8], "little")
    return value, Weight(shape=(4, 8), dtype=torch.float32, read=lambda: value, origin="x",
                         span=FileSpan(path=path, offset=offset, num_bytes=value.nbytes))


def test_a_cache_engine_points_into_its_checkpoint(tmp_path):
    value, weight = checkpoint_weight(tmp_path / "model.safetensors")
    made = constant(torch.ones(3), "made")
    write(tmp_path / "cached", weights={"x": weight, "y": made}, allow_pointers=True)
    engine = Engine.load(tmp_path / "cached")
    assert engine.manifest.tensors["x"].file == str(tmp_path / "model.safetensors")
    assert not engine.manifest.self_contained
    assert torch.equal(engine.tensor("x"), value)
    assert torch.equal(engine.tensor("y"), torch.ones(3))
    data = bytearray((tmp_path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(EngineCorruptError, match="tensor x"):
        Engine.load(tmp_path / "cached")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(EngineCorruptError, match=r"model\.safetensors"):
        Engine.load(tmp_path / "cached")


def test_without_pointers_an_engine_is_self_contained(tmp_path):
    value, weight = checkpoint_weight(tmp_path / "model.safetensors")
    write(tmp_path / "whole", weights={"x": weight})
    (tmp_path / "model.safetensors").unlink()
    assert torch.equal(Engine.load(tmp_path / "whole").tensor("x"), value)


def test_replacing_keeps_the_old_engine_until_the_new_is_whole(folder):
    old = Engine.load(folder)

    def broken():
        raise RuntimeError("unreadable")

    with pytest.raises(RuntimeError, match="unreadable"):
        write(folder, weights={"z": Weight(shape=(1,), dtype=torch.float32, read=broken)})
    assert Engine.load(folder).manifest == old.manifest
    write(folder, weights={"z": constant(torch.ones(1), "z")})
    assert list(Engine.load(folder).tensors()) == ["z"]
    assert torch.equal(old.tensor("a.weight"), tensors()["a.weight"])
    assert [path.name for path in folder.parent.iterdir()] == ["engine"]


def test_native_code_is_carried_checked_and_loaded_on_demand(tmp_path, monkeypatch):
    # any shared library stands in for the kernels, so the check of what it was compiled from must stand aside
    monkeypatch.setattr("camshaft.engine.artifact.load_library", lambda path: ctypes.CDLL(str(path)))
    source = tmp_path / "libkernels-abc.so"
    shutil.copyfile(_ctypes.__file__, source)
    saved, memory = write(tmp_path / "engine", native=source), write(None, native=source)
    source.unlink()
    for engine in (saved, memory, Engine.load(tmp_path / "engine")):
        assert engine.library().PyInit__ctypes
        assert engine.manifest.native.file == "libkernels-abc.so"
    copy = tmp_path / "engine" / "libkernels-abc.so"
    cut = copy.read_bytes()[:-1]
    copy.unlink()  # never write into a loaded library
    copy.write_bytes(cut)
    with pytest.raises(EngineCorruptError, match="libkernels-abc"):
        Engine.load(tmp_path / "engine")


def test_native_code_of_another_version_is_refused(tmp_path):
    source = tmp_path / "libkernels-abc.so"
    shutil.copyfile(_ctypes.__file__, source)
    write(tmp_path / "engine", native=source)
    with pytest.raises(EngineVersionError, match="Build the engine again"):
        Engine.load(tmp_path / "engine").library()


def test_native_code_that_cannot_be_loaded_is_a_corrupt_engine(tmp_path):
    (tmp_path / "libjunk.so").write_bytes(b"not an object file")
    write(tmp_path / "engine", native=tmp_path / "libjunk.so")
    with pytest.raises(EngineCorruptError, match="native library"):
        Engine.load(tmp_path / "engine").library()


def test_a_folder_with_other_things_is_not_overwritten(tmp_path):
    (tmp_path / "precious.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match="output"):
        EngineWriter(tmp_path)
    with pytest.raises(UserError, match="output"):
        EngineWriter(tmp_path / "precious.txt")


def test_a_full_disk_surfaces_and_leaves_nothing(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match=r".+"):
            write(tmp_path / "engine", weights={"big": constant(torch.zeros(1 << 16), "big")})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_place_under_a_file_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        EngineWriter(tmp_path / "file" / "engine")


def test_an_unwritable_parent_surfaces(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        write(tmp_path / "file" / "engine")


def test_leftovers_of_dead_writers_are_removed_and_live_ones_kept(tmp_path):
    for token in ("dead", "live"):
        (tmp_path / f".engine.{token}.partial").mkdir()
        (tmp_path / f".engine.{token}.lock").touch()
    with storage.filelock.FileLock(tmp_path / ".engine.live.lock"):
        write(tmp_path / "engine")
        assert (tmp_path / ".engine.live.partial").exists()
    assert not (tmp_path / ".engine.dead.partial").exists()
    assert is_engine_folder(tmp_path / "engine")


def test_an_engine_moved_aside_by_a_writer_that_died_comes_back(folder, tmp_path):
    manifest = (folder / "engine.json").read_bytes()
    os.rename(folder, folder.with_name(f".{folder.name}.deadbeef.old"))
    folder.with_name(f".{folder.name}.deadbeef.lock").touch()
    with pytest.raises(ZeroDivisionError), storage.atomic_folder(folder):
        1 / 0  # noqa: B018
    assert (folder / "engine.json").read_bytes() == manifest
    assert list(tmp_path.glob(".*")) == []


def test_a_place_that_takes_no_files_is_refused_at_once():
    with pytest.raises(OSError, match="/proc"), storage.atomic_folder(Path("/proc/engine")):
        pass


def test_writer_refuses_what_its_caller_got_wrong(tmp_path):
    writer = EngineWriter(None)
    writer.add_tensor("a", constant(torch.ones(2), "a"))
    with pytest.raises(InternalError, match="twice"):
        writer.add_tensor("a", constant(torch.ones(2), "a"))
    lying = Weight(shape=(3,), dtype=torch.float32, read=lambda: torch.ones(2))
    with pytest.raises(InternalError, match="declared"):
        write(tmp_path / "engine", weights={"a": lying})
