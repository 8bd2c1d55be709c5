"""Host nodes of the native link do not use the interpreter: they run while another thread holds the GIL, without any bytecode."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

from stepgraph import Constraint
from stepgraph.graphs.context import FirstError
from stepgraph.graphs.cuda.context import HostCallback
from stepgraph.graphs.tape.player import HostCall
from stepgraph.sampling.grammar import MaskStatus
from stepgraph.sampling.grammar.link.native import NativeLink, NativeRow
from stepgraph.sampling.grammar.link.protocol import HostLink, MatcherRow
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.protocol import Matcher
from tests.helpers.link_bench import ROUND_STEPS, XGRAMMAR_COMPILER, A, Memory, letters_row, native_link, set_running
from tests.helpers.planted import plant
from tests.helpers.toy_engines import CONTROL, Setup, finish, make_engine, needs_native, plain
from tools.gpu.checks.timing import call_under_the_gil

pytestmark = needs_native
BOTH_LIBRARIES = [Constraint.regex("[a-z]+", "xgrammar"), Constraint.regex("[a-z]+", "llguidance")]


def run_under_the_gil(link: HostLink, rows: list[MatcherRow], rounds: int, seconds: float) -> tuple[list[int], int, int]:
    """Run rounds on a C thread while this thread holds the GIL. Returns when each round ended, and the time span of the GIL."""
    log = np.zeros((rounds + 1, 3), np.int64)
    link.log_nodes(log)
    for _ in range(rounds):
        link.push_batch(rows)
    start, end = call_under_the_gil(HostCallback("walk", link.node(ROUND_STEPS), FirstError()), rounds, seconds)
    return log[1 : 1 + log[0, 0], 2].tolist(), start, end


@pytest.mark.parametrize("threads", [1, 3])
def test_rounds_complete_while_another_thread_holds_the_gil(threads: int) -> None:
    """Rows of both libraries, without a marker and with markers that end inside the drafts."""
    memory, rounds = Memory.make(16, 3), 200
    link = native_link(memory, depth=rounds, threads=threads)
    constraints = BOTH_LIBRARIES + [constraint.after(marker) for marker in ("aa", [A], "b") for constraint in BOTH_LIBRARIES]
    rows: list[MatcherRow] = [
        link.row(owner, XGRAMMAR_COMPILER.compile(constraint).matcher()) for owner, constraint in enumerate(2 * constraints, 1)
    ]
    for slot, row in enumerate(rows):
        set_running(memory, row, slot)
    memory.drafts[:] = A
    finished, start, end = run_under_the_gil(link, rows, rounds, 2.0)
    assert len(finished) == rounds and start < finished[0] and finished[-1] < end, "all rounds ran while the GIL was held"
    assert link.stats.fills == rounds * 16 * 4
    assert [row.fault for row in rows] == [""] * 16
    assert memory.tags[:, :, 3].tolist() == [[MaskStatus.OK] * 16] * 4


def test_python_rounds_wait_for_the_gil() -> None:
    """The negative control of the test above."""
    memory = Memory.make(2, 3)
    link = PythonLink(*memory.all)
    rows: list[MatcherRow] = [letters_row(link, owner) for owner in (1, 2)]
    for slot, row in enumerate(rows):
        set_running(memory, row, slot)
    finished, _, end = run_under_the_gil(link, rows, 1, 0.6)
    assert finished[0] > end and link.stats.fills > 0


def bytecodes_in_host_nodes(host_link: str, constraints: Sequence[Constraint]) -> tuple[int, int]:
    """Calls of host nodes in a run on the tape, and bytecodes executed inside them."""
    source, first = inspect.getsourcelines(HostCall.__call__)
    (call_line,) = (first + offset for offset, text in enumerate(source) if "self._function()" in text)
    calls, bytecodes = [0], [0]

    def in_a_node(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not HostCall.__call__.__code__:
            frame = frame.f_back
        return frame is not None and frame.f_lineno == call_line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is HostCall.__call__.__code__:
            calls[0] += event == "line" and frame.f_lineno == call_line
            return trace
        if not in_a_node(frame.f_back):
            return None
        frame.f_trace_opcodes = True
        bytecodes[0] += event == "opcode"
        return trace

    before = threading.gettrace()  # of a coverage run
    threading.settrace(trace)  # for threads started from now on: the tape's
    try:
        engine = make_engine(Setup(k=3, host_link=host_link, grammar_lane="host"))
        jobs = [engine.submit([index], constraint=constraint, max_new_tokens=8) for index, constraint in enumerate(constraints)]
        finish(engine)
        engine.close()
    finally:
        threading.settrace(before)
    for index, (job, constraint) in enumerate(zip(jobs, constraints, strict=True)):
        assert job.tokens == plain([index], 8, constraint).tokens, job.error
    assert calls[0] == engine.backend.stats.host_nodes
    return calls[0], bytecodes[0]


def test_no_bytecode_runs_inside_a_host_node() -> None:
    """With both libraries, without and with markers."""
    marked = [Constraint.json_object(backend="xgrammar").after("a"), Constraint.json_object(backend="llguidance").after([CONTROL])]
    calls, bytecodes = bytecodes_in_host_nodes("native", [*marked, *BOTH_LIBRARIES])
    assert calls > 10 and bytecodes == 0


def test_bytecodes_of_the_python_link_and_of_python_functions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above."""
    constraint = Constraint.json_object()
    calls, bytecodes = bytecodes_in_host_nodes("python", [constraint])
    assert calls > 10 and bytecodes > 100
    real = NativeLink.row

    def in_python(link: NativeLink, owner: int, matcher: Matcher, committed: int = 0) -> NativeRow:
        row = real(link, owner, matcher, committed)
        plant(row, "fill", lambda fill, *arguments: int(fill(*arguments)))
        return row

    monkeypatch.setattr(NativeLink, "row", in_python)
    calls, bytecodes = bytecodes_in_host_nodes("native", [constraint])
    assert calls > 10 and bytecodes > calls
