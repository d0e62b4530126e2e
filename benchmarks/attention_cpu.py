"""Paged attention on a CPU beside torch's SDPA on contiguous tensors, which has no paging to do.

Decode at batch 1 and 16 over contexts 128 to 4096, and prefill of 512 tokens, with the default model's heads.
Contenders alternate within a round; the medians and the whole configuration are printed as JSON.

    python -m benchmarks.attention_cpu
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

from camshaft.core.device import probe_cpu
from camshaft.kernels import native
from camshaft.kernels.dispatch import bind
from camshaft.kernels.op import load_families

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, LAYERS = 9, 3, 64, 32, 30
ROUNDS, BUDGET_SECONDS = 15, 1.5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """``batch`` rows of ``past`` cached tokens and ``queries`` new ones."""

    name: str
    batch: int
    past: int
    queries: int


CASES = (
    *(Case(name=f"decode_batch{batch}_context{context}", batch=batch, past=context - 1, queries=1)
      for batch in (1, 16) for context in (128, 512, 1024, 4096)),
    Case(name="prefill_512", batch=1, past=0, queries=512),
)


def contenders(case: Case, paged: Callable[..., torch.Tensor]) -> dict[str, Callable[[int], torch.Tensor]]:
    """One function a contender, taking the layer to run; layers have their own caches, so that none is warm."""
    length, scale = case.past + case.queries, HEAD_DIM**-0.5
    layers = max(1, min(LAYERS, (1 << 29) // (case.batch * length * KV_HEADS * HEAD_DIM * 8)))
    pages = case.batch * -(-length // PAGE_SIZE)
    pools = torch.randn(layers, pages, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM)
    table = torch.randperm(pages, dtype=torch.int32).reshape(case.batch, -1)
    starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.queries
    lens = torch.full((case.batch,), length, dtype=torch.int32)
    q = torch.randn(case.batch * case.queries, HEADS + 2 * KV_HEADS, HEAD_DIM)[:, :HEADS]
    q_bhtd = q.reshape(case.batch, case.queries, HEADS, HEAD_DIM).transpose(1, 2).contiguous()
    keys = torch.randn(layers, 2, case.batch, KV_HEADS, length, HEAD_DIM)

    def run_paged(layer: int) -> torch.Tensor:
        return paged(q, pools[layer % layers], table, starts, lens, scale, None, None)

    def run_sdpa(layer: int) -> torch.Tensor:
        k, v = keys[layer % layers]
        return functional.scaled_dot_product_attention(q_bhtd, k, v, is_causal=case.queries > 1, enable_gqa=True)

    return {"paged": run_paged, "sdpa": run_sdpa}


def measure(case: Case, paged: Callable[..., torch.Tensor]) -> dict[str, object]:
    """Median microseconds of one layer's call, over rounds of all layers, contenders alternating."""
    runs = contenders(case, paged)
    times: dict[str, list[float]] = {name: [] for name in runs}
    deadline = time.perf_counter() + BUDGET_SECONDS
    for round_index in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            for layer in range(LAYERS):
                run(layer)
            if round_index:
                times[name].append((time.perf_counter() - start) / LAYERS * 1e6)
        if round_index and time.perf_counter() > deadline:
            break
    medians = {f"{name}_us": round(statistics.median(values), 2) for name, values in times.items()}
    return {**dataclasses.asdict(case), **medians, "rounds": len(times["paged"])}


def main() -> None:
    """Run all cases and print the JSON."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = native.compile_library(Path(folder))
        if path is None:
            sys.exit("this benchmark needs a C compiler")
        paged = bind(load_families("cpu").get("paged_attention"), "native", native.load_library(path))
        results = [measure(case, paged) for case in CASES]
    config = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "page_size": PAGE_SIZE, "layers": LAYERS,
              "dtype": "float32", "threads": torch.get_num_threads(), "torch": torch.__version__,
              "cpu": dataclasses.asdict(probe_cpu()), "flags": native.FLAGS}
    print(json.dumps({"benchmark": "attention_cpu", "config": config, "results": results}, indent=1))


if __name__ == "__main__":
    main()
