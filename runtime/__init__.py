"""Requests, rows and time: the engine and what a user holds of it."""

from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.request import FinishReason, Job, StepEvent, TokenLogprob
from stepgraph.runtime.stats import EngineStats
from stepgraph.sampling.grammar import Constraint, Vocabulary
from stepgraph.sampling.params import SamplingParams

__all__ = [
    "Constraint",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "FinishReason",
    "Job",
    "SamplingParams",
    "StepEvent",
    "TokenLogprob",
    "Vocabulary",
]
