"""The native host link is bit-identical to the Python one, and a failure affects only its own row."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from ctypes import addressof, c_void_p
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Constraint, Vocabulary
from stepgraph.sampling.c_declarations import constants
from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.link.native import NativeRow, load
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, NODE_BOUNDS_NS, HostAction, HostLink, advance
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.forced import FORCED_BYTES
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode, HostColumn, MaskStatus
from tests.helpers.link_bench import (
    AUTOMATON_COMPILER,
    ROUND_STEPS,
    WORDS,
    XGRAMMAR_COMPILER,
    A,
    LinkPair,
    Memory,
    letters_row,
    native_link,
    resident_bytes,
    run_round,
)
from tests.helpers.planted import fail, plant
from tests.helpers.toy_engines import STOP, needs_native

pytestmark = needs_native

schedules = st.tuples(st.integers(1, 6), st.integers(0, 5), st.booleans(), st.integers(1, 3), st.integers(0, 2**32))


@settings(max_examples=30)
@given(schedule=schedules)
def test_native_equals_python_bit_for_bit(schedule: tuple[int, int, bool, int, int]) -> None:
    """Masks, tags, forced tokens, faults, counters and the state of each row, after every node of a random schedule."""
    slots, drafts, masked, threads, seed = schedule
    LinkPair(slots, drafts, Random(seed), threads).run(12, masked)


@pytest.mark.soak
@settings(max_examples=3000, derandomize=False)
@given(schedule=schedules)
def test_native_equals_python_in_long_runs(schedule: tuple[int, int, bool, int, int]) -> None:
    slots, drafts, masked, threads, seed = schedule
    LinkPair(slots, drafts, Random(seed), threads).run(40, masked)


def test_a_node_has_the_type_that_cuda_graphs_call() -> None:
    assert load().without_gil.stepgraph_node.restype is None, "void, as CUhostFn"


@pytest.mark.parametrize("bug", ["rollback", "fill", "accept", "forced"])
def test_the_comparison_detects_a_bug_in_the_native_library(bug: str) -> None:
    bugs: dict[str, Callable[..., int]] = {
        "rollback": lambda real, library, matcher, tokens, *rest: real(library, matcher, tokens - 1, *rest),
        "fill": lambda *_: 0,
        "accept": lambda *_: 1,
        "forced": lambda *_: 0,
    }

    class Buggy(LinkPair):
        def admit_random(self, slot: int) -> None:
            super().admit_random(slot)
            request = self.requests[slot]
            assert request is not None
            if request.rows[1].struct.text_words:
                plant(request.rows[1], bug, bugs[bug])

    pair = Buggy(3, 3, Random(8))
    with pytest.raises(AssertionError):
        pair.run(60, masked=True)


def test_a_mask_does_not_depend_on_the_one_that_its_memory_held() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    constraints = Constraint.regex("[a-f]+"), Constraint.regex("[g-k]+")
    backends = AUTOMATON_COMPILER, AUTOMATON_COMPILER, XGRAMMAR_COMPILER, AUTOMATON_COMPILER
    for compiler, index in zip(backends, (0, 1, 0, 1), strict=True):
        row = letters_row(link, compiler=compiler, constraint=constraints[index])
        run_round(memory, link, [row])
        expected = torch.zeros(1, WORDS, dtype=torch.int32)
        XGRAMMAR_COMPILER.compile(constraints[index]).matcher().fill_next_token_bitmask(expected, 0)
        assert torch.equal(memory.masks[0, 0], expected[0])


# faults


@pytest.mark.parametrize(
    ("function", "statuses"),
    [
        ("fill", [MaskStatus.FAULT, MaskStatus.NONE]),
        ("is_terminated", [MaskStatus.NONE, MaskStatus.NONE]),
        ("accept", [MaskStatus.OK, MaskStatus.FAULT]),
    ],
)
def test_a_failing_library_call_is_the_fault_of_its_row_only(function: str, statuses: list[int]) -> None:
    memory = Memory.make(2, 3)
    link = native_link(memory)
    rows = [letters_row(link, 8), letters_row(link, 9)]
    plant(rows[1], function, lambda real, *arguments: fail(arguments[-1], b"planted"))
    run_round(memory, link, rows, [A] * 3)
    assert (rows[0].fault, rows[1].fault) == ("", "planted")
    assert memory.tags[:2, 0, 3].tolist() == [MaskStatus.OK] * 2
    assert memory.tags[:2, 1, 3].tolist() == statuses
    if function == "fill":
        assert not memory.masks[0, 1].any(), "the mask of a failed row is zero"
    run_round(memory, link, rows, history=1, last=A)
    assert link.stats.fills <= 8 + 1, "a failed matcher is not called again"


def test_a_token_after_the_stop_token_is_rejected_without_a_library_log(capfd: pytest.CaptureFixture[str]) -> None:
    memory = Memory.make(1, 0)
    link = native_link(memory)
    row = letters_row(link)
    for history, token in ((0, 0), (1, A), (2, STOP), (3, A)):
        run_round(memory, link, [row], history=history, last=token, steps=(BEGIN_ROUND, COMMIT, END_ROUND))
        assert bool(row.fault) == (history == 3)
    assert f"RuntimeError: token {A} was sampled under a mask of this grammar" in row.fault
    assert capfd.readouterr().err == ""


def test_an_id_that_is_hidden_from_xgrammar_is_rejected_without_a_library_log(capfd: pytest.CaptureFixture[str]) -> None:
    vocabulary = Vocabulary([b"x", b"y", b"z", b"xy", b"xzxy", b""], stop_token_ids=[5])
    memory = Memory.make(1, 1, vocabulary.mask_words, vocabulary)
    link = native_link(memory)
    row = letters_row(link, compiler=GrammarCompiler(vocabulary, backend="xgrammar"))
    run_round(memory, link, [row], [4], steps=(BEGIN_ROUND, COMMIT, advance(1), END_ROUND))
    assert (vocabulary.xgrammar_unsafe_ids, row.fault, capfd.readouterr().err) == (frozenset({4}), "", "")


def test_is_terminated_is_called_once_and_after_stop_tokens() -> None:
    memory, answers = Memory.make(1, 3), list[int]()
    link = native_link(memory)
    row = letters_row(link)

    def is_terminated(real: Callable[..., int], *arguments: Any) -> int:
        answers.append(real(*arguments))
        return answers[-1]

    plant(row, "is_terminated", is_terminated)
    run_round(memory, link, [row], [A] * 3)
    assert answers == [0] and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK] * 4
    memory.drafts[1] = STOP
    run_round(memory, link, [row], history=1, last=A)
    assert answers == [0, 1] and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK, MaskStatus.OK, MaskStatus.TERMINATED, 0]
    run_round(memory, link, [row], history=2, last=A, steps=(BEGIN_ROUND, COMMIT, END_ROUND))
    assert answers == [0, 1, 0] and memory.tags[0, 0, 3] == MaskStatus.OK, "the stop token was rolled back"


@pytest.mark.parametrize("make", [native_link, lambda memory: PythonLink(*memory.all)], ids=["native", "python"])
@pytest.mark.parametrize(("history", "accepted"), [(1, -2), (7, 4), (0, -(2**63)), (5, 0), (-1, -4), (2**62, 2**62 - 3)])
def test_an_impossible_history_rolls_nothing_back(make: Callable[[Memory], HostLink], history: int, accepted: int) -> None:
    memory = Memory.make(1, 3)
    link = make(memory)
    row = letters_row(link)
    memory.drafts[:] = A
    for generated, last, kept in ((0, 0, 0), (2, A, 1), (history, A, accepted)):
        run_round(memory, link, [row], history=generated, last=last, accepted=kept)
    fault = f"RuntimeError: the history has {history} tokens, {accepted} from drafts; the matcher had 2 + 3"
    assert (row.fault, link.stats.rollbacks) == (fault, 1) and memory.tags[:, 0, 3].tolist() == [0] * 4


def test_a_failing_rollback_is_a_fault() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    row = letters_row(link)
    plant(row, "rollback", lambda real, *arguments: fail(arguments[-1], b"RuntimeError: stuck"))
    for _ in range(2):
        run_round(memory, link, [row], [A] * 3)
    assert row.fault == "RuntimeError: stuck" and memory.tags[:, 0, 3].tolist() == [0] * 4


def library_error(row: NativeRow) -> str:
    """The library's own message for a rollback of more tokens than it has."""
    error = ctypes.create_string_buffer(constants.FAULT_BYTES)
    functions = row._library.xgrammar.struct.functions
    rollback = ctypes.CFUNCTYPE(ctypes.c_int, c_void_p, c_void_p, ctypes.c_int64, c_void_p)(functions.rollback)
    assert rollback(row.struct.library, row.struct.matcher, 7, addressof(error)) == -1
    return error.value.decode()


def test_the_librarys_error_is_reported_and_freed() -> None:
    memory = Memory.make(1, 3)
    row = letters_row(native_link(memory))
    text = library_error(row)
    assert text.startswith("RuntimeError: ") and "Intended to rollback 7 tokens" in text
    for _ in range(2000):
        library_error(row)
    before = resident_bytes()
    for _ in range(20_000):
        library_error(row)
    assert resident_bytes() - before < 2 << 20, "an error object takes some hundred bytes"


def test_a_message_of_the_maximum_length_is_kept() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory)
    row = letters_row(link)
    plant(row, "fill", lambda real, *arguments: fail(arguments[-1], b"x" * (constants.FAULT_BYTES - 1)))
    run_round(memory, link, [row])
    assert row.fault == "x" * (constants.FAULT_BYTES - 1)


def test_a_call_that_exceeds_its_fuel_is_the_last_one() -> None:
    def burn(real: Any, *arguments: Any) -> int:
        start = time.thread_time()
        while time.thread_time() - start < 0.08:
            pass
        return int(real(*arguments))

    def sleep(real: Any, *arguments: Any) -> int:
        time.sleep(0.08)
        return int(real(*arguments))

    for bug, fault in ((burn, "one step of the grammar took 0.0"), (sleep, "")):
        memory = Memory.make(1, 3)
        link = native_link(memory)
        row = letters_row(link)
        row.struct.fuel_seconds = 0.04
        plant(row, "fill", bug)
        run_round(memory, link, [row])
        assert row.fault.startswith(fault) and bool(row.fault) == bool(fault), "only processor time counts"


def test_push_batch_is_limited_by_the_depth_and_required_for_each_round() -> None:
    memory = Memory.make(1, 3)
    link = native_link(memory, depth=2)
    rows = [letters_row(link)]
    for _ in range(2):
        link.push_batch(rows)
    with pytest.raises(RuntimeError, match="2 rounds are pushed and have not ended"):
        link.push_batch(rows)
    for _ in range(3):
        link.node(ROUND_STEPS)()
    with pytest.raises(RuntimeError, match="1 rounds began without a pushed batch"):
        link.release_finished()
    assert memory.tags[:, :, 3].sum() == 0


# arguments


def test_a_matcher_with_a_fault_is_rejected() -> None:
    matcher: Any = XGRAMMAR_COMPILER.compile(Constraint.regex("a+")).matcher()
    matcher.fault = "spent"
    with pytest.raises(ValueError, match=r"row.matcher: got a failed matcher \(spent\)"):
        native_link(Memory.make(2, 3)).row(1, matcher)


# times


NODES = ((BEGIN_ROUND, advance(1)), (COMMIT,), (advance(1), END_ROUND))


@pytest.mark.parametrize("make", [native_link, lambda memory: PythonLink(*memory.all)], ids=["native", "python"])
def test_node_times_are_recorded_on_request_until_the_log_is_full(make: Callable[[Memory], HostLink]) -> None:
    link = make(Memory.make(2, 1))
    nodes = [link.node(steps) for steps in NODES]

    def run_round() -> None:
        link.push_batch([None, None])
        for node in nodes:
            node()

    log = np.zeros((5, 3), np.int64)
    run_round()
    link.log_nodes(log)
    before = time.perf_counter_ns()
    run_round()
    run_round()
    after = time.perf_counter_ns()
    link.log_nodes(None)
    run_round()
    assert log[0, 0] == 4 and log[1:, 0].tolist() == [1, 0, 0, 1], "four of six nodes: the log is full"
    times = log[1:, 1:].flatten().tolist()
    assert times == sorted(times) and before <= times[0] and times[-1] <= after, "on the clock of time.perf_counter_ns"
    link.close()


def test_constants_of_the_headers_are_those_of_python() -> None:
    ours = {member.name: int(member) for numbers in (HostColumn, MaskStatus, HostAction) for member in numbers}
    assert {name: getattr(constants, name) for name in ours} == ours
    assert (len(HostColumn), TAG_FIELDS, FinishCode.RUNNING) == (constants.HOST_COLUMNS, constants.TAG_FIELDS, constants.ROW_RUNNING)
    assert (FORCED_BYTES, len(NODE_BOUNDS_NS)) == (constants.FORCED_BYTES, constants.NODE_BOUNDS)
