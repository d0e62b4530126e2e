"""ModelEngine: runs step plans on an engine.

Owns the bound graph, the KV pools and the order of a step: arrivals and page tables, page copies, forward,
scores of prompt tokens, sampling, and the sampled token kept for the row's next step. Decides nothing about who runs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from camshaft.core import env
from camshaft.core.errors import InternalError
from camshaft.engine.artifact import Engine
from camshaft.ir.program import LIFE_CYCLE_INPUTS, STEP_INPUTS, pool_input
from camshaft.runtime.binding import bind_graph
from camshaft.runtime.buffers import allocate_pools
from camshaft.runtime.cpu_graphs import CpuGraphs
from camshaft.runtime.inputs import RowState, StepInputs
from camshaft.runtime.logprobs import LogprobReader, copied_rows, spread
from camshaft.runtime.sampler import Picks, Sampler
from camshaft.runtime.step import Int32Array, StepLogprobs, StepOutput, StepPlan

_NOTHING = Picks(token_ids=np.empty(0, np.int32), finite=np.empty(0, np.bool_))
MAX_THREADS = 1024
"""Bound of CPU threads a caller may ask for: far beyond it the process cannot start them, and dies."""


@dataclasses.dataclass(slots=True)
class FinishedStep:
    """Handle of a step that ran during ``submit``: its output, or what it raised."""

    outcome: StepOutput | Exception | None

    def result(self) -> StepOutput:
        """The step's output, once; raises what the step raised."""
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            raise InternalError("the result of a step was read twice")
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class ModelEngine:
    """Implements ``StepRunner`` on an engine.

    ``num_pages`` is the size of each life cycle's pool, trash page included (``kv_pages_for``).
    ``num_threads`` sets the CPU threads of this process; default: CAMSHAFT_NUM_THREADS, else torch's own.
    ``device`` defaults to the engine's. Token ids from ``num_token_ids`` on are never sampled; default: those the
    engine's tokenizer does not know. Without ``capture`` no step becomes a graph. Not safe for use from two threads
    at once.
    """

    def __init__(self, engine: Engine, *, num_pages: tuple[int, ...], num_threads: int | None = None,
                 device: torch.device | None = None, num_token_ids: int | None = None, capture: bool = True) -> None:
        threads = num_threads or env.read_int("CAMSHAFT_NUM_THREADS", highest=MAX_THREADS)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device or torch.device(engine.manifest.device.kind)
        life_cycles = engine.manifest.life_cycles
        with torch.inference_mode():
            self.graph = bind_graph(engine, self.device)
            self.pools = allocate_pools(life_cycles, num_pages, self.device)
            self._sampler = Sampler(engine, self.device, _checked_ids(engine, num_token_ids))
            self._logprobs = LogprobReader(engine, self.device)
        self._rows = RowState(engine.manifest, num_pages)
        self._layer_pools = {pool_input(layer): pool[index] for spec, pool in zip(life_cycles, self.pools, strict=True)
                             for index, layer in enumerate(spec.layers)}
        library = engine.library() if capture and self.device.type == "cpu" and self.graph.native else None
        columns = tuple(table.shape[1] for table in self._rows.page_tables)
        self._graphs = library and CpuGraphs(engine, library, self._layer_pools, columns)

    def submit(self, plan: StepPlan) -> FinishedStep:
        """Run a step. It is done, or failed, when this returns; the handle says which."""
        try:
            return FinishedStep(self._run(plan))
        # the caller reads results later, perhaps on another path: the failure must wait in the handle
        except Exception as error:  # noqa: BLE001
            return FinishedStep(error)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> StepOutput:
        self._rows.apply(plan)
        self._copy_pages(plan)
        inputs = self._rows.build(plan)
        logits_LV = self.forward(inputs)
        rows, epochs = plan.rows[plan.samples], plan.epochs[plan.samples]
        sampled = inputs.sampled
        logits_SV = logits_LV if sampled is None else copied_rows(logits_LV, sampled)
        picks = _NOTHING
        if len(rows):
            picks = self._sampler.sample(logits_SV, self._rows, plan)
            self._rows.last_token[rows] = picks.token_ids
        return StepOutput(step=plan.step, rows=rows, epochs=epochs, token_ids=picks.token_ids, finite=picks.finite,
                          logprobs=self._logprobs_of(logits_SV, rows, picks.token_ids),
                          scores=self._scores_of(logits_LV, inputs, plan), failures=picks.failures)

    def _logprobs_of(self, logits_SV: torch.Tensor, rows: Int32Array, token_ids: Int32Array) -> StepLogprobs | None:
        """Log-probabilities of the tokens picked, for the rows that want them."""
        wanted = self._rows.num_logprobs
        numbers = {place: wanted[row] for place, row in enumerate(rows.tolist()) if row in wanted} if wanted else {}
        if not numbers:
            return None
        places = np.array(list(numbers), np.int64)
        found = self._logprobs.read(logits_SV, places, token_ids[places].astype(np.int64), max(numbers.values()))
        return spread(found, places, len(rows))

    def _scores_of(self, logits_LV: torch.Tensor, inputs: StepInputs, plan: StepPlan) -> StepLogprobs | None:
        """Log-probabilities of the prompt tokens that follow the scored ones."""
        if inputs.scored is None or not len(inputs.scored) or plan.score_lens is None or plan.score_targets is None:
            return None
        num_top = max(self._rows.num_prompt_logprobs[row] for row in plan.rows[plan.score_lens > 0].tolist())
        return self._logprobs.read(logits_LV, inputs.scored, plan.score_targets.astype(np.int64), num_top)

    def _copy_pages(self, plan: StepPlan) -> None:
        for pool, updates in zip(self.pools, plan.page_updates, strict=True):
            if len(updates.copy_from):
                sources, targets = (torch.from_numpy(pages.astype(np.int64)).to(self.device)
                                    for pages in (updates.copy_from, updates.copy_to))
                pool.index_copy_(1, targets, pool.index_select(1, sources))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [L, V] of a step's packed inputs; writes their keys and values into the pools.

        On a CPU the logits are valid until the next call.
        """
        captured = self._graphs.run(inputs) if self._graphs else None
        if captured is not None:
            return captured
        values = {name: self._moved(getattr(inputs, name)) for name in STEP_INPUTS}
        for kind in LIFE_CYCLE_INPUTS:
            for index, array in enumerate(getattr(inputs, kind)):
                values[f"{kind}_{index}"] = self._moved(array)
        values.update(self._layer_pools)
        return self.graph.call(*[values[name] for name in self.graph.inputs])

    def _moved(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def warm_up(self) -> None:
        """Run the graph on the trash page once with one token and once with a few: first-call costs are paid here."""
        for num_tokens in (1, 8):
            count = np.arange(num_tokens, dtype=np.int64)
            zeros = tuple(np.zeros(num_tokens, np.int64) for _ in self.pools)
            tables = tuple(np.zeros((1, num_tokens), np.int32) for _ in self.pools)
            self.forward(StepInputs(
                token_ids=np.zeros(num_tokens, np.int64), positions=count, slot_mapping=zeros, page_table=tables,
                query_start=np.array([0, num_tokens], np.int32), seq_lens=np.array([num_tokens], np.int32),
                logits_rows=count[-1:]))


def _checked_ids(engine: Engine, num_token_ids: int | None) -> int:
    vocab_size = engine.manifest.model.vocab_size
    number = num_token_ids or engine.manifest.num_token_ids or vocab_size
    if not 0 < number <= vocab_size:
        raise InternalError(f"num_token_ids {number} of a model with a vocabulary of {vocab_size}")
    return number
