"""What a benchmark asks for: prompts as token ids and how many tokens each answer has, from a seed or a file.

Owns length rules and the dataset format. Runs nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from camshaft.config.doc import INT32_MAX, Doc, check_int
from camshaft.core.errors import UserError

_RULE = re.compile(r"(?P<low>\d+):(?P<high>\d+)|(?P<mean>\d+),(?P<deviation>\d+)|(?P<fixed>\d+)", re.ASCII)
_MAX_REQUESTS = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """Requests of a benchmark. Equal settings make equal requests."""

    num_requests: Annotated[int | None, Doc("Requests that are measured; default: all of the dataset, else "
                                            "32.")] = None
    input_len: Annotated[str, Doc("Tokens a prompt: N, or MEAN,DEVIATION of a normal distribution, or LOW:HIGH, all "
                                  "equally likely.")] = "128"
    output_len: Annotated[str, Doc("Tokens an answer has, no more and no fewer; as input_len.")] = "64"
    warmup: Annotated[int, Doc("Requests run before the measured ones, and not counted.")] = 2
    dataset: Annotated[Path | None, Doc("JSONL file in place of random prompts: a line a request, with task_id, prompt "
                                        "or input_ids, and output_tokens.")] = None
    seed: Annotated[int, Doc("Seed of lengths and random prompts.")] = 0

    def __post_init__(self) -> None:
        if self.num_requests is not None:
            check_int("num_requests", self.num_requests, 1, _MAX_REQUESTS)
        check_int("warmup", self.warmup, 0, _MAX_REQUESTS)
        check_int("seed", self.seed, 0, 2**64 - 1)
        for name in ("input_len", "output_len"):
            LengthRule.parse(name, getattr(self, name))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data; a dataset by its name and content. UserError where it cannot be read."""
        found = {**dataclasses.asdict(self), "dataset": None if self.dataset is None else self.dataset.name}
        if self.dataset is not None:
            found["dataset_sha256"] = hashlib.sha256(_content(self.dataset)).hexdigest()
        return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConcurrentConfig(WorkloadConfig):
    """Requests that run side by side."""

    concurrency: Annotated[int | None, Doc("Most requests under way at once; default: all of them.")] = None

    def __post_init__(self) -> None:
        super(ConcurrentConfig, self).__post_init__()  # slots make another class, which a bare super() misses
        if self.concurrency is not None:
            check_int("concurrency", self.concurrency, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthRule:
    """How long prompts or answers are: from ``low`` to ``high``, equally likely or about a mean."""

    low: int
    high: int
    mean: int | None = None
    deviation: int = 0

    @classmethod
    def parse(cls, name: str, text: str) -> LengthRule:
        """Read ``N``, ``MEAN,DEVIATION`` or ``LOW:HIGH``. UserError naming the option."""
        match = _RULE.fullmatch(text)
        found = {} if match is None else {key: int(value) for key, value in match.groupdict().items() if value}
        low = found.get("low", found.get("fixed", found.get("mean", 0)))
        high = found.get("high", low)
        if not 1 <= low <= high <= INT32_MAX:
            raise UserError(name, text, "N, MEAN,DEVIATION or LOW:HIGH with whole numbers from 1",
                            "Give e.g. 128 or 64:256")
        if "mean" in found:
            return cls(low=1, high=INT32_MAX, mean=found["mean"], deviation=found["deviation"])
        return cls(low=low, high=high)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """``count`` lengths."""
        if self.mean is None:
            drawn = rng.integers(self.low, self.high, count, endpoint=True)
        else:
            drawn = np.rint(rng.normal(self.mean, self.deviation, count)).clip(self.low, self.high).astype(np.int64)
        lengths: list[int] = drawn.tolist()
        return lengths


@dataclasses.dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request: what goes in, and how many tokens come out."""

    prompt_token_ids: list[int]
    output_len: int


def make_requests(cfg: WorkloadConfig, vocab_size: int, encode: Callable[[str], list[int]], *,
                  longest: int = INT32_MAX) -> tuple[list[BenchRequest], list[BenchRequest]]:
    """(warm-up requests, measured requests). Random warm-up prompts share nothing with the measured ones.

    UserError for a dataset that cannot be read, and for random lengths of more than ``longest`` tokens, prompt and
    answer together; a dataset's prompts go through ``encode``.
    """
    measured = _random(cfg, vocab_size, cfg.num_requests or 32, longest, stream=0) if cfg.dataset is None else _read(
        cfg.dataset, cfg.num_requests, encode)
    return _random(cfg, vocab_size, cfg.warmup, longest, stream=1), measured


def _random(cfg: WorkloadConfig, vocab_size: int, count: int, longest: int, *, stream: int) -> list[BenchRequest]:
    rng = np.random.default_rng([cfg.seed, stream])
    inputs = LengthRule.parse("input_len", cfg.input_len).draw(rng, count)
    outputs = LengthRule.parse("output_len", cfg.output_len).draw(rng, count)
    most = max(map(sum, zip(inputs, outputs, strict=True)), default=0)
    if most > longest:  # before so many tokens are drawn
        raise UserError("input_len", f"{cfg.input_len} with output_len {cfg.output_len}, {most} tokens together",
                        f"at most max_seq_len ({longest}) tokens together", "Lower one of them, or raise --max-seq-len")
    return [BenchRequest(rng.integers(0, vocab_size, size).tolist(), output_len)
            for size, output_len in zip(inputs, outputs, strict=True)]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError("dataset", str(path), f"a JSONL file that can be read ({error})", "Check the path") from error


def _read(path: Path, limit: int | None, encode: Callable[[str], list[int]]) -> list[BenchRequest]:
    try:
        lines = _content(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError("dataset", str(path), f"a JSONL file in UTF-8 ({error})", "Convert it") from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if limit is not None and limit > len(numbered):
        raise UserError("num_requests", limit, f"at most the dataset's {len(numbered)} requests")
    found = [_request(f"{path}, line {number}", line, encode) for number, line in numbered[:limit]]
    if not found:
        raise UserError("dataset", str(path), "at least one request", "Write a line a request")
    return found


def _request(where: str, line: str, encode: Callable[[str], list[int]]) -> BenchRequest:
    wanted = 'an object with "output_tokens" and either "prompt" or "input_ids"'
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("dataset", where, f"{wanted} ({error})") from error
    if not isinstance(data, dict) or ("prompt" in data) == ("input_ids" in data):
        raise UserError("dataset", where, wanted)
    prompt, output_len = data.get("prompt"), data.get("output_tokens")
    if not isinstance(output_len, int) or isinstance(output_len, bool) or output_len < 1:
        raise UserError(f"dataset {where}: output_tokens", output_len, "a whole number of 1 or more")
    ids: Any = encode(prompt) if isinstance(prompt, str) else data.get("input_ids")
    if not isinstance(ids, Sequence) or not ids or not all(isinstance(token, int) for token in ids):
        raise UserError(f"dataset {where}", prompt if "prompt" in data else ids, "a prompt that is text, or input_ids "
                        "that are token ids, at least one")
    return BenchRequest(list(ids), output_len)
