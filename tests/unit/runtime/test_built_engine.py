"""A built Llama, saved and loaded, against the definition it was built from, run dense in plain torch."""

import os

import pytest
import torch

from camshaft.builder.build import build
from camshaft.config.build import BuildConfig
from camshaft.engine.artifact import Engine
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.models.registry import family_of
from camshaft.runtime.model_engine import ModelEngine
from camshaft.testing.tiny import write_tiny_llama
from tests.unit.runtime.plans import arrival, plan

PROMPTS = ([7, 30, 11, 4, 250, 9, 61, 5, 19, 88, 42, 17, 3, 90, 21, 6, 77, 13], [100, 3, 200], [8] * 16)
COUNT = 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", seed=5, tokenizer=False)


@pytest.fixture(scope="module")
def engine(checkpoint, tmp_path_factory):
    """Built without a C compiler: the native kernels have their own parity test and the end-to-end tests."""
    folder = tmp_path_factory.mktemp("built") / "engine"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "CAMSHAFT_CC", "none")
        build(checkpoint, BuildConfig(device="cpu", max_batch_size=4, max_num_tokens=64, max_seq_len=64), output=folder)
    return Engine.load(folder)


@pytest.fixture(scope="module")
def dense(checkpoint):
    """Greedy continuation by the eager module over the whole sequence, once a token."""
    opened = open_checkpoint(checkpoint)
    family = family_of(opened.config.architecture)
    module = family.module(opened.config)
    names = family.weight_names(opened.config)
    module.load_state_dict({name: opened.tensors[tensor].read().clone() for name, tensor in names.items()})

    @torch.inference_mode()
    def greedy(prompt):
        tokens = list(prompt)
        for _ in range(COUNT):
            logits = module(torch.tensor(tokens), torch.arange(len(tokens)), torch.tensor([len(tokens) - 1]))
            tokens.append(int(logits[0].argmax()))
        return tokens[len(prompt):]

    return greedy


def test_batched_and_paged_equals_the_dense_definition(engine, dense):
    runner = ModelEngine(engine, num_pages=(16,))
    assert engine.library() is None
    rows = range(len(PROMPTS))
    out = runner.submit(plan(0, arrivals=[arrival(row) for row in rows],
                             pages=[(row, column, 1 + 3 * row + column) for row in rows for column in range(3)],
                             context=[(row, 0, list(prompt), 0) for row, prompt in enumerate(PROMPTS)])).result()
    got = [out.token_ids]
    for index in range(1, COUNT):
        generation = [(row, len(PROMPTS[row]) + index - 1, index) for row in rows]
        got.append(runner.submit(plan(index, generation=generation)).result().token_ids)
    expected = [dense(prompt) for prompt in PROMPTS]
    assert len({token for tokens in expected for token in tokens}) >= 8
    for row in rows:
        assert [int(step[row]) for step in got] == expected[row]


def test_the_engine_in_memory_holds_the_same_graph_and_weights(checkpoint, engine, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    memory = build(checkpoint, BuildConfig(device="cpu", max_batch_size=4, max_num_tokens=64, max_seq_len=64))
    assert memory.folder is None
    assert memory.graph_text == engine.graph_text
    assert memory.manifest.weights_id == engine.manifest.weights_id
    for name, tensor in engine.tensors().items():
        assert torch.equal(memory.tensor(name), tensor)
