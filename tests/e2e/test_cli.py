"""The command: answers, exit codes, one readable line for every mistake, and nothing left after a signal."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from camshaft.cli.main import main
from camshaft.config.build import BuildConfig
from camshaft.config.doc import field_docs
from camshaft.testing.tiny import write_tiny_llama

ROOT = Path(__file__).parents[2]
SMALL = ("--kv-max-bytes", str(2**22))
SLOW_BUILD = """
import time
from camshaft.engine import storage
storage.write_weights = lambda *a: (print("writing", flush=True), time.sleep(100))
from camshaft.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("cli") / "model", seed=3, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "engine"
    subprocess.run([sys.executable, "-m", "camshaft", "build", str(model), "-o", str(folder)], check=True, cwd=ROOT,
                   capture_output=True, env={**os.environ, "CAMSHAFT_CC": "none"})
    return folder


@pytest.fixture
def camshaft(monkeypatch, capfd):
    """Run the command in this process; returns exit code, standard output and standard error."""
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["camshaft", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as leaving:
            main()
        return leaving.value.code or 0, *capfd.readouterr()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def started(tmp_path):
    """Start the command as a process of its own; what it leaves in the temporary folder is a failure."""
    running = []

    def start(*arguments, code=None):
        (tmp_path / "scratch").mkdir(exist_ok=True)
        head = ["-m", "camshaft"] if code is None else ["-c", code]
        running.append(subprocess.Popen([sys.executable, *head, *map(str, arguments)], cwd=ROOT, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        env={**os.environ, "CAMSHAFT_CC": "none", "TMPDIR": str(tmp_path / "scratch")}))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_sampling_options_reach_the_model(camshaft, engine):
    given = ("run", engine, *SMALL, "--prompt", "a valve", "--max-tokens", 6, "--ignore-eos", "--raw")
    plain = camshaft(*given)[1]
    forced = camshaft(*given, "--logit-bias", "70=100", "--logit-bias", "71=-100")
    assert (forced[0], len(set(forced[1].strip()))) == (0, 1)
    assert camshaft(*given, "--allowed-token-ids", 70, "--repetition-penalty", 1.5)[1] == forced[1]
    assert camshaft(*given, "--bad", plain.strip()[0], "--no-repeat-ngram-size", 1)[1] != plain
    best = camshaft(*given, "--best-of", 3, "--temperature", 1, "--seed", 4)
    assert best[0] == 0
    assert "6 new tokens" in best[2]
    for wrong, named in (("--logit-bias", "--logit-bias"), ("--best-of", "best_of")):
        code, _, err = camshaft(*given, wrong, "3")
        assert code != 0
        assert named in err


def test_an_answer_goes_to_stdout_and_everything_else_to_stderr(camshaft, engine):
    code, out, err = camshaft("run", engine, *SMALL, "--prompt", "a valve", "--max-tokens", 8, "--ignore-eos",
                              "--seed", 1)
    assert code == 0
    assert out.strip()
    assert "8 new tokens" in err
    assert "prompt tokens" not in out
    assert camshaft("run", engine, *SMALL, "-p", "-", "--max-tokens", 8, "--ignore-eos", "--seed", 1,
                    stdin=b"a valve")[1] == out


@pytest.mark.parametrize("prompt", ["", "\N{GRINNING FACE}", "-x", "{{ 1 }}", "<|end|>", "word " * 1000])
def test_odd_prompts_are_answered(camshaft, engine, prompt):
    code, _, err = camshaft("run", engine, *SMALL, f"--prompt={prompt}", "--max-tokens", 2)
    assert (code, "new tokens" in err) == (0, True)


MISTAKES = [
    (("run", "{engine}", "--prompt", "", "--raw"), 1, "prompt='': expected at least one token"),
    (("run", "{engine}", "--prompt", "\udcff"), 1, "prompt='\\udcff': expected UTF-8 text"),
    (("run", "{engine}", "--prompt", "word " * 20000), 1, "at most"),
    (("run", "{engine}", "--max-tokens", "0"), 1, "max_tokens=0: expected at least 1"),
    (("run", "{engine}", "--top-p", "7"), 1, "top_p=7.0: expected a number from 0 to 1"),
    (("run", "{engine}", "--dtype", "float16"), 1, "build={'dtype': 'float16'}: no build settings"),
    (("run", "{engine}", "--kv-max-bytes", str(2**60)), 1, "kv_cache.max_bytes=1152921504606846976: expected at most"),
    (("run", "{engine}", "--scheduler-max-batch-size", "9999"), 1, "at most the engine's 256"),
    (("run", "{model}", "--max-seq-len", "99999"), 1, "at most the model's 8192 positions"),
    (("run", "{model}", "--skip-passes", "nothing"), 1, "passes that may be skipped"),
    (("run", "nowhere/at/all"), 1, "an existing folder"),
    (("run", "some/model"), 1, "HF_HUB_OFFLINE is set"),
    (("run", "{model}", "--revision", "main"), 1, "is a local path"),
    (("build", "{model}", "-o", "{model}"), 1, "a new or empty folder, or an engine to replace"),
    (("build", "{model}", "-o", "{model}/config.json/engine"), 1, "Not a directory"),
    (("build", "{model}", "-o", "/proc/engine"), 1, "/proc"),
    (("build", "{engine}", "-o", "{model}/new"), 1, "a checkpoint to build from"),
    (("inspect", "{model}"), 1, "an engine folder (it holds engine.json)"),
    (("run", "{engine}", "--max-token", "3"), 2, "No such option"),
    (("run", "{engine}", "--max-tokens", "few"), 2, "--max-tokens"),
    (("build", "{model}"), 2, "--output"),
    (("inspect",), 2, "Missing argument"),
]


@pytest.mark.parametrize(("arguments", "status", "words"), MISTAKES, ids=[str(index) for index in range(len(MISTAKES))])
def test_a_mistake_is_answered_in_words(camshaft, engine, model, arguments, status, words):
    before = sorted(model.iterdir())
    code, out, err = camshaft(*(text.replace("{engine}", str(engine)).replace("{model}", str(model))
                                for text in arguments))
    assert code == status
    assert all(part in err for part in words.split(": "))
    assert "Traceback" not in err
    assert out == ""
    if status == 1:
        last = err.splitlines()[-1]
        assert last.startswith("Error: ")
        assert len(last) < 1000
    assert sorted(model.iterdir()) == before


def test_build_inspect_run(camshaft, model, tmp_path):
    folder = tmp_path / "made"
    code, out, err = camshaft("build", model, "-o", folder, "--max-seq-len", 64, "--page-size", 32)
    assert code == 0, err
    assert f"camshaft run {folder}" in out
    code, out, _ = camshaft("inspect", folder)
    assert (code, "64 tokens a sequence" in out, "fuse_linear" in out) == (0, True, True)
    code, out, _ = camshaft("inspect", folder, "--json")
    assert json.loads(out)["build"]["page_size"] == 32
    assert "paged_attention" in camshaft("inspect", folder, "--graph")[1]
    assert camshaft("inspect", folder, "--verify")[0] == 0
    assert camshaft("build", model, "-o", folder, "--max-seq-len", 32)[0] == 0, "an engine may be replaced"
    with (folder / "weights.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"damage!!")
    code, out, _ = camshaft("inspect", folder, "--verify")
    assert (code, "BAD" in out) == (1, True)
    code, _, err = camshaft("run", folder, *SMALL)
    assert (code, "CRC-32" in err, "Traceback" in err) == (1, True, False)


def test_closed_standard_streams_are_no_bug(engine):
    command = f"'{sys.executable}' -m camshaft run '{engine}' {' '.join(SMALL)} --max-tokens 2"
    for redirection, status, words in (("-p - <&-", 1, "standard input, which is closed"), (">&-", 0, "2 new tokens"),
                                       (">/dev/full", 1, "Error: [Errno 28]")):
        done = subprocess.run(["bash", "-c", f"{command} --ignore-eos {redirection}"], cwd=ROOT, check=False, text=True,
                              capture_output=True)
        assert done.returncode == status, done.stderr
        assert words in done.stderr
        assert "Traceback" not in done.stderr


def test_characters_an_output_encoding_lacks_end_no_command(engine):
    """Half of these tokens are parts of characters, which show as U+FFFD."""
    done = subprocess.run([sys.executable, "-m", "camshaft", "run", str(engine), "-p", "a", "--max-tokens", "8", *SMALL,
                           "--ignore-eos", "--no-repeat-ngram-size", "1",
                           *(flag for token in range(180, 220) for flag in ("--allowed-token-ids", str(token)))],
                          cwd=ROOT, capture_output=True, check=False,
                          env={**os.environ, "CAMSHAFT_CC": "none", "PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, b"?" in done.stdout) == (0, True), done.stderr[-500:]


@pytest.mark.parametrize("value", ["many", "0", "100000", "9" * 5000])
def test_a_thread_count_no_machine_can_start_is_refused(camshaft, engine, monkeypatch, value):
    monkeypatch.setenv("CAMSHAFT_NUM_THREADS", value)
    code, _, err = camshaft("run", engine, *SMALL)
    assert code == 1
    assert "a whole number from 1 to 1024" in err


def test_help_is_made_of_the_configurations_documentation(camshaft):
    code, out, _ = camshaft("build", "--help")
    assert code == 0
    flat = " ".join(out.replace("│", " ").split())
    for field in field_docs(BuildConfig):
        assert "--" + field.name.replace("_", "-") in flat
        assert " ".join(field.doc.split())[:30] in flat
    assert camshaft("--version")[1].startswith("camshaft ")


def test_a_reader_that_leaves_ends_the_command_quietly(started, engine):
    process = started("run", engine, *SMALL, "--ignore-eos", "--max-tokens", 8000)
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in process.stderr.read()


def test_ctrl_c_while_generating_ends_at_once_without_a_traceback(started, engine):
    process = started("run", engine, *SMALL, "--ignore-eos", "--max-tokens", 8000)
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "new tokens" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_build_leaves_nothing(started, model, tmp_path, number, code):
    process = started("build", model, "-o", tmp_path / "out" / "engine", code=SLOW_BUILD)
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    assert list((tmp_path / "out").iterdir()) == []
