"""Ctrl-C at any point of `submit` leaves no claim on a grammar, no unknown job and no held lock."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import stepgraph
from stepgraph import Constraint, Engine, FinishReason, Job
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.sampling.grammar import GrammarCompiler
from tests.helpers.toy_engines import Setup, make_engine
from tests.sampling.grammar.compile.test_compiler import waited

ROOT = os.path.dirname(os.path.abspath(stepgraph.__file__))


def interrupted(index: int, call: Callable[[], Any]) -> bool:
    """Raise KeyboardInterrupt at point `index` of a call; False if the call has fewer points.

    Points are the begin and end of every function of this package and the returns of C functions, except the end of `call` itself.
    """
    seen, depth = 0, 0

    def at(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen, depth
        depth += (event == "call") - (event == "return")
        if event in ("call", "return", "c_return") and depth > 0 and frame.f_code.co_filename.startswith(ROOT) and frame.f_code is not own:
            seen += 1
            if seen == index:
                raise KeyboardInterrupt

    own = interrupted.__code__
    sys.setprofile(at)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def claims(compiler: GrammarCompiler) -> int:
    return sum(len(entry.claims) for entry in compiler._cache._entries.values())


@pytest.mark.parametrize("kept", [True, False], ids=["found", "compiled"])
def test_interrupt_in_submit_leaves_no_job_claim_or_lock(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(Setup(k=0, max_rows=2, asynchronous=False, grammar_lane="host"), grammar_cache_bytes=1 << 20 if kept else 1) as engine:
        compiler, queue, others = engine._parts.compiler, engine.queue, list[Job]()
        assert compiler is not None
        submit = functools.partial(engine.submit, [1], constraint=Constraint.regex("a+b"), max_new_tokens=2)
        engine.compile(Constraint.regex("a+b"))

        def withdraw(queued: QueuedRequest) -> None:
            if not kept and queued.claim is not None and queued.claim.entry is not None:
                others.append(submit())  # another request with the same grammar, as from another thread
            RequestQueue.withdraw(queue, queued)

        monkeypatch.setattr(queue, "withdraw", withdraw)
        index = cancelled = 0
        while interrupted(index := index + 1, submit):
            cancelled += check_forgotten(engine, compiler)
            assert all(job.finish_reason == FinishReason.LENGTH for job in others)
        while engine.has_work:
            engine.step()
        assert index > 100 and cancelled > 0 and bool(others) != kept and claims(compiler) == 0


def check_forgotten(engine: Engine, compiler: GrammarCompiler) -> int:
    """Return the number of jobs, at most one, that were queued before the interrupt and are cancelled now."""
    cancelled = 0
    for _ in range(1000):
        if engine.has_work:
            cancelled += sum(event.finish_reason == FinishReason.CANCELLED for event in engine.step())
    stats = engine.stats()
    assert not engine.has_work and stats.waiting == 0 and stats.submitted == sum(count for _, count in stats.finished)
    waited(lambda: not compiler._threads, "an unused compile continues")
    assert compiler.stats.running == compiler.stats.waiting == claims(compiler) == 0
    return cancelled
