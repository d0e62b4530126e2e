"""The scheduler and the real cache over a strict fake engine, driven through anything that may happen.

What must hold whatever the order: every accepted request ends exactly once; its tokens are those it gets
alone, and so are its log-probabilities and scores; one whose own tokens spoil the cache fails alone; the fake
engine sees no page read wrongly, shared while written or written twice; no page and no row is left over. Every
queue, capacity and chunking policy, life cycles of every kind, depth 0 and 1, tiny pools, tiny chunks.
"""

import dataclasses

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from camshaft.config.kv import reserved_ahead
from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import EngineDeadError, QueueFullError, RequestTooLargeError
from camshaft.executor.messages import PrefixScope
from camshaft.executor.policies.base import load_policies
from camshaft.executor.request import RequestSize
from camshaft.testing.executor_rig import ExecutorRig, RigConfig

VOCAB = 7
SPOILING = VOCAB - 1
SCOPES = (PrefixScope(model="fake"), PrefixScope(model="fake", adapter=1), PrefixScope(model="fake", salt="1"))
BASES = np.random.default_rng(7).integers(0, SPOILING, (2, 24)).astype(np.int32)
MAX_SEQ_LEN = 48
MAX_WAITING = 6
POLICIES = load_policies()
LIFE_CYCLES = (((None, 0),), ((None, 0),), ((6, 0),), ((None, 0), (5, 0)), ((4, 3),), ((3, 0), (9, 2)))
"""(window, sinks) of each."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """A request to be made: the beginning of a base sequence and a tail."""

    base: int
    shared: int
    tail: list[int]
    max_tokens: int
    min_tokens: int
    stops: set[int]
    scope: int
    reuse: bool
    hot: bool
    priority: int
    edited: bool
    logprobs: int | None
    scores: int | None
    only_scores: bool


SPECS = st.builds(
    Spec, base=st.sampled_from([0, 0, 1]), shared=st.integers(2, 24),
    tail=st.lists(st.integers(0, VOCAB - 1), max_size=3) | st.just([SPOILING, 0, 0, 0, 0]),
    max_tokens=st.integers(1, 16), min_tokens=st.integers(0, 3),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=2), scope=st.sampled_from([0, 0, 0, 0, 1, 2]),
    reuse=st.sampled_from([True, True, True, False]), hot=st.booleans(), priority=st.integers(-1, 1),
    edited=st.sampled_from([False, False, True]), logprobs=st.sampled_from([None, None, 0, 2]),
    scores=st.sampled_from([None, None, None, 0, 2]), only_scores=st.sampled_from([False, False, True]))


class ExecutorMachine(RuleBasedStateMachine):
    rig: ExecutorRig

    @initialize(depth=st.integers(0, 1), batch=st.integers(1, 4), extra=st.integers(0, 9),
                chunk=st.sampled_from([None, 1, 3]), tokens=st.integers(16, 80), page_size=st.sampled_from([1, 2, 4]),
                reuse=st.sampled_from([(True, True), (True, True), (True, False), (False, False)]),
                policies=st.tuples(st.sampled_from(POLICIES.queue), st.sampled_from(POLICIES.capacity),
                                   st.sampled_from(POLICIES.chunking)),
                life_cycles=st.sampled_from(LIFE_CYCLES), logits_rows=st.integers(0, 6))
    def make(self, depth, batch, extra, chunk, tokens, page_size, reuse, policies, life_cycles, logits_rows):
        queue, capacity, chunking = policies
        scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=batch + extra, context_chunk_tokens=chunk,
                                    overlap_depth=depth, max_waiting=MAX_WAITING, queue_policy=queue,
                                    capacity_policy=capacity, context_chunking_policy=chunking)
        self.rig = ExecutorRig(RigConfig(
            num_pages=1 + tokens // page_size, page_size=page_size, max_seq_len=MAX_SEQ_LEN, vocab_size=VOCAB,
            block_reuse=reuse[0], partial_reuse=reuse[1], scheduler=scheduler, windows=life_cycles,
            max_logits_rows=batch + logits_rows))
        self.rig.engine.spoiling_token = SPOILING
        self.num_poisons = self.num_failures = 0
        self.injected = False

    @rule(specs=st.lists(SPECS, min_size=1, max_size=6))
    def submit(self, specs):
        for spec in specs:
            self.submit_one(spec)

    def submit_one(self, spec):
        prompt = [*BASES[spec.base, :spec.shared].tolist(), *spec.tail] or [0]
        max_tokens = 0 if spec.only_scores and spec.scores is not None else spec.max_tokens
        request = self.rig.request(prompt, max_tokens, stop=spec.stops, min_tokens=min(spec.min_tokens, max_tokens),
                                   temperature=float(spec.hot), scope=SCOPES[spec.scope], reuse=spec.reuse,
                                   priority=spec.priority, num_logprobs=spec.logprobs,
                                   num_prompt_logprobs=spec.scores,
                                   repetition_penalty=1.5 if spec.edited else 1.0)
        try:
            self.rig.submit(request)
        except RequestTooLargeError:
            self.check_too_large(request)
        except QueueFullError:
            assert self.rig.executor.stats().num_waiting == MAX_WAITING
        except EngineDeadError:
            assert self.injected

    def check_too_large(self, request):
        size, config = RequestSize.of(request), self.rig.config
        limit = size.output_limit(self.rig.limits)
        ahead = reserved_ahead(config.scheduler.step_limits().context_chunk_tokens, config.page_size)
        worst = self.rig.kv.worst_pages(size.worst_case_tokens(self.rig.limits), ahead)
        assert limit < min(request.max_tokens, max(1, request.min_tokens)) or worst.max() > config.num_pages - 1

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            self.rig.executor.step()

    @rule(specs=st.lists(SPECS, min_size=1, max_size=4), steps=st.integers(1, 5),
          picks=st.lists(st.integers(0, 9), max_size=2))
    def submit_step_abort(self, specs, steps, picks):
        self.submit(specs)
        self.step(steps)
        live = [request_id for request_id, told in self.rig.told.items() if not told.finals]
        for pick in picks if live else ():
            self.rig.executor.abort(live[pick % len(live)])

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort_any(self, data):
        self.rig.executor.abort(data.draw(st.sampled_from(sorted(self.rig.requests))))

    @rule(row=st.integers(0, 3), chosen=st.integers(0, 4))
    def poison(self, row, chosen):
        if chosen == 2:
            self.num_poisons += 1
            self.rig.engine.poison_rows.add(row)
        elif chosen == 3:
            self.num_failures += 1
            self.rig.engine.failing_processor_rows.add(row)

    @precondition(lambda self: not self.injected)
    @rule(ahead=st.integers(0, 3), on_result=st.booleans(), chosen=st.integers(0, 19))
    def inject_failure(self, ahead, on_result, chosen):
        if chosen == 7:  # rarely, as it ends the run
            self.injected = True
            self.rig.engine.fail_on_result = on_result
            self.rig.engine.fail_at = self.rig.engine.plans + ahead

    @rule()
    def drain(self):
        self.rig.run(max_steps=2000)
        self.rig.check_told()
        self.rig.check_drained()

    @invariant()
    def books_are_sound(self):
        self.rig.kv.check_integrity()
        assert self.rig.engine.violations == []
        assert all(len(told.finals) <= 1 and not told.num_after_final for told in self.rig.told.values())

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.drain()
        ends = [told.end for told in self.rig.told.values()]
        assert self.injected or "EngineDeadError" not in ends
        clean = [told.end for request_id, told in self.rig.told.items()
                 if SPOILING not in [*self.rig.requests[request_id].prompt_token_ids.tolist(), *told.token_ids]]
        assert clean.count("NonFiniteLogitsError") <= self.num_poisons
        assert ends.count("RuntimeError") <= self.num_failures
        for request_id, told in self.rig.told.items():
            if SPOILING in self.rig.requests[request_id].prompt_token_ids:
                assert not told.token_ids
        self.rig.executor.shutdown()


ExecutorMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None,
                                             suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
TestExecutorMachine = ExecutorMachine.TestCase
