"""ModelEngine: runs step plans on an engine.

Owns the bound graph, the KV pools and the order of a step: arrivals and page tables, page copies, forward,
sampling, and the sampled token kept for the row's next step. Decides nothing about who runs.
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
from camshaft.runtime.inputs import RowState, StepInputs
from camshaft.runtime.sampler import Sampler
from camshaft.runtime.step import StepOutput, StepPlan

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
    ``device`` defaults to the engine's. Not safe for use from two threads at once.
    """

    def __init__(self, engine: Engine, *, num_pages: tuple[int, ...], num_threads: int | None = None,
                 device: torch.device | None = None) -> None:
        threads = num_threads or env.read_int("CAMSHAFT_NUM_THREADS", highest=MAX_THREADS)
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = device or torch.device(engine.manifest.device.kind)
        life_cycles = engine.manifest.life_cycles
        with torch.inference_mode():
            self.graph = bind_graph(engine, self.device)
            self.pools = allocate_pools(life_cycles, num_pages, self.device)
            self._sampler = Sampler(engine, self.device)
        self._rows = RowState(engine.manifest, num_pages)
        self._layer_pools = {pool_input(layer): pool[index] for spec, pool in zip(life_cycles, self.pools, strict=True)
                             for index, layer in enumerate(spec.layers)}

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
        logits = self.forward(self._rows.build(plan))
        rows, epochs = plan.rows[plan.samples], plan.epochs[plan.samples]
        if not len(rows):
            token_ids, finite = np.empty(0, np.int32), np.empty(0, np.bool_)
        else:
            token_ids, finite = self._sampler.sample(logits, self._rows, plan)
            self._rows.last_token[rows] = token_ids
        return StepOutput(step=plan.step, rows=rows, epochs=epochs, token_ids=token_ids, finite=finite)

    def _copy_pages(self, plan: StepPlan) -> None:
        for pool, updates in zip(self.pools, plan.page_updates, strict=True):
            if len(updates.copy_from):
                sources, targets = (torch.from_numpy(pages.astype(np.int64)).to(self.device)
                                    for pages in (updates.copy_from, updates.copy_to))
                pool.index_copy_(1, targets, pool.index_select(1, sources))

    @torch.inference_mode()
    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Logits [L, V] of a step's packed inputs; writes their keys and values into the pools."""
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
            tables = tuple(np.zeros((1, 1), np.int32) for _ in self.pools)
            self.forward(StepInputs(
                token_ids=np.zeros(num_tokens, np.int64), positions=count, slot_mapping=zeros, page_table=tables,
                query_start=np.array([0, num_tokens], np.int32), seq_lens=np.array([num_tokens], np.int32),
                logits_rows=count[-1:]))
