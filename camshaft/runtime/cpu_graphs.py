"""CPU graphs: a decode step captured once and replayed, as a CUDA graph is on a GPU.

Owns which steps are captured, the memory they run in, and the replay. A step of a small model makes hundreds of short
kernel calls; the interpreter between them costs more than its instructions, since every weight matrix that streams
by pushes the interpreter's own data out of the caches. Here the calls of a step with so many generation rows are
noted as they are first made, at fixed addresses, and from then on made by one native call, with the interpreter's
lock free. What torch computes in between (an embedding, a selection of rows) is called between such lists. Results
are the same bits: the same kernels read and write the same values.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from camshaft.engine.artifact import Engine
from camshaft.ir.program import LIFE_CYCLE_INPUTS, STEP_INPUTS
from camshaft.kernels.capture import CallList, KernelCall, NotingLibrary
from camshaft.runtime.binding import bind_graph
from camshaft.runtime.inputs import StepInputs

ARENA_BYTES = 64 << 20
"""Memory of all captured steps together; one that needs more runs uncaptured. Only what they touch is ever used."""
_ALIGNMENT = 64
_ALLOCATIONS = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default,
                          torch.ops.aten.empty_like.default})
_Action = Callable[[], object]


class CpuGraphs:
    """Captured decode steps of one engine, by their number of rows. ``pools``: KV pools by graph input.

    ``table_columns``: columns of each life cycle's page table, for the longest sequence there can be.
    """

    def __init__(self, engine: Engine, library: ctypes.CDLL, pools: dict[str, torch.Tensor],
                 table_columns: tuple[int, ...]) -> None:
        self._library = library
        self._pools = pools
        self._table_columns = table_columns
        self._tape = _Tape(torch.from_numpy(np.empty(ARENA_BYTES + _ALIGNMENT, np.uint8)))
        self._graph = bind_graph(engine, torch.device("cpu"), NotingLibrary(library, self._tape.note_call))
        self._captured: dict[tuple[int, int], _CapturedStep | None] = {}

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """Logits [L, V], valid until the next call; None where the step is not one of those captured.

        These are steps that feed every row one token and read every row's logits.
        """
        num_rows = len(inputs.seq_lens)
        if not len(inputs.token_ids) == len(inputs.logits_rows) == num_rows:
            return None
        key = num_rows, torch.get_num_threads()
        if key not in self._captured:
            return self._capture(key, inputs)
        step = self._captured[key]
        return None if step is None else step.run(inputs)

    def _capture(self, key: tuple[int, int], inputs: StepInputs) -> torch.Tensor:
        """Run the step, noting it; what failed is not kept."""
        self._tape.rewind()
        step = _CapturedStep(self._tape, inputs, self._table_columns)
        values = step.tensors | self._pools
        with self._tape:
            logits = self._graph.call(*[values[name] for name in self._graph.inputs])
        self._captured[key] = None
        if self._tape.whole:
            step.finish(self._tape, self._library, logits)
            self._captured[key] = step
        return logits


class _CapturedStep:
    """The inputs' fixed places, and what to do once they are filled."""

    def __init__(self, tape: _Tape, inputs: StepInputs, table_columns: tuple[int, ...]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._places: list[npt.NDArray[Any]] = []
        self._actions: list[_Action] = []
        self._logits: torch.Tensor | None = None
        columns = iter(table_columns)
        for name, array in _named(inputs):
            shape = (len(array), next(columns)) if array.ndim == 2 else array.shape
            place = tape.allocate(shape, torch.from_numpy(array).dtype)
            self.tensors[name] = place
            self._places.append(place.numpy())
        self._fill(inputs)

    def _fill(self, inputs: StepInputs) -> None:
        for place, (_, array) in zip(self._places, _named(inputs), strict=True):
            if array.ndim == 2:
                place[:, :array.shape[1]] = array
            else:
                place[:] = array

    def finish(self, tape: _Tape, library: ctypes.CDLL, logits: torch.Tensor) -> None:
        """Take what the tape noted."""
        for native, noted in itertools.groupby(tape.noted, lambda item: isinstance(item, KernelCall)):
            if native:
                self._actions.append(CallList(library, [call for call in noted if isinstance(call, KernelCall)]))
            else:
                self._actions += [action for action in noted if not isinstance(action, KernelCall)]
        self._logits = logits

    def run(self, inputs: StepInputs) -> torch.Tensor | None:
        """The step again, with other inputs."""
        self._fill(inputs)
        for action in self._actions:
            action()
        return self._logits


def _named(inputs: StepInputs) -> Iterable[tuple[str, npt.NDArray[Any]]]:
    """A step's inputs as the graph names them."""
    for name in STEP_INPUTS:
        yield name, getattr(inputs, name)
    for kind in LIFE_CYCLE_INPUTS:
        for index, array in enumerate(getattr(inputs, kind)):
            yield f"{kind}_{index}", array


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes what a step does while it is entered: kernel calls, and torch's operations but views and allocations.

    New tensors come from ``arena``, one after another, so none shares memory with another of its step.
    """

    def __init__(self, arena: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._arena = arena
        self.rewind()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's hook; True, its default, would import the whole of ``torch._dynamo`` at the first captured step."""
        return False

    def rewind(self) -> None:
        """Forget everything; the arena is free again."""
        self.noted: list[KernelCall | _Action] = []
        self.whole = True
        self._used = -self._arena.data_ptr() % _ALIGNMENT

    def note_call(self, call: KernelCall) -> None:
        """Listener of the noting library."""
        self.noted.append(call)

    def allocate(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the arena; where that is full, elsewhere, and the tape is no longer whole."""
        shape = tuple(shape)
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        start = self._used
        if start + num_bytes > len(self._arena):
            self.whole = False
            return torch.empty(shape, dtype=dtype)
        self._used = start - (-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._arena[start:start + num_bytes].view(dtype).view(shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in _ALLOCATIONS:
            return self.allocate(result.shape, result.dtype)
        repeat = functools.partial(func, *args, **kwargs)
        if func._schema.is_mutable:
            self.noted.append(repeat)
            return result
        outputs = result if isinstance(result, list | tuple) else [result]
        if not all(isinstance(output, torch.Tensor) for output in outputs):
            self.whole = False  # the host read a value: other inputs may take another way
            return result
        owned = {_storage(value) for value in _tensors((*args, *kwargs.values()))}
        if any(_storage(output) not in owned for output in outputs):
            self.noted.append(functools.partial(_again, repeat, outputs))
        return result


def _again(repeat: Callable[[], Any], outputs: Iterable[torch.Tensor]) -> None:
    """Compute once more what ``outputs`` are, into their memory."""
    result = repeat()
    for output, value in zip(outputs, result if isinstance(result, list | tuple) else [result], strict=True):
        output.copy_(value)


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
