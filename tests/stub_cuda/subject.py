"""The parts of stepgraph that most tests here use."""

from __future__ import annotations

import torch

from stepgraph import Constraint, Engine, EngineConfig
from stepgraph.graphs import Backend, BufferSpec, CaptureError, StaticBuffers, current_context, make_backend
from stepgraph.graphs.cuda import loop as cuda_loop
from tools.gpu.checks.context import VOCABULARY, toy_draft, toy_target

__all__ = [
    "Backend",
    "BufferSpec",
    "CaptureError",
    "Constraint",
    "Engine",
    "StaticBuffers",
    "cuda_loop",
    "current_context",
    "greedy_engine",
    "make_backend",
]


def greedy_engine(**changes: object) -> Engine:
    """A small engine with a draft model on the CUDA device: two rows, two drafts in every round, grammars on the host."""
    device = torch.device("cuda", 0)
    settings = {
        "max_rows": 2,
        "num_speculative_tokens": 2,
        "draft_length": changes.get("num_speculative_tokens", 2),
        "max_length": 256,
        "page_size": 8,
        "compile_isolation": "none",
        "grammar_lane": "host",
    }
    config = EngineConfig(**{**settings, "greedy_only": True, **changes})  # type: ignore[arg-type]
    return Engine(toy_target(device), toy_draft(device, 0.7), vocabulary=VOCABULARY, config=config)
