"""Fault injection into model and proposer methods, and into the grammar compile worker."""

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
    """A model method raises: during capture, or in any call that Python makes."""

    @contextlib.contextmanager
    def point(engine: Engine, fault: Fault) -> Iterator[None]:
        model = getattr(engine._parts.models, which)
        original = getattr(model, name)

        def call(*arguments: Any) -> Any:
            fault.strike()
            return original(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, name, call)
            yield

    return point


def worker_dies(after: bool) -> Point:
    """Kill the compile worker before an exchange with it or, with `after`, after one: at set-up, while compiling or when idle."""

    @contextlib.contextmanager
    def point(engine: Engine, fault: Fault) -> Iterator[None]:
        compiler = engine._parts.compiler
        assert compiler is not None
        compiler._cache.clear()
        original = CompileWorker._exchange

        def exchange(worker: CompileWorker, *arguments: Any, **options: Any) -> tuple[str, bool, bytes]:
            process, due = worker._process, fault.due()
            assert process is not None
            if due and not after:
                end(process.popen)
            answer = original(worker, *arguments, **options)
            if due and after:
                end(process.popen)
            return answer

        def end(popen: subprocess.Popen[bytes]) -> None:
            popen.kill()
            popen.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CompileWorker, "_exchange", exchange)
            yield

    return point
