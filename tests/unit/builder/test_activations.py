"""Activation memory, against counts made by hand."""

import dataclasses

import pytest

from camshaft.builder.activations import activation_peak_bytes
from camshaft.core.errors import InternalError
from camshaft.passes.pipeline import run_passes
from tests.passes.graphs import BUILD, CONFIG, Builder, context, tiny_llama

ROW = 8 * 4  # bytes of a float32 row of 8
TOKENS = BUILD.max_num_tokens


@pytest.fixture
def b():
    return Builder()


@pytest.fixture
def x(b):
    return b.call("aten.embedding.default", b.weight("table", CONFIG.vocab_size, 8), b.token_ids)


def test_a_chain_holds_two_tensors_at_a_time(b, x):
    for _ in range(5):
        x = b.call("aten.silu.default", x)
    assert activation_peak_bytes(b.finish(x), BUILD) == 2 * TOKENS * ROW


def test_a_residual_stays_alive(b, x):
    y = x
    for _ in range(5):
        y = b.call("aten.silu.default", y)
    assert activation_peak_bytes(b.finish(b.call("aten.add.Tensor", x, y)), BUILD) == 3 * TOKENS * ROW


def test_views_take_nothing_and_keep_their_source(b, x):
    half = b.call("aten.slice.Tensor", x, 1, 0, 4)
    half = b.call("aten.view.default", half, [-1, 2, 2])
    y = b.call("aten.silu.default", half)
    y = b.call("aten.silu.default", y)
    program = b.finish(b.call("aten.view.default", b.call("aten.add.Tensor", y, half), [-1, 4]))
    assert activation_peak_bytes(program, BUILD) == 2 * TOKENS * ROW  # whole x + two halves


def test_a_reshape_counts_as_copy_and_as_view(b, x):
    y = b.call("aten.reshape.default", x, [-1, 2, 4])
    y = b.call("aten.silu.default", y)
    assert activation_peak_bytes(b.finish(b.call("aten.view.default", y, [-1, 8])), BUILD) == 3 * TOKENS * ROW


def test_several_results_live_together(b, x):
    both = b.call("camshaft.add_rms_norm", x, x, b.weight("w", 8), 1e-5)
    program = b.finish(b.call("getitem", both, 0))
    assert activation_peak_bytes(program, BUILD) == 3 * TOKENS * ROW


@pytest.mark.parametrize(("max_batch_size", "max_num_tokens", "num_rows"), [(4, 100, 64), (70, 100, 70), (4, 16, 16)])
def test_logit_rows_are_bounded_by_the_batch_the_scores_and_the_tokens(b, x, max_batch_size, max_num_tokens, num_rows):
    rows = b.call("aten.index_select.default", x, 0, b.logits_rows)
    build = dataclasses.replace(BUILD, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens)
    assert activation_peak_bytes(b.finish(rows), build) == (max_num_tokens + num_rows) * ROW


def test_a_lowered_program_grows_with_its_limits():
    program = tiny_llama()
    run_passes(program, context())
    small = activation_peak_bytes(program, BUILD)
    assert activation_peak_bytes(program, dataclasses.replace(BUILD, max_num_tokens=2 * TOKENS)) == 2 * small


def test_limits_must_be_resolved(b, x):
    with pytest.raises(InternalError, match="resolved"):
        activation_peak_bytes(b.finish(x), dataclasses.replace(BUILD, max_seq_len=None))
