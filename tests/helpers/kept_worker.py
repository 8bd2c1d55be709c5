"""One compile worker for all checks of constraints: starting one per check is slow."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from stepgraph.sampling.grammar import GrammarLimits, Vocabulary
from stepgraph.sampling.grammar.compile import backends
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker

_start = functools.cache(CompileWorker)


def keep_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the default limits; others have a worker of their own."""

    def worker(vocabulary: Vocabulary, limits: GrammarLimits, max_threads: int) -> Any:
        if limits != GrammarLimits():
            return CompileWorker(vocabulary, limits, max_threads)
        return SimpleNamespace(call=_start(vocabulary, limits, max_threads).call, close=lambda: None)

    monkeypatch.setattr(backends, "CompileWorker", worker)
