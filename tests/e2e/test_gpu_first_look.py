"""A CPU-built engine on a CUDA device with reference kernels: same tokens, and a captured decode step replays."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from camshaft.builder.build import build
from camshaft.config.build import BuildConfig
from camshaft.engine.artifact import Engine
from camshaft.runtime.model_engine import ModelEngine
from camshaft.runtime.step import PageUpdates, RowArrival, RowSampling, StepPlan
from camshaft.testing.tiny import write_tiny_llama

pytestmark = pytest.mark.gpu
PROMPT = [5, 9, 200, 31, 77, 123, 8]
NUM_NEW = 40


def ints(*values):
    return np.array(values, dtype=np.int32)


def updates(first, last):
    """Row 0 gets pages ``first..last - 1`` (+1: page 0 is the trash page) in its columns of the same number."""
    columns = np.arange(first, last, dtype=np.int32)
    return (PageUpdates(rows=np.zeros_like(columns), columns=columns, pages=columns + 1, copy_from=ints(),
                        copy_to=ints()),)


def greedy():
    return RowSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, choice=0, min_tokens=0,
                       suppressed_token_ids=ints())


def plans(prompt, num_new):
    """A prefill of ``prompt`` and decode steps on row 0, all pages handed over in the first."""
    for step in range(num_new):
        yield StepPlan(
            step=step, arrivals=() if step else (RowArrival(row=0, epoch=0, sampling=greedy()),),
            page_updates=updates(0, 0 if step else 8), rows=ints(0), epochs=ints(0), num_generation=int(step > 0),
            query_lens=ints(1 if step else len(prompt)), start_positions=ints(len(prompt) + step - 1 if step else 0),
            context_token_ids=ints() if step else ints(*prompt), samples=np.array([True]), output_indices=ints(step))


def run(engine, device):
    runner = ModelEngine(engine, num_pages=(16,), device=torch.device(device))
    tokens = [int(runner.submit(plan).result().token_ids[0]) for plan in plans(PROMPT, NUM_NEW)]
    return runner, tokens


@pytest.fixture(params=["float32", "bfloat16"])
def engine(request, tmp_path, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    model = write_tiny_llama(tmp_path / "model", seed=7)
    build(model, BuildConfig(dtype=request.param), output=tmp_path / "engine")
    return Engine.load(tmp_path / "engine")


def static_inputs(runner, device):
    """Tensors of fixed address for one decode token of one row."""
    return {
        "token_ids": torch.zeros(1, dtype=torch.int64, device=device),
        "positions": torch.zeros(1, dtype=torch.int64, device=device),
        "logits_rows": torch.zeros(1, dtype=torch.int64, device=device),
        "query_start": torch.tensor([0, 1], dtype=torch.int32, device=device),
        "seq_lens": torch.ones(1, dtype=torch.int32, device=device),
        "slot_mapping_0": torch.zeros(1, dtype=torch.int64, device=device),
        "page_table_0": torch.arange(1, 9, dtype=torch.int32, device=device)[None],
        **{name: pool for name, pool in runner._layer_pools.items()},
    }


def replayed(engine, device):
    """Greedy tokens with every decode step replayed from one captured graph."""
    runner = ModelEngine(engine, num_pages=(16,), device=torch.device(device))
    first = next(plans(PROMPT, 1))
    tokens = [int(runner.submit(first).result().token_ids[0])]
    inputs = static_inputs(runner, device)
    arguments = [inputs[name] for name in runner.graph.inputs]
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            runner.graph.call(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = runner.graph.call(*arguments)
        for position in range(len(PROMPT), len(PROMPT) + NUM_NEW - 1):
            inputs["token_ids"].fill_(tokens[-1])
            inputs["positions"].fill_(position)
            inputs["slot_mapping_0"].fill_(16 + position)
            inputs["seq_lens"].fill_(position + 1)
            graph.replay()
            tokens.append(int(logits.argmax()))
    return tokens


def test_the_same_engine_gives_the_same_tokens_on_the_card(engine):
    if engine.manifest.build.dtype == "float32":
        _, on_cpu = run(engine, "cpu")
        _, on_card = run(engine, "cuda")
        assert on_card == on_cpu
    else:
        _, on_card = run(engine, "cuda")
    assert len(set(on_card)) >= 8
    assert replayed(engine, "cuda") == on_card


def test_an_engine_built_elsewhere_loads_and_replays(request):
    """Give ``--foreign-engine=FOLDER``: an engine another torch version built, with its CPU tokens in tokens.json."""
    folder = request.config.getoption("--foreign-engine")
    if folder is None:
        pytest.skip("no --foreign-engine given")
    engine = Engine.load(Path(folder))
    expected = json.loads((Path(folder).parent / "tokens.json").read_text())
    assert expected["torch"] != torch.__version__.split("+")[0]
    assert run(engine, "cuda")[1] == expected["tokens"]
    assert replayed(engine, "cuda") == expected["tokens"]
