"""The runtime on a small model: paged equals dense, however the work is cut into steps."""

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch

from camshaft.core.errors import EngineCorruptError, EngineDeviceError, InternalError
from camshaft.runtime.binding import bind_graph
from camshaft.runtime.inputs import RowState
from camshaft.runtime.model_engine import ModelEngine
from tests.unit.runtime import attention_model as model
from tests.unit.runtime.plans import arrival, ints, plan

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8]
PAGES = 24


@pytest.fixture(scope="module")
def engine():
    return model.engine()


@pytest.fixture
def runner(engine):
    return ModelEngine(engine, num_pages=(PAGES,))


def pages_of(row, first, count):
    return [(row, column, first + column) for column in range(count)]


def tokens_of(handle):
    out = handle.result()
    assert out.finite.all()
    return out.token_ids.tolist()


def generate(runner, prompt, count, *, row=0, chunk=None, first_page=1, step=0, **options):
    """Run one request alone; returns its tokens."""
    tokens, chunk = [], chunk or len(prompt)
    pages = pages_of(row, first_page, 5)
    for start in range(0, len(prompt), chunk):
        piece = prompt[start:start + chunk]
        last = start + len(piece) == len(prompt)
        tokens += tokens_of(runner.submit(plan(
            step, arrivals=[arrival(row, **options)] if start == 0 else [], pages=pages if start == 0 else [],
            context=[(row, start, piece, 0 if last else None)])))
        step += 1
    for index in range(1, count):
        tokens += tokens_of(runner.submit(plan(step, generation=[(row, len(prompt) + index - 1, index)])))
        step += 1
    return tokens


@pytest.mark.parametrize("chunk", [1, 5, 16, 19])
def test_chunked_and_paged_equals_dense(runner, chunk):
    expected = model.dense_greedy(PROMPT, 30)
    assert len(set(expected)) >= 8
    assert generate(runner, PROMPT, 30, chunk=chunk) == expected


def test_logits_equal_dense(engine, runner):
    rows = RowState(engine.manifest, (PAGES,))
    first = plan(0, arrivals=[arrival(0)], pages=pages_of(0, 3, 2), context=[(0, 0, PROMPT[:11], 0)])
    second = plan(1, context=[(0, 11, PROMPT[11:], 0)])
    expected = model.dense_logits(PROMPT)
    for step, position in ((first, 10), (second, len(PROMPT) - 1)):
        rows.apply(step)
        found = runner.forward(rows.build(step))
        torch.testing.assert_close(found, expected[position:position + 1], rtol=1e-5, atol=1e-5)


def test_mixed_steps_give_what_each_request_gives_alone(runner):
    """Row 0 generates while row 1 is prefilled in chunks and row 2 arrives whole; rows end at different times."""
    prompts = {0: PROMPT[:5], 1: PROMPT, 2: PROMPT[7:12]}
    got = {row: [] for row in prompts}
    script = [
        dict(arrivals=[arrival(0)], pages=pages_of(0, 1, 3), context=[(0, 0, prompts[0], 0)]),
        dict(generation=[(0, 5, 1)], arrivals=[arrival(1)], pages=pages_of(1, 6, 3),
             context=[(1, 0, PROMPT[:7], None)]),
        dict(generation=[(0, 6, 2)], arrivals=[arrival(2)], pages=pages_of(2, 12, 2),
             context=[(1, 7, PROMPT[7:17], None), (2, 0, prompts[2], 0)]),
        dict(generation=[(0, 7, 3), (2, 5, 1)], context=[(1, 17, PROMPT[17:], 0)]),
        *(dict(generation=[(2, 6 + i, 2 + i), (1, 19 + i, 1 + i), (0, 8 + i, 4 + i)]) for i in range(6)),
    ]
    for step, parts in enumerate(script):
        out = runner.submit(plan(step, **parts)).result()
        for row, token in zip(out.rows.tolist(), out.token_ids.tolist(), strict=True):
            got[row].append(token)
    for row, prompt in prompts.items():
        assert got[row] == model.dense_greedy(prompt, len(got[row]))
        assert len(got[row]) >= 7


def test_a_chunk_before_the_last_samples_nothing_but_fills_the_cache(runner):
    out = runner.submit(plan(0, arrivals=[arrival(0)], pages=pages_of(0, 1, 2),
                             context=[(0, 0, PROMPT[:8], None)])).result()
    assert len(out.rows) == len(out.token_ids) == len(out.finite) == 0
    assert runner.pools[0][:, 1, :, :, :8].abs().sum() > 0


def test_shared_prefix_and_copied_page_equal_dense(runner):
    generate(runner, PROMPT, 1)
    other = [*PROMPT[:17], 11, 12]
    out = runner.submit(plan(50, arrivals=[arrival(1)], pages=[(1, 0, 1), (1, 1, 9)], copies=[(2, 9)],
                             context=[(1, 17, other[17:], 0)])).result()
    assert out.token_ids.tolist() == model.dense_greedy(other, 1)
    before = runner.pools[0][:, 2].clone()
    runner.submit(plan(51, generation=[(1, 19, 1)])).result()
    assert torch.equal(runner.pools[0][:, 2], before)


def test_a_reused_row_forgets_its_last_request(runner):
    generate(runner, PROMPT, 3, temperature=0.9, seed=1, min_tokens=9, suppressed=[1])
    short = PROMPT[4:9]
    tokens = tokens_of(runner.submit(plan(90, arrivals=[arrival(0, epoch=1)], pages=[(0, 0, 7)], epochs=[1],
                                          context=[(0, 0, short, 0)])))
    assert tokens == model.dense_greedy(short, 1)
    stale = runner.submit(plan(91, generation=[(0, 5, 1)], epochs=[0]))
    with pytest.raises(InternalError, match="epoch"):
        stale.result()


def test_rows_beyond_the_first_block_grow_the_state(runner):
    assert generate(runner, PROMPT, 2) == model.dense_greedy(PROMPT, 2)
    assert generate(runner, PROMPT, 4, row=200, first_page=8, step=10) == model.dense_greedy(PROMPT, 4)
    assert tokens_of(runner.submit(plan(30, generation=[(0, 20, 2)]))) == model.dense_greedy(PROMPT, 3)[2:]


def test_sampling_depends_on_the_seed_and_not_on_neighbours(runner):
    warm = dict(temperature=1.0, seed=7)
    alone = generate(runner, PROMPT, 12, **warm)
    assert alone == generate(runner, PROMPT, 12, row=1, first_page=7, step=40, **warm)
    assert alone != generate(runner, PROMPT, 12, row=2, step=60, temperature=1.0, seed=8)
    got = tokens_of(runner.submit(plan(100, arrivals=[arrival(3), arrival(4, **warm)],
                                       pages=pages_of(3, 1, 2) + pages_of(4, 7, 2),
                                       context=[(3, 0, PROMPT, 0), (4, 0, PROMPT, 0)])))
    for index in range(1, 12):
        got += tokens_of(runner.submit(plan(100 + index, generation=[(4, 18 + index, index), (3, 18 + index, index)])))
    rows = [3, 4] + [4, 3] * 11
    assert [token for row, token in zip(rows, got, strict=True) if row == 4] == alone
    assert [token for row, token in zip(rows, got, strict=True) if row == 3] == model.dense_greedy(PROMPT, 12)


def test_suppressed_ids_are_held_off_until_the_minimum_and_no_longer(runner):
    greedy = model.dense_greedy(PROMPT, 1)
    held = generate(runner, PROMPT, 6, min_tokens=4, suppressed=range(0, model.VOCAB, 2))
    assert all(token % 2 for token in held[:4])
    history = PROMPT + held[:4]
    assert held[4] == model.dense_greedy(history, 1)[0]
    assert generate(runner, PROMPT, 1, row=1, first_page=7, step=50, min_tokens=0, suppressed=greedy) == greedy


def test_a_row_with_broken_logits_is_reported_alone(runner):
    whole = runner.graph

    def broken(*inputs):
        logits = whole.call(*inputs)
        logits[0, 5] = torch.nan
        return logits

    runner.graph = dataclasses.replace(whole, call=broken)
    out = runner.submit(plan(0, arrivals=[arrival(0), arrival(1)], pages=pages_of(0, 1, 1) + pages_of(1, 4, 1),
                             context=[(0, 0, [1, 29, 3], 0), (1, 0, [1, 2, 3], 0)])).result()
    assert out.finite.tolist() == [False, True]
    assert out.token_ids.tolist()[1:] == model.dense_greedy([1, 2, 3], 1)


def _with_tensors(engine, tensors):
    from camshaft.engine.artifact import Engine

    return Engine(manifest=engine.manifest, graph_text=engine.graph_text, folder=None, tensors=tensors,
                  tokenizer_files={}, native=None)


def wrong(base, **changes):
    return dataclasses.replace(base, **changes)


START = plan(0, arrivals=[arrival(0)], pages=pages_of(0, 1, 2), context=[(0, 0, PROMPT, 0)])
WRONG = {
    "page 0": plan(0, arrivals=[arrival(0)], pages=[(0, 0, 0)], context=[(0, 0, [1], 0)]),
    "page beyond the pool": plan(0, arrivals=[arrival(0)], pages=[(0, 0, PAGES)], context=[(0, 0, [1], 0)]),
    "no page": plan(0, arrivals=[arrival(0)], context=[(0, 0, [1], 0)]),
    "copy beyond the pool": plan(0, arrivals=[arrival(0)], pages=[(0, 0, 1)], copies=[(1, PAGES)],
                                 context=[(0, 0, [1], 0)]),
    "token out of the vocabulary": plan(0, arrivals=[arrival(0)], pages=[(0, 0, 1)],
                                        context=[(0, 0, [model.VOCAB], 0)]),
    "unknown row": plan(0, context=[(500, 0, [1], 0)]),
    "row that never came": plan(0, context=[(5, 0, [1], 0)]),
    "generation before a token": plan(0, arrivals=[arrival(0)], pages=[(0, 0, 1)], generation=[(0, 0, 0)]),
    "too many tokens": plan(0, arrivals=[arrival(0)], pages=pages_of(0, 1, 5), context=[(0, 0, [1] * 65, 0)]),
    "too long": plan(0, arrivals=[arrival(0)], pages=pages_of(0, 1, 6), context=[(0, 60, [1] * 40, 0)]),
    "no rows": plan(0),
    "counts do not add up": wrong(START, query_lens=ints(3)),
    "no tokens for a row": wrong(START, query_lens=ints(0)),
    "negative position": wrong(START, start_positions=ints(-1)),
    "missing life cycle": wrong(START, page_updates=()),
    "grammar": wrong(START, grammar_slots=ints(0)),
    "page of an unknown row": wrong(START, page_updates=plan(0, pages=[(999, 0, 1)]).page_updates),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_plans_fail_in_the_handle(runner, kind):
    handle = runner.submit(WRONG[kind])
    with pytest.raises(InternalError, match="step plan refused"):
        handle.result()


def test_a_result_is_read_once(runner):
    handle = runner.submit(START)
    handle.result()
    with pytest.raises(InternalError, match="twice"):
        handle.result()


def test_warm_up_touches_only_the_trash_page(runner):
    runner.warm_up()
    assert runner.pools[0][:, 1:].abs().sum() == 0
    assert generate(runner, PROMPT, 4) == model.dense_greedy(PROMPT, 4)


def test_threads_can_be_chosen(engine):
    before = torch.get_num_threads()
    try:
        ModelEngine(engine, num_pages=(PAGES,), num_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_bound_graph_is_straight_calls_that_drop_what_is_done(engine):
    graph = bind_graph(engine, torch.device("cpu"))
    assert graph.inputs[:2] == ("token_ids", "positions")
    lines = [line.strip() for line in graph.source.splitlines()[1:]]
    assert lines[-1].startswith("return v")
    made = {line.split(" = ")[0] for line in lines if " = " in line}
    dropped = [name for line in lines if line.startswith("del ") for name in line[4:].split(", ")]
    assert sorted(dropped) == sorted(made - {lines[-1].split()[1]})


def test_a_bound_graph_goes_with_its_last_user_and_waits_for_no_collection(engine):
    gc.disable()
    try:
        graph = bind_graph(engine, torch.device("cpu"))
        call = weakref.ref(graph.call)
        del graph
        assert call() is None, "what a frozen collection never visits would keep its weights for ever"
    finally:
        gc.enable()


@pytest.mark.parametrize(("old", "new"), [
    ("@tokens.weight", "@absent.weight"), ("aten.add.Tensor", "aten.pow.Scalar"), ("camshaft.kv_write", "os.system"),
    ('"result": null}', '"result": null'),
])
def test_an_edited_graph_is_refused(engine, old, new):
    edited = _with_tensors(engine, dict(engine.tensors()))
    edited.graph_text = engine.graph_text.replace(old, new, 1)
    with pytest.raises(EngineCorruptError):
        bind_graph(edited, torch.device("cpu"))


def with_kernel(engine, kernel):
    edited = _with_tensors(engine, dict(engine.tensors()))
    edited.graph_text = engine.graph_text.replace('"op": "camshaft.kv_write",',
                                                  f'"op": "camshaft.kv_write", "kernel": "{kernel}",')
    return edited


def test_an_unknown_kernel_is_refused_and_another_device_takes_the_reference(engine):
    with pytest.raises(EngineCorruptError, match="of_tomorrow"):
        bind_graph(with_kernel(engine, "of_tomorrow"), torch.device("cpu"))
    elsewhere = with_kernel(engine, "of_tomorrow")
    elsewhere.manifest = dataclasses.replace(
        engine.manifest, device=dataclasses.replace(engine.manifest.device, kind="cuda"))
    assert bind_graph(elsewhere, torch.device("cpu")).inputs == bind_graph(engine, torch.device("cpu")).inputs


def test_weights_packed_for_another_device_are_refused(engine, monkeypatch):
    from camshaft.kernels.op import OPS, Impl

    packing = Impl(name="packing", device="cuda", fn=lambda *args: None, prepare={"k": lambda tensor: tensor})
    monkeypatch.setitem(OPS.get("kv_write").impls, "packing", packing)
    elsewhere = with_kernel(engine, "packing")
    elsewhere.manifest = dataclasses.replace(
        engine.manifest, device=dataclasses.replace(engine.manifest.device, kind="cuda"))
    with pytest.raises(EngineDeviceError, match="packed"):
        bind_graph(elsewhere, torch.device("cpu"))


@pytest.mark.gpu
def test_the_same_tokens_on_a_gpu(engine):
    runner = ModelEngine(engine, num_pages=(PAGES,), device=torch.device("cuda"))
    assert generate(runner, PROMPT, 10, chunk=7) == model.dense_greedy(PROMPT, 10)


def test_row_state_builds_the_documented_arrays(engine):
    rows = RowState(engine.manifest, (PAGES,))
    setup = plan(0, arrivals=[arrival(0), arrival(1)], pages=[(0, 0, 5), (0, 1, 6), (1, 0, 9)],
                 context=[(0, 0, [7] * 17, 0), (1, 0, [8], 0)])
    rows.apply(setup)
    rows.build(setup)
    rows.last_token[0] = 4
    inputs = rows.build(plan(1, generation=[(0, 17, 1)], context=[(1, 1, [2, 3], None)]))
    assert inputs.token_ids.tolist() == [4, 2, 3]
    assert inputs.positions.tolist() == [17, 1, 2]
    assert inputs.slot_mapping[0].tolist() == [6 * 16 + 1, 9 * 16 + 1, 9 * 16 + 2]
    assert inputs.page_table[0].tolist() == [[5, 6], [9, 0]]
    assert inputs.query_start.tolist() == [0, 1, 3]
    assert inputs.seq_lens.tolist() == [18, 3]
    assert inputs.logits_rows.tolist() == [0]
    assert [array.dtype for array in (inputs.token_ids, inputs.positions, inputs.slot_mapping[0], inputs.logits_rows)
            ] == [np.int64] * 4
    assert [array.dtype for array in (inputs.page_table[0], inputs.query_start, inputs.seq_lens)] == [np.int32] * 3
