"""Contracts of ``sample`` and ``logprobs``, in readable torch.

Owns the order in which temperature, top-k, top-p and min-p apply, and what a rank is. All arithmetic is float64,
so that every implementation picks the same token. Penalties, masks and random numbers come from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from camshaft.kernels.op import OpSpec, Sample, define_op


def sample(logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor,
           min_p: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick a token a row of logits [S, V]; returns ids [S] (int64) and finite [S] (bool).

    temperature, top_p, min_p, uniform in [0, 1): float32 [S]; top_k: int32 [S]. Temperature 0 picks the
    largest logit, lowest id on ties. Otherwise tokens are ordered by descending logit, then id; the top_k
    first stay (0: all), renormalised; then the fewest that reach mass top_p (at least one); then those at
    least min_p times as likely as the first; and ``uniform`` picks by their cumulative mass.
    finite is False, and the id 0, where a logit is NaN or +inf or all are -inf; -inf alone masks a token.
    """
    values = logits.double()
    best = values.amax(dim=1)
    finite = torch.isfinite(best)
    values = values.masked_fill(~finite[:, None], 0.0)
    ordered, ids = values.sort(dim=1, descending=True, stable=True)
    greedy = temperature == 0
    divisor = temperature.double().masked_fill(greedy, 1.0)[:, None]
    mass = torch.exp((ordered - ordered[:, :1]) / divisor)
    rank = torch.arange(mass.shape[1], device=mass.device)
    limit = torch.where(top_k > 0, top_k, mass.shape[1])[:, None]
    mass = mass.masked_fill(rank >= limit, 0.0)
    before = mass.cumsum(1) - mass
    nucleus = (before < top_p.double()[:, None] * mass.sum(1, keepdim=True)) | (top_p >= 1)[:, None]
    kept = (nucleus & (mass >= min_p.double()[:, None])) | (rank == 0)
    mass = mass.masked_fill(~kept, 0.0)
    cumulative = mass.cumsum(1)
    passed = cumulative <= uniform.double()[:, None] * cumulative[:, -1:]
    choice = torch.where(greedy, 0, passed.sum(1))
    picked = ids.gather(1, choice[:, None])[:, 0]
    return torch.where(finite, picked, 0), finite


def _fake(logits: torch.Tensor, *rest: object) -> tuple[torch.Tensor, torch.Tensor]:
    return (logits.new_empty(logits.shape[:1], dtype=torch.int64), logits.new_empty(logits.shape[:1], dtype=torch.bool))


Row = tuple[float, int, float, float]
"""temperature, top_k, top_p, min_p"""


def _arguments(logits: torch.Tensor, rows: tuple[Row, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Arguments of ``sample`` on the device of ``logits``; parameter rows repeat to fill the batch."""
    chosen = [rows[index % len(rows)] for index in range(len(logits))]
    temperature, top_k, top_p, min_p = (torch.tensor([row[field] for row in chosen], device=logits.device)
                                        for field in range(4))
    uniform = torch.rand(len(logits), generator=generator).to(logits.device)
    return logits, temperature.float(), top_k.int(), top_p.float(), min_p.float(), uniform


def _samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    plain: Row = (1.0, 0, 1.0, 0.0)
    rows: tuple[Row, ...] = (
        plain, (0.0, 0, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (1.3, 5, 1.0, 0.05), (1e-6, 0, 0.5, 0.0),
        (100.0, 100000, 0.3, 0.0), (0.8, 0, 0.95, 0.1), (1.0, 1, 1.0, 0.0), (100.0, 0, 1.0, 1.0),
    )

    def draw(count: int, vocabulary: int) -> torch.Tensor:
        return (3 * torch.randn(count, vocabulary, generator=generator)).to(device, dtype)

    def case(name: str, logits: torch.Tensor) -> Sample:
        return Sample(name, _arguments(logits, rows, generator))

    yield case("empty", draw(0, 10))
    yield case("one", draw(1, 7))
    yield case("one_word", draw(3, 1))
    yield case("rows", draw(27, 1003))
    yield case("vocabulary", draw(9, 20011))
    yield case("strided", draw(9, 601)[:, 50:450])
    yield case("ties", torch.round(draw(18, 333) / 4))
    yield case("equal", torch.zeros_like(draw(9, 64)))
    broken = draw(12, 97)
    broken[0, 5], broken[1, 96], broken[2] = math.nan, math.inf, -math.inf
    broken[3, :90], broken[4, 0], broken[5, 1::2] = -math.inf, -math.inf, -math.inf
    broken[6, 3], broken[6, 4], broken[7, 0], broken[7, 1] = math.inf, math.nan, math.nan, -math.inf
    yield case("not_finite", broken)


sample_op = define_op(OpSpec(
    name="sample",
    schema="(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor uniform) "
           "-> (Tensor, Tensor)",
    reference=sample, fake=_fake, samples=_samples,
))


def logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    """Log-softmax of each row of logits [M, V] at its target [M] (int64) and at its ``num_top`` likeliest tokens.

    Returns float32 log-probabilities [M] and int64 ranks [M] of the targets, ids [M, num_top] (int64) and
    log-probabilities [M, num_top] (float32) of the likeliest, and finite [M] (bool). Tokens are ordered by
    descending logit, then id; a rank is a token's place in that order, from 1. ``num_top`` is at most V.
    finite is False, and the other results are 0, where a logit is NaN or +inf or all are -inf.
    """
    values = logits.double()
    best = values.amax(dim=1)
    finite = torch.isfinite(best)
    values = values.masked_fill(~finite[:, None], 0.0)
    ordered, ids = values.sort(dim=1, descending=True, stable=True)
    normaliser = values.logsumexp(dim=1, keepdim=True)
    of_target = (values.gather(1, targets[:, None]) - normaliser)[:, 0]
    ranks = 1 + (ids == targets[:, None]).long().argmax(dim=1)
    top = (ordered - normaliser)[:, :num_top]
    return (of_target.float().masked_fill(~finite, 0.0), ranks.masked_fill(~finite, 0),
            ids[:, :num_top].masked_fill(~finite[:, None], 0), top.float().masked_fill(~finite[:, None], 0.0), finite)


def _fake_logprobs(logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> tuple[torch.Tensor, ...]:
    rows = logits.shape[0]
    return (logits.new_empty(rows, dtype=torch.float32), logits.new_empty(rows, dtype=torch.int64),
            logits.new_empty((rows, num_top), dtype=torch.int64),
            logits.new_empty((rows, num_top), dtype=torch.float32), logits.new_empty(rows, dtype=torch.bool))


def _logprob_samples(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterable[Sample]:
    def draw(count: int, vocabulary: int) -> torch.Tensor:
        return (3 * torch.randn(count, vocabulary, generator=generator)).to(device, dtype)

    def case(name: str, logits: torch.Tensor, num_top: int) -> Sample:
        targets = torch.randint(logits.shape[1], (len(logits),), generator=generator).to(device)
        return Sample(name, (logits, targets, num_top))

    yield case("empty", draw(0, 10), 3)
    yield case("one", draw(1, 7), 2)
    yield case("one_word", draw(3, 1), 1)
    yield case("none_asked", draw(5, 1003), 0)
    yield case("rows", draw(27, 1003), 20)
    yield case("all_asked", draw(4, 300), 300)
    yield case("vocabulary", draw(9, 20011), 5)
    yield case("strided", draw(9, 601)[:, 50:450], 7)
    yield case("ties", torch.round(draw(18, 333) / 4), 12)
    yield case("equal", torch.zeros_like(draw(9, 64)), 6)
    yield case("rising", torch.arange(97.0).expand(2, -1).to(device, dtype).contiguous(), 9)
    yield case("far_apart", torch.cat([draw(2, 50) - 10000, draw(2, 50)], dim=1), 60)
    broken = draw(12, 97)
    broken[0, 5], broken[1, 96], broken[2] = math.nan, math.inf, -math.inf
    broken[3, :90], broken[4, 0], broken[5, 1::2] = -math.inf, -math.inf, -math.inf
    broken[6, 3], broken[6, 4], broken[7, 0], broken[7, 1] = math.inf, math.nan, math.nan, -math.inf
    yield case("not_finite", broken, 11)


logprobs_op = define_op(OpSpec(
    name="logprobs",
    schema="(Tensor logits, Tensor targets, int num_top) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=logprobs, fake=_fake_logprobs, samples=_logprob_samples,
))
