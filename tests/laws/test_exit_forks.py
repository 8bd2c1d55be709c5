"""Forks of a process with an open engine: calls raise, nothing hangs, and the parent process is not affected."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepgraph import Constraint, Engine, EngineConfig, Job
from stepgraph.graphs import TapeBackend
from stepgraph.runtime.replay import read_recording
from stepgraph.sampling.lifetimes import FORKED_ERROR
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, TARGET, VOCABULARY, finish, plain
from tools.train.saved_states import SavedStates

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")

CHILD_SECONDS = 30  # after which SIGALRM ends a child that hangs
ASKS = (([1], None), ([2], CONSTRAINTS[1]), ([3], CONSTRAINTS[4]))


def make(folder: Path) -> Engine:
    config = EngineConfig(
        max_rows=2,
        num_speculative_tokens=2,
        draft_length=2,
        max_length=64,
        page_size=8,
        greedy_only=True,
        eager=True,
        compile_isolation="process",
        save_hidden_states=folder / "states",
        backend="tape",
    )
    backend = TapeBackend(asynchronous=True)
    engine = Engine(TARGET, DRAFTERS["fair"](), vocabulary=VOCABULARY, config=config, backend=backend, record=folder / "record.jsonl")
    engine.capture()
    return engine


@contextlib.contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Another thread holds all locks, and in a fork never releases them."""
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        compiler, link, writer = engine._parts.compiler, engine._parts.host_link, engine._parts.hidden_states.writer  # type: ignore[union-attr]
        others = writer._lock, engine._scheduler._recorder._lock, compiler._lock, getattr(link, "_closing", None)  # type: ignore[union-attr]
        with contextlib.ExitStack() as stack:
            for lock in filter(None, (engine.step_lock.entered(), engine.queue.lock, *others)):
                stack.enter_context(lock)
            inside.set()
            go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    yield
    go.set()
    thread.join()


class Child:
    """A forked process that reports one line for each call, and then waits for release()."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        reader, writer_end = os.pipe()
        self._release_pipe, end = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(CHILD_SECONDS)
            os.close(end)
            os.write(writer_end, "\n".join(map(outcome, calls)).encode())
            os.close(writer_end)
            os.read(self._release_pipe, 1)
            os._exit(0)
        os.close(writer_end)
        self._end = end
        with open(reader, encoding="utf-8") as pipe:
            self.lines = pipe.read().splitlines()

    def release(self) -> int:
        os.close(self._end)
        os.close(self._release_pipe)
        return os.waitpid(self.pid, 0)[1]


def outcome(call: Callable[[], object]) -> str:
    try:
        return f"{call()}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def worker_pid(engine: Engine) -> int | None:
    compiler = engine._parts.compiler
    assert compiler is not None
    return next((worker.pid for worker in compiler._workers if worker is not None and worker.pid is not None), None)


def submitted(engine: Engine) -> list[Job]:
    for _, constraint in ASKS:
        if constraint is not None:
            engine.compile(constraint)
    return [engine.submit(prompt, constraint=constraint, max_new_tokens=20) for prompt, constraint in ASKS]


def check_goes_on(engine: Engine, jobs: list[Job], worker: int | None) -> None:
    """All jobs have the expected tokens, and the compile worker is the same process."""
    finish(engine)
    for job, (prompt, constraint) in zip(jobs, ASKS, strict=True):
        answer = plain(prompt, 20, constraint)
        assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)
    engine.compile(Constraint.regex("k+"))
    assert worker_pid(engine) == worker


def test_fork_raises_and_changes_nothing_for_the_parent(tmp_path: Path) -> None:
    engine = make(tmp_path)
    jobs, worker = submitted(engine), worker_pid(engine)
    engine.step()
    engine.step()
    with held(engine):
        child = Child(
            engine.step,
            engine.wait,
            lambda: engine.submit([5]),
            engine.capture,
            engine.trace,
            lambda: engine.compile(Constraint.regex("q+")),
            lambda: list(engine.stream()),
            lambda: engine.cancel(jobs[1]),
            lambda: {(str(job.finish_reason), job.error) for job in jobs[1:]},
            lambda: engine.stats().submitted,
            engine.close,
        )
    refused = [f"EngineClosedError: Engine.{call}(): {FORKED_ERROR}" for call in ("step", "wait", "submit", "capture", "trace", "compile")]
    assert child.lines == [*refused, "[]", "False", str({("error", FORKED_ERROR)}), "3", "None"]
    other = Child(vars(engine).clear, lambda: gc.collect() >= 0)  # collecting it in the child does not affect the parent
    assert (other.lines, other.release()) == (["None", "True"], 0)
    check_goes_on(engine, jobs, worker)
    engine.close()
    assert child.release() == 0
    assert len(SavedStates(tmp_path / "states")) == len(jobs), "the child wrote its copy of the hidden states"
    recorded = read_recording(tmp_path / "record.jsonl")
    assert [request.tokens for request in recorded.requests] == [job.tokens for job in jobs]
    assert recorded.ending == "the engine was closed" and recorded.path.read_bytes().count(b'"kind":"closed"') == 1
