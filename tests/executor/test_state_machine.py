"""The scheduler and the real cache over a strict fake engine, driven through anything that may happen.

What must hold whatever the order: every accepted request ends exactly once; its tokens are those it gets
alone; the fake engine sees no page read wrongly, shared while written or written twice; no page and no
row is left over. Depth 0 and 1, tiny pools, tiny chunks.
"""

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from camshaft.config.runtime import SchedulerConfig
from camshaft.core.errors import EngineDeadError, QueueFullError, RequestTooLargeError
from camshaft.executor.messages import PrefixScope
from camshaft.testing.executor_rig import ExecutorRig, RigConfig

VOCAB = 6
SCOPES = (PrefixScope(model="fake"), PrefixScope(model="fake", adapter=1), PrefixScope(model="fake", salt="1"))
BASES = np.random.default_rng(7).integers(0, VOCAB, (3, 40)).astype(np.int32)


class ExecutorMachine(RuleBasedStateMachine):
    rig: ExecutorRig

    @initialize(depth=st.integers(0, 1), batch=st.integers(1, 4), extra=st.integers(0, 9),
                chunk=st.sampled_from([None, 1, 3]), pages=st.integers(4, 20), page_size=st.sampled_from([1, 2, 4]),
                reuse=st.sampled_from([(True, True), (True, True), (True, False), (False, False)]))
    def make(self, depth, batch, extra, chunk, pages, page_size, reuse):
        scheduler = SchedulerConfig(max_batch_size=batch, max_num_tokens=batch + extra, context_chunk_tokens=chunk,
                                    overlap_depth=depth, max_waiting=6)
        self.rig = ExecutorRig(RigConfig(num_pages=pages, page_size=page_size, max_seq_len=48, vocab_size=VOCAB,
                                         block_reuse=reuse[0], partial_reuse=reuse[1], scheduler=scheduler))
        self.num_poisons = 0
        self.injected = False

    @rule(base=st.integers(0, 2), shared=st.integers(0, 30), tail=st.lists(st.integers(0, VOCAB - 1), max_size=3),
          max_tokens=st.integers(1, 14), min_tokens=st.integers(0, 3),
          stops=st.sets(st.integers(0, VOCAB - 1), max_size=2), scope=st.sampled_from([0, 0, 0, 1, 2]),
          reuse=st.sampled_from([True, True, False]), hot=st.booleans())
    def submit(self, base, shared, tail, max_tokens, min_tokens, stops, scope, reuse, hot):
        prompt = [*BASES[base, :shared].tolist(), *tail] or [0]
        request = self.rig.request(prompt, max_tokens, stop=stops, min_tokens=min(min_tokens, max_tokens),
                                   temperature=float(hot), scope=SCOPES[scope], reuse=reuse)
        try:
            self.rig.submit(request)
        except RequestTooLargeError:
            limit = min(max_tokens, 48 - len(prompt))
            most = (self.rig.config.num_pages - 1) * self.rig.config.page_size
            assert limit < max(1, request.min_tokens) or len(prompt) + limit - 1 > most
        except QueueFullError:
            assert self.rig.executor.stats().num_waiting == 6
        except EngineDeadError:
            assert self.injected

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        for _ in range(steps):
            self.rig.executor.step()

    @precondition(lambda self: self.rig.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.rig.executor.abort(data.draw(st.sampled_from(sorted(self.rig.requests))))

    @rule(row=st.integers(0, 3))
    def poison(self, row):
        self.num_poisons += 1
        self.rig.engine.poison_rows.add(row)

    @precondition(lambda self: not self.injected)
    @rule(ahead=st.integers(0, 3), on_result=st.booleans(), chosen=st.integers(0, 3))
    def inject_failure(self, ahead, on_result, chosen):
        if chosen == 0:  # rarely, as it ends the run
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
        assert ends.count("NonFiniteLogitsError") <= self.num_poisons
        self.rig.executor.shutdown()


ExecutorMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None,
                                             suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
TestExecutorMachine = ExecutorMachine.TestCase
