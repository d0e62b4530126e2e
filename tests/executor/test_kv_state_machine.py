"""The KV cache manager against a world that stores prefix hashes instead of keys and values.

A slot holds what its key and value would depend on: the scope and every token up to its position. Row tables are
fed only by reservations. Steps run as the runtime runs
them: page-table updates of all rows, all copies, then all writes, then all reads.
"""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from camshaft.config.kv import LifeCycleSpec
from camshaft.core.ids import RequestId
from camshaft.executor.kv.lifecycle import LIFE_CYCLES, LifeCycle
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import PrefixScope

PAGE = 4
SINK_PAGES = 1
WINDOW = 6
SCOPES = (*[PrefixScope(model="m")] * 4, PrefixScope(model="m", adapter=1), PrefixScope(model="m", salt="s"))
PROMPTS = st.builds(lambda shared, own: [0] * shared + own, st.integers(1, 4 * PAGE),
                    st.lists(st.integers(0, 1), max_size=PAGE))
OUTPUTS = st.lists(st.integers(0, 1), max_size=2 * PAGE)
MOSTLY = st.sampled_from((True, True, True, False))


@LIFE_CYCLES.register("window_of_tests")
class SinksAndWindow(LifeCycle):
    """A token reads the first page and the last WINDOW positions, its own included."""

    @property
    def whole_prefix(self):
        return False

    def out_of_reach(self, num_tokens):
        return range(SINK_PAGES, max(SINK_PAGES, (num_tokens - WINDOW + 1) // PAGE))

    def max_pages(self, num_tokens):
        return -(-num_tokens // PAGE)


def spec(kind):
    return LifeCycleSpec(kind=kind, layers=(0,), num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32")


@dataclasses.dataclass
class Request:
    """One sequence as the scheduler and the runtime together see it."""

    tokens: np.ndarray
    """The whole sequence, known from the start; ``prompt`` tokens of it are the prompt."""
    prompt: int
    scope: PrefixScope
    reuse: bool
    computed: int = 0
    ran: bool = False
    table: list = dataclasses.field(default_factory=list)

    @property
    def worst_case_pages(self):
        return -(-len(self.tokens) // PAGE)

    @functools.cached_property
    def states(self):
        """What each position's key and value depend on."""
        return [hash((self.scope, tuple(self.tokens[:stop]))) for stop in range(1, len(self.tokens) + 1)]


class KvMachine(RuleBasedStateMachine):
    kinds = ("full",)

    @initialize(pages=st.integers(5, 12), partial=MOSTLY, reuse=MOSTLY)
    def build(self, pages, partial, reuse):
        self.reuse, self.num_pages = reuse, pages
        self.kv = KVCacheManager(tuple(spec(kind) for kind in self.kinds), (pages + 1,) * len(self.kinds),
                                 enable_block_reuse=reuse, enable_partial_reuse=partial)
        self.slots = [np.full((pages + 1, PAGE), -1) for _ in self.kinds]
        self.live: dict[RequestId, Request] = {}
        self.next_id = 0
        self.plan: list = []

    # Planning: any interleaving of arrivals and chunks makes up a step; at most one chunk a request.

    def owed(self):
        """Pages the running requests may still ask for."""
        return sum(r.worst_case_pages - self.kv.held_pages(i) for i, r in self.live.items())

    @rule(prompt=PROMPTS, output=OUTPUTS, scope=st.sampled_from(SCOPES), reuse=MOSTLY)
    def arrive(self, prompt, output, scope, reuse):
        self.admit(prompt, output, scope, reuse)

    def admit(self, prompt, output, scope, reuse):
        request = Request(np.array(prompt + output, np.int32), len(prompt), scope, reuse)
        assert self.kv.can_ever_hold(len(request.tokens)) == (request.worst_case_pages <= self.num_pages)
        match = self.kv.match(request.tokens[:request.prompt], scope)
        assert match.num_tokens == match.num_pages * PAGE + match.num_partial_tokens < request.prompt
        if not reuse:
            match = dataclasses.replace(match, num_tokens=0, num_pages=0, num_pages_unreferenced=0)
        room = self.kv.available_pages() - match.num_pages_unreferenced - self.owed()
        if request.worst_case_pages - match.num_pages > room:
            assert self.live or request.worst_case_pages > self.num_pages, "a lone request that fits is never held up"
            return
        request.computed = self.kv.start(RequestId(self.next_id), request.tokens[:request.prompt], scope, reuse)
        assert request.computed in (match.num_tokens, match.num_pages * PAGE)
        assert self.reuse or request.computed == 0
        self.live[RequestId(self.next_id)] = request
        self.next_id += 1

    @precondition(lambda self: not self.plan)
    @rule(data=st.data(), prompt=PROMPTS)
    def serve_at_once(self, data, prompt):
        """A whole life in one step, so that there is always something cached."""
        known = set(self.live)
        self.admit(prompt, [], SCOPES[0], True)
        for chosen in set(self.live) - known:
            self.plan = [(chosen, len(prompt), self.kv.reserve(chosen, len(prompt)))]
            self.step(data)
            self.end(chosen)

    def ready(self):
        planned = {i for i, _, _ in self.plan}
        return [i for i, r in self.live.items() if i not in planned and r.computed < len(r.tokens)]

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), chunk=st.sampled_from((8 * PAGE, PAGE, 1)))
    def schedule(self, data, chunk):
        chosen = data.draw(st.sampled_from(self.ready()))
        request = self.live[chosen]
        stop = min(request.computed + chunk, len(request.tokens))
        reservation = self.kv.reserve(chosen, stop)
        assert reservation is not None, "an admitted request was refused a page"
        assert self.kv.held_pages(chosen) <= request.worst_case_pages
        self.plan.append((chosen, stop, reservation))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ask_for_too_much(self, data):
        chosen = data.draw(st.sampled_from(sorted(self.live)))
        before = (self.kv.stats(), self.kv.available_pages(), self.kv.held_pages(chosen))
        assert self.kv.reserve(chosen, (before[2] + before[1] + 1) * PAGE) is None
        assert (self.kv.stats(), self.kv.available_pages(), self.kv.held_pages(chosen)) == before

    @precondition(lambda self: self.plan)
    @rule(data=st.data())
    def run_step(self, data):
        self.step(data)

    def step(self, data):
        plan, self.plan = self.plan, []
        for c, slots in enumerate(self.slots):
            copies = []
            for chosen, _, reservation in plan:
                change = reservation.updates[c]
                table = self.live[chosen].table
                if not table:
                    table.extend({} for _ in self.kinds)
                table[c].update(zip(change.columns.tolist(), change.pages.tolist(), strict=True))
                copies += zip(change.copy_from.tolist(), change.copy_to.tolist(), strict=True)
            sources, targets = {source for source, _ in copies}, [target for _, target in copies]
            assert not sources & set(targets), "copies depend on their order"
            assert len(set(targets)) == len(targets), "two copies go to one page"
            for source, target in data.draw(st.permutations(copies)):
                slots[target] = slots[source]
            self.write(c, plan)
        for chosen, stop, _ in plan:
            self.live[chosen].computed, self.live[chosen].ran = stop, True
        for chosen, _, _ in plan:
            self.check_reads(self.live[chosen])
        for chosen, stop, _ in plan:
            if data.draw(st.booleans()) or stop == len(self.live[chosen].tokens):
                self.kv.commit(chosen, self.live[chosen].tokens, stop)

    def write(self, c, plan):
        shared = {node.pages[c] for node in self.kv._ledger.tree.nodes()} | {0}
        written = set()
        for chosen, stop, _ in plan:
            request = self.live[chosen]
            for position in range(request.computed, stop):
                page, offset = request.table[c][position // PAGE], position % PAGE
                assert page not in shared, "a shared page was written"
                assert (page, offset) not in written, "two rows wrote one slot"
                written.add((page, offset))
                self.slots[c][page, offset] = request.states[position]

    def check_reads(self, request):
        """What the next token would read is the request's own text, in every life cycle."""
        for c, kind in enumerate(self.kinds):
            for position in range(request.computed):
                in_reach = kind == "full" or position < SINK_PAGES * PAGE or position > request.computed - WINDOW
                if in_reach:
                    page = request.table[c][position // PAGE]
                    assert page != 0
                    assert self.slots[c][page, position % PAGE] == request.states[position]

    # Between steps

    @precondition(lambda self: self.live and not self.plan)
    @rule(data=st.data())
    def finish_or_abort(self, data):
        done = [i for i, r in self.live.items() if r.computed == len(r.tokens)]
        self.end(data.draw(st.sampled_from(done or sorted(self.live))))

    def end(self, chosen):
        before = self.kv.stats()
        held = self.kv.held_pages(chosen)
        self.kv.release(chosen)
        del self.live[chosen]
        assert before.num_referenced - self.kv.stats().num_referenced <= held * len(self.kinds)

    @precondition(lambda self: not self.plan)
    @rule(lot=st.integers(0, 15))
    def clear(self, lot):
        if lot != 7:
            return
        before = self.kv.stats()
        self.kv.clear_cache()
        assert self.kv.stats().num_referenced == before.num_referenced
        if not self.live:
            assert self.kv.stats().num_free == before.num_pages

    @invariant()
    def books_add_up(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        stats = self.kv.stats()
        assert stats.num_pages == self.num_pages * len(self.kinds)
        assert stats.num_free + stats.num_referenced + stats.num_cached == stats.num_pages
        assert self.kv.available_pages() >= self.owed()
        for request in self.live.values():
            if request.ran:
                self.check_reads(request)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for chosen in list(self.live):
            self.kv.release(chosen)
        self.kv.check_integrity()
        assert self.kv.stats().num_referenced == 0
        assert self.kv.available_pages() == self.num_pages
        self.kv.clear_cache()
        assert self.kv.stats().num_free == self.kv.stats().num_pages
        assert len(self.kv._ledger.tree) == 0


class TwoFullMachine(KvMachine):
    kinds = ("full", "full")


class FullAndWindowMachine(KvMachine):
    kinds = ("full", "window_of_tests")


class WindowMachine(KvMachine):
    kinds = ("window_of_tests",)


@pytest.mark.parametrize(("machine", "examples"), [(KvMachine, 60), (TwoFullMachine, 20), (FullAndWindowMachine, 40),
                                                   (WindowMachine, 20)])
def test_random_lives_of_requests(machine, examples):
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))


def windowed(pages=10, kinds=("full", "window_of_tests"), partial=False):
    return KVCacheManager(tuple(spec(kind) for kind in kinds), (pages + 1,) * len(kinds), enable_block_reuse=True,
                          enable_partial_reuse=partial)


def test_pages_out_of_reach_are_given_back_while_running():
    kv = windowed(kinds=("window_of_tests",))
    tokens = np.arange(24, dtype=np.int32)
    kv.start(RequestId(1), tokens, SCOPES[0], False)
    for stop in range(4, 25, 4):
        assert kv.reserve(RequestId(1), stop) is not None
        kv.commit(RequestId(1), tokens, stop)
        kv.check_integrity()
    assert kv.stats().num_referenced == 3, "the sinks, and two pages that the window of 6 tokens reaches"
    assert kv.held_pages(RequestId(1)) == 6


def test_a_match_needs_all_life_cycles_to_agree():
    kv = windowed(6)
    tokens = np.arange(20, dtype=np.int32)
    kv.start(RequestId(1), tokens, SCOPES[0], True)
    kv.reserve(RequestId(1), 16)
    kv.commit(RequestId(1), tokens, 16)
    kv.release(RequestId(1))
    assert kv.match(tokens, SCOPES[0]).num_tokens == 16
    window_only = kv._ledger.queues[1].pop()
    kv._ledger.drop(window_only, 1)
    kv.check_integrity()
    assert window_only.num_tokens == PAGE, "the page itself stays for full attention"
    lacking = kv._tree.walk(kv._tree.root(SCOPES[0]), tokens.tobytes()).index(window_only)
    for length in range(2, 21):
        found = kv.match(tokens[:length], SCOPES[0]).num_pages
        gone = SinksAndWindow(spec("window_of_tests")).out_of_reach(found * PAGE)
        assert lacking >= found or lacking in gone
    assert kv.start(RequestId(2), tokens, SCOPES[0], True) == kv.match(tokens, SCOPES[0]).num_tokens
    kv.check_integrity()
