"""The native host link writes what the Python one writes, bit for bit, and stays within a row where something fails."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import addressof, c_void_p
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Constraint
from stepgraph.sampling.grammar.link.layout import FAULT_BYTES
from stepgraph.sampling.grammar.link.native_row import NativeRow
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.status import MaskStatus
from tests.helpers.link_bench import WALK, A, Foreign, Memory, Twins, letters, native_link, resident, running
from tests.helpers.planted import fail, plant
from tests.helpers.toy_engines import COMPILER, STOP, needs_native

pytestmark = needs_native

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


@pytest.mark.parametrize("bug", ["rollback", "fill", "accept", "forced"])
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
            bugs = {"accept": lambda *_: 1, "forced": lambda *_: 0}  # takes everything; knows of nothing that must come
            if guest.rows[1].struct.text_words:
                plant(guest.rows[1], bug, bugs.get(bug, off_by_one))

        twins.seat = seat  # type: ignore[method-assign]
        for _ in range(30):
            twins.round(masked=True)

    with pytest.raises(AssertionError):
        run()


# faults


@pytest.mark.parametrize(
    ("function", "tags", "told"),
    [
        ("fill", [0, 0], "planted"),
        ("is_terminated", [0, 0], "planted"),
        ("accept", [MaskStatus.OK, MaskStatus.FAULT], "planted"),
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
    link.push_batch(rows)
    link.node(WALK)()
    assert (rows[0].fault, rows[1].fault) == ("", told)
    assert memory.tags[:2, 0, 3].tolist() == [MaskStatus.OK] * 2
    statuses = memory.tags[:2, 1, 3].tolist()
    assert statuses == tags or (function == "fill" and statuses == [MaskStatus.FAULT, 0])
    if function == "fill":
        assert not memory.masks[0, 1].any(), "a row that failed is zero"
    running(memory, rows[1], 1, history=1, last=A)
    running(memory, rows[0], 0, history=1, last=A)
    link.push_batch(rows)
    link.node(WALK)()
    assert rows[1].fills <= 1 and rows[0].fills == 8, "nothing more is asked of it"


def test_a_token_behind_the_end_is_refused_before_the_library_complains(capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory.make(1, 0)
    link = native_link(memory)
    row = letters(link)
    for history, token in ((0, 0), (1, A), (2, STOP), (3, A)):
        running(memory, row, history=history, last=token)
        link.push_batch([row])
        link.node((BEGIN_ROUND, COMMIT, END_ROUND))()
        assert bool(row.fault) == (history == 3)
    assert f"RuntimeError: token {A} was sampled under a mask of this grammar" in row.fault
    assert capfd.readouterr().err == ""


def test_whether_a_text_is_over_is_asked_once_and_behind_a_stop_token() -> None:
    memory, asked = Memory.make(1, 3), list[int]()
    link = native_link(memory)
    row = letters(link)

    def is_terminated(real: Callable[..., int], *arguments: Any) -> int:
        asked.append(real(*arguments))
        return asked[-1]

    plant(row, "is_terminated", is_terminated)
    running(memory, row)
    memory.drafts[:] = A
    link.push_batch([row])
    link.node(WALK)()
    assert asked == [0] and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK] * 4
    memory.drafts[1] = STOP
    running(memory, row, history=1, last=A)
    link.push_batch([row])
    link.node(WALK)()
    assert asked == [0, 1] and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK, MaskStatus.OK, MaskStatus.TERMINATED, 0]
    running(memory, row, history=2, last=A)
    link.push_batch([row])
    link.node((BEGIN_ROUND, COMMIT, END_ROUND))()
    assert asked == [0, 1, 0] and memory.tags[0, 0, 3] == MaskStatus.OK, "the stop token was taken back"


@pytest.mark.parametrize("make", [native_link, lambda memory: PythonLink(*memory.all)], ids=["native", "python"])
@pytest.mark.parametrize(("history", "accepted"), [(1, -2), (7, 4), (0, -(2**63)), (5, 0), (-1, -4), (2**62, 2**62 - 3)])
def test_a_history_that_cannot_be_takes_nothing_back(make: Callable[[Memory], HostLink], history: int, accepted: int) -> None:
    memory = Memory.make(1, 3)
    link = make(memory)
    row = letters(link)
    memory.drafts[:] = A
    for shown, last, held in ((0, 0, 0), (2, A, 1), (history, A, accepted)):
        running(memory, row, history=shown, last=last, accepted=held)
        link.push_batch([row])
        link.node(WALK)()
    told = f"RuntimeError: the history has {history} tokens, {accepted} from drafts; the matcher had 2 + 3"
    assert (row.fault, link.stats.rollbacks) == (told, 1) and memory.tags[:, 0, 3].tolist() == [0] * 4


def test_a_failing_rollback_is_a_fault() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    row = letters(link)
    plant(row, "rollback", lambda real, *arguments: fail(arguments[-1], b"RuntimeError: stuck"))
    running(memory, row)
    memory.drafts[:] = A
    for _ in range(2):
        link.push_batch([row])
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


def test_a_long_message_is_cut_and_the_first_one_stays() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    row = link.row(9, COMPILER.compile(Constraint.regex("a+")).matcher())
    assert isinstance(row, NativeRow)
    plant(row, "fill", lambda real, *arguments: fail(arguments[-1], b"x" * (FAULT_BYTES - 1)))
    running(memory, row)
    link.push_batch([row])
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
        link.push_batch([row])
        link.node(WALK)()
        assert row.fault.startswith(told) and bool(row.fault) == bool(told), "waiting is no work"


def test_rounds_are_announced_and_no_more_than_there_is_room_for() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory, depth=2)
    rows = [letters(link)]
    for _ in range(2):
        link.push_batch(rows)
    with pytest.raises(RuntimeError, match="2 rounds are announced and have not ended"):
        link.push_batch(rows)
    for _ in range(3):
        link.node(WALK)()
    with pytest.raises(RuntimeError, match="1 rounds began that were not announced"):
        link.release_finished()
    assert memory.tags[:, :, 3].sum() == 0


# at the edge


def test_foreign_matchers_take_part_and_their_faults_are_told_as_they_are() -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory)
    inner: Any = COMPILER.compile(Constraint.regex("a+")).matcher()
    rows = [link.row(1, Foreign(inner)), letters(link, 2)]
    for slot, row in enumerate(rows):
        running(memory, row, slot)
    memory.drafts[:] = A
    link.push_batch(rows)
    link.node(WALK)()
    assert memory.tags[:, :, 3].tolist() == [[MaskStatus.OK] * 2] * 4
    inner._fuel_seconds = -1.0
    link.push_batch(rows)
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
