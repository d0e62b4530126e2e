"""How an LLM ends with its process, its last reference or its fork, and what Ctrl-C leaves behind."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from camshaft import LLM, SamplingParams

PREAMBLE = """
import os, signal, sys, threading, time
from camshaft import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_cache={"max_bytes": 2**24}, scheduler={"max_waiting": 40})
LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
"""
START = "running = [llm.generate_async('x', LONG) for _ in range(20)]\n"
IN_A_FORK = START + """
child = os.fork()
if child == 0:
    try:
        llm.generate("x")
    except ValueError as error:
        sys.exit(7 if "fork" in str(error) else 8)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, len(running[0].result().outputs[0].token_ids))
"""
CTRL_C = """
def interrupt():
    while llm.get_stats()["counters"]["num_generated_tokens"] < 30:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    llm.generate([f"x{i}" for i in range(200)], LONG)
except KeyboardInterrupt:
    print("interrupted")
for _ in range(5000):
    stats = llm.get_stats()
    if not (stats["num_running"] + stats["num_waiting"] + len(llm._parts.front._live)):
        break
    time.sleep(0.002)
print(stats["counters"]["num_finished"] < 200, stats["kv"]["num_referenced"], len(llm._parts.front._live))
print(len(llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True)).outputs[0].token_ids))
"""


@pytest.mark.parametrize(("script", "code", "printed"), [
    (START + "raise ValueError('mine')", 1, ""), (START + "sys.exit(3)", 3, ""),
    ("threading.Thread(target=lambda: print(len(llm.generate('x', LONG).outputs[0].token_ids))).start()", 0, "400"),
    (IN_A_FORK, 0, "7 400"), (CTRL_C, 0, "interrupted\nTrue 0 0\n3"),
], ids=["error", "exit", "thread", "fork", "ctrl-c"])
def test_a_process_that_forgot_to_shut_down_ends_as_it_would_without_an_engine(tiny_engine, script, code, printed):
    done = subprocess.run([sys.executable, "-c", PREAMBLE + script, str(tiny_engine)], capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.strip() == printed
    assert ("ValueError: mine" in done.stderr) == ("mine" in script)
    assert done.stderr.count("Traceback") == ("mine" in script)


@pytest.mark.parametrize("shut_down", [False, True])
def test_the_last_reference_takes_threads_and_memory_with_it(tiny_engine, shut_down):
    llm = LLM(tiny_engine, kv_cache={"max_bytes": 2**24})
    result = llm.generate_async("x", SamplingParams(max_tokens=400, ignore_eos=True))
    pages = weakref.ref(llm._parts.executor._runner.pools[0])
    thread = llm._parts.executor._thread
    if shut_down:
        llm.shutdown()
    del llm
    gc.collect()
    assert result.snapshot().finished
    assert not thread.is_alive()
    assert pages() is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="weights lie on the card, not in a mapping")
def test_llms_that_were_shut_down_leave_no_weights_mapped(tiny_engine):
    weights = str((Path(tiny_engine) / "weights.safetensors").resolve())
    before = Path("/proc/self/maps").read_text().count(weights)
    for _ in range(3):
        with LLM(tiny_engine, kv_cache={"max_bytes": 2**24}) as llm:
            llm.generate("x", SamplingParams(max_tokens=2))
            assert Path("/proc/self/maps").read_text().count(weights) > before
        del llm
        gc.collect()
    assert Path("/proc/self/maps").read_text().count(weights) == before
