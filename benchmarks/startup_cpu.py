"""From process start to first token with the engine in the cache, beside ``import torch``; and ``import camshaft``.

    python benchmarks/startup_cpu.py [MODEL.gguf] [--json OUT]

Every reading is a fresh process of this interpreter, contestants in turn; medians over the rounds. A process
that starts is timed from before its interpreter does until the token is there.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from camshaft import __version__
from camshaft.core.device import probe_cpu
from camshaft.frontend.default_model import default_model

ROUNDS = 7
FIRST_TOKEN = """
import sys
from camshaft import LLM, SamplingParams
with LLM(sys.argv[1], device="cpu", dtype="float32") as llm:
    next(iter(llm.generate_async("The capital of France is", SamplingParams(max_tokens=1))))
    print("token", flush=True)
    sys.stdin.readline()
"""
SCRIPTS = {
    "interpreter": "print('token', flush=True)",
    "import_torch": "import torch; print('token', flush=True)",
    "import_camshaft": "import camshaft, sys; assert 'torch' not in sys.modules; print('token', flush=True)",
    "first_token": FIRST_TOKEN,
}


def seconds(script: str, model: Path) -> float:
    """Of a fresh process until it prints."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", script, str(model)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline()
        took = time.perf_counter() - start
        process.stdin.close()
    if line.strip() != "token" or process.returncode:
        raise SystemExit(f"a child process failed ({process.returncode})")
    return took


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    path = args.model or default_model(show_progress=True).path
    taken: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for round_index in range(ROUNDS + 1):
        for name, script in SCRIPTS.items():
            took = seconds(script, path)
            if round_index:  # the first round builds the engine and fills the page cache
                taken[name].append(took)
    middle = {name: statistics.median(values) for name, values in taken.items()}
    result = {
        "benchmark": "startup_cpu", "camshaft": __version__, "python": platform.python_version(),
        "cpu": probe_cpu().name, "model": path.name, "rounds": ROUNDS,
        **{f"{name}_s": round(value, 3) for name, value in middle.items()},
        "import_camshaft_ms": round(1000 * (middle["import_camshaft"] - middle["interpreter"]), 1),
        "first_token_beyond_import_torch_s": round(middle["first_token"] - middle["import_torch"], 3),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
