"""What a model takes in memory, from headers alone: weights in each type, a step's activations, keys and values.

Owns the sizes. Nothing is read beyond headers, nothing compiled or written: the graph is exported without tensors and
goes through the passes of a build. How much memory there is, and what fits into it, is the caller's business.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import torch

from camshaft.builder.activations import activation_peak_bytes
from camshaft.config.build import DTYPES, BuildConfig, resolve_build
from camshaft.config.kv import LifeCycleSpec
from camshaft.config.model import ModelConfig
from camshaft.core import device as devices
from camshaft.core.device import DeviceSpec
from camshaft.core.errors import UserError
from camshaft.engine.artifact import is_engine_folder, read_manifest
from camshaft.frontend.checkpoint import open_checkpoint
from camshaft.frontend.load import program_from_headers
from camshaft.ir import nodes
from camshaft.ir.program import Program
from camshaft.ir.weight import Weight
from camshaft.kernels.native import find_compiler
from camshaft.passes.base import PassContext
from camshaft.passes.pipeline import run_passes

_SCALE_BYTES = 4
"""Of one output channel of a matrix in 8 bits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightChoice:
    """One way to store the weights, as build settings, and what it takes."""

    dtype: str
    weight_dtype: str
    quantization: str
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeeds:
    """What an engine takes once it runs, KV cache apart."""

    model: ModelConfig
    build: BuildConfig
    """Resolved."""
    weight_bytes: int
    activation_peak_bytes: int
    """Intermediate tensors of a step at the limits of ``build``."""
    life_cycles: tuple[LifeCycleSpec, ...]
    choices: tuple[WeightChoice, ...]
    """What else a build on the same device could be asked for; empty for an engine, which is built already."""


def memory_needs(path: Path, cfg: BuildConfig) -> MemoryNeeds:
    """The needs of the checkpoint or engine at ``path``.

    ``cfg`` may ask for a device this machine lacks. Raises what opening and resolving raise, and UserError for build
    settings beside an engine.
    """
    if is_engine_folder(path):
        if cfg != BuildConfig():
            raise UserError("build", str(path), "no build settings for an engine that is already built",
                            "Leave them out, or give the checkpoint")
        manifest = read_manifest(path)
        num_bytes = sum(math.prod(tensor.shape) * _itemsize(tensor.dtype) for tensor in manifest.tensors.values())
        return MemoryNeeds(model=manifest.model, build=manifest.build, weight_bytes=num_bytes,
                           activation_peak_bytes=manifest.activation_peak_bytes, life_cycles=manifest.life_cycles,
                           choices=())
    checkpoint = open_checkpoint(path)
    device = _device(cfg.device)
    build = resolve_build(cfg, checkpoint.config, device=device.kind)
    program = program_from_headers(checkpoint, getattr(torch, build.dtype), build.max_seq_len)
    choices = _choices(program, device.kind)
    native = device.kind == "cpu" and find_compiler() is not None
    run_passes(program, PassContext(build=build, device=device, native=native))
    return MemoryNeeds(model=program.config, build=build, choices=choices,
                       weight_bytes=sum(weight.num_bytes for weight in program.weights.values()),
                       activation_peak_bytes=activation_peak_bytes(program, build), life_cycles=program.life_cycles)


def _device(kind: str) -> DeviceSpec:
    """The device at hand, or one of that kind that nothing is known of."""
    if kind == "cuda" and not torch.cuda.is_available():
        return DeviceSpec(kind="cuda", name="a CUDA device", features=(), num_threads=1, memory_bytes=0)
    return devices.probe(kind)


def _itemsize(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Sizes of a model's weights by what reads them."""

    products: int
    """Elements of matrices that only products read."""
    rows: int
    """Output channels of all matrices that products read."""
    looked_up: int
    """Elements of tables that only lookups read."""
    both: int
    """Elements of tables that both read: an embedding that is the head too."""
    others: int
    """Elements of norms and biases."""
    fixed_bytes: int
    """What keeps its type: constants, and norms that stay float32."""

    def num_bytes(self, dtype: str, weight_dtype: str, quantization: str) -> int:
        """Bytes of all weights when they are stored so."""
        wide, matrix = _itemsize(dtype), _itemsize(weight_dtype)
        rest = (self.looked_up + self.both) * matrix + self.others * wide + self.fixed_bytes
        if quantization == "none":
            return self.products * matrix + rest
        return self.products + self.both + self.rows * _SCALE_BYTES + rest


def _choices(program: Program, device: str) -> tuple[WeightChoice, ...]:
    """Every type the weights could be stored in, from the program as it was exported."""
    counts = _counts(program)
    asked = [(dtype, dtype, "none") for dtype in DTYPES]
    if device == "cpu":
        asked += [("float32", "bfloat16", "none"), ("float32", "float32", "w8a16"), ("float32", "bfloat16", "w8a16")]
    return tuple(WeightChoice(dtype=dtype, weight_dtype=weight_dtype, quantization=quantization,
                              num_bytes=counts.num_bytes(dtype, weight_dtype, quantization))
                 for dtype, weight_dtype, quantization in asked)


def _counts(program: Program) -> _Counts:
    products, looked_up = set[str](), set[str]()
    for node in program.graph.nodes:
        if (read := nodes.matrix_read(node)) is not None:
            (products if nodes.is_call(node, "camshaft.linear") else looked_up).add(read[1])
    weights = program.weights
    others = [weight for name, weight in weights.items() if name not in products | looked_up]
    return _Counts(
        products=_elements(weights, products - looked_up), looked_up=_elements(weights, looked_up - products),
        rows=sum(weights[name].shape[0] for name in products), both=_elements(weights, products & looked_up),
        others=sum(math.prod(weight.shape) for weight in others if not weight.fixed),
        fixed_bytes=sum(weight.num_bytes for weight in others if weight.fixed))


def _elements(weights: dict[str, Weight], names: set[str]) -> int:
    return sum(math.prod(weights[name].shape) for name in names)
