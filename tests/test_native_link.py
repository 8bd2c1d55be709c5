"""The native host link writes what the Python one writes, bit for bit, and needs no interpreter to do so."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import threading
import time
import weakref
from ctypes import addressof, byref, c_void_p
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.graphs import TapeBackend
from stepgraph.graphs.driver import HostCallback, HostErrors
from stepgraph.graphs.tape_run import HostCall
from stepgraph.runtime import Constraint
from stepgraph.sampling.grammar.host_link import BEGIN, COMMIT, END, HostLink, MatcherRow, advance
from stepgraph.sampling.grammar.matcher import XGrammarMatcher
from stepgraph.sampling.grammar.native import load
from stepgraph.sampling.grammar.native.layout import FAULT_BYTES, CallListStruct, CallStruct
from stepgraph.sampling.grammar.native_link import NativeRow
from stepgraph.sampling.grammar.python_link import PythonLink
from stepgraph.sampling.grammar.status import ROW_RUNNING, MaskStatus
from tests.link_bench import Foreign, Memory, Twins, native_link
from tests.planted import fail, plant
from tests.toy_engines import COMPILER, CONSTRAINTS, STOP, VOCABULARY, Setup, make_engine, needs_native, plain

pytestmark = needs_native

A, B = (VOCABULARY.tokens.index(letter) for letter in (b"a", b"b"))
WALK = (BEGIN, COMMIT, advance(1), advance(2), advance(3), END)
schedules = st.tuples(st.integers(1, 6), st.integers(0, 5), st.booleans(), st.integers(1, 3), st.integers(0, 2**32))


@settings(max_examples=80)
@given(schedule=schedules)
def test_native_equals_python_bit_for_bit(schedule: tuple[int, int, bool, int, int]) -> None:
    """Masks, tags, faults, counts and what each row believes, after every node of a random schedule."""
    slots, drafts, masked, threads, seed = schedule
    twins = Twins(slots, drafts, Random(seed), threads)
    for _ in range(12):
        twins.round(masked)


@pytest.mark.soak
@settings(max_examples=3000, derandomize=False)
@given(schedule=schedules)
def test_native_equals_python_at_length(schedule: tuple[int, int, bool, int, int]) -> None:
    slots, drafts, masked, threads, seed = schedule
    twins = Twins(slots, drafts, Random(seed), threads)
    for _ in range(40):
        twins.round(masked)


@pytest.mark.parametrize("bug", ["rollback", "fill", "accept"])
def test_the_comparison_finds_a_native_side_that_errs(bug: str) -> None:
    def off_by_one(real: Any, library: int, matcher: int, value: int, *rest: Any) -> int:
        return real(library, matcher, value - 1 if bug == "rollback" else value, *rest) if bug != "fill" else 0

    def run() -> None:
        twins = Twins(3, 3, Random(5))
        real_seat = twins.seat

        def seat(slot: int) -> None:
            real_seat(slot)
            guest = twins.guests[slot]
            assert guest is not None and isinstance(guest.rows[1], NativeRow)
            bugs = {"accept": lambda *_: 1}  # takes everything
            if guest.rows[1].struct.text_words:
                plant(guest.rows[1], bug, bugs.get(bug, off_by_one))

        twins.seat = seat  # type: ignore[method-assign]
        for _ in range(30):
            twins.round(masked=True)

    with pytest.raises(AssertionError):
        run()


# faults


def running(memory: Memory, row: MatcherRow, slot: int = 0, history: int = 0, last: int = 0, accepted: int = 0) -> None:
    memory.state[slot] = torch.tensor([row.owner, history, last, accepted, ROW_RUNNING])


def letters(link: HostLink, owner: int = 9) -> Any:
    return link.row(owner, COMPILER.compile(Constraint.regex("[a-z]+")).matcher())


@pytest.mark.parametrize(
    ("function", "tags", "told"),
    [
        ("fill", [0, 0], "planted"),
        ("is_terminated", [0, 0], "planted"),
        ("accept", [MaskStatus.OK, MaskStatus.ILLEGAL], "planted"),
    ],
)
def test_whatever_the_library_fails_at_is_this_rows_fault_alone(function: str, tags: list[int], told: str) -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory)
    rows = [letters(link, 8), letters(link, 9)]
    plant(rows[1], function, lambda real, *arguments: fail(arguments[-1], b"planted"))
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    link.announce(rows)
    link.node(WALK)()
    assert (rows[0].fault, rows[1].fault) == ("", told)
    assert memory.tags[:2, 0, 3].tolist() == [MaskStatus.OK] * 2
    statuses = memory.tags[:2, 1, 3].tolist()
    assert statuses == tags or (function == "fill" and statuses == [MaskStatus.FAULT, 0])
    if function == "fill":
        assert not memory.masks[0, 1].any(), "a row that failed is zero"
    running(memory, rows[1], 1, history=1, last=A)
    running(memory, rows[0], 0, history=1, last=A)
    link.announce(rows)
    link.node(WALK)()
    assert rows[1].fills <= 1 and rows[0].fills == 8, "nothing more is asked of it"


def test_a_token_behind_the_end_is_refused_before_the_library_complains(capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory.make(1, 0)
    link = native_link(memory)
    row = letters(link)
    for history, token in ((0, 0), (1, A), (2, STOP), (3, A)):
        running(memory, row, history=history, last=token)
        link.announce([row])
        link.node((BEGIN, COMMIT, END))()
        assert bool(row.fault) == (history == 3)
    assert f"RuntimeError: token {A} was sampled under a mask of this grammar" in row.fault
    assert capfd.readouterr().err == ""


def test_a_failing_rollback_is_a_fault() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    row = letters(link)
    plant(row, "rollback", lambda real, *arguments: fail(arguments[-1], b"RuntimeError: stuck"))
    running(memory, row)
    memory.drafts[:] = A
    for _ in range(2):
        link.announce([row])
        link.node(WALK)()
    assert row.fault == "RuntimeError: stuck" and memory.tags[:, 0, 3].tolist() == [0] * 4


def library_error(row: NativeRow) -> str:
    """What the library itself says when it is told to take back more than it has."""
    why = ctypes.create_string_buffer(FAULT_BYTES)
    functions = row._library.xgrammar.struct.functions
    rollback = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_void_p, ctypes.c_int64, c_void_p)(functions.rollback)
    assert rollback(row.struct.library, row.struct.matcher, 7, addressof(why)) == -1
    return why.value.decode()


def test_the_librarys_own_error_is_told_and_released() -> None:
    memory = Memory.make(1, 3)
    row = letters(native_link(memory))
    text = library_error(row)
    assert text.startswith("RuntimeError: ") and "Intended to rollback 7 tokens" in text
    for _ in range(2000):
        library_error(row)
    before = resident()
    for _ in range(20_000):
        library_error(row)
    assert resident() - before < 2 << 20, "each error object is some hundred bytes"


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_long_message_is_cut_and_the_first_one_stays() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    row = link.row(9, COMPILER.compile(Constraint.regex("a+")).matcher())
    assert isinstance(row, NativeRow)
    plant(row, "fill", lambda real, *arguments: fail(arguments[-1], b"x" * (FAULT_BYTES - 1)))
    running(memory, row)
    link.announce([row])
    link.node(WALK)()
    assert row.fault == "x" * (FAULT_BYTES - 1)


def test_a_call_that_takes_longer_than_its_fuel_is_the_last_one() -> None:
    def burn(real: Any, *arguments: Any) -> int:
        begun = time.thread_time()
        while time.thread_time() - begun < 0.08:
            pass
        return int(real(*arguments))

    def sleep(real: Any, *arguments: Any) -> int:
        time.sleep(0.08)
        return int(real(*arguments))

    for planted, told in ((burn, "one step of the grammar took 0.0"), (sleep, "")):
        memory = Memory.make(1, 3)
        link = native_link(memory)
        row = letters(link)
        row.struct.fuel_seconds = 0.04
        plant(row, "fill", planted)
        running(memory, row)
        link.announce([row])
        link.node(WALK)()
        assert row.fault.startswith(told) and bool(row.fault) == bool(told), "waiting is no work"


def test_rounds_are_announced_and_no_more_than_there_is_room_for() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory, depth=2)
    rows = [letters(link)]
    for _ in range(2):
        link.announce(rows)
    with pytest.raises(RuntimeError, match="2 rounds are announced and have not ended"):
        link.announce(rows)
    for _ in range(3):
        link.node(WALK)()
    with pytest.raises(RuntimeError, match="1 rounds began that were not announced"):
        link.let_go()
    assert memory.tags[:, :, 3].sum() == 0


# threads


def test_a_slow_row_does_not_stop_the_others() -> None:
    """The first row's fill waits for the last one's: with one thread, or in order, that would be for ever."""
    memory, reached = Memory.make(6, 3), threading.Event()
    link = native_link(memory, threads=2)
    rows = [letters(link, owner) for owner in range(1, 7)]
    waited: list[bool] = []

    def wait(real: Any, *arguments: Any) -> int:
        waited.append(reached.wait(10))
        return int(real(*arguments))

    plant(rows[0], "fill", wait)

    def tell(real: Any, *arguments: Any) -> int:
        reached.set()
        return int(real(*arguments))

    plant(rows[-1], "fill", tell)
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    link.announce(rows)
    link.node((BEGIN, COMMIT, END))()
    assert waited == [True]
    assert memory.tags[0, :, 3].tolist() == [MaskStatus.OK] * 6


def test_many_rounds_over_many_threads_miss_nothing() -> None:
    memory = Memory.make(16, 3)
    link = native_link(memory, threads=5)
    rows = [letters(link, owner) for owner in range(1, 17)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    node = link.node(WALK)
    for _ in range(2000):
        link.announce(rows)
        node()
    assert link.stats.fills == 2000 * 16 * 4
    assert [row.fault for row in rows] == [""] * 16


def test_a_forked_process_does_its_rows_alone() -> None:
    memory = Memory.make(6, 3)
    link = native_link(memory, threads=3)
    rows = [letters(link, owner) for owner in range(1, 7)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    link.announce(rows)
    node = link.node(WALK)
    child = os.fork()
    if child == 0:
        node()
        done = memory.tags[0, :, 3].tolist() == [MaskStatus.OK] * 6
        link.close()
        os._exit(0 if done else 1)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended and status == 0


# no interpreter


def sequence(link: HostLink, rows: list[MatcherRow], rounds: int) -> tuple[Any, Any, list[Any]]:
    """Calls for a thread that is not Python's: it rests for 0.2 s, then runs rounds. Returns the list, its calls, what they need."""
    usleep = ctypes.cast(ctypes.CDLL(None).usleep, c_void_p).value
    calls = (CallStruct * (rounds + 1))()
    calls[0].function, calls[0].data = usleep, 200_000
    node = HostCallback("walk", link.node(WALK), HostErrors())
    for call in calls[1:]:
        call.function, call.data = node.address, node.data
    for _ in range(rounds):
        link.announce(rows)
    return CallListStruct(calls, len(calls)), calls, [node]


def run_while_the_gil_is_held(call_list: Any, seconds: float) -> tuple[float, float]:
    """Run the calls in a thread of C's own; meanwhile another Python thread keeps the GIL. When it had it, and until when."""
    thread, held = ctypes.c_ulong(), list[float]()
    entry = c_void_p(load().run_calls_address)

    def hold() -> None:
        keeping = ctypes.PyDLL(None)  # keeps the GIL across its calls
        assert keeping.pthread_create(byref(thread), None, entry, byref(call_list)) == 0
        held.append(time.monotonic())
        keeping.usleep(int(seconds * 1e6))
        held.append(time.monotonic())

    holder = threading.Thread(target=hold)
    holder.start()
    holder.join()
    assert ctypes.CDLL(None).pthread_join(thread, None) == 0
    return held[0], held[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_rounds_complete_while_another_thread_holds_the_gil(threads: int) -> None:
    memory, rounds = Memory.make(8, 3), 300
    link = native_link(memory, depth=rounds, threads=threads)
    rows = [letters(link, owner) for owner in range(1, 9)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    call_list, calls, _needed = sequence(link, rows, rounds)
    begun, ended = run_while_the_gil_is_held(call_list, 2.0)
    finished = [call.finished for call in calls[1:]]
    assert begun < finished[0] and finished[-1] < ended, "all rounds ran while the GIL was taken"
    assert link.stats.fills == rounds * 8 * 4
    assert [row.fault for row in rows] == [""] * 8


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


def bytecodes_in_host_nodes(host_link: str) -> tuple[int, int]:
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

    threading.settrace(trace)  # of threads that begin from now on: the tape's
    try:
        engine = make_engine(Setup(k=3, host_link=host_link))
        jobs = [engine.submit([place], constraint=CONSTRAINTS[1], max_new_tokens=8) for place in range(2)]
        for _ in engine.stream():
            pass
        engine.close()
    finally:
        threading.settrace(None)
    assert [job.tokens for job in jobs] == [plain([place], 8, CONSTRAINTS[1]).tokens for place in range(2)]
    assert calls[0] == engine.backend.stats.host_nodes
    return calls[0], bytecodes[0]


def test_no_bytecode_runs_inside_a_host_node() -> None:
    calls, bytecodes = bytecodes_in_host_nodes("native")
    assert calls > 10 and bytecodes == 0
    calls, bytecodes = bytecodes_in_host_nodes("python")
    assert calls > 10 and bytecodes > 1000, "the counter counts"


# lifetimes


def test_a_matcher_outlives_every_round_that_was_announced_with_it() -> None:
    """Cancelled with rounds on their way: the matcher is there until they have ended, and not a step longer."""
    hold = threading.Event()
    backend = TapeBackend(asynchronous=True, delay=lambda name: (hold.wait(), None)[1])
    engine = make_engine(Setup(k=2, rounds_in_flight=3, host_link="native"), backend)
    job, other = engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=40), engine.submit([2], max_new_tokens=30)
    engine.step()
    (matcher,) = [weakref.ref(seat.matcher.matcher) for seat in engine._desk.rows if seat.matcher]
    engine.cancel(job)
    engine.step()
    gc.collect()
    assert job.finished and matcher() is not None
    hold.set()
    for _ in engine.stream():
        pass
    engine.step()
    assert matcher() is None
    assert other.tokens == plain([2], 30).tokens
    engine.close()


def test_a_link_is_freed_with_its_last_node_and_may_be_closed_before() -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory, threads=2)
    threads = len(os.listdir("/proc/self/task"))
    node, alive = link.node(WALK), weakref.ref(link)
    del link
    assert alive() is not None, "a node that may still be called keeps it"
    del node
    assert alive() is None
    assert len(os.listdir("/proc/self/task")) == threads - 1
    closed = native_link(memory)
    closed.close()
    closed.close()
    assert closed.stats.fills == 0
    for call in (lambda: closed.announce([]), closed.let_go, lambda: closed.node(WALK)):
        with pytest.raises(RuntimeError, match="it is closed"):
            call()


def test_hundreds_of_requests_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    made, real_init = weakref.WeakSet[XGrammarMatcher](), XGrammarMatcher.__init__

    def counted(matcher: XGrammarMatcher, *arguments: Any) -> None:
        real_init(matcher, *arguments)
        made.add(matcher)

    monkeypatch.setattr(XGrammarMatcher, "__init__", counted)
    engine = make_engine(Setup(k=2, max_rows=8, host_link="native"))
    grown = []
    for batch in range(5):
        for place in range(120):
            engine.submit([place % 90], constraint=CONSTRAINTS[1 + place % 5], max_new_tokens=1 + place % 2)
        for _ in engine.stream():
            pass
        engine.step()
        assert len(made) == 0
        if batch:
            grown.append(resident())
    assert grown[-1] - grown[0] < 3 << 20
    engine.close()


# at the edge


def test_foreign_matchers_take_part_and_their_faults_are_told_as_they_are() -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory)
    inner: Any = COMPILER.compile(Constraint.regex("a+")).matcher()
    rows = [link.row(1, Foreign(inner)), letters(link, 2)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    link.announce(rows)
    link.node(WALK)()
    assert memory.tags[:, :, 3].tolist() == [[MaskStatus.OK] * 2] * 4
    inner._fuel_seconds = -1.0
    link.announce(rows)
    link.node(WALK)()
    assert rows[0].fault.startswith("one step of the grammar took") and rows[1].fault == ""


@pytest.mark.parametrize("name", ["state", "drafts", "masks", "tags"])
def test_memory_of_another_shape_is_refused(name: str) -> None:
    memory = Memory.make(2, 3)
    wrong = {"state": memory.state[:1], "drafts": memory.drafts.t(), "masks": memory.masks.long(), "tags": memory.tags[:, :, :3]}
    tensors = [wrong[name] if one == name else getattr(memory, one) for one in ("state", "drafts", "masks", "tags")]
    with pytest.raises(ValueError, match=rf"NativeLink\.{name}_host: got .*, want contiguous"):
        native_link(Memory(*tensors))


def test_a_matcher_of_another_width_or_one_that_failed_is_refused() -> None:
    link = native_link(Memory.make(2, 3, words=9))
    with pytest.raises(ValueError, match=r"row.matcher: got masks of \d words, want 9"):
        letters(link)
    matcher: Any = COMPILER.compile(Constraint.regex("a+")).matcher()
    matcher._fault = "spent"
    with pytest.raises(ValueError, match=r"row.matcher: got one that has failed \(spent\)"):
        native_link(Memory.make(2, 3)).row(1, matcher)
