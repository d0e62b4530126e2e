"""The op contract: what an op is, and how implementations register beside it.

Owns ``OpSpec``, ``Op``, ``Impl`` and the registration with ``torch.library``. Chooses nothing:
``kernels/dispatch.py`` ranks implementations, ``passes/select_kernels.py`` records the choice.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

import torch

from camshaft.core.device import DeviceSpec
from camshaft.core.errors import InternalError
from camshaft.core.registry import Registry

NAMESPACE = "camshaft"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]  # untyped in torch
OPS: Registry[Op] = Registry("op")


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor argument at build time. A dynamic size is None."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OpCall:
    """One use of an op, as a capability check sees it: arguments in schema order, tensors as TensorInfo."""

    device: DeviceSpec
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Arguments for one parity run, in schema order, on a given device and dtype. ``name`` labels the test."""

    name: str
    args: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted ``max|out - ref| / max|ref|`` of an implementation against float64 ``ref``, a dtype."""

    float32: float = 1e-5
    bfloat16: float = 1.6e-2
    float16: float = 2e-3

    def of(self, dtype: torch.dtype) -> float:
        """The bound for ``dtype``."""
        return {torch.float32: self.float32, torch.bfloat16: self.bfloat16, torch.float16: self.float16}[dtype]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """An op's contract. ``reference`` is readable torch and defines the result."""

    name: str
    """Without the namespace: ``"rms_norm"`` is ``camshaft::rms_norm`` in graphs."""
    schema: str
    """``torch.library`` schema after the name, e.g. ``"(Tensor x, Tensor weight, float eps) -> Tensor"``."""
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    """Shapes and dtypes of the results from those of the arguments; runs under FakeTensorMode."""
    samples: Callable[[torch.dtype, torch.device, torch.Generator], Iterable[Sample]]
    """Parity samples: zero tokens, one token, sizes off every boundary, strided input."""
    tolerance: Tolerance = Tolerance()
    mutates: tuple[str, ...] = ()
    """Names of the arguments written in place; the schema marks them ``Tensor(a!)`` too."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)


def _always(call: OpCall) -> str | None:
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Impl:
    """One implementation of an op.

    ``supports`` returns None where the implementation can serve a call, else the reason it cannot.
    With ``native`` set, ``fn`` is a factory: ``fn(library: ctypes.CDLL) -> callable``; otherwise it
    is the callable. Either way the callable takes the op's arguments positionally in schema order.
    ``prepare`` maps argument names of weights to functions applied once at build time; the callable
    then receives the prepared tensor in that place. They are plain torch and run on meta tensors too:
    a build learns the prepared shape without reading the weight.
    """

    name: str
    device: str
    """``"cpu"``, ``"cuda"`` or ``"any"``."""
    fn: Callable[..., Any]
    supports: Callable[[OpCall], str | None] = _always
    rank: int = 0
    """Higher wins among supporting implementations."""
    prepare: dict[str, Callable[[torch.Tensor], torch.Tensor]] = dataclasses.field(default_factory=dict)
    native: bool = False


class Op:
    """An op with its implementations. Calling it goes through the torch dispatcher (for export and tests)."""

    def __init__(self, spec: OpSpec) -> None:
        self.spec = spec
        self.impls: dict[str, Impl] = {}
        _LIBRARY.define(spec.name + spec.schema)  # type: ignore[no-untyped-call]
        _LIBRARY.impl(spec.name, spec.reference, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{spec.name}", spec.fake, lib=_LIBRARY)
        self.overload: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), spec.name).default
        self.add(Impl(name="ref", device="any", fn=spec.reference, rank=-100))

    def add(self, impl: Impl) -> None:
        """Register an implementation; names are unique within the op (InternalError)."""
        if impl.name in self.impls:
            raise InternalError(f"{self.spec.name} already has an implementation {impl.name!r}")
        self.impls[impl.name] = impl

    def impl(self, name: str, *, device: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator form of :meth:`add`; ``options`` are the fields of :class:`Impl`."""

        def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
            self.add(Impl(name=name, device=device, fn=fn, **options))
            return fn

        return decorate

    @property
    def arg_names(self) -> tuple[str, ...]:
        """Argument names in schema order."""
        return tuple(argument.name for argument in self.overload._schema.arguments)

    def __call__(self, *args: Any) -> Any:
        """Run through the torch dispatcher, as export and the reference interpreter do."""
        return self.overload(*args)


def define_op(spec: OpSpec) -> Op:
    """Define ``camshaft::<name>`` and make it known to the registry."""
    return OPS.add(spec.name, Op(spec))


def load_families(device: str) -> Registry[Op]:
    """Import every family's ``ref`` and the implementation files for ``device``; returns all ops.

    A family is a package in this folder with a ``ref.py``; ``cpu.py`` is always imported, ``gpu.py``
    (Triton) only for ``device="cuda"``, where Triton is installed: every CUDA build of torch brings it, and
    without one a GPU can only be planned for. Idempotent.
    """
    with_gpu = device == "cuda" and importlib.util.find_spec("triton") is not None
    package = importlib.import_module("camshaft.kernels")
    for family in sorted(info.name for info in pkgutil.iter_modules(package.__path__) if info.ispkg):
        home = importlib.import_module(f"camshaft.kernels.{family}")
        present = {info.name for info in pkgutil.iter_modules(home.__path__)}
        for module in ("ref", "cpu", "gpu"):
            if module in present and (module != "gpu" or with_gpu):
                importlib.import_module(f"camshaft.kernels.{family}.{module}")
    return OPS
