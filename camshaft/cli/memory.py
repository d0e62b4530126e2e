"""``camshaft inspect --memory``: what of a model fits into how much memory, before anyone runs out.

Owns the question's options, the arithmetic of fitting, advice, and how it is shown. Sizes are ``builder/memory.py``'s.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from camshaft.config.build import BuildConfig
from camshaft.config.doc import Doc, check_int
from camshaft.config.runtime import KvCacheConfig
from camshaft.core.errors import UserError

if TYPE_CHECKING:
    from camshaft.builder.memory import MemoryNeeds, WeightChoice

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?", re.ASCII)
_UNITS = MappingProxyType({"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "ki": 2**10, "Mi": 2**20,
                           "Gi": 2**30, "Ti": 2**40})
_MOST_MEMORY = 2**63 - 1
_MOST_OF_THE_REST = 0.95
_LARGE_SHARE = 0.2
"""Activations above this share of all memory are worth a word."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """What is asked beside --memory."""

    device_memory: Annotated[str | None, Doc("Memory to fit into, e.g. 141GB or 80GiB; default: what is free on this "
                                             "machine.")] = None
    seq_len: Annotated[int | None, Doc("Tokens of the requests that are to fit, prompt and answer; default: the "
                                       "longest that can run.")] = None
    revision: Annotated[str | None, Doc("Branch, tag or commit on the hub.")] = None

    def __post_init__(self) -> None:
        if self.device_memory is not None:
            parse_bytes("device_memory", self.device_memory)
        if self.seq_len is not None:
            check_int("seq_len", self.seq_len, 1)


def parse_bytes(field: str, text: str) -> int:
    """Bytes of ``141GB``, ``80GiB``, ``512M`` or a plain number. UserError naming ``field``."""
    match = _AMOUNT.fullmatch(text.strip())
    amount = 0.0 if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if not 1 <= amount <= _MOST_MEMORY:
        raise UserError(field, text, "an amount of memory such as 141GB, 80GiB or a number of bytes")
    return int(amount)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """What an engine leaves of some memory, and what that holds."""

    memory_bytes: int
    left_bytes: int
    """Once weights and activations are in place; negative where they do not fit."""
    kv_budget_bytes: int
    seq_len: int
    request_bytes: int
    """Most pages of keys and values that one request of ``seq_len`` tokens holds."""
    num_tokens: int
    """Tokens of such requests that the KV cache holds."""
    num_requests: int
    """Requests of ``seq_len`` tokens that it holds at once, without shared prefixes."""

    @property
    def fits(self) -> bool:
        """Whether at least one request can run."""
        return self.num_requests >= 1


def fit(needs: MemoryNeeds, memory_bytes: int, kv_cache: KvCacheConfig, seq_len: int | None = None) -> MemoryFit:
    """How far ``memory_bytes`` go, sharing out the rest as a start does. UserError for a ``seq_len`` beyond the
    engine's ``max_seq_len``."""
    from camshaft.runtime.buffers import pages_needed, share_pages

    longest = needs.build.longest_sequence
    tokens = longest if seq_len is None else seq_len
    if tokens > longest:
        raise UserError("seq_len", tokens, f"at most max_seq_len ({longest})", "Raise --max-seq-len, or lower it")
    each = pages_needed(needs.life_cycles, tokens, needs.build)
    left = memory_bytes - needs.weight_bytes - needs.activation_peak_bytes
    budget = int(max(left, 0) * kv_cache.memory_fraction)
    if kv_cache.max_bytes is not None:
        budget = min(kv_cache.max_bytes, max(left, 0))
    held = [0] * len(each)
    if budget >= 2 * sum(spec.page_bytes for spec in needs.life_cycles):
        held = [pages - 1 for pages in share_pages(needs.life_cycles, budget, needs.build)]
    return MemoryFit(memory_bytes=memory_bytes, left_bytes=left, kv_budget_bytes=budget, seq_len=tokens,
                     request_bytes=sum(pages * spec.page_bytes
                                       for pages, spec in zip(each, needs.life_cycles, strict=True)),
                     num_tokens=min(pages * tokens // one for pages, one in zip(held, each, strict=True)),
                     num_requests=min(pages // one for pages, one in zip(held, each, strict=True)))


def advice(needs: MemoryNeeds, found: MemoryFit, kv_cache: KvCacheConfig) -> Iterator[str]:
    """What to change where it does not fit, each with what it brings."""
    if found.fits:
        return
    left, request = found.left_bytes, found.request_bytes
    if left < request and (choice := _smaller_weights(needs, left, request)) is not None:
        yield f"{_flags(choice)} (weights of {_size(choice.num_bytes)})"
        left += needs.weight_bytes - choice.num_bytes
    if kv_cache.max_bytes is None and left * _MOST_OF_THE_REST >= request > left * kv_cache.memory_fraction:
        yield (f"--kv-memory-fraction {min(_MOST_OF_THE_REST, math.ceil(request / left * 100) / 100 + 0.02):g} or more "
               f"(now {kv_cache.memory_fraction:g})")
    elif kv_cache.max_bytes is not None and left >= request > kv_cache.max_bytes:
        yield f"a larger --kv-max-bytes (now {kv_cache.max_bytes}), or none"
    if needs.activation_peak_bytes > _LARGE_SHARE * found.memory_bytes:
        yield (f"a lower --max-num-tokens or --max-batch-size (now {needs.build.max_num_tokens} and "
               f"{needs.build.max_batch_size}, for {_size(needs.activation_peak_bytes)} of activations)")
    if found.left_bytes > 0 or 0 < left < request:
        yield f"a lower --max-seq-len (now {needs.build.max_seq_len}), or shorter requests (--seq-len)"
    if found.left_bytes < request:
        yield f"{_size(request - found.left_bytes)} more memory, a smaller model, or a device of another kind"


def _smaller_weights(needs: MemoryNeeds, left: int, request: int) -> WeightChoice | None:
    """The widest type that leaves room for a request; else the narrowest, if shorter requests would then fit."""
    by_size = sorted(needs.choices, key=lambda choice: -choice.num_bytes)
    for choice in by_size:
        if left + needs.weight_bytes - choice.num_bytes >= request:
            return choice
    narrowest = by_size[-1] if by_size else None
    if narrowest is None or narrowest.num_bytes >= needs.weight_bytes:
        return None
    return narrowest if left + needs.weight_bytes - narrowest.num_bytes > 0 else None


def _flags(choice: WeightChoice) -> str:
    flags = f"--dtype {choice.dtype}"
    if choice.weight_dtype != choice.dtype:
        flags += f" --weight-dtype {choice.weight_dtype}"
    return flags if choice.quantization == "none" else f"{flags} --quantization {choice.quantization}"


def inspect_memory(model: str, question: MemoryConfig, build: BuildConfig, kv_cache: KvCacheConfig, *,
                   as_json: bool) -> None:
    """Answer, as a table or as JSON; exit code 1 where not one request fits."""
    import torch

    from camshaft.builder.memory import memory_needs
    from camshaft.frontend.hub import resolve_headers
    from camshaft.runtime.buffers import free_bytes

    with tempfile.TemporaryDirectory(prefix="camshaft-headers-") as scratch:
        needs = memory_needs(resolve_headers(model, Path(scratch), revision=question.revision), build)
    kind = needs.build.device
    if question.device_memory is not None:
        memory_bytes = parse_bytes("device_memory", question.device_memory)
    elif kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device", "cuda", "a CUDA device that torch can see, or --device-memory beside it",
                        "Give e.g. --device-memory 141GB")
    else:
        memory_bytes = free_bytes(torch.device(kind))
    found = fit(needs, memory_bytes, kv_cache, question.seq_len)
    changes = list(advice(needs, found, kv_cache))
    if as_json:
        typer.echo(json.dumps(_report(model, needs, found, changes), indent=1))
    else:
        _show(needs, found, changes, "asked for" if question.device_memory else f"free on this {kind} device")
    if not found.fits:
        raise typer.Exit(1)


def _report(model: str, needs: MemoryNeeds, found: MemoryFit, changes: list[str]) -> dict[str, Any]:
    return {
        "model": model, "build": needs.build.to_dict(), "weight_bytes": needs.weight_bytes,
        "activation_peak_bytes": needs.activation_peak_bytes,
        "weight_choices": [dataclasses.asdict(choice) for choice in needs.choices],
        "kv": [{**dataclasses.asdict(spec), "token_bytes": spec.page_bytes / spec.page_size}
               for spec in needs.life_cycles],
        "fit": {**dataclasses.asdict(found), "fits": found.fits}, "advice": changes}


def _show(needs: MemoryNeeds, found: MemoryFit, changes: list[str], whose: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console, build, model = Console(highlight=False), needs.build, needs.model
    facts = Table("", "", "", show_header=False, box=None)
    facts.add_row("model", "", f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}")
    facts.add_row("memory", _size(found.memory_bytes), whose)
    facts.add_row("weights", _size(needs.weight_bytes), _kind(build.dtype, build.weight_dtype, build.quantization))
    facts.add_row("activations", _size(needs.activation_peak_bytes),
                  f"at most, {build.max_num_tokens} tokens a step of {build.max_batch_size} requests")
    facts.add_row("left", _size(found.left_bytes), "")
    facts.add_row("KV cache", _size(found.kv_budget_bytes), f"{found.num_tokens} tokens of such requests")
    for spec in needs.life_cycles:
        kept = "all tokens" if spec.window is None else (
            f"the last {spec.window} tokens" + (f" and the first {spec.sinks}" if spec.sinks else ""))
        facts.add_row("", _size(spec.page_bytes / spec.page_size), f"a token in {len(spec.layers)} layers, {kept}")
    facts.add_row("a request", _size(found.request_bytes), f"of {found.seq_len} tokens")
    facts.add_row("at once", str(min(found.num_requests, build.max_batch_size)),
                  f"such requests (the cache holds {found.num_requests}, a step {build.max_batch_size})")
    console.print(facts)
    if needs.choices:
        types = Table("weights stored as", "bytes", "", title="Types", title_justify="left")
        for choice in needs.choices:
            asked = (choice.dtype, choice.weight_dtype, choice.quantization) == (
                build.dtype, build.weight_dtype, build.quantization.replace("w8a8", "w8a16"))
            types.add_row(_kind(choice.dtype, choice.weight_dtype, choice.quantization), _size(choice.num_bytes),
                          "as asked" if asked else "")
        console.print(types)
    console.print("Fits." if found.fits else "Does not fit. What would help:", markup=False)
    for change in changes:
        console.print(f"- {change}", markup=False)


def _kind(dtype: str, weight_dtype: str, quantization: str) -> str:
    stored = dtype if weight_dtype == dtype else f"{weight_dtype} for {dtype}"
    return stored if quantization == "none" else f"8 bits ({quantization}), the rest {stored}"


def _size(num_bytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes:.0f} B"
