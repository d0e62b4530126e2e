"""The recipe on one page: a checkpoint in, an engine out.

Owns the order of the steps and the limits a build is held to. Each step is a layer below; the cache is
``cache.py``.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from camshaft.builder.activations import activation_peak_bytes
from camshaft.builder.token_ids import count_token_ids
from camshaft.config.build import BuildConfig, resolve_build
from camshaft.config.model import GenerationDefaults, ModelConfig
from camshaft.core import device as devices
from camshaft.core import env
from camshaft.core.device import DeviceSpec
from camshaft.core.errors import UserError
from camshaft.core.log import logger, progress
from camshaft.engine.artifact import Engine, EngineParts, EngineWriter, is_engine_folder
from camshaft.engine.manifest import DeviceRequirement
from camshaft.frontend.checkpoint import Checkpoint, open_checkpoint
from camshaft.frontend.default_model import default_model
from camshaft.frontend.hub import resolve_model
from camshaft.frontend.load import program_from_checkpoint
from camshaft.ir.program import Program
from camshaft.ir.text import dump_graph
from camshaft.kernels.native import compile_library, find_compiler
from camshaft.passes.base import PassContext
from camshaft.passes.pipeline import run_passes, select_passes

_SAMPLE_BYTES, _NUM_SAMPLES = 16 << 10, 64


def build(model: str | Path | None, cfg: BuildConfig | None = None, *, output: Path | None = None,
          show_progress: bool = False, allow_pointers: bool = False) -> Engine:
    """Build the engine of ``model``: a folder at ``output``, or in memory.

    ``model`` is a folder, a ``.gguf`` file, a hub id, or None for the default model.

    Tensors are read one at a time. ``allow_pointers`` lets unchanged ones stay in the checkpoint's files, for
    cache engines; otherwise the folder needs nothing but itself. Raises UserError for settings or models that
    cannot be built, OSError where the disk refuses.
    """
    asked = cfg or BuildConfig()
    path = default_model(show_progress).path if model is None else resolve_model(model, show_progress=show_progress)
    if is_engine_folder(path):
        raise UserError("model", str(path), "a checkpoint to build from; this is a built engine", "Run it as it is")
    checkpoint = open_checkpoint(path)
    device = devices.probe(asked.device)
    cfg = resolve_build(asked, checkpoint.config, device=device.kind)
    select_passes(cfg.skip_passes)
    writer = EngineWriter(output, allow_pointers=allow_pointers)
    with tempfile.TemporaryDirectory(prefix="camshaft-build-") as scratch, \
            concurrent.futures.ThreadPoolExecutor(max_workers=1) as compiling:
        library = compiling.submit(_native_library, device, Path(scratch))
        with progress("compiling", 3, show=show_progress, unit="steps") as advance:
            program = program_from_checkpoint(checkpoint, getattr(torch, cfg.dtype), cfg.max_seq_len)
            advance(1)
            native = library.result()
            advance(1)
            run_passes(program, PassContext(build=cfg, device=device, native=native is not None))
            _check_memory(program, device, cfg)
            advance(1)
        for name, weight in program.weights.items():
            writer.add_tensor(name, weight)
        return writer.finish(_parts(program, checkpoint, cfg, device, native), show_progress=show_progress)


def _parts(program: Program, checkpoint: Checkpoint, cfg: BuildConfig, device: DeviceSpec,
           native: Path | None) -> EngineParts:
    """Everything of the engine beside its weights."""
    needed = device.features if native is not None or device.kind != "cpu" else ()
    vocab_size, tokenizer_files = program.config.vocab_size, checkpoint.tokenizer_files()
    generation = _known_tokens(checkpoint.generation, vocab_size)
    return EngineParts(
        graph_text=dump_graph(program), model=program.config, build=cfg, generation=generation,
        device=DeviceRequirement(kind=device.kind, features=needed), life_cycles=program.life_cycles,
        history=tuple({"name": record.name, "matches": record.matches, "notes": list(record.notes)}
                      for record in program.history),
        kernels=_kernels(program),
        activation_peak_bytes=activation_peak_bytes(program, cfg),
        weights_id=_weights_id(checkpoint, program.config, cfg), tokenizer_files=tokenizer_files, native=native,
        num_token_ids=count_token_ids(tokenizer_files, generation, vocab_size))


def _known_tokens(generation: GenerationDefaults, vocab_size: int) -> GenerationDefaults:
    """``generation`` without ids the model cannot produce: nothing would ever end by them, or be masked by them."""
    strange = [token for token in generation.eos_token_ids if token >= vocab_size]
    if strange:
        logger.warning("the checkpoint's end-of-sequence ids %s are beyond the vocabulary of %d; left out", strange,
                       vocab_size)
    ends = tuple(token for token in generation.eos_token_ids if token < vocab_size)
    return dataclasses.replace(generation, eos_token_ids=ends)


def _native_library(device: DeviceSpec, scratch: Path) -> Path | None:
    """The compiled CPU kernels: from the cache where it can be used, else made in ``scratch``; None without."""
    if device.kind != "cpu" or find_compiler() is None:
        return None
    return compile_library(env.cache_dir() / "native") or compile_library(scratch)


def _check_memory(program: Program, device: DeviceSpec, cfg: BuildConfig) -> None:
    needed = sum(weight.num_bytes for weight in program.weights.values())
    if needed > device.memory_bytes:
        kind = cfg.weight_dtype if cfg.quantization == "none" else f"{cfg.quantization} and {cfg.weight_dtype}"
        raise UserError("model", f"{needed / 1e9:.1f} GB of {kind} weights",
                        f"at most the {device.memory_bytes / 1e9:.1f} GB of this {device.kind} device",
                        "Use a smaller type (dtype, weight_dtype), 8-bit weights (quantization) or a smaller model")


def _kernels(program: Program) -> tuple[dict[str, Any], ...]:
    """How often each kernel was chosen, and why."""
    chosen = collections.Counter(
        (str(node.target).split(".")[1], node.meta["kernel"], node.meta["why"])
        for node in program.graph.nodes if "kernel" in node.meta)
    return tuple({"op": op, "kernel": kernel, "count": count, "why": why}
                 for (op, kernel, why), count in sorted(chosen.items()))


def _weights_id(checkpoint: Checkpoint, model: ModelConfig, cfg: BuildConfig) -> str:
    """SHA-256 over the model's shape, what the build changes of it and evenly spaced samples of every checkpoint file.

    Equal checkpoints in two places have one id; reading them whole would double the time of a build.
    """
    facts = json.dumps([model.to_dict(), cfg.dtype, cfg.weight_dtype, cfg.quantization,
                        cfg.max_attention_window, cfg.sink_tokens], sort_keys=True)
    digest = hashlib.sha256(facts.encode())
    for path in sorted(checkpoint.files, key=lambda file: file.name):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        for piece in _samples(path):
            digest.update(piece)
    return digest.hexdigest()


def _samples(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    step = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
    with path.open("rb") as file:
        for offset in range(0, size, step):
            file.seek(offset)
            yield file.read(_SAMPLE_BYTES)
