"""What a step's results mean: tokens, scores, stops, failures, and which cached pages are proven by them.

Owns the landing of results in the table and the increments they become. Plans nothing.
"""

from __future__ import annotations

import numpy as np

from camshaft.core.errors import InternalError
from camshaft.executor import output
from camshaft.executor.decoder.stop import CONTINUE, LENGTH, StopTable
from camshaft.executor.messages import Increment, TokenLogprob
from camshaft.executor.pages import RowPages
from camshaft.executor.stats import Counters
from camshaft.executor.table import CONTEXT, DRAINING, GENERATION, RequestTable
from camshaft.runtime.step import BoolArray, Int32Array, StepLogprobs, StepOutput, StepPlan


class Landing:
    """Reads results into ``table``. A result whose row has ended, was preempted or handed on since lands nowhere."""

    def __init__(self, table: RequestTable, pages: RowPages, stops: StopTable, counters: Counters) -> None:
        self._table = table
        self._pages = pages
        self._stops = stops
        self._counters = counters

    def land(self, plan: StepPlan, out: StepOutput) -> list[Increment]:
        """Land the results of ``plan``, the oldest step in flight: at most one increment a request.

        Rows whose request ended are left draining; see :meth:`drained`.
        """
        self._check_answers(plan, out)
        table, rows = self._table, plan.rows
        table.in_flight[rows] -= 1
        state = table.state[rows]
        live = ((state == CONTEXT) | (state == GENERATION)) & (table.epoch[rows] == plan.epochs)
        sound_scores = _sound_rows(plan, out.scores) if out.scores is not None else None
        self._land_positions(plan, live, out.finite, sound_scores)
        increments = self._fail_rows(plan, out, live, sound_scores)
        if increments:
            live &= table.state[rows] != DRAINING
        scores = self._land_scores(plan, out.scores, live) if out.scores is not None else {}
        increments += self._land_tokens(out, live[plan.samples], scores)
        if plan.num_rows > plan.num_generation:
            increments += self._land_unsampled(plan, live & ~plan.samples, scores)
        return increments

    def drained(self, plan: StepPlan) -> list[int]:
        """Rows of the landed ``plan`` that may be freed: their request has left them, and no step names them."""
        table, rows = self._table, plan.rows
        found: list[int] = rows[(table.state[rows] == DRAINING) & (table.in_flight[rows] == 0)].tolist()
        return found

    def _check_answers(self, plan: StepPlan, out: StepOutput) -> None:
        sampled = plan.rows[plan.samples]
        num_scores = 0 if plan.score_lens is None else int(plan.score_lens.sum())
        if (out.step != plan.step or not np.array_equal(out.rows, sampled) or len(out.token_ids) != len(sampled)
                or (0 if out.scores is None else len(out.scores.logprobs)) != num_scores):
            raise InternalError(f"results of step {out.step} do not answer step {plan.step}")
        if out.logprobs is None and self._table.wants_logprobs[sampled].any():
            live = self._table.epoch[sampled] == plan.epochs[plan.samples]
            if (live & self._table.wants_logprobs[sampled]).any():
                raise InternalError(f"results of step {out.step} lack the log-probabilities that were asked for")

    def _land_positions(self, plan: StepPlan, live: BoolArray, finite: BoolArray, sound: BoolArray | None) -> None:
        """Advance what is known to be sound in the cache, and share the pages that have become full.

        Only finite logits prove what was fed before them: a chunk without logits may hold NaN, and whoever shared its
        pages would fail too. Where a window has passed a NaN they prove less, but what is cached of a token depends on
        nothing after it, so that whoever shares such a page fares as he would alone.
        """
        table, page_size = self._table, self._pages.page_size
        proven, ends = live & plan.samples, plan.start_positions + plan.query_lens
        proven[plan.samples] &= finite
        if sound is not None and plan.score_lens is not None:
            scored = live & sound & ~plan.samples & (plan.score_lens > 0)
            ends[scored] = (plan.start_positions + plan.score_lens)[scored]
            proven = (proven & sound) | scored
        rows, ends = plan.rows[proven], ends[proven]
        filled = table.shares[rows] & (table.num_landed[rows] // page_size != ends // page_size)
        table.num_landed[rows] = ends
        table.num_context_landings += plan.num_rows > plan.num_generation
        for row in rows[filled].tolist():
            self._pages.commit(row)

    def _fail_rows(self, plan: StepPlan, out: StepOutput, live: BoolArray, sound: BoolArray | None) -> list[Increment]:
        """End the requests whose logits were not finite or whose processor failed, each alone."""
        causes: dict[int, Exception | None] = {}
        if sound is not None:
            causes.update(dict.fromkeys(plan.rows[live & ~sound].tolist()))
        live_samples = live[plan.samples]
        if not out.finite.all():
            causes.update(dict.fromkeys(out.rows[live_samples & ~out.finite].tolist()))
        for place, error in out.failures:
            if live_samples[place]:
                causes.setdefault(int(out.rows[place]), error)
        return [self._fail_row(row, error) for row, error in causes.items()]

    def _fail_row(self, row: int, error: Exception | None) -> Increment:
        table = self._table
        increment = (output.non_finite(table.ids[row], int(table.num_outputs[row])) if error is None
                     else output.failed(table.ids[row], error))
        self._counters.num_failed += 1
        table.drain(row)
        return increment

    def _land_scores(self, plan: StepPlan, scores: StepLogprobs | None,
                     live: BoolArray) -> dict[int, tuple[TokenLogprob, ...]]:
        """Log-probabilities of the prompt tokens that this step scored, by row."""
        found: dict[int, tuple[TokenLogprob, ...]] = {}
        lens, targets = plan.score_lens, plan.score_targets
        if scores is None or lens is None or targets is None:
            return found
        firsts = np.cumsum(lens) - lens
        for place in np.flatnonzero(live & (lens > 0)).tolist():
            row, first, count = int(plan.rows[place]), int(firsts[place]), int(lens[place])
            num_top = self._table.request_at(row).sampling.num_prompt_logprobs or 0
            found[row] = tuple(output.token_logprob(scores, at, int(targets[at]), num_top)
                               for at in range(first, first + count))
            self._table.num_scored[row] = plan.start_positions[place] + count
        return found

    def _land_tokens(self, out: StepOutput, live: BoolArray,
                     scores: dict[int, tuple[TokenLogprob, ...]]) -> list[Increment]:
        table = self._table
        rows, tokens, places = out.rows, out.token_ids, None
        if not live.all():
            rows, tokens, places = rows[live], tokens[live], np.flatnonzero(live)
        counts = table.num_outputs[rows]
        table.tokens[rows, table.prompt_len[rows] + counts] = tokens
        counts = counts + np.int32(1)
        table.num_outputs[rows] = counts
        self._counters.num_generated_tokens += len(rows)
        verdicts = self._stops.verdicts(rows, tokens, counts, table.output_limit[rows])
        special = (verdicts != CONTINUE) | ~table.is_told[rows]
        if out.logprobs is not None:
            special |= table.wants_logprobs[rows]
        if scores:
            special |= np.isin(rows, list(scores))
        increments = []
        for place in np.flatnonzero(special).tolist():
            row, verdict = int(rows[place]), int(verdicts[place])
            found = () if out.logprobs is None else self._logprobs(
                row, int(tokens[place]), out.logprobs, place if places is None else int(places[place]))
            increments.append(output.landed(table.ids[row], int(tokens[place]), verdict,
                                            num_cached_tokens=self._tell(row), logprobs=found,
                                            prompt_logprobs=scores.get(row, ())))
            if verdict != CONTINUE:
                self._counters.num_finished += 1
                table.drain(row)
        plain = rows[~special]
        increments += output.plain_increments(table.ids[plain].tolist(), tokens[~special].tolist())
        return increments

    def _logprobs(self, row: int, token_id: int, found: StepLogprobs, place: int) -> tuple[TokenLogprob, ...]:
        num_top = self._table.request_at(row).sampling.num_logprobs
        return () if num_top is None else (output.token_logprob(found, place, token_id, num_top),)

    def _land_unsampled(self, plan: StepPlan, live: BoolArray,
                        scores: dict[int, tuple[TokenLogprob, ...]]) -> list[Increment]:
        """News of rows whose chunk samples nothing: their scores, and the end of those that want nothing else."""
        table = self._table
        rows: Int32Array = plan.rows[live]
        ended = (table.output_limit[rows] == 0) & ((plan.start_positions + plan.query_lens)[live]
                                                   == table.context_len[rows])
        increments = []
        for row, is_end in zip(rows.tolist(), ended.tolist(), strict=True):
            if not is_end and row not in scores:
                continue
            increments.append(output.scored(table.ids[row], scores.get(row, ()), LENGTH if is_end else CONTINUE,
                                            num_cached_tokens=self._tell(row)))
            if is_end:
                self._counters.num_finished += 1
                table.drain(row)
        return increments

    def _tell(self, row: int) -> int | None:
        """Cached prompt tokens where the request has not heard of them; it has from now on."""
        if self._table.is_told[row]:
            return None
        self._table.is_told[row] = True
        return int(self._table.num_cached[row])


def _sound_rows(plan: StepPlan, scores: StepLogprobs) -> BoolArray:
    """[R] whether every score of the row was computed from finite logits."""
    sound = np.ones(plan.num_rows, np.bool_)
    if plan.score_lens is not None:
        sound[np.repeat(np.arange(plan.num_rows), plan.score_lens)[~scores.finite]] = False
    return sound
