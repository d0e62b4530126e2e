"""Captured decode steps give the bits of uncaptured ones, whatever the model, the rows and the steps between."""

import gc
import weakref

import numpy as np
import pytest
import torch

from camshaft.builder.build import build
from camshaft.config.build import BuildConfig
from camshaft.kernels.native import find_compiler
from camshaft.runtime import cpu_graphs
from camshaft.runtime.inputs import StepInputs
from camshaft.runtime.model_engine import ModelEngine
from camshaft.testing.tiny import TINY_FAMILIES, write_tiny

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
PAGES, VOCAB = 40, 250
LIMITS = dict(device="cpu", max_batch_size=12, max_num_tokens=64, max_seq_len=96)
FORMS = (dict(dtype="float32"), dict(dtype="bfloat16"), dict(dtype="float32", quantization="w8a8"),
         dict(dtype="float32", quantization="w8a16"), dict(dtype="float32", weight_dtype="float16"))


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def checkpoint(request, tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny") / request.param, request.param, seed=3, tokenizer=False)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_tiny(tmp_path_factory.mktemp("tiny") / "llama", "llama", seed=3, tokenizer=False)
    return build(folder, BuildConfig(**LIMITS))


def drawn_steps(rng, life_cycles, count):
    """Inputs of steps on rows of random lengths and pages of their own: decode mostly, prefill at times."""
    for index in range(count):
        rows = int(rng.integers(1, 13))
        lens = np.ones(rows, np.int64) if index % 4 else rng.integers(1, 5, rows)
        starts = rng.integers(0, 40, rows)
        seq_lens = starts + lens
        query_start = np.concatenate([[0], np.cumsum(lens)])
        positions = np.concatenate([np.arange(a, b) for a, b in zip(starts, seq_lens, strict=True)])
        owner = np.repeat(np.arange(rows), lens)
        tables, slots = [], []
        for spec in life_cycles:
            columns = -(-int(seq_lens.max()) // spec.page_size)
            table = np.stack([1 + rng.permutation(PAGES - 1)[:columns] for _ in range(rows)]).astype(np.int32)
            tables.append(table)
            slots.append(table[owner, positions // spec.page_size].astype(np.int64) * spec.page_size
                          + positions % spec.page_size)
        yield StepInputs(token_ids=rng.integers(0, VOCAB, len(positions)), positions=positions,
                         slot_mapping=tuple(slots), page_table=tuple(tables), query_start=query_start.astype(np.int32),
                         seq_lens=seq_lens.astype(np.int32), logits_rows=query_start[1:] - 1)


def runners(engine):
    return [ModelEngine(engine, num_pages=(PAGES,) * len(engine.manifest.life_cycles), capture=capture)
            for capture in (True, False)]


def assert_equal_steps(engine, count, seed=0):
    """Every step's logits and, at the end, every key and value; returns the capturing runner."""
    captured, plain = runners(engine)
    for inputs in drawn_steps(np.random.default_rng(seed), engine.manifest.life_cycles, count):
        assert torch.equal(captured.forward(inputs), plain.forward(inputs))
    for mine, other in zip(captured.pools, plain.pools, strict=True):
        assert torch.equal(mine[:, 1:], other[:, 1:])
        assert mine.abs().sum() > 0
    return captured


def lists_of(runner):
    return [step for step in runner._graphs._captured.values() if step is not None]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(form.values()))
def test_captured_steps_equal_uncaptured_ones(checkpoint, form):
    captured = assert_equal_steps(build(checkpoint, BuildConfig(**LIMITS, **form)), 48)
    assert len(lists_of(captured)) >= 6


def test_a_step_too_large_for_the_arena_runs_uncaptured(llama, monkeypatch):
    monkeypatch.setattr(cpu_graphs, "ARENA_BYTES", 60_000)
    captured = assert_equal_steps(llama, 48)
    assert 1 <= len(lists_of(captured)) < len(captured._graphs._captured)


def test_another_number_of_threads_is_another_capture(llama):
    captured, plain = runners(llama)
    inputs = next(step for step in drawn_steps(np.random.default_rng(1), llama.manifest.life_cycles, 9)
                  if len(step.token_ids) == len(step.seq_lens))
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert torch.equal(captured.forward(inputs), plain.forward(inputs))
    finally:
        torch.set_num_threads(before)
    assert len(lists_of(captured)) == 2


def test_what_torch_copies_inside_a_kernel_is_copied_again(llama, monkeypatch):
    """A kernel handed strided values makes them contiguous first: that copy is part of the step."""
    from camshaft.runtime import binding

    plain_bind = binding.bind

    def strided(op, kernel, library):
        function = plain_bind(op, kernel, library)
        if op.spec.name != "silu_mul":
            return function
        return lambda x: function(x.t().contiguous().t())

    monkeypatch.setattr(binding, "bind", strided)
    captured = assert_equal_steps(llama, 24)
    assert lists_of(captured)


def test_a_step_in_which_the_host_reads_a_value_is_not_captured(llama, monkeypatch):
    from camshaft.runtime import binding

    plain_bind = binding.bind

    def reading(op, kernel, library):
        function = plain_bind(op, kernel, library)
        if op.spec.name != "silu_mul":
            return function
        return lambda x: function(x) if float(x[0, 0]) > 0 else function(x + 0)

    monkeypatch.setattr(binding, "bind", reading)
    captured = assert_equal_steps(llama, 24)
    assert not lists_of(captured)


def test_a_capture_that_fails_fails_its_step_alone(llama, monkeypatch):
    captured, plain = runners(llama)
    steps = [step for step in drawn_steps(np.random.default_rng(2), llama.manifest.life_cycles, 12)
             if len(step.token_ids) == len(step.seq_lens)]
    graph = captured._graphs._graph
    broken = type(graph)(inputs=graph.inputs, call=lambda *_: torch.zeros(1) / 0 + [], source="", native=True)
    captured._graphs._graph = broken
    with pytest.raises(TypeError):
        captured.forward(steps[0])
    captured._graphs._graph = graph
    for inputs in steps:
        assert torch.equal(captured.forward(inputs), plain.forward(inputs))


def test_without_native_kernels_nothing_is_captured(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMSHAFT_CC", "none")
    engine = build(write_tiny(tmp_path / "llama", "llama", seed=3, tokenizer=False), BuildConfig(**LIMITS))
    assert ModelEngine(engine, num_pages=(PAGES,))._graphs is None


def test_weights_go_with_the_runner(llama):
    captured = assert_equal_steps(llama, 12)
    graphs = weakref.ref(captured._graphs)
    gc.disable()
    try:
        del captured
        assert graphs() is None
    finally:
        gc.enable()
