"""Compiles in background threads and worker processes, which may crash, hang or exceed limits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, GrammarLimits, MaskStatus
from stepgraph.sampling.grammar.compile.limits import MIB
from stepgraph.sampling.grammar.compile.worker import receive
from stepgraph.sampling.grammar.compile.worker_process import CompileWorker
from tests.helpers.documents import DOCUMENTS
from tests.helpers.grammar_texts import EXAMPLES, PRINTABLE, STOP, encode, fill_mask, take_claim
from tests.helpers.toy_engines import needs_native

SLOW = replace(Constraint.ebnf("root ::= " + "[a]*" * 29_000), backend="xgrammar")  # minutes
GREEDY = replace(Constraint.ebnf("root ::= " + "[a]?" * 29_000), backend="xgrammar")  # gigabytes


def isolated(**limits: float) -> GrammarCompiler:
    return GrammarCompiler(PRINTABLE, 1, isolation="process", limits=GrammarLimits(**limits))  # type: ignore[arg-type]


COMPILER = isolated()
PLAIN = GrammarCompiler(PRINTABLE, 1)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_worker_and_in_process_compiles_give_the_same_masks(kind: str) -> None:
    constraint, good, _ = EXAMPLES[kind]
    there, here = COMPILER.compile(constraint), PLAIN.compile(constraint)
    assert (there.backend, there.nbytes) == (here.backend, here.nbytes)
    matchers = there.matcher(), here.matcher()
    for token in [*encode(good), STOP]:
        first, second = map(fill_mask, matchers)
        assert first == second and token in first[1]
        assert all(matcher.accept_token(token) for matcher in matchers)
    assert fill_mask(matchers[0]) == (MaskStatus.TERMINATED, [])


def test_equal_constraints_share_one_compile() -> None:
    compiler = isolated()
    claims = [take_claim(compiler, Constraint.regex("a[b-f]{3}")) for _ in range(4)]
    assert len({id(claim.result(60)) for claim in claims}) == 1
    assert (compiler.stats.misses, compiler.stats.hits, compiler.stats.workers_started) == (1, 3, 1)
    compiler.close()


def waited(condition: Callable[[], bool], what: str) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(what)


def busy_worker(compiler: GrammarCompiler) -> int:
    """The process that is compiling SLOW."""

    def waits_for_answer() -> bool:  # a process that is lost before it has the request is replaced, and the compile goes on
        stacks = sys._current_frames()
        threads = [thread.ident for thread in compiler._threads if thread.ident in stacks]
        return any(frame.f_code is receive.__code__ for ident in threads for frame, _ in traceback.walk_stack(stacks[ident]))

    waited(waits_for_answer, "no worker was started")
    (worker,) = compiler._running.values()
    assert worker is not None and worker.pid is not None
    return worker.pid


def gone(pid: int) -> bool:
    """Whether the process has ended and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_compile_is_cancelled_when_its_last_claim_is_released() -> None:
    compiler = isolated(compile_seconds=600)
    claims = [take_claim(compiler, SLOW) for _ in range(2)]
    pid = busy_worker(compiler)
    claims[0].release()
    claims[0].release()
    assert not gone(pid) and compiler.stats.running == 1, "the other claim is still held"
    claims[1].release()
    waited(lambda: compiler.stats.running == 0, "the compile continues")
    assert gone(pid) and (compiler.stats.failures, compiler.stats.grammars) == (0, 0)
    assert compiler.compile(Constraint.regex("a")).nbytes > 0, "the next compile has a new worker"
    compiler.close()


def test_waiting_compile_without_claims_is_not_started() -> None:
    compiler = GrammarCompiler(PRINTABLE, 1, isolation="process", max_compiles=1, limits=GrammarLimits(compile_seconds=600))
    first, second = take_claim(compiler, SLOW), take_claim(compiler, Constraint.regex("b+"))
    busy_worker(compiler)
    assert (compiler.stats.running, compiler.stats.waiting) == (1, 1)
    second.release()
    assert (compiler.stats.running, compiler.stats.waiting) == (1, 0)
    first.release()
    waited(lambda: compiler.stats.running == 0, "the compile continues")
    compiler.close()


@needs_native
@pytest.mark.parametrize("killer", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_death_of_a_worker_fails_one_request_with_its_cause(killer: signal.Signals) -> None:
    compiler = isolated(compile_seconds=600)
    claim = take_claim(compiler, SLOW)
    pid = busy_worker(compiler)
    other = take_claim(compiler, Constraint.regex("b+"))
    os.kill(pid, killer)
    with pytest.raises(ValueError, match=f"constraint ebnf: cannot be compiled: the compile worker died of {killer.name}"):
        claim.result(60)
    assert other.result(60).backend == "automaton" and gone(pid)
    assert compiler.compile(Constraint.regex("c+")).backend == "automaton"
    assert compiler.stats.failures == 1
    compiler.close()


@needs_native
@pytest.mark.parametrize(
    ("limits", "constraint", "message"),
    [
        ({"compile_seconds": 0.3}, SLOW, r"GrammarLimits.compile_seconds: got a compile that takes longer, expected at most 0.3 s"),
        (
            {"compile_bytes": 40 * MIB},
            GREEDY,
            r"GrammarLimits.compile_bytes: got a compile that takes more, expected at most 40 MiB of memory",
        ),
        (
            {"result_bytes": 2000},
            Constraint.json_object(backend="xgrammar"),
            r"GrammarLimits.result_bytes: got \d.* of compiled grammar, expected at most 2,000",
        ),
        ({"max_chars": 30}, Constraint.regex("a" * 31), r"GrammarLimits.max_chars: got 31 characters, expected at most 30"),
        (
            {"max_nesting": 3},
            Constraint.ebnf('root ::= (((("a"))))'),
            r"GrammarLimits.max_nesting: got 4 brackets open at once, expected at mos",
        ),
    ],
)
def test_exceeded_limit_is_named_and_the_next_compile_succeeds(limits: dict[str, float], constraint: Constraint, message: str) -> None:
    compiler = isolated(**limits)
    with pytest.raises(ValueError, match=f"constraint {constraint.kind}: cannot be compiled: {message}"):
        compiler.compile(constraint)
    assert compiler.compile(Constraint.regex("b")).backend == "automaton"
    compiler.close()


LLGUIDANCE_LIMITS = [
    ({"compile_fuel": 20}, Constraint.regex("([a-z]+[0-9]){3,900}x", "llguidance"), "compile_fuel"),
    ({"compile_fuel": 10_000}, Constraint.regex("a?" * 1000 + "a" * 1000, "llguidance"), "compile_fuel"),
    ({"grammar_symbols": 20}, Constraint.json_object(backend="llguidance"), "grammar_symbols"),
    ({"lexer_states": 20}, Constraint.json_object(backend="llguidance"), "lexer_states"),
    ({"mask_items": 1}, Constraint.json_object(backend="llguidance"), "mask_items"),
]


@pytest.mark.parametrize(("limits", "constraint", "field"), LLGUIDANCE_LIMITS)
def test_llguidance_fuel_follows_the_limits(limits: dict[str, int], constraint: Constraint, field: str) -> None:
    compiler = GrammarCompiler(PRINTABLE, limits=GrammarLimits(**limits))
    with pytest.raises(ValueError, match=rf"(?s)constraint .*: cannot be compiled: .*\(GrammarLimits.{field}\)"):
        compiler.compile(constraint)
    assert GrammarCompiler(PRINTABLE).compile(constraint).backend == "llguidance"


def test_invalid_settings_raise_with_the_field() -> None:
    with pytest.raises(ValueError, match=r"GrammarCompiler.backend: got 'auto,', expected one of 'auto', 'automaton'"):
        GrammarCompiler(PRINTABLE, backend="auto,")  # type: ignore[arg-type]
    for wrong, message in (
        ({"compile_seconds": 0}, "GrammarLimits.compile_seconds: got 0, expected a number above 0"),
        ({"compile_seconds": float("nan")}, "GrammarLimits.compile_seconds: got nan"),
        ({"compile_bytes": 1.5}, "GrammarLimits.compile_bytes: got 1.5, expected a whole number from 1"),
        ({"max_nesting": True}, "GrammarLimits.max_nesting: got True"),
        ({"automaton_bytes": 2**33}, "GrammarLimits.automaton_bytes: got 8589934592, expected a whole number from 1 to 8589934588"),
        ({"max_schema_chars": 2 * 10**6}, "GrammarLimits.max_schema_chars: got 2000000, expected a whole number from 1 to 1000000"),
    ):
        with pytest.raises(ValueError, match=message):
            GrammarLimits(**wrong)


def test_documentation_lists_every_limit_with_its_default() -> None:
    text = DOCUMENTS["docs/constrain.md"]
    documented = dict[str, str]()
    for names, values in re.findall(r"^\| (`\w+`.*?) \| (.*?) \|", text, re.MULTILINE):
        documented |= dict(zip(names.split(", "), values.split(", "), strict=False))
    for field in fields(GrammarLimits):
        number, *unit = documented[f"`{field.name}`"].replace(",", "").split()
        assert float(number) * ({"MiB": MIB, "GiB": 1024 * MIB}[unit[0]] if unit else 1) == getattr(GrammarLimits(), field.name), field.name


def test_close_fails_waiting_claims_and_ends_the_workers() -> None:
    compiler = GrammarCompiler(PRINTABLE, 1, isolation="process", max_compiles=1, limits=GrammarLimits(compile_seconds=600))
    running, waiting = take_claim(compiler, SLOW), take_claim(compiler, Constraint.regex("b+"))
    pid = busy_worker(compiler)
    compiler.close()
    for claim in (running, waiting):
        with pytest.raises(ValueError, match=r"constraint .*: cannot be compiled: the compile"):
            claim.result(60)
        claim.release()
    waited(lambda: gone(pid), "the worker is still alive")
    with pytest.raises(RuntimeError, match="it is closed"):
        take_claim(compiler, Constraint.regex("b+"))


SCRIPT = """
import os, sys
from stepgraph.sampling.grammar import Constraint, GrammarCompiler, Vocabulary

compiler = GrammarCompiler(Vocabulary.printable(), 1, isolation="process")
compiler.compile(Constraint.regex("a+"))
worker = compiler._idle_workers[-1]
first, child = worker.pid, os.fork()
if child == 0:
    compiler.compile(Constraint.regex("b+"))  # with a worker of its own
    assert worker.pid != first and worker.processes_started == 2
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
compiler.compile(Constraint.regex("c+"))
assert worker.pid == first and worker.processes_started == 1, "the fork ended its parent's worker"
print(worker.pid)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.slow
def test_worker_ends_with_its_parent_and_survives_a_fork() -> None:
    """The script comes from standard input, so there is no main module to import; the compiler is not closed."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-"], input=SCRIPT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
    waited(lambda: gone(int(found.stdout)), "the worker is still alive")


@needs_native
def test_error_when_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = isolated()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(ValueError, match=r"cannot be compiled: the compile worker did not start: .*No such file"):
        compiler.compile(Constraint.regex("a"))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match="cannot be compiled: the compile worker ended with exit code 1, before it was ready"):
        compiler.compile(Constraint.regex("a"))
    monkeypatch.undo()
    assert compiler.compile(Constraint.regex("a")).backend == "automaton"
    compiler.close()


@needs_native
def test_late_kill_does_not_cancel_the_next_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last claim is released just as the compile returns, and the killed worker has not ended yet."""
    compiler = isolated()
    compiler.compile(Constraint.regex("a"))
    worker = compiler._idle_workers[-1]
    assert worker is not None and worker._process is not None
    popen, dying = worker._process.popen, list[int]()
    kill = popen.kill
    monkeypatch.setattr(popen, "kill", lambda: kill() if dying else dying.append(popen.pid))
    worker.kill()
    assert compiler.compile(Constraint.regex("b")).backend == "automaton"
    assert worker.processes_started == 2 and gone(dying[0])
    compiler.close()


def test_cancelled_compile_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, goes_on = GrammarCompiler(PRINTABLE, 1), threading.Event()
    compiler.compile(Constraint.regex("a"))
    build = compiler._backends.build
    monkeypatch.setattr(compiler._backends, "build", lambda *arguments: goes_on.wait(60) and build(*arguments))
    claim = take_claim(compiler, Constraint.regex("b"))
    waited(lambda: compiler.stats.running == 1, "no compile was started")
    claim.release()
    assert (compiler.stats.running, compiler.stats.grammars) == (1, 1)
    goes_on.set()
    waited(lambda: compiler.stats.running == 0, "the compile continues")
    assert (compiler.stats.grammars, compiler.stats.failures) == (1, 0)


@needs_native
def test_claim_without_a_thread_leaves_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    compiler = GrammarCompiler(PRINTABLE, 1)
    monkeypatch.setattr(threading.Thread, "start", fails)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        take_claim(compiler, Constraint.regex("a"))
    monkeypatch.undo()
    assert (compiler.stats.waiting, compiler.stats.misses) == (0, 0)
    assert take_claim(compiler, Constraint.regex("a")).result(60).backend == "automaton"


@needs_native
def test_worker_is_closed_by_one_thread_if_the_compiler_is_closed_just_after_a_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that close it at a time may fail, and the claims of the compile then wait for ever."""

    def counted(worker: CompileWorker) -> None:
        closed.append(worker)
        close(worker)

    class ClosedAfterAppend(list[CompileWorker | None]):
        def append(self, worker: CompileWorker | None) -> None:
            super().append(worker)
            compiler.close()

    compiler, closed, close = isolated(), list[CompileWorker](), CompileWorker.close
    monkeypatch.setattr(CompileWorker, "close", counted)
    compiler._idle_workers = ClosedAfterAppend(compiler._workers[:1])
    claim = take_claim(compiler, Constraint.regex("a"))
    assert claim.result(60).backend == "automaton"
    assert len(closed) == 2, "before its process was started, and with the compiler"
