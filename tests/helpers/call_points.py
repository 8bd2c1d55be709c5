"""Faults in what an engine calls of others: methods of models and proposers, and the process that compiles grammars."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from stepgraph import Engine
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from tests.helpers.fault_points import Fault, Point


def call_raises(which: str, name: str) -> Point:
    """A method of one of the models, which are users' code: while a round is captured, or whenever Python runs it."""

    @contextlib.contextmanager
    def point(engine: Engine, fault: Fault) -> Iterator[None]:
        model = getattr(engine._parts.models, which)
        real = getattr(model, name)

        def call(*arguments: Any) -> Any:
            fault.strike()
            return real(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, name, call)
            yield

    return point


def worker_dies(behind: bool) -> Point:
    """The compile worker is killed in front of an exchange with it, or behind one: when it is set up, compiles, or has nothing to do."""

    @contextlib.contextmanager
    def point(engine: Engine, fault: Fault) -> Iterator[None]:
        compiler = engine._grammar_queue._compiler
        assert compiler is not None
        compiler._cache.clear()
        real = CompileWorker._exchange

        def exchange(worker: CompileWorker, parts: list[bytes], seconds: float) -> list[bytes]:
            process, due = worker._process, fault.due()
            assert process is not None
            if due and not behind:
                end(process.popen)
            answer = real(worker, parts, seconds)
            if due and behind:
                end(process.popen)
            return answer

        def end(popen: subprocess.Popen[bytes]) -> None:
            popen.kill()
            popen.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CompileWorker, "_exchange", exchange)
            yield

    return point
