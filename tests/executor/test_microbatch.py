"""Plans and landings: what a step holds, in which order, and when rows and pages come back."""

import dataclasses

import numpy as np
import pytest

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import InternalError
from camshaft.core.ids import RequestId
from camshaft.executor.messages import Increment
from camshaft.executor.microbatch import MicroBatchScheduler
from camshaft.executor.output import plain_increments
from camshaft.executor.table import DRAINING, RequestTable, RowNeeds
from camshaft.executor.waiting import WaitingRequest
from camshaft.testing.executor_rig import ExecutorRig, RigConfig


class Bench:
    """A scheduler driven by hand: plans and results are under the test's control."""

    def __init__(self, *, batch=4, tokens=8, chunk=None, **fields):
        scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=tokens, context_chunk_tokens=chunk,
                                    overlap_depth=0)
        self.rig = ExecutorRig(RigConfig(scheduler=scheduler, **fields))
        self.kv, self.engine = self.rig.kv, self.rig.engine
        self.batch = MicroBatchScheduler(self.kv, self.rig.limits, scheduler)

    def add(self, prompt, max_tokens, **options):
        request = self.rig.request(prompt, max_tokens, **options)
        self.batch.enqueue(request)
        return request

    def turn(self):
        plan = self.batch.next_plan()
        return plan, self.batch.apply(self.engine.submit(plan).result())


def test_generation_rows_come_first_then_chunks_in_order_of_admission():
    bench = Bench(tokens=8, chunk=5)
    bench.add([1, 2], 9)
    plan, _ = bench.turn()
    assert (plan.num_generation, plan.num_tokens, [arrival.row for arrival in plan.arrivals]) == (0, 2, [0])
    bench.add(range(10, 17), 9)
    bench.add(range(20, 24), 9)
    plan, _ = bench.turn()
    assert plan.rows.tolist() == [0, 1, 2]
    assert plan.num_generation == 1
    assert plan.query_lens.tolist() == [1, 5, 2]
    assert plan.start_positions.tolist() == [2, 0, 0]
    assert plan.samples.tolist() == [True, False, False]
    assert plan.output_indices[0] == 1
    assert plan.context_token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21]
    plan, _ = bench.turn()
    assert plan.arrivals == ()
    assert plan.query_lens.tolist() == [1, 2, 2]
    assert plan.samples.tolist() == [True, True, True]
    assert plan.context_token_ids.tolist() == [15, 16, 22, 23]
    assert bench.turn()[0].num_generation == 3


def test_nobody_is_admitted_without_tokens_left_in_the_step():
    bench = Bench(tokens=4)
    bench.add([1] * 9, 2)
    bench.add([2] * 9, 2)
    for waiting in (1, 1, 0):
        plan, _ = bench.turn()
        assert plan.num_tokens <= 4
        assert len(bench.batch.waiting) == waiting


def test_page_updates_name_every_page_a_row_needs():
    bench = Bench(tokens=16, page_size=4)
    bench.add([1] * 9, 9)
    plan, _ = bench.turn()
    (updates,) = plan.page_updates
    assert updates.rows.tolist() == [0, 0, 0]
    assert updates.columns.tolist() == [0, 1, 2]
    assert len(set(updates.pages.tolist())) == 3
    seen = set(updates.columns.tolist())
    for _ in range(8):
        plan, _ = bench.turn()
        (updates,) = plan.page_updates
        seen.update(updates.columns.tolist())
        assert (plan.start_positions[0]) // 4 in seen
    assert bench.batch.next_plan() is None
    assert max(seen) == bench.kv.pages_for(9 + 9 - 1) - 1, "pages beyond the longest outcome were taken"


def test_a_row_whose_limit_is_in_flight_is_not_scheduled_again():
    bench = Bench()
    bench.add([1, 2], 2)
    first, second = bench.batch.next_plan(), None
    results = [bench.engine.submit(first)]
    second = bench.batch.next_plan()
    results.append(bench.engine.submit(second))
    assert bench.batch.next_plan() is None
    (one,) = bench.batch.apply(results[0].result())
    assert bench.batch.next_plan() is None
    (two,) = bench.batch.apply(results[1].result())
    assert (one.finish_reason, two.finish_reason) == (None, "length")
    assert bench.batch.table.num_used == 0


def test_a_late_stop_drops_the_extra_result_and_keeps_pages_until_it_retired():
    bench = Bench(vocab_size=5)
    request = bench.add([1, 2], 9, stop=range(5))
    held = bench.engine.submit(bench.batch.next_plan())
    extra = bench.engine.submit(bench.batch.next_plan())
    (increment,) = bench.batch.apply(held.result())
    assert (increment.id, increment.finish_reason, len(increment.token_ids)) == (request.id, "stop", 1)
    assert bench.batch.table.state[0] == DRAINING
    assert bench.kv.stats().num_referenced > 0
    assert bench.batch.next_plan() is None
    assert bench.batch.apply(extra.result()) == []
    assert bench.kv.stats().num_referenced == 0
    assert bench.batch.table.num_used == 0


def test_a_row_is_handed_out_with_a_new_epoch():
    bench = Bench(batch=1)
    epochs = []
    for start in range(3):
        bench.add([start], 1)
        plan, _ = bench.turn()
        epochs.append(plan.arrivals[0].epoch)
        assert plan.epochs.tolist() == epochs[-1:]
    assert epochs == sorted(set(epochs))


def test_cancel_knows_every_state():
    bench = Bench(batch=2, tokens=2)
    running, waiting = bench.add([1] * 5, 3), bench.add([2], 3)
    handle = bench.engine.submit(bench.batch.next_plan())
    for request in (waiting, running):
        assert bench.batch.cancel(request.id).finish_reason == "cancelled"
        assert bench.batch.cancel(request.id) is None
    assert bench.batch.table.num_used == 1, "its step is in flight"
    assert bench.batch.apply(handle.result()) == []
    assert bench.batch.table.num_used == 0
    assert bench.kv.stats().num_referenced == 0


def test_finished_output_is_reused_by_the_next_turn_of_a_conversation():
    bench = Bench(tokens=32)
    request = bench.add([1, 2, 3], 8)
    answer = []
    for _ in range(8):
        answer += [token for increment in bench.turn()[1] for token in increment.token_ids]
    bench.add([*request.prompt_token_ids.tolist(), *answer, 4], 2)
    _, (increment,) = bench.turn()
    assert increment.num_cached_tokens == 3 + 7, "all but the last token, which was never fed"


@pytest.mark.parametrize("wrong", [{"step": 7}, {"rows": np.array([3], np.int32)},
                                   {"token_ids": np.zeros(2, np.int32)}])
def test_results_must_answer_the_oldest_step(wrong):
    bench = Bench()
    bench.add([1], 3)
    out = bench.engine.submit(bench.batch.next_plan()).result()
    with pytest.raises(InternalError, match="step"):
        bench.batch.apply(dataclasses.replace(out, **wrong))


def test_results_without_a_step_are_refused():
    bench = Bench()
    bench.add([1], 3)
    out = bench.engine.submit(bench.batch.next_plan()).result()
    bench.batch.apply(out)
    with pytest.raises(InternalError, match="in flight"):
        bench.batch.apply(out)


@pytest.mark.parametrize("config", [SchedulerConfig(overlap_depth=0),
                                    SchedulerConfig(max_batch_size=8, max_num_tokens=4, overlap_depth=0)])
def test_unresolved_or_starving_limits_are_refused(config):
    bench = Bench()
    with pytest.raises(InternalError):
        MicroBatchScheduler(bench.kv, bench.rig.limits, config)


def test_table_gives_a_row_back_once_and_only_when_it_is_idle():
    bench = Bench()
    table = RequestTable(num_rows=2, max_seq_len=8)
    request = bench.rig.request([1, 2], 3)
    pages = np.ones(1, np.int32)
    row = table.occupy(WaitingRequest(request=request, precedence=0, arrival=1, token_ids=request.prompt_token_ids),
                       RowNeeds(output_limit=3, worst_tokens=4, worst_pages=pages, soon_pages=pages), num_cached=0)
    with pytest.raises(InternalError, match="freed"):
        table.free(row)
    assert table.running_rows().tolist() == [row]
    table.drain(row)
    assert table.running_rows().tolist() == []
    table.in_flight[row] = 1
    with pytest.raises(InternalError, match="in flight"):
        table.free(row)
    table.in_flight[row] = 0
    table.free(row)
    assert table.num_free == 2
    with pytest.raises(InternalError, match="freed"):
        table.free(row)
    with pytest.raises(InternalError, match="no request"):
        table.request_at(row)


def test_plain_increments_are_ordinary_ones():
    made = plain_increments([RequestId(3), RequestId(4)], [10, 11])
    assert made == [Increment(id=RequestId(3), token_ids=(10,)), Increment(id=RequestId(4), token_ids=(11,))]
    with pytest.raises(AttributeError):
        made[0].id = RequestId(5)
