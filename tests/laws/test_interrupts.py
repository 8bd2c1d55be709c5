"""Ctrl-C at any point of `submit` leaves no claim on a grammar, no unknown job and no held lock, and in other calls no unfinished job."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import stepgraph
from stepgraph import Constraint, Engine, EngineClosedError, EngineConfig, FinishReason, Job
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.sampling.grammar import GrammarCompiler
from tests.helpers.toy_engines import DRAFTERS, TARGET, VOCABULARY, Setup, finish, make_engine
from tests.laws.test_fault_sweep import threads
from tests.sampling.grammar.compile.test_compiler import waited

ROOT = os.path.dirname(os.path.abspath(stepgraph.__file__))


def interrupted(index: int, call: Callable[[], Any], file: str = "") -> bool:
    """Raise KeyboardInterrupt at point `index` of a call, counted in one file if given; False if the call has fewer points.

    Points are the begin and end of every function of this package and the returns of C functions, except the end of `call` itself.
    """
    seen, depth, start = 0, 0, os.path.join(ROOT, file)

    def at(frame: FrameType, event: str, argument: object) -> None:
        nonlocal seen, depth
        depth += (event == "call") - (event == "return")
        if event in ("call", "return", "c_return") and depth > 0 and frame.f_code.co_filename.startswith(start) and frame.f_code is not own:
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
        finish(engine)
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


def test_interrupt_at_the_step_lock_releases_it() -> None:
    with make_engine(Setup(k=0, max_rows=1, eager=True)) as engine:
        index = 0
        while interrupted(index := index + 1, engine.step, "runtime/step_lock.py"):
            other = threading.Thread(target=engine.step, daemon=True)
            other.start()
            other.join(5)
            assert not other.is_alive()
        assert index > 3


@pytest.mark.parametrize("file", ["runtime/scheduler.py", "runtime/watchdog.py"])
def test_interrupted_close_can_be_repeated(file: str) -> None:
    before, engine = threads(), make_engine(Setup(k=0, max_rows=2, eager=True))
    jobs = [engine.submit([token], max_new_tokens=8) for token in (1, 2)]
    engine.step()
    assert interrupted(1, engine.close, file)
    engine.close()
    assert [job.finish_reason for job in jobs] == [FinishReason.CANCELLED] * 2
    waited(lambda: threads() <= before, "a thread is still running")


def test_interrupted_calibration_closes_the_engine() -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=1, max_length=32, greedy_only=True, eager=True, backend="tape")
    engine = Engine(TARGET, DRAFTERS["fair"](), vocabulary=VOCABULARY, config=config)
    assert interrupted(3, engine.capture, "runtime/calibration.py")
    with pytest.raises(EngineClosedError, match=r"KeyboardInterrupt: in capture\(\), which closed the engine"):
        engine.submit([1])
