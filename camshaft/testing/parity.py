"""The parity harness: what every implementation of every op must pass, plugins included.

Owns the checks and their wording. Samples come from the op's contract (``OpSpec.samples``); which
implementations exist comes from the registry. ``check_impl`` and ``check_op`` raise ``ParityError``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import torch

from camshaft.core.device import DeviceSpec, probe
from camshaft.core.errors import UserError
from camshaft.kernels.dispatch import Verdict, bind, explain
from camshaft.kernels.op import OPS, Op, OpCall, Sample, TensorInfo

_FULL_OPCHECK = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


class ParityError(AssertionError):
    """An implementation breaks its op's contract; the message holds the numbers."""


@functools.lru_cache(maxsize=256)
def samples_of(op_name: str, dtype: torch.dtype, device: str) -> tuple[Sample, ...]:
    """The op's parity samples, the same ones every time. Treat them as read-only."""
    generator = torch.Generator().manual_seed(20)
    return tuple(OPS.get(op_name).spec.samples(dtype, torch.device(device), generator))


def sample_of(op: Op, dtype: torch.dtype, name: str, device: str = "cpu") -> Sample:
    """One sample by name; UserError where there is none, or where two share the name."""
    found = [sample for sample in samples_of(op.spec.name, dtype, device) if sample.name == name]
    if len(found) != 1:
        raise UserError("sample", name, f"the name of one sample of {op.spec.name}, found {len(found)}")
    return found[0]


@functools.lru_cache(maxsize=2)
def _device(kind: str) -> DeviceSpec:
    return probe(kind)


def verdict_of(op: Op, impl_name: str, sample: Sample, library: ctypes.CDLL | None, device: str = "cpu") -> Verdict:
    """Whether the implementation serves the sample, and the reason where it does not."""
    info = tuple(TensorInfo(argument.dtype, tuple(argument.shape)) if isinstance(argument, torch.Tensor) else argument
                 for argument in sample.args)
    verdicts = explain(op, OpCall(_device(device), info), native=library is not None)
    return next(verdict for verdict in verdicts if verdict.impl == impl_name)


def private_copy(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies with the same strides, offsets and shared storage, so that views stay views of one tensor."""
    storages: dict[int, torch.UntypedStorage] = {}

    def copy(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        storage = argument.untyped_storage()
        key = storage.data_ptr()
        if key not in storages:
            storages[key] = storage.clone()  # type: ignore[no-untyped-call]
        empty = torch.empty(0, dtype=argument.dtype, device=argument.device)
        return empty.set_(storages[key], argument.storage_offset(), argument.shape, argument.stride())

    return tuple(copy(argument) for argument in args)


def _widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(argument.to(torch.float64, copy=True) if isinstance(argument, torch.Tensor)
                 and argument.is_floating_point() else argument
                 for argument in private_copy(args))


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    if result is None:
        return ()
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A clone, because one element counts as contiguous under any stride, and view(uint8) then refuses it.
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(_bytes(left), _bytes(right))


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fresh tensors hold NaN (the largest value for integers), so that an output left unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled()
    switch: Any = torch.utils.deterministic
    filled = switch.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        switch.fill_uninitialized_memory = filled


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """``max|found - wanted| / max|wanted|`` over finite values; infinite where the non-finite ones differ."""
    found, wanted = found.double(), wanted.double()
    finite = wanted.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    if not torch.equal(found[~finite].nan_to_num(), wanted[~finite].nan_to_num()):
        return float("inf")
    if not finite.any():
        return 0.0
    difference = (found[finite] - wanted[finite]).abs().max().item()
    scale = wanted[finite].abs().max().item()
    return difference / scale if scale else difference


def _tolerance(op: Op, tensors: tuple[Any, ...]) -> float:
    """That of the coarsest floating-point type among ``tensors``."""
    dtypes = {tensor.dtype for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()}
    return max((op.spec.tolerance.of(dtype) for dtype in dtypes), default=0.0)


def _check_form(op: Op, label: str, sample: Sample, outputs: tuple[torch.Tensor, ...]) -> None:
    """Number, shapes, dtypes and layout of the results are what the contract's fake promises to the graph."""
    meta = tuple(torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")
                 if isinstance(argument, torch.Tensor) else argument for argument in sample.args)
    promised = _as_tuple(op.spec.fake(*meta))
    if len(promised) != len(outputs):
        raise ParityError(f"{label}: {len(outputs)} results, the contract has {len(promised)}")
    for index, (found, wanted) in enumerate(zip(outputs, promised, strict=True)):
        form = (found.shape, found.dtype, found.is_contiguous())
        needed = (wanted.shape, wanted.dtype, wanted.is_contiguous())
        if form != needed:
            raise ParityError(f"{label}: result {index} has (shape, dtype, contiguous) {form}, the contract {needed}")


def _check_values(label: str, tolerance: float, found: dict[str, torch.Tensor],
                  wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            if not torch.equal(tensor, wanted[name]):
                where = (tensor != wanted[name]).nonzero()[0].tolist()
                raise ParityError(f"{label}: {name} differs from the reference, first at {where}")
            continue
        error = relative_error(tensor, wanted[name])
        if not error <= tolerance:
            raise ParityError(f"{label}: {name} is off by {error:.3g} relative to its largest value, "
                              f"tolerance {tolerance:.3g}")


def _named(op: Op, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Everything a call produced: results, and arguments it is declared to write."""
    written = {name: args[op.arg_names.index(name)] for name in op.spec.mutates}
    return {**{f"result {index}": tensor for index, tensor in enumerate(outputs)}, **written}


def check_impl(op: Op, impl_name: str, sample: Sample, library: ctypes.CDLL | None) -> None:
    """Run one implementation on one sample and raise ParityError where it breaks the contract.

    Checked: shapes, dtypes and layout; values against the float64 reference; the same bits twice, once
    into memory full of NaN; no argument written that the contract does not declare.
    """
    label = f"{op.spec.name}/{impl_name} on {sample.name}"
    function, prepare = bind(op, impl_name, library), op.impls[impl_name].prepare

    def call() -> tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]:
        args = private_copy(sample.args)
        ready = (prepare[name](argument) if name in prepare else argument
                 for name, argument in zip(op.arg_names, args, strict=True))
        return args, _as_tuple(function(*ready))

    args, outputs = call()
    _check_form(op, label, sample, outputs)
    wide = _widened(sample.args)
    wanted = _named(op, wide, _as_tuple(op.spec.reference(*wide)))
    made = _named(op, args, outputs)
    _check_values(label, _tolerance(op, tuple(made.values())), made, wanted)

    for name, before, after in zip(op.arg_names, sample.args, args, strict=True):
        if isinstance(after, torch.Tensor) and name not in op.spec.mutates and not _same_bits(before, after):
            raise ParityError(f"{label}: argument {name} was written, which the contract does not declare")
    with _poisoned_memory():
        again_args, again = call()
    for name, tensor in _named(op, again_args, again).items():
        if not _same_bits(tensor, _named(op, args, outputs)[name]):
            raise ParityError(f"{label}: {name} changed on a second call into poisoned memory: "
                              "it is not deterministic, or leaves values unwritten")


def check_op(op: Op, sample: Sample, *, full: bool = False) -> None:
    """Run ``torch.library.opcheck`` on the op's reference: schema and fake, and with ``full`` also autograd and AOT."""
    checks = _FULL_OPCHECK if full else ("test_schema", "test_faketensor")
    # An empty view at an offset is more than opcheck's own copying can do: it gets a plain empty tensor.
    args = tuple(torch.empty_like(argument, memory_format=torch.contiguous_format)
                 if isinstance(argument, torch.Tensor) and argument.numel() == 0 else argument
                 for argument in private_copy(sample.args))
    # It multiplies floats to compare them, which torch cannot do in 8 bits: it gets them widened.
    args = tuple(argument.float() if isinstance(argument, torch.Tensor) and argument.dtype is torch.float8_e4m3fn
                 else argument for argument in args)
    torch.library.opcheck(op.overload, args, test_utils=checks)
