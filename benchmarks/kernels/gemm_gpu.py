"""Small products and sampling on one GPU, against the card's own read bandwidth.

    python benchmarks/kernels/gemm_gpu.py [--seconds 85] [--output FILE]

Shapes are the products of Llama-3.1-8B and Qwen3-0.6B. Each is run for 1 to 64 tokens by cuBLAS and by every tile of
``camshaft.kernels.gemm.gpu`` of its bucket, in bf16 and with fp8 weights (the rounding of x included), in captured
graphs whose weights rotate beyond the cache. Then the 128 products of one 8B step, chained in one graph, and sampling.
Every timed result is checked against fp32. A failure is printed and the rest goes on; what time leaves out is named.
Prints a JSON object a line and a table of winners last.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from camshaft.kernels.gemm import gpu as gemm
from camshaft.kernels.gemm import ref
from camshaft.kernels.sampling import gpu as sampling
from camshaft.kernels.sampling.ref import sample as sample_reference

LAYER_8B = {"8b.qkv": (6144, 4096), "8b.o": (4096, 4096), "8b.gate_up": (28672, 4096), "8b.down": (4096, 14336)}
SHAPES = {"8b.gate_up": (28672, 4096), "8b.down": (4096, 14336), "8b.qkv": (6144, 4096), "8b.o": (4096, 4096),
          "8b.head": (128256, 4096), "0.6b.gate_up": (6144, 1024), "0.6b.qkv": (4096, 1024), "0.6b.o": (1024, 2048),
          "0.6b.down": (1024, 3072), "0.6b.head": (151936, 1024)}
TOKENS = (1, 2, 4, 8, 16, 32, 64)
NUM_LAYERS = 32
ROTATED_BYTES = 256 << 20
VOCABULARY = 128256
Product = Callable[[torch.Tensor, Any], torch.Tensor]


def median_us(call: Callable[[], object], calls: int, replays: int = 7) -> float:
    """Microseconds of one of ``calls`` that ``call`` makes, from replays of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second of reading 4 GiB: a sum and a maximum, the faster."""
    large = torch.randn(1 << 30, device="cuda")
    return max(large.nbytes / (median_us(reduce, 1) * 1e-6) for reduce in (large.sum, large.max))


def weights_of(shape: tuple[int, int], kind: str, copies: int) -> list[Any]:
    """Random weights: bf16 matrices, or pairs of e4m3 matrix and scales."""
    made = []
    for _ in range(copies):
        matrix = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02
        if kind == "fp8":
            scale = matrix.abs().amax(dim=1).float() / ref.FP8_MAX
            made.append(((matrix / scale[:, None]).to(torch.float8_e4m3fn), scale))
        else:
            made.append(matrix)
    return made


def tile_product(tile: gemm.Tile) -> Product:
    """The product by one tile, of either kind of weight."""
    def product(x: torch.Tensor, weight: Any) -> torch.Tensor:
        matrix = weight[0] if isinstance(weight, tuple) else weight
        out = torch.empty((x.shape[0], matrix.shape[0]), dtype=x.dtype, device=x.device)
        if isinstance(weight, tuple):
            rounded, scale = gemm.quantise_rows_fp8(x)
            gemm.run_tile(rounded, matrix, None, out, tile, gemm.Scales(x=scale, weight=weight[1]))
        else:
            gemm.run_tile(x, matrix, None, out, tile)
        return out

    return product


def library_product(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """cuBLAS, or ``_scaled_mm`` behind the same rounding of x."""
    if not isinstance(weight, tuple):
        return torch.nn.functional.linear(x, weight)
    rounded, scale = gemm.quantise_rows_fp8(x)
    return torch._scaled_mm(rounded, weight[0].t(), scale[:, None], weight[1][None, :], out_dtype=x.dtype,
                            use_fast_accum=True)


def chosen_product(x: torch.Tensor, weight: Any) -> torch.Tensor:
    """What an engine would run."""
    return gemm.linear_fp8(x, *weight, None) if isinstance(weight, tuple) else gemm.linear(x, weight, None)


def contestants(num_tokens: int) -> dict[str, Product]:
    """Everything that can serve ``num_tokens``, by name; what an engine would run is "chosen"."""
    buckets = (1, 16) if num_tokens == 1 else (gemm.bucket_of(num_tokens),)
    tiles = {name: tile_product(tile) for name, tile in gemm.TILES.items() if tile.tokens in buckets}
    return {"library": library_product, "chosen": chosen_product, **tiles}


def compile_all() -> float:
    """Seconds to compile every tile for both kinds of weight, many at a time."""
    start = time.perf_counter()
    small = {kind: weights_of((4096, 4096), kind, 1)[0] for kind in ("bf16", "fp8")}

    def compile_one(kind: str, tile: gemm.Tile) -> None:
        torch.cuda.set_device(0)
        x = torch.randn(1 if tile.tokens == 1 else 16, 4096, device="cuda", dtype=torch.bfloat16)
        tile_product(tile)(x, small[kind])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        jobs = {pool.submit(compile_one, kind, tile): (kind, name)
                for kind, (name, tile) in itertools.product(small, gemm.TILES.items())}
        for job, label in jobs.items():
            with told(*label):
                job.result()
    torch.cuda.synchronize()
    return time.perf_counter() - start


@contextlib.contextmanager
def told(*label: object) -> Iterator[None]:
    """Prints an error under a label instead of ending the run."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # whatever one shape raises, the others are still worth their minute
        print(json.dumps({"failed": list(map(str, label)), "error": repr(error)[:300]}), flush=True)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found.float() - wanted).norm() / wanted.norm()).item()


def measure_shape(label: str, kind: str, num_tokens: int, weights: list[Any], bandwidth: float) -> dict[str, Any]:
    """All contestants on one shape."""
    first = weights[0]
    matrix = first[0] if kind == "fp8" else first
    rows, depth = matrix.shape
    num_bytes = matrix.nbytes + 2 * num_tokens * (rows + depth)
    x = torch.randn(num_tokens, depth, device="cuda", dtype=torch.bfloat16)
    wanted = ref.linear_fp8(x.float(), *first, None) if kind == "fp8" else x.float() @ first.float().t()
    calls = max(len(weights), 8)
    times, errors = {}, {}
    for name, product in contestants(num_tokens).items():
        with told(label, kind, num_tokens, name):
            errors[name] = relative_error(product(x, first), wanted)
            if not errors[name] < 1e-2:
                raise ValueError(f"relative error {errors[name]:.3g}")
            turn = itertools.cycle(weights)

            def run(product: Product = product, turn: Iterator[Any] = turn) -> None:
                for _ in range(calls):
                    product(x, next(turn))

            times[name] = median_us(run, calls)
    limit = num_bytes / bandwidth * 1e6
    best = min((name for name in times if name != "chosen"), key=times.__getitem__)
    return {"shape": label, "kind": kind, "tokens": num_tokens, "limit_us": round(limit, 2), "winner": best,
            "of_limit": round(limit / times[best], 3), "chosen_of_limit": round(limit / times.get("chosen", 1e9), 3),
            "us": {name: round(us, 2) for name, us in times.items()}, "worst_error": round(max(errors.values()), 5)}


def measure_chain(kind: str, num_tokens: int, winners: dict[str, str], bandwidth: float) -> dict[str, Any]:
    """The four products of 32 layers of 8B, each fed by the one before, in one graph."""
    weights = {label: weights_of(shape, kind, NUM_LAYERS) for label, shape in LAYER_8B.items()}
    num_bytes = sum((part[0] if kind == "fp8" else part).nbytes for parts in weights.values() for part in parts)
    start = torch.randn(num_tokens, 4096, device="cuda", dtype=torch.bfloat16)
    by_name = contestants(num_tokens)
    ways: dict[str, dict[str, Product]] = {
        name: dict.fromkeys(weights, by_name[name]) for name in ("library", "chosen")}
    ways["winners"] = {label: by_name[winners.get(label, "chosen")] for label in weights}
    for name in by_name:
        if name.endswith("_early"):
            ways[name] = dict.fromkeys(weights, by_name[name])
            ways[name.removesuffix("_early")] = dict.fromkeys(weights, by_name[name.removesuffix("_early")])
    found: dict[str, Any] = {"chain": kind, "tokens": num_tokens, "limit_ms": round(num_bytes / bandwidth * 1e3, 3)}
    for name, products in ways.items():
        def step(products: dict[str, Product] = products) -> None:
            x = start
            for layer in range(NUM_LAYERS):
                qkv = products["8b.qkv"](x, weights["8b.qkv"][layer])
                out = products["8b.o"](qkv[:, :4096], weights["8b.o"][layer])
                wide = products["8b.gate_up"](out, weights["8b.gate_up"][layer])
                x = products["8b.down"](wide[:, :14336], weights["8b.down"][layer])

        with told("chain", kind, num_tokens, name):
            spent = median_us(step, 1)
            found[name] = {"ms": round(spent / 1e3, 3), "TB/s": round(num_bytes / spent / 1e6, 3)}
    return found


def sampling_arguments(rows: int, row: tuple[float, int, float, float]) -> tuple[torch.Tensor, ...]:
    """Parameters of ``rows`` equal rows, and their uniform numbers."""
    temperature, top_k, top_p, min_p = (torch.full((rows,), value, device="cuda") for value in row)
    return temperature.float(), top_k.int(), top_p.float(), min_p.float(), torch.rand(rows, device="cuda")


def measure_sampling(rows: int, dtype: torch.dtype, bandwidth: float) -> dict[str, Any]:
    """Greedy, plain, top-k and top-p rows, and log-probabilities, beside torch's argmax and sort."""
    logits = (3 * torch.randn(rows, VOCABULARY, device="cuda")).to(dtype)
    found: dict[str, Any] = {"sampling": rows, "dtype": str(dtype),
                             "limit_us": round(logits.nbytes / bandwidth * 1e6, 2)}
    kinds = {"greedy": (0.0, 0, 1.0, 0.0), "plain": (0.8, 0, 1.0, 0.0), "top_k_50": (1.0, 50, 1.0, 0.0),
             "top_p_0.9": (1.0, 0, 0.9, 0.0), "all": (0.7, 50, 0.9, 0.05)}
    for name, row in kinds.items():
        with told("sampling", rows, name):
            arguments = sampling_arguments(rows, row)
            same = sampling.sample(logits, *arguments)[0] == sample_reference(logits, *arguments)[0]
            us = median_us(lambda arguments=arguments: sampling.sample(logits, *arguments), 1)
            found[name] = {"us": round(us, 1), "as_reference": f"{int(same.sum())}/{rows}"}
    targets = torch.randint(VOCABULARY, (rows,), device="cuda")
    others: dict[str, Callable[[], object]] = {
        "logprobs_5": lambda: sampling.logprobs(logits, targets, 5), "torch.argmax": lambda: logits.argmax(dim=1),
        "torch.softmax": lambda: logits.float().softmax(dim=1), "torch.sort": lambda: logits.sort(dim=1)}
    for name, call in others.items():
        with told("sampling", rows, name):
            found[name] = {"us": round(median_us(call, 1), 1)}
    return found


class Report:
    """Prints results as they come, keeps them, and says when time is up."""

    def __init__(self, seconds: float) -> None:
        self.results: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self._end = time.perf_counter() + seconds

    def add(self, label: str, measure: Callable[[], dict[str, Any]]) -> None:
        """Measure and print, unless time is up."""
        if time.perf_counter() > self._end:
            self.left_out.append(label)
            return
        with told(label):
            result = measure()
            self.results.append(result)
            print(json.dumps(result), flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    """Measure in the order of importance, then print the winners."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=85.0, help="what is not begun by then is left out")
    parser.add_argument("--output", type=Path, help="write all results here too, as one JSON array")
    options = parser.parse_args()
    torch.manual_seed(0)
    report = Report(options.seconds)
    bandwidth = read_bandwidth()
    report.add("card", lambda: {"card": torch.cuda.get_device_name(), "torch": torch.__version__,
                                "read_TB/s": round(bandwidth / 1e12, 3), "compile_s": round(compile_all(), 1)})
    winners: dict[tuple[str, int], dict[str, str]] = {}
    for label, kind in sorted(itertools.product(SHAPES, ("bf16", "fp8")), key=lambda case: case[0].startswith("0.6b")):
        with told(label, kind):
            itemsize = 1 if kind == "fp8" else 2
            copies = max(2, -(-ROTATED_BYTES // (SHAPES[label][0] * SHAPES[label][1] * itemsize)))
            weights = weights_of(SHAPES[label], kind, copies)
            for num_tokens in TOKENS:
                report.add(f"{label} {kind} {num_tokens}", lambda label=label, kind=kind, num_tokens=num_tokens,
                           weights=weights: measure_shape(label, kind, num_tokens, weights, bandwidth))
            del weights
        for result in report.results:
            if result.get("shape") == label and result["kind"] == kind:
                winners.setdefault((kind, result["tokens"]), {})[label] = result["winner"]
        if label == "8b.head" and kind == "fp8":
            for chain_kind, num_tokens in itertools.product(("bf16", "fp8"), (1, 8, 16, 64)):
                report.add(f"chain {chain_kind} {num_tokens}", lambda chain_kind=chain_kind, num_tokens=num_tokens:
                           measure_chain(chain_kind, num_tokens, winners.get((chain_kind, num_tokens), {}), bandwidth))
            for rows, dtype in itertools.product((1, 128, 256), (torch.bfloat16, torch.float32)):
                report.add(f"sampling {rows} {dtype}",
                           lambda rows=rows, dtype=dtype: measure_sampling(rows, dtype, bandwidth))
    if options.output is not None:
        options.output.write_text(json.dumps(report.results, indent=1))
    for result in report.results:
        if "shape" in result:
            print(f"{result['shape']:13} {result['kind']:4} {result['tokens']:3} limit {result['limit_us']:7} "
                  f"of limit {result['of_limit']:5} chosen {result['chosen_of_limit']:5} "
                  f"library {result['us'].get('library')} winner {result['winner']} {result['us'][result['winner']]}")
    print("left out:", report.left_out)


if __name__ == "__main__":
    main()
