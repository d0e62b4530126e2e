"""``camshaft chat`` through a pipe and in a terminal, ``camshaft bench`` on a tiny engine: statuses and formats."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from camshaft.testing.tiny import write_tiny_llama

ROOT = Path(__file__).parents[2]
SMALL = ("--kv-max-bytes", str(2**22))


def camshaft(*arguments, stdin=""):
    done = subprocess.run([sys.executable, "-m", "camshaft", *map(str, arguments)], cwd=ROOT, input=stdin, text=True,
                          capture_output=True, check=False, env={**os.environ, "CAMSHAFT_CC": "none"})
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_chat_through_a_pipe(tiny_engine):
    lines = "a valve\n/set max_tokens=3\na valve\n/undo\n\n/quit\nnever\n"
    code, out, err = camshaft("chat", tiny_engine, *SMALL, "--max-tokens", 4, "--ignore-eos", stdin=lines)
    assert code == 0, err
    assert "never" not in out
    assert err.count("prompt tokens") == 2
    assert "max_tokens: 3" in err
    assert camshaft("chat", tiny_engine, *SMALL, stdin="/nonsense\n")[0] == 1


@pytest.mark.parametrize(("arguments", "words"), [
    (("--n", "2"), "No such option"), (("--best-of", "2"), "best_of"), (("--no-detokenize",), "detokenize"),
    (("--top-p", "7"), "top_p")])
def test_what_a_chat_cannot_follow_is_refused(tiny_engine, arguments, words):
    code, _, err = camshaft("chat", tiny_engine, *SMALL, *arguments)
    assert (code != 0, words in err) == (True, True)


def test_a_model_without_a_template_is_refused_with_the_way_out(tmp_path):
    model = write_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    code, _, err = camshaft("chat", model, *SMALL, stdin="hi\n")
    assert (code, "camshaft run --raw" in err) == (1, True)
    for raw in ((), ("--raw",)):
        code, _, err = camshaft("run", model, *SMALL, "--prompt", "hi", "--max-tokens", 1, *raw)
        assert (code, "no chat template" in err) == (0, not raw), "continuing without a template is said"


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments):
        self.seen = ""
        self._main, side = pty.openpty()
        self.process = subprocess.Popen([sys.executable, "-m", "camshaft", *map(str, arguments)], cwd=ROOT, stdin=side,
                                        stdout=side, stderr=side, start_new_session=True, preexec_fn=_own_terminal,
                                        env={**os.environ, "CAMSHAFT_CC": "none", "TERM": "xterm"})
        os.close(side)

    def type(self, text):
        os.write(self._main, text.encode())

    def wait_for(self, text, timeout=120):
        """Read until ``text`` was shown since the last call."""
        end = time.monotonic() + timeout
        while text not in self.seen:
            assert time.monotonic() < end, f"never saw {text!r}: {self.seen[-500:]}"
            if select.select([self._main], [], [], 1)[0]:
                self.seen += os.read(self._main, 4096).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def wait_at_prompt(self, timeout=120):
        """Read up to a prompt, until keys are waited for: Python holds a Ctrl-C before that back until a line ends."""
        self.wait_for("> ")
        end = time.monotonic() + timeout
        while Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "S":
            assert time.monotonic() < end
            time.sleep(0.01)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _own_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminal(tiny_engine):
    opened = Terminal("chat", tiny_engine, *SMALL, "--ignore-eos", "--max-tokens", 400)
    yield opened
    opened.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_chat_in_a_terminal(terminal):
    terminal.wait_for("Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("/set max_tokens=4\n")
    terminal.wait_for("max_tokens")
    terminal.wait_for("> ")
    terminal.type("a valve\n")
    terminal.wait_for("4 new")
    terminal.wait_at_prompt()
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for("> ")
    terminal.type("/sta\t\n")
    terminal.wait_for("kv.num_free")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=60) == 0
    history = Path(os.environ["CAMSHAFT_CACHE_DIR"]) / "chat_history"
    assert "a valve" in history.read_text()


THROUGHPUT = ("--num-requests", 4, "--input-len", "3:9", "--output-len", "2,1", "--concurrency", 2, "--warmup", 1)


def a_thousand_times_slower(report):
    """The report of a machine that nothing here can be slower than."""
    def slower(value, name=""):
        if isinstance(value, dict):
            return {key: slower(each, key) for key, each in value.items()}
        return value / 1000 if "throughput" in name else value * 1000 if isinstance(value, float) else value

    return report | {part: slower(report[part]) for part in ("performance", "streaming_metrics")}


def test_a_benchmark_reports_in_json_and_compares(tiny_engine, tmp_path):
    first = tmp_path / "first.json"
    code, out, err = camshaft("bench", "throughput", tiny_engine, *SMALL, *THROUGHPUT, "--output", first)
    assert (code, out) == (0, ""), err
    report = json.loads(first.read_text())
    assert report["request_info"]["num_requests"] == 4
    assert report["configuration"]["workload"]["concurrency"] == 2
    assert {"torch", "python", "device"} <= report["environment"].keys()
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(a_thousand_times_slower(report)))
    code, out, err = camshaft("bench", "throughput", tiny_engine, *SMALL, *THROUGHPUT, "--compare", slow)
    again = json.loads(out)
    assert code == 0, err
    assert again["output_sha256"] == report["output_sha256"]
    assert "Compared with" in err
    report["performance"]["request_throughput_req_s"] = 1e9
    first.write_text(json.dumps(report))
    code, _, err = camshaft("bench", "throughput", tiny_engine, *SMALL, *THROUGHPUT, "--compare", first)
    assert (code, "REGRESSION" in err) == (1, True)
    code, out, err = camshaft("bench", "throughput", tiny_engine, *SMALL, *THROUGHPUT, "--seed", 1, "--compare", first)
    assert (code, out, "workload.seed" in err) == (1, "", True)


def test_latency_runs_one_request_at_a_time_from_a_dataset(tiny_engine, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"task_id": 0, "prompt": "a valve", "output_tokens": 4}\n'
                    '{"task_id": 1, "input_ids": [5, 6], "output_tokens": 2}\n')
    code, out, err = camshaft("bench", "latency", tiny_engine, *SMALL, "--dataset", data)
    assert code == 0, err
    report = json.loads(out)
    assert report["request_info"]["avg_output_length"] == 3.0
    assert report["request_info"]["avg_num_concurrent_requests"] <= 1.0
    code, _, err = camshaft("bench", "latency", tiny_engine, *SMALL, "--output-len", 100000)
    assert (code, "at most" in err) == (1, True)


def test_startup_starts_fresh_processes(tmp_path):
    model = write_tiny_llama(tmp_path / "model", num_hidden_layers=1)
    code, out, err = camshaft("bench", "startup", model, *SMALL, "--rounds", 1)
    assert code == 0, err
    found = json.loads(out)["startup"]
    assert found["cold"]["build_s"]["p50"] > 0
    assert found["cached"].keys() == {"import_s", "load_s", "first_token_s", "total_s"}
    code, _, err = camshaft("bench", "startup", model, "--kv-max-bytes", 1, "--rounds", 1)
    assert (code, "kv_cache.max_bytes" in err) == (1, True)
