"""Host nodes of the native link need no interpreter: they run while its lock is held, and no bytecode runs in them."""

from __future__ import annotations

import ctypes
import inspect
import threading
import time
from collections.abc import Sequence
from ctypes import byref, c_void_p
from types import FrameType
from typing import Any

import pytest

from stepgraph import Constraint
from stepgraph.graphs.cuda.driver import HostCallback, HostErrors
from stepgraph.graphs.tape.player import HostCall
from stepgraph.sampling.grammar import GrammarCompiler, MaskStatus
from stepgraph.sampling.grammar.link.layout import CallListStruct, CallStruct
from stepgraph.sampling.grammar.link.library import load
from stepgraph.sampling.grammar.link.native import NativeLink
from stepgraph.sampling.grammar.link.protocol import HostLink, MatcherRow
from stepgraph.sampling.grammar.link.python import PythonLink
from tests.helpers.link_bench import WALK, A, Foreign, Memory, letters, native_link, running
from tests.helpers.toy_engines import COMPILER, CONTROL, VOCABULARY, Setup, make_engine, needs_native, plain

pytestmark = needs_native
ANY = Constraint.json_object()
BOTH = [Constraint.regex("[a-z]+", "xgrammar"), Constraint.regex("[a-z]+", "llguidance")]
COMPILERS = COMPILER, GrammarCompiler(VOCABULARY, check_masks=True)


def sequence(link: HostLink, rows: list[MatcherRow], rounds: int) -> tuple[Any, Any, list[Any]]:
    """Calls for a thread that is not Python's: it rests for 0.2 s, then runs rounds. Returns the list, its calls, what they need."""
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, c_void_p).value
    calls = (CallStruct * (rounds + 1))()
    calls[0].function, calls[0].data = usleep, 200_000
    node = HostCallback("walk", link.node(WALK), HostErrors())
    for call in calls[1:]:
        call.function, call.data = node.address, node.data
    for _ in range(rounds):
        link.push_batch(rows)
    return CallListStruct(calls, len(calls)), calls, [node]


def run_while_the_gil_is_held(call_list: Any, seconds: float) -> tuple[float, float]:
    """Run the calls in a thread of C's own; meanwhile another Python thread keeps the GIL. From when until when it surely had it."""
    thread, held = ctypes.c_ulong(), list[float]()
    entry = c_void_p(load().run_calls_address)

    def hold() -> None:
        keeping = ctypes.PyDLL(None)  # keeps the GIL across its calls
        assert keeping.pthread_create(byref(thread), None, entry, byref(call_list)) == 0
        held.append(time.monotonic())
        keeping.usleep(int(seconds * 1e6))

    holder = threading.Thread(target=hold)
    holder.start()
    holder.join()
    assert ctypes.CDLL(None).pthread_join(thread, None) == 0
    return held[0], held[0] + seconds


@pytest.mark.parametrize("threads", [1, 3])
def test_rounds_complete_while_another_thread_holds_the_gil(threads: int) -> None:
    """Rows of both libraries, at once and behind markers that end inside the drafts, half of them checked."""
    memory, rounds = Memory.make(16, 3), 200
    link = native_link(memory, depth=rounds, threads=threads)
    asked = BOTH + [constraint.after(marker) for marker in ("aa", [A], "b") for constraint in BOTH]
    grammars = [compiler.compile(constraint) for compiler in COMPILERS for constraint in asked]
    rows: list[MatcherRow] = [link.row(owner, grammar.matcher()) for owner, grammar in enumerate(grammars, 1)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    call_list, calls, _needed = sequence(link, rows, rounds)
    begun, ended = run_while_the_gil_is_held(call_list, 2.0)
    finished = [call.finished for call in calls[1:]]
    assert begun < finished[0] and finished[-1] < ended, "all rounds ran while the GIL was taken"
    assert link.stats.fills == rounds * 16 * 4
    assert [row.fault for row in rows] == [""] * 16
    assert memory.tags[:, :, 3].tolist() == [[MaskStatus.OK] * 16] * 4


def test_python_rounds_wait_for_the_gil() -> None:
    """The negative control of the test above."""
    memory = Memory.make(2, 3)
    link = PythonLink(*memory.all)
    rows: list[MatcherRow] = [letters(link, owner) for owner in (1, 2)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    call_list, calls, _needed = sequence(link, rows, 3)
    _, ended = run_while_the_gil_is_held(call_list, 0.6)
    assert calls[1].finished > ended and link.stats.fills > 0


def bytecodes_in_host_nodes(host_link: str, constraints: Sequence[Constraint], check_masks: bool = False) -> tuple[int, int]:
    """Over a whole run on the tape: calls of host nodes, and bytecodes that ran inside them."""
    source, first = inspect.getsourcelines(HostCall.__call__)
    (the_call,) = (first + place for place, text in enumerate(source) if "self._function()" in text)
    calls, bytecodes = [0], [0]

    def in_a_node(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code is not HostCall.__call__.__code__:
            frame = frame.f_back
        return frame is not None and frame.f_lineno == the_call

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is HostCall.__call__.__code__:
            calls[0] += event == "line" and frame.f_lineno == the_call
            return trace
        if not in_a_node(frame.f_back):
            return None
        frame.f_trace_opcodes = True
        bytecodes[0] += event == "opcode"
        return trace

    before = threading.gettrace()  # whoever measures coverage goes on afterwards
    threading.settrace(trace)  # of threads that begin from now on: the tape's
    try:
        engine = make_engine(Setup(k=3, host_link=host_link), check_masks=check_masks)
        jobs = [engine.submit([place], constraint=constraint, max_new_tokens=8) for place, constraint in enumerate(constraints)]
        for _ in engine.stream():
            pass
        engine.close()
    finally:
        threading.settrace(before)
    for place, (job, constraint) in enumerate(zip(jobs, constraints, strict=True)):
        assert job.tokens == plain([place], 8, constraint).tokens, job.error
    assert calls[0] == engine.backend.stats.host_nodes
    return calls[0], bytecodes[0]


@pytest.mark.parametrize("check_masks", [False, True])
def test_no_bytecode_runs_inside_a_host_node(check_masks: bool) -> None:
    """Under either library, at once and behind markers."""
    asked = [Constraint.json_object(backend="xgrammar").after("a"), Constraint.json_object(backend="llguidance").after([CONTROL])]
    calls, bytecodes = bytecodes_in_host_nodes("native", [*asked, *BOTH], check_masks)
    assert calls > 10 and bytecodes == 0


def test_the_bytecodes_of_host_nodes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the Python link, and a matcher that the native one does not know."""
    calls, bytecodes = bytecodes_in_host_nodes("python", [ANY])
    assert calls > 10 and bytecodes > 100
    real = NativeLink.row
    monkeypatch.setattr(NativeLink, "row", lambda link, owner, matcher, committed=0: real(link, owner, Foreign(matcher), committed))
    calls, bytecodes = bytecodes_in_host_nodes("native", [ANY])
    assert calls > 10 and bytecodes > 100
