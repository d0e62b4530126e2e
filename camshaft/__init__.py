"""Camshaft: build once, run optimised, schedule dynamically.

Importing the package loads no torch; names resolve on first use.
"""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camshaft.api.llm import LLM as LLM
    from camshaft.api.outputs import CompletionOutput as CompletionOutput
    from camshaft.api.outputs import Logprob as Logprob
    from camshaft.api.outputs import RequestOutput as RequestOutput
    from camshaft.builder.build import build as build
    from camshaft.config.build import BuildConfig as BuildConfig
    from camshaft.config.runtime import KvCacheConfig as KvCacheConfig
    from camshaft.config.runtime import SchedulerConfig as SchedulerConfig
    from camshaft.config.sampling import SamplingParams as SamplingParams
    from camshaft.core.errors import CamshaftError as CamshaftError
    from camshaft.core.errors import CapacityError as CapacityError
    from camshaft.core.errors import EngineError as EngineError
    from camshaft.core.errors import InternalError as InternalError
    from camshaft.core.errors import UserError as UserError
    from camshaft.runtime.step import LogitsProcessor as LogitsProcessor

__version__ = "0.1.0"

_HOMES = MappingProxyType({
    "BuildConfig": "camshaft.config.build",
    "CamshaftError": "camshaft.core.errors",
    "CapacityError": "camshaft.core.errors",
    "CompletionOutput": "camshaft.api.outputs",
    "EngineError": "camshaft.core.errors",
    "InternalError": "camshaft.core.errors",
    "KvCacheConfig": "camshaft.config.runtime",
    "LLM": "camshaft.api.llm",
    "LogitsProcessor": "camshaft.runtime.step",
    "Logprob": "camshaft.api.outputs",
    "RequestOutput": "camshaft.api.outputs",
    "SamplingParams": "camshaft.config.sampling",
    "SchedulerConfig": "camshaft.config.runtime",
    "UserError": "camshaft.core.errors",
    "build": "camshaft.builder.build",
})

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> object:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'camshaft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
