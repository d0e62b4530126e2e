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
from camshaft.executor.kv.manager import KVCacheManager
from camshaft.executor.messages import PrefixScope

PAGE = 4
LOOK_AHEAD = PAGE
"""Positions that may be reserved beyond a chunk."""
CHUNKS = (3 * PAGE, PAGE, 1)
STEP_TOKENS = 2 * max(CHUNKS) + LOOK_AHEAD
"""Two chunks of a request may be reserved and not yet noted as computed."""
SCOPES = (*[PrefixScope(model="m")] * 4, PrefixScope(model="m", adapter=1), PrefixScope(model="m", salt="s"))
PROMPTS = st.builds(lambda shared, own: [0] * shared + own, st.integers(1, 4 * PAGE),
                    st.lists(st.integers(0, 1), max_size=PAGE))
OUTPUTS = st.lists(st.integers(0, 1), max_size=2 * PAGE)
MOSTLY = st.sampled_from((True, True, True, False))


def full():
    return LifeCycleSpec(kind="full", layers=(0,), num_kv_heads=1, head_dim=4, page_size=PAGE, dtype="float32")


def window(width, sinks=0):
    return dataclasses.replace(full(), kind="window", window=width, sinks=sinks)


def in_reach(spec, position, reader):
    """Whether the token at ``reader`` reads ``position``, by the definition."""
    return position <= reader and (spec.window is None or position > reader - spec.window or position < spec.sinks)


@dataclasses.dataclass
class Request:
    """One sequence as the scheduler and the runtime together see it."""

    tokens: np.ndarray
    """The whole sequence, known from the start; ``prompt`` tokens of it are the prompt."""
    prompt: int
    scope: PrefixScope
    reads: bool
    worst: np.ndarray
    computed: int = 0
    noted: int = 0
    ran: bool = False
    table: list = dataclasses.field(default_factory=list)

    @functools.cached_property
    def states(self):
        """What each position's key and value depend on."""
        return [hash((self.scope, tuple(self.tokens[:stop]))) for stop in range(1, len(self.tokens) + 1)]


class KvMachine(RuleBasedStateMachine):
    """What a scheduler that admits by worst cases may do to a cache; ``specs`` are the life cycles."""

    specs = (full(),)

    @initialize(pages=st.integers(5, 12), partial=MOSTLY, reuse=MOSTLY)
    def build(self, pages, partial, reuse):
        self.reuse, self.num_pages = reuse, pages
        self.kv = KVCacheManager(self.specs, (pages + 1,) * len(self.specs), enable_block_reuse=reuse,
                                 enable_partial_reuse=partial)
        self.slots = [np.full((pages + 1, PAGE), -1) for _ in self.specs]
        self.live: dict[RequestId, Request] = {}
        self.next_id = 0
        self.plan: list = []

    # Planning: any interleaving of arrivals and chunks makes up a step; at most one chunk a request.

    def owed(self):
        """Pages the running requests may still ask for, a life cycle."""
        return sum((r.worst - self.kv.held_pages(i) for i, r in self.live.items()), np.zeros(len(self.specs), np.int32))

    @rule(prompt=PROMPTS, output=OUTPUTS, scope=st.sampled_from(SCOPES), reads=MOSTLY, leaves=MOSTLY)
    def arrive(self, prompt, output, scope, reads, leaves):
        self.admit(prompt, output, scope, reads, leaves)

    def admit(self, prompt, output, scope, reads, leaves):
        tokens = np.array(prompt + output, np.int32)
        worst = self.kv.worst_pages(len(tokens), STEP_TOKENS)
        request = Request(tokens, len(prompt), scope, reads, worst)
        assert self.kv.can_ever_hold(len(tokens), STEP_TOKENS) == bool((worst <= self.num_pages).all())
        match = self.kv.match(tokens[:request.prompt], scope)
        assert match.num_tokens < request.prompt
        if not reads:
            none = np.zeros(len(self.specs), np.int32)
            match = dataclasses.replace(match, num_tokens=0, num_pages=none, num_pages_unreferenced=none)
        room = self.kv.available_pages() - match.num_pages_unreferenced - self.owed()
        if (worst - match.num_pages > room).any():
            assert self.live or (worst > self.num_pages).any(), "a lone request that fits is never held up"
            return
        request.computed = request.noted = self.kv.start(RequestId(self.next_id), tokens[:request.prompt], scope,
                                                         reads=reads, leaves=leaves)
        assert request.computed in (match.num_tokens, match.num_tokens - match.num_partial_tokens)
        assert self.reuse or request.computed == 0
        self.live[RequestId(self.next_id)] = request
        self.next_id += 1

    @precondition(lambda self: not self.plan)
    @rule(data=st.data(), prompt=PROMPTS)
    def serve_at_once(self, data, prompt):
        """A whole life in one step, so that there is always something cached."""
        known = set(self.live)
        self.admit(prompt, [], SCOPES[0], True, True)
        for chosen in set(self.live) - known:
            self.plan = [(chosen, len(prompt), self.kv.reserve(chosen, len(prompt)))]
            self.step(data)
            self.end(chosen)

    def ready(self):
        planned = {i for i, _, _ in self.plan}
        return [i for i, r in self.live.items() if i not in planned and r.computed < len(r.tokens)]

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), chunk=st.sampled_from(CHUNKS), ahead=st.integers(0, LOOK_AHEAD))
    def schedule(self, data, chunk, ahead):
        chosen = data.draw(st.sampled_from(self.ready()))
        request = self.live[chosen]
        stop = min(request.computed + chunk, len(request.tokens))
        reservation = self.kv.reserve(chosen, min(stop + ahead, len(request.tokens)))
        assert reservation is not None, "an admitted request was refused a page"
        assert (self.kv.held_pages(chosen) <= request.worst).all()
        self.plan.append((chosen, stop, reservation))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def ask_for_too_much(self, data):
        chosen = data.draw(st.sampled_from(sorted(self.live)))
        def books():
            return self.kv.stats(), self.kv.available_pages().tolist(), self.kv.columns(chosen)

        before = books()
        assert self.kv.reserve(chosen, (before[2] + min(before[1]) + 1) * PAGE) is None
        assert books() == before

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
                    table.extend({} for _ in self.specs)
                table[c].update(zip(change.columns.tolist(), change.pages.tolist(), strict=True))
                copies += zip(change.copy_from.tolist(), change.copy_to.tolist(), strict=True)
            sources, targets = {source for source, _ in copies}, [target for _, target in copies]
            assert not sources & set(targets), "copies depend on their order"
            assert len(set(targets)) == len(targets), "two copies go to one page"
            for source, target in data.draw(st.permutations(copies)):
                slots[target] = slots[source]
            self.write(c, plan)
        for chosen, stop, _ in plan:
            request = self.live[chosen]
            for reader in range(request.computed, stop):
                self.check_reads(request, reader, stop)
            request.computed, request.ran = stop, True
        for chosen, stop, _ in plan:
            request = self.live[chosen]
            if data.draw(st.booleans()):
                self.kv.commit(chosen, request.tokens, stop)
                request.noted = stop
            elif data.draw(st.booleans()) or stop - request.noted > STEP_TOKENS - max(CHUNKS) - LOOK_AHEAD:
                self.kv.advance(chosen, stop)
                request.noted = stop

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

    def check_reads(self, request, reader, stop):
        """What the token at ``reader`` reads below ``stop`` is the request's own text, in every life cycle."""
        for c, spec in enumerate(self.specs):
            for position in range(min(reader + 1, stop)):
                if in_reach(spec, position, reader):
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
        columns = self.kv.columns(chosen)
        self.kv.release(chosen)
        del self.live[chosen]
        assert before.num_referenced - self.kv.stats().num_referenced <= columns * len(self.specs)

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
        assert stats.num_pages == self.num_pages * len(self.specs)
        assert stats.num_free + stats.num_referenced + stats.num_cached == stats.num_pages
        for c, spec in enumerate(self.specs):
            promised = sum(request.worst[c] for request in self.live.values())
            if spec.kind == "full":
                assert self.kv.available_pages()[c] >= self.owed()[c]
            else:
                assert promised <= self.num_pages
        for request in self.live.values():
            if request.ran:
                self.check_reads(request, request.computed, request.computed)

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        for chosen in list(self.live):
            self.kv.release(chosen)
        self.kv.check_integrity()
        assert self.kv.stats().num_referenced == 0
        assert (self.kv.available_pages() == self.num_pages).all()
        self.kv.clear_cache()
        assert self.kv.stats().num_free == self.kv.stats().num_pages
        assert len(self.kv._ledger.tree) == 0


class TwoFullMachine(KvMachine):
    specs = (full(), full())


class WindowMachine(KvMachine):
    specs = (window(6),)


class FullAndWindowMachine(KvMachine):
    specs = (full(), window(6))


class WindowAndSinksMachine(KvMachine):
    specs = (window(3, sinks=5),)


class TwoWindowsMachine(KvMachine):
    specs = (window(1), window(9, sinks=2))


class EverythingMachine(KvMachine):
    specs = (window(5), full(), window(PAGE, sinks=1))


@pytest.mark.parametrize(("machine", "examples"), [
    (KvMachine, 60), (TwoFullMachine, 20), (WindowMachine, 40), (FullAndWindowMachine, 40), (WindowAndSinksMachine, 40),
    (TwoWindowsMachine, 30), (EverythingMachine, 20)])
def test_random_lives_of_requests(machine, examples):
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=40, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck)))
