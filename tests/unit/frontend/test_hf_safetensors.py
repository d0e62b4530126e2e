"""Safetensors headers, mapped reading, and the shard index as a two-way contract."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from camshaft.core.errors import CheckpointError
from camshaft.frontend.safetensors_files import INDEX_FILE, file_weights, folder_weights, read_header
from camshaft.testing.tiny import tiny_config, tiny_tensors, write_tensors

TENSORS = {
    "matrix": torch.arange(24, dtype=torch.float32).view(4, 6), "half": torch.arange(5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5, dtype=torch.float16), "ids": torch.arange(3),
}


def raw_file(path, header, data=b""):
    """A safetensors file with any header text over any bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin, end, dtype="U8", shape=None):
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def test_every_tensor_reads_as_the_library_reads_it(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    weights = file_weights(path)
    assert weights.keys() == TENSORS.keys()
    for name, expected in load_file(path).items():
        assert torch.equal(weights[name].read(), expected)
        assert weights[name].dtype == expected.dtype
        assert weights[name].shape == tuple(expected.shape)


def test_a_span_is_exactly_the_tensors_bytes(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    span = file_weights(path)["matrix"].span
    held = path.read_bytes()[span.offset:span.offset + span.num_bytes]
    assert held == TENSORS["matrix"].numpy().tobytes()


def test_reading_maps_once_and_never_writes_through(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    weight, before = file_weights(path)["matrix"], path.read_bytes()
    first, second = weight.read(), weight.read()
    assert first.data_ptr() == second.data_ptr()
    first.fill_(-1.0)
    assert path.read_bytes() == before


def test_a_tensor_off_its_alignment_is_still_read(tmp_path):
    data = b"\x01" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    for padding in range(4):
        header = json.dumps({"a": entry(0, 1), "b": entry(1, 9, "F32", [2])}).encode() + b" " * padding
        weights = file_weights(raw_file(tmp_path / f"{padding}.safetensors", header, data))
        assert weights["b"].read().tolist() == [1.5, -2.0]


@pytest.mark.parametrize(("header", "data"), [
    (b"", b""),
    (b"[1]", b""),
    (b"{", b""),
    (b"\xff\xfe", b""),
    (b"[" * 100_000, b""),
    (b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {}}', b"1"),
    ({"a": None}, b""),
    ({"a": {"dtype": "U8", "shape": [1]}}, b"1"),
    ({"a": entry(0, 1, shape=[-1])}, b"1"),
    ({"a": entry(0, 1, shape=[True])}, b"1"),
    ({"a": entry(0, 1, "F4")}, b"1"),
    ({"a": entry(0, 1, ["U8"])}, b"1"),
    ({"a": entry(0, 4, "F32", [2])}, b"1234"),
    ({"a": entry(0, 4, "F32", [10**30])}, b"1234"),
    ({"a": entry(0, 0, shape=[0, 2**62, 2**62])}, b""),
    ({"a": entry(1, 0, shape=[0])}, b"1"),
    ({"a": entry(0, 8)}, b"1234"),
    ({"a": entry(0, 2)}, b"1234"),
    ({"a": entry(0, 2), "b": entry(1, 3)}, b"123"),
    ({"a": entry(0, 1), "b": entry(2, 3)}, b"123"),
    ({"a": entry(10**20, 10**20 + 1)}, b"1"),
])
def test_a_header_that_lies_is_a_checkpoint_error(tmp_path, header, data):
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_header(path)


@pytest.mark.parametrize("content", [b"", b"1234567", (2**63).to_bytes(8, "little") + b"{}",
                                     (200_000_000).to_bytes(8, "little") + b"{}"])
def test_an_absurd_header_length_is_a_checkpoint_error(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="header"):
        read_header(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_files_never_crash(tmp_path, data):
    good = tmp_path / "good.safetensors"
    if not good.exists():
        save_file(TENSORS, good)
    content = bytearray(good.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)):]
    for _ in range(data.draw(st.integers(0, 4))):
        if content:
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    try:
        tensors = {name: weight.read() for name, weight in file_weights(path).items()}
    except CheckpointError:
        return
    assert sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) < len(content)


def test_a_file_cut_after_opening_is_an_error_and_not_a_fault(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    weights = file_weights(path)
    os.truncate(path, weights["matrix"].span.offset)
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        weights["matrix"].read()


@pytest.fixture
def sharded(tmp_path):
    write_tensors(tmp_path, tiny_tensors(tiny_config(), seed=0), num_shards=3)
    return tmp_path


def shard(folder, number, total=3):
    return folder / f"model-{number:05}-of-{total:05}.safetensors"


def test_shards_read_as_one_file_does(sharded):
    weights, files = folder_weights(sharded)
    expected = tiny_tensors(tiny_config(), seed=0)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name].read(), tensor) for name, tensor in expected.items())
    assert [path.name for path in files] == [INDEX_FILE, *(shard(sharded, number).name for number in (1, 2, 3))]


def test_b57_a_missing_shard_is_named(sharded):
    shard(sharded, 2).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        folder_weights(sharded)


def test_b57_a_stray_shard_of_another_version_is_refused(sharded):
    save_file({"model.norm.weight": torch.zeros(64)}, shard(sharded, 4, 4))
    with pytest.raises(CheckpointError, match="model-00004-of-00004"):
        folder_weights(sharded)


def test_b57_a_single_file_beside_the_index_is_refused(sharded):
    write_tensors(sharded, tiny_tensors(tiny_config(), seed=1))
    with pytest.raises(CheckpointError, match=r"'model\.safetensors'"):
        folder_weights(sharded)


def test_b57_shards_without_their_index_are_refused(sharded):
    (sharded / INDEX_FILE).unlink()
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        folder_weights(sharded)
    shard(sharded, 2).unlink()
    shard(sharded, 3).unlink()
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        folder_weights(sharded)


def test_b57_extra_tensors_in_a_reused_shard_do_not_overwrite_the_right_ones(sharded):
    tensors = load_file(shard(sharded, 1))
    tensors["model.norm.weight" if "model.norm.weight" not in tensors else "lm_head.weight"] = torch.zeros(64)
    save_file(tensors, shard(sharded, 1))
    with pytest.raises(CheckpointError, match="places in this file"):
        folder_weights(sharded)


def test_b57_a_shard_of_another_version_lacks_what_the_index_promises(sharded):
    tensors = load_file(shard(sharded, 1))
    tensors.pop(next(iter(tensors)))
    save_file(tensors, shard(sharded, 1))
    with pytest.raises(CheckpointError, match="tensors that their shards hold"):
        folder_weights(sharded)


def test_b57_consolidated_files_repeat_the_model_and_are_left_alone(sharded, caplog):
    expected, files = folder_weights(sharded)
    shutil.copy(shard(sharded, 1), sharded / "consolidated.safetensors")
    with caplog.at_level("INFO", logger="camshaft"):
        again, same_files = folder_weights(sharded)
    assert again.keys() == expected.keys()
    assert same_files == files
    assert "consolidated.safetensors" in caplog.text


def test_a_file_under_another_name_is_left_alone_but_not_quietly(sharded, caplog):
    save_file({"a": torch.zeros(1)}, sharded / "adapter_model.safetensors")
    folder_weights(sharded)
    assert "adapter_model.safetensors" in caplog.text


@pytest.mark.parametrize("weight_map", [
    None, [], {}, {"a": 1}, {"a": "../model.safetensors"}, {"a": "/model.safetensors"}, {"a": "weights.bin"},
])
def test_an_index_that_is_none_is_refused(sharded, weight_map):
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        folder_weights(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'])
def test_an_index_that_is_no_json_object_is_refused(sharded, text):
    (sharded / INDEX_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=INDEX_FILE):
        folder_weights(sharded)


def test_one_file_called_shard_1_of_1_is_the_model(tmp_path):
    save_file({"a": torch.ones(2)}, shard(tmp_path, 1, 1))
    weights, files = folder_weights(tmp_path)
    assert weights["a"].read().tolist() == [1.0, 1.0]
    assert files == (shard(tmp_path, 1, 1),)


def test_pickles_are_refused_with_the_way_out(tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*save_pretrained"):
        folder_weights(tmp_path)


def test_a_folder_without_weights_says_what_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        folder_weights(tmp_path)
