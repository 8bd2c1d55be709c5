"""One compile worker for all checks of constraints: starting one per check is slow."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from stepgraph.sampling.grammar import GrammarLimits
from stepgraph.sampling.grammar.compile import backends
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker

_start = functools.cache(CompileWorker)


class _Kept:
    """Its user does not close it; a call that reaches a limit does."""

    def __init__(self, *settings: Any, **options: Any) -> None:
        self._worker = _start(*settings, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)

    def close(self) -> None:
        pass


def keep_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the default limits; others have a worker of their own."""
    monkeypatch.setattr(
        backends,
        "CompileWorker",
        lambda vocabulary, limits, **options: (_Kept if limits == GrammarLimits() else CompileWorker)(vocabulary, limits, **options),
    )
