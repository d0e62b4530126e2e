"""Matrix products of the default model (SmolLM2-135M) on this CPU, against the memory's own read bandwidth.

    python benchmarks/gemv_cpu.py [--dtype float32] [--tokens 1 4 16] [--rounds 15]

The kernels with narrower weights (bfloat16 under fp32 arithmetic, int8 with and without int8 activations) run beside
those of ``--dtype``.

One round calls every product of one decoding step: 30 layers of merged qkv, output, merged gate-up and down, then
the head, each through the bound implementation as the runtime calls it. Contestants take turns within a round, so
that a disturbance hits them all; medians are reported. Bandwidth counts the weights once; reading a large tensor
(a sum and a maximum, the faster of the two) in the same rounds gives the limit. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from camshaft.core.device import probe_cpu
from camshaft.kernels.dispatch import bind
from camshaft.kernels.gemm.ref import quantise_rows
from camshaft.kernels.native import compile_library, load_library
from camshaft.kernels.op import load_families

LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE = (49152, 576)
READ_BYTES = 512 << 20

Step = Callable[[], object]


Operands = list[tuple[torch.Tensor, ...]]


def _products(run: Callable[..., Any], operands: Operands, x: dict[int, torch.Tensor], *rest: None) -> Step:
    calls = [(x[weight.shape[1]], weight, *more) for weight, *more in operands]

    def step() -> None:
        for call in calls:
            run(*call, *rest)

    return step


def _int8(weights: Operands) -> Operands:
    return [(values.to(torch.int8), scale[:, 0]) for weight, in weights
            for values, scale in (quantise_rows(weight.float()),)]


def _medians(contestants: dict[str, Step], rounds: int) -> dict[str, float]:
    """Median seconds of each, after one round to warm up, taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for index in range(rounds + 1):
        for name, step in contestants.items():
            start = time.perf_counter()
            step()
            if index:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(dtype: torch.dtype, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Times and bandwidths of all contestants for steps of ``num_tokens`` tokens."""
    ops = load_families("cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    weights: Operands = [(draw(*shape),) for _ in range(LAYERS) for shape in LAYER_SHAPES] + [(draw(*HEAD_SHAPE),)]
    x = {depth: draw(num_tokens, depth) for depth in (576, 1536)}
    large = torch.randn(READ_BYTES // 4, generator=generator)
    contestants: dict[str, Step] = {
        "read_sum": large.sum, "read_max": large.amax,
        "torch": _products(torch.nn.functional.linear, weights, x),
    }
    sizes = {"torch": _num_bytes(weights), "native": _num_bytes(weights)}
    with tempfile.TemporaryDirectory() as scratch:
        path = compile_library(Path(scratch))
        if path is not None:
            library, int8 = load_library(path), _int8(weights)
            sizes |= {"w8a16": _num_bytes(int8), "w8a8": _num_bytes(int8)}
            contestants["native"] = _products(bind(ops.get("linear"), "native", library), weights, x, None)
            for name in ("w8a16", "w8a8"):
                contestants[name] = _products(bind(ops.get(f"linear_{name}"), "native", library), int8, x, None)
            if dtype is torch.float32:
                narrow: Operands = [(weight.to(torch.bfloat16),) for weight, in weights]
                sizes["bfloat16_weights"] = _num_bytes(narrow)
                contestants["bfloat16_weights"] = _products(bind(ops.get("linear"), "native", library), narrow, x, None)
        seconds = _medians(contestants, rounds)
    limit = READ_BYTES / min(seconds.pop("read_sum"), seconds.pop("read_max"))
    num_products = num_tokens * sum(weight.numel() for weight, in weights)
    return {
        "tokens": num_tokens, "read_gb_s": round(limit / 1e9, 2),
        "results": {name: {"ms": round(1e3 * value, 3), "weight_mb": round(sizes[name] / 1e6, 1),
                           "gb_s": round(sizes[name] / value / 1e9, 2),
                           "of_read_bandwidth": round(sizes[name] / value / limit, 3),
                           "gflop_s": round(2 * num_products / value / 1e9, 1)}
                    for name, value in seconds.items()},
    }


def _num_bytes(operands: Operands) -> int:
    return sum(tensor.nbytes for operand in operands for tensor in operand)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    cpu = probe_cpu()
    with torch.inference_mode():
        runs = [measure(getattr(torch, args.dtype), tokens, args.rounds) for tokens in args.tokens]
    print(json.dumps({
        "benchmark": "gemv_cpu", "dtype": args.dtype, "rounds": args.rounds, "threads": torch.get_num_threads(),
        "cpu": cpu.name, "features": cpu.features, "torch": torch.__version__, "python": platform.python_version(),
        "shapes": {"layers": LAYERS, "layer": LAYER_SHAPES, "head": HEAD_SHAPE}, "runs": runs,
    }, indent=1))


if __name__ == "__main__":
    main()
