"""The engine cache: one build for equal inputs, another for any change, and never a failure of its own."""

import dataclasses
import errno
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from camshaft.builder import build as recipe
from camshaft.builder import cache
from camshaft.builder.cache import cache_key, cached_engine
from camshaft.config.build import BuildConfig
from camshaft.core import device as devices
from camshaft.core.errors import ModelNotFoundError, UserError
from camshaft.testing.tiny import write_tiny_llama

CFG = BuildConfig(device="cpu", max_batch_size=4, max_num_tokens=16)
SOURCES_HASH = cache._sources_hash


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("cache") / "model", seed=5, num_hidden_layers=1)


@pytest.fixture
def model(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")


@pytest.fixture(autouse=True)
def settled_sources(monkeypatch):
    """An edit of the package while the tests run does not change their keys."""
    monkeypatch.setattr(cache, "_sources_hash", lambda: "settled")


@pytest.fixture
def builds(monkeypatch):
    """Counts builds: the arguments of each."""
    made, real = [], recipe.build

    def counting(*args, **kwargs):
        made.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(recipe, "build", counting)
    return made


def engines():
    folder = Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "engines"
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_the_second_start_builds_nothing(model, builds):
    first = cached_engine(model, CFG)
    second = cached_engine(str(model), CFG)
    assert len(builds) == 1
    assert first.folder == second.folder
    assert engines() == [cache_key(model, CFG)]
    assert first.graph_text == second.graph_text
    assert set(first.tensors()) == set(second.tensors())


def test_no_cache_leaves_nothing_behind(model, builds):
    engine = cached_engine(model, CFG, use_cache=False)
    assert engine.folder is None
    assert not (Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "engines").exists()


@pytest.mark.parametrize("change", [
    lambda model: (model / "config.json").write_text((model / "config.json").read_text() + " "),
    lambda model: os.utime(model / "model.safetensors", ns=(1, 1)),
    lambda model: (model / "generation_config.json").unlink(missing_ok=True) or (model / "extra.json").write_text("{}"),
    lambda model: (model / "tokenizer.json").unlink(),
])
def test_a_changed_checkpoint_has_another_key(model, change):
    before = cache_key(model, CFG)
    change(model)
    assert cache_key(model, CFG) != before


def test_an_edited_header_has_another_key_though_size_and_time_agree(model):
    path = model / "model.safetensors"
    before, stat = cache_key(model, CFG), path.stat()
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cache_key(model, CFG) != before


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"max_batch_size": 5}, {"max_num_tokens": 17},
                                     {"max_seq_len": 64}, {"page_size": 32}, {"skip_passes": ("cleanup",)},
                                     {"kernels": ("linear=ref",)}])
def test_another_configuration_has_another_key(model, changes):
    assert cache_key(model, dataclasses.replace(CFG, **changes)) != cache_key(model, CFG)


def test_everything_else_an_engine_depends_on_is_in_the_key(model, monkeypatch, tmp_path):
    keys = {cache_key(model, CFG)}
    real = devices.probe_cpu()
    with monkeypatch.context() as patch:
        patch.setattr(devices, "probe", lambda kind: dataclasses.replace(real, features=("other",)))
        keys.add(cache_key(model, CFG))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "find_compiler", lambda: "cc")
        keys.add(cache_key(model, CFG))
    with monkeypatch.context() as patch:
        patch.setattr(cache.torch, "__version__", "9.9.1")
        keys.add(cache_key(model, CFG))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_sources_hash", lambda: "other")
        keys.add(cache_key(model, CFG))
    shutil.copytree(model, tmp_path / "copy")
    keys.add(cache_key(tmp_path / "copy", CFG))
    assert len(keys) == 6


def test_the_key_covers_our_own_sources(monkeypatch, tmp_path):
    package = tmp_path / "camshaft"
    for name in ("passes/fuse.py", "kernels/gemm/cpu.c", "runtime/step.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("1")
    monkeypatch.setattr(cache.camshaft, "__file__", str(package / "__init__.py"))
    hashes = [SOURCES_HASH()]
    for name in ("runtime/step.py", "passes/fuse.py", "kernels/gemm/cpu.c"):
        (package / name).write_text("2")
        hashes.append(SOURCES_HASH())
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_file_beside_the_model_does_not_matter(model):
    before = cache_key(model, CFG)
    (model / "README.md").write_text("hello")
    assert cache_key(model, CFG) == before


@pytest.mark.parametrize("damage", [
    lambda entry: next(entry.glob("graph.*")).write_text("{}"), lambda entry: (entry / "engine.json").unlink(),
    lambda entry: (entry / "engine.json").write_bytes(b""),
    lambda entry: os.truncate(entry / "weights.safetensors", 100),
])
def test_a_damaged_entry_is_built_again_with_a_warning(model, builds, caplog, damage):
    first = cached_engine(model, CFG)
    graph, folder = first.graph_text, first.folder
    damage(folder)
    with caplog.at_level(logging.WARNING, logger="camshaft"):
        again = cached_engine(model, CFG)
    assert len(builds) == 2
    assert again.graph_text == graph
    assert "damaged" in caplog.text
    cached_engine(model, CFG)
    assert len(builds) == 2


def test_a_cache_that_cannot_be_made_costs_a_warning(model, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="camshaft"):
        engine = cached_engine(model, CFG)
    assert engine.folder is None
    assert "building in memory" in caplog.text


def test_a_full_disk_costs_a_warning_and_leaves_no_entry(model, monkeypatch, caplog):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("camshaft.engine.storage.write_weights", full)
    with caplog.at_level(logging.WARNING, logger="camshaft"):
        engine = cached_engine(model, CFG)
    assert engine.folder is None
    assert "No space left" in caplog.text
    assert engines() == []


def test_errors_of_the_model_are_not_taken_for_errors_of_the_cache(model, caplog):
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"config\.json"):
        cached_engine(model, CFG)
    with pytest.raises(ModelNotFoundError):
        cached_engine(model.parent / "missing", CFG)
    assert "cache cannot be used" not in caplog.text


def test_a_file_system_without_locks_costs_a_warning(model, monkeypatch, caplog):
    def refuse(self, timeout=None):
        raise RuntimeError("no flock here")

    monkeypatch.setattr(cache.filelock.FileLock, "acquire", refuse)
    monkeypatch.setattr("camshaft.core.env.cache_dir", lambda: model.parent / "locks")
    with caplog.at_level(logging.WARNING, logger="camshaft"):
        assert cached_engine(model, CFG).folder is None
    assert "does not support locks" in caplog.text


def test_waiting_for_another_process_is_said(model, monkeypatch, caplog):
    monkeypatch.setattr(cache, "_PATIENCE_SECONDS", 0.01)
    folder = Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "engines"
    folder.mkdir(parents=True)
    other = cache.filelock.FileLock(folder / f"{cache_key(model, CFG)}.lock", thread_local=False)
    other.acquire()

    def release_once_said(record):
        other.release()
        return True

    with caplog.at_level(logging.WARNING, logger="camshaft"):
        caplog.handler.addFilter(release_once_said)
        assert cached_engine(model, CFG).folder is not None
        caplog.handler.removeFilter(release_once_said)
    assert "waiting for it" in caplog.text


def test_an_unreadable_size_limit_is_refused_before_building(model, monkeypatch, builds):
    monkeypatch.setenv("CAMSHAFT_CACHE_MAX_BYTES", "lots")
    with pytest.raises(UserError, match="CAMSHAFT_CACHE_MAX_BYTES"):
        cached_engine(model, CFG)
    assert builds == []


def test_a_failed_build_leaves_nothing_in_use(model, monkeypatch):
    real = recipe.build
    monkeypatch.setattr(recipe, "build", lambda *args, **kwargs: 1 / 0)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZeroDivisionError):
        cached_engine(model, CFG)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.setattr(recipe, "build", real)
    assert cached_engine(model, CFG).folder is not None


def test_concurrent_starts_share_one_build(model, builds):
    barrier = threading.Barrier(3)

    def start(_):
        barrier.wait()
        return cached_engine(model, CFG).graph_text

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(start, range(3)))) == 1
    assert len(builds) == 1


def made_entries(model, count):
    """Entries of different configurations, oldest first."""
    kept = []
    for index in range(count):
        kept.append(cached_engine(model, dataclasses.replace(CFG, max_batch_size=index + 1)).folder)
        os.utime(kept[-1], (index + 1, index + 1))
    return kept


def test_least_recently_used_entries_go_first(model, monkeypatch):
    oldest, middle, recent = made_entries(model, 3)
    cached_engine(model, dataclasses.replace(CFG, max_batch_size=1))
    size = sum(file.stat().st_size for file in oldest.rglob("*"))
    monkeypatch.setenv("CAMSHAFT_CACHE_MAX_BYTES", str(int(size * 3.5)))
    newest = cached_engine(model, dataclasses.replace(CFG, max_batch_size=4))
    assert not middle.exists()
    assert oldest.exists()
    assert recent.exists()
    assert newest.folder.exists()


def test_what_is_in_use_or_just_built_is_never_evicted(model, monkeypatch):
    held = cached_engine(model, dataclasses.replace(CFG, max_batch_size=1))
    (loose,) = made_entries(model, 2)[1:]
    monkeypatch.setenv("CAMSHAFT_CACHE_MAX_BYTES", "1")
    newest = cached_engine(model, dataclasses.replace(CFG, max_batch_size=3))
    assert held.folder.exists()
    assert newest.folder.exists()
    assert not loose.exists()


def test_a_start_that_finds_its_engine_waits_for_no_lock(model, builds, monkeypatch):
    folder = cached_engine(model, CFG).folder
    other = cache.filelock.FileLock(folder.with_name(f"{folder.name}.lock"), thread_local=False)
    monkeypatch.setattr(cache._Cache, "_locked", lambda *args: pytest.fail("asked for the lock"))
    with other:
        assert cached_engine(model, CFG).folder == folder
    assert len(builds) == 1


def test_an_entry_evicted_while_a_start_waited_is_not_trusted(model, builds, monkeypatch):
    folder = cached_engine(model, CFG).folder
    real, calls = cache._hold_shared, []

    def late(path, flags=os.O_RDWR | os.O_CREAT):
        held = real(path, flags)
        if not calls:
            path.unlink()
        calls.append(path)
        return held

    monkeypatch.setattr(cache, "_hold_shared", late)
    assert cached_engine(model, CFG).folder == folder
    assert len(calls) == 2


def test_what_killed_builds_left_goes_with_the_next_build_of_anything(model):
    engines_folder = Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "engines"
    partial = engines_folder / ".0123.deadbeef.partial"
    partial.mkdir(parents=True)
    (partial / "weights.safetensors").write_bytes(bytes(100))
    (engines_folder / ".0123.deadbeef.lock").touch()
    cached_engine(model, CFG)
    assert [path.name for path in engines_folder.iterdir() if path.name.startswith(".")] == []


def test_a_cache_that_takes_no_files_is_given_up_at_once():
    with pytest.raises(OSError, match=r"key\.lock"), cache._Cache(Path("/proc"))._locked("key", 1.0):
        pass


def test_a_changed_checkpoint_of_equal_size_and_time_is_not_run_from_the_old_bytes(model, builds):
    before = cached_engine(model, CFG)
    path = model / "model.safetensors"
    entry = next(entry for entry in before.manifest.tensors.values() if entry.file == str(path))
    stat, content = path.stat(), bytearray(path.read_bytes())
    content[entry.offset] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cached_engine(model, CFG).folder is not None
    assert len(builds) == 2


def test_an_engine_folder_is_loaded_as_it_is(model, tmp_path, builds):
    made = recipe.build(model, CFG, output=tmp_path / "engine")
    builds.clear()
    assert cached_engine(tmp_path / "engine").manifest == made.manifest
    assert builds == []
    with pytest.raises(UserError, match=r"build=.*'max_batch_size': 4, 'max_num_tokens': 16\}: .*already built"):
        cached_engine(tmp_path / "engine", CFG)
