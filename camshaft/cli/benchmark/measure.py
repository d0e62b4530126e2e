"""Running a workload and noting when what arrived. Owns concurrency and the clock; judges nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from camshaft.cli.benchmark.workload import BenchRequest
from camshaft.config.sampling import SamplingParams

if TYPE_CHECKING:
    from camshaft.api.llm import LLM


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One request as its caller saw it; seconds of one clock."""

    asked_s: float
    first_s: float
    """First token."""
    ended_s: float
    num_input: int
    num_cached: int
    """Prompt tokens served from shared pages."""
    token_ids: tuple[int, ...]


def run_requests(llm: LLM, requests: Sequence[BenchRequest], concurrency: int | None,
                 advance: Callable[[int], None] = lambda amount: None) -> list[Timing]:
    """Run ``requests``, at most ``concurrency`` of them at once (None: all), greedily and to their full length.

    Raises what the engine refuses a request with, or the error of one that failed.
    """
    return asyncio.run(_run_all(llm, requests, concurrency or len(requests), advance))


async def _run_all(llm: LLM, requests: Sequence[BenchRequest], concurrency: int,
                   advance: Callable[[int], None]) -> list[Timing]:
    places = asyncio.Semaphore(max(concurrency, 1))

    async def run(request: BenchRequest) -> Timing:
        async with places:
            timing = await _run(llm, request)
        advance(1)
        return timing

    return list(await asyncio.gather(*map(run, requests)))


async def _run(llm: LLM, request: BenchRequest) -> Timing:
    params = SamplingParams(max_tokens=request.output_len, min_tokens=request.output_len, temperature=0.0,
                            ignore_eos=True, detokenize=False)
    asked = first = time.perf_counter()
    stream = llm.generate_async(request.prompt_token_ids, params)
    num_seen = 0
    async for output in stream:
        if not num_seen:
            first, num_seen = time.perf_counter(), len(output.outputs[0].token_ids)
    return Timing(asked_s=asked, first_s=first, ended_s=time.perf_counter(), num_input=len(request.prompt_token_ids),
                  num_cached=output.num_cached_tokens, token_ids=tuple(output.outputs[0].token_ids))
