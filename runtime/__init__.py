"""Requests, rows and time: the engine and what a user holds of it.

Names are imported when they are asked for: `stepgraph --help` need not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepgraph.runtime.aio import AsyncEngine
    from stepgraph.runtime.config import EngineConfig
    from stepgraph.runtime.engine import Engine
    from stepgraph.runtime.request import EngineClosedError, FinishReason, Job, Origin, QueueFullError, StepEvent, TokenLogprob
    from stepgraph.runtime.stats import EngineStats
    from stepgraph.sampling.grammar import Constraint, Vocabulary
    from stepgraph.sampling.params import SamplingParams

__all__ = [
    "AsyncEngine",
    "Constraint",
    "Engine",
    "EngineClosedError",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "Job",
    "Origin",
    "QueueFullError",
    "SamplingParams",
    "StepEvent",
    "TokenLogprob",
    "Vocabulary",
]
_HOMES = {
    "AsyncEngine": "runtime.aio",
    "Constraint": "sampling.grammar",
    "Engine": "runtime.engine",
    "EngineClosedError": "runtime.request",
    "EngineConfig": "runtime.config",
    "EngineStats": "runtime.stats",
    "FinishReason": "runtime.request",
    "Job": "runtime.request",
    "Origin": "runtime.request",
    "QueueFullError": "runtime.request",
    "SamplingParams": "sampling.params",
    "StepEvent": "runtime.request",
    "TokenLogprob": "runtime.request",
    "Vocabulary": "sampling.grammar",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"stepgraph.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
