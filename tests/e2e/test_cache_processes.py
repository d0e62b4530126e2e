"""The engine cache between processes: builds are shared, killed ones leave nothing in the way, loading is light."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from camshaft.builder import cache
from camshaft.builder.cache import cached_engine
from camshaft.config.build import BuildConfig
from camshaft.testing.tiny import write_tiny_llama

CFG = BuildConfig(device="cpu", max_batch_size=4, max_num_tokens=16)
SETTLED = "from camshaft.builder import cache; cache._sources_hash = lambda: 'settled'\n"
REPOSITORY = Path(cache.__file__).parents[2]


@pytest.fixture
def model(tmp_path):
    return write_tiny_llama(tmp_path / "model", seed=5)


@pytest.fixture(autouse=True)
def settled_sources(monkeypatch):
    """An edit of the package while the tests run does not change their keys; children do as ``SETTLED`` says."""
    monkeypatch.setattr(cache, "_sources_hash", lambda: "settled")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")


def engines():
    return [path for path in (Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "engines").glob("[!.]*") if path.is_dir()]


def test_two_processes_share_one_build(model):
    code = (f"{SETTLED}import sys, logging; from camshaft.builder import build as r; real = r.build\n"
            "def loud(*a, **k): print('built', flush=True); return real(*a, **k)\n"
            "r.build = loud\n"
            "from camshaft.builder.cache import cached_engine; from camshaft.config.build import BuildConfig\n"
            f"e = cached_engine({str(model)!r}, BuildConfig(device='cpu', max_batch_size=4, max_num_tokens=16))\n"
            "print(e.manifest.weights_id)\n")
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
               for _ in range(2)]
    outputs = [process.communicate(timeout=250)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(output.count("built") for output in outputs) == 1
    assert outputs[0][-1] == outputs[1][-1]


def test_the_second_start_imports_nothing_of_the_build_side(model):
    cached_engine(model, CFG)
    code = (f"{SETTLED}import sys, json; from camshaft.builder.cache import cached_engine\n"
            "from camshaft.config.build import BuildConfig\n"
            f"cached_engine({str(model)!r}, BuildConfig(device='cpu', max_batch_size=4, max_num_tokens=16))\n"
            "print(json.dumps(sorted(sys.modules)))\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout))
    assert "camshaft.engine.artifact" in loaded
    heavy = {"camshaft.passes", "camshaft.models", "camshaft.layers", "camshaft.frontend.export",
             "camshaft.builder.build", "transformers", "huggingface_hub", "sympy", "torch._dynamo"}
    assert not heavy & loaded
    assert len(engines()) == 1


def test_a_build_killed_midway_leaves_a_usable_cache(model):
    code = ("import os, signal, sys; from camshaft.engine import storage; real = storage._sync_tree\n"
            "storage._sync_tree = lambda folder: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"{SETTLED}"
            "from camshaft.config.build import BuildConfig\n"
            f"cache.cached_engine({str(model)!r}, BuildConfig(device='cpu', max_batch_size=4, max_num_tokens=16))\n")
    killed = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    folder = Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "engines"
    assert len(list(folder.glob(".*.partial"))) == 1
    assert cached_engine(model, CFG).folder is not None
    assert len(engines()) == 1
    assert list(folder.glob(".*")) == []
