"""Starting up where the machine is not kind: no compiler, a home that cannot be written, a full disk, company."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATE = """
import json, sys
from camshaft import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", kv_cache={"max_bytes": 2**22}) as llm:
    out = llm.generate([5, 6, 7], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)).outputs[0]
    print(json.dumps({"tokens": out.token_ids, "engine": llm.description["engine"]}))
"""


def environment(**changes):
    kept = {name: value for name, value in os.environ.items()
            if name not in ("CAMSHAFT_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    return {**kept, "PYTHONPATH": str(ROOT), **changes}


def start(model, **changes):
    return subprocess.Popen([sys.executable, "-c", GENERATE, str(model)], cwd="/", env=environment(**changes),
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.fixture(scope="module")
def expected(tiny_llama, tmp_path_factory):
    found, _ = finish(start(tiny_llama, CAMSHAFT_CACHE_DIR=str(tmp_path_factory.mktemp("usual"))))
    return found["tokens"]


@pytest.fixture
def tmpfs(tmp_path):
    """A mounted file system of 200 kB."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", folder], check=False, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_without_a_c_compiler_torch_does_the_work(tiny_llama, expected, tmp_path):
    found, err = finish(start(tiny_llama, CAMSHAFT_CC="none", CAMSHAFT_CACHE_DIR=str(tmp_path)))
    assert found["tokens"] == expected
    manifest = json.loads((Path(found["engine"]) / "engine.json").read_text())["manifest"]
    assert manifest["native"] is None
    assert "compiler" in err, "the slower path is said aloud"


def test_a_home_that_cannot_be_written_costs_a_warning(tiny_llama, expected):
    found, err = finish(start(tiny_llama, HOME="/proc/self/fd"))
    assert found == {"tokens": expected, "engine": None}
    assert "engine cache" in err


def test_a_read_only_cache_costs_a_warning(tiny_llama, expected, tmpfs):
    subprocess.run(["mount", "-o", "remount,ro", tmpfs], check=True)
    found, err = finish(start(tiny_llama, CAMSHAFT_CACHE_DIR=str(tmpfs)))
    assert found == {"tokens": expected, "engine": None}
    assert "engine cache" in err


def test_a_read_only_cache_that_holds_the_engine_is_used(tiny_llama, expected, tmp_path):
    usual = {"CAMSHAFT_CACHE_DIR": str(tmp_path), "CAMSHAFT_CC": "none"}
    built, _ = finish(start(tiny_llama, **usual))
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "--bind", tmp_path, tmp_path], check=False, capture_output=True).returncode == 0
    if not mounted:
        pytest.skip("needs the right to mount a file system")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", tmp_path], check=True)
        found, err = finish(start(tiny_llama, **usual))
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert found == built
    assert found["tokens"] == expected
    assert "engine cache" not in err


def test_a_full_disk_under_the_cache_costs_a_warning_and_leaves_nothing(tiny_llama, expected, tmpfs):
    found, err = finish(start(tiny_llama, CAMSHAFT_CACHE_DIR=str(tmpfs)))
    assert found == {"tokens": expected, "engine": None}
    assert "engine cache" in err
    assert [path for path in tmpfs.rglob("*") if path.is_file() and path.stat().st_size > 0] == []


def test_a_limit_on_file_sizes_costs_a_warning(tiny_llama, expected, tmp_path):
    command = f"ulimit -f 64; exec '{sys.executable}' -c '{GENERATE}' '{tiny_llama}'"
    run = subprocess.run(["bash", "-c", command], cwd="/", capture_output=True, text=True, timeout=240, check=False,
                         env=environment(CAMSHAFT_CACHE_DIR=str(tmp_path)))
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {"tokens": expected, "engine": None}


def test_two_processes_share_one_build(tiny_llama, expected, tmp_path):
    both = [start(tiny_llama, CAMSHAFT_CACHE_DIR=str(tmp_path), CAMSHAFT_LOG="info") for _ in range(2)]
    found = [finish(process)[0] for process in both]
    assert [each["tokens"] for each in found] == [expected, expected]
    assert found[0]["engine"] == found[1]["engine"]
    engines = [path for path in (tmp_path / "engines").iterdir() if path.is_dir()]
    assert [str(path) for path in engines] == [found[0]["engine"]]


def test_a_second_start_neither_exports_nor_fuses(tiny_llama, expected, tmp_path):
    finish(start(tiny_llama, CAMSHAFT_CACHE_DIR=str(tmp_path)))
    spy = GENERATE + "\nprint(sorted(m for m in sys.modules if m.startswith(('camshaft.passes', 'camshaft.models', "\
        "'camshaft.frontend.export', 'torch._dynamo', 'transformers'))), file=sys.stderr)\n"
    run = subprocess.run([sys.executable, "-c", spy, str(tiny_llama)], cwd="/", capture_output=True, text=True,
                         timeout=240, check=True, env=environment(CAMSHAFT_CACHE_DIR=str(tmp_path)))
    assert json.loads(run.stdout)["tokens"] == expected
    assert run.stderr.splitlines()[-1] == "[]"
