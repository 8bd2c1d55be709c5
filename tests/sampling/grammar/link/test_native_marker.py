"""Rows with a marker in the native link: bit-identical to the Python link."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.sampling.grammar import Constraint, GrammarCompiler, MaskStatus, Vocabulary
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.link.native import NativeRow
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, advance
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from tests.helpers.link_bench import A, LinkPair, Memory, Request, native_link, run_round, set_running
from tests.helpers.planted import fail, plant
from tests.helpers.toy_engines import CONTROL, STOP, VOCABULARY, needs_native
from tests.sampling.grammar.matchers.test_marker import CLOSE, OPEN, SMALL, legal_in_state

pytestmark = needs_native

ONE = Vocabulary([b"a", b"aa", b"aaaa", b""], stop_token_ids=[3])  # all its tokens start with the same byte
WITH_MARKER: tuple[BackendChoice, ...] = ("xgrammar", "llguidance")  # the image of an automaton contains the marker
INNER = {
    VOCABULARY: [
        Constraint.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}),
        Constraint.regex("(ab|ac)+"),
        Constraint.regex("[a-c]{0,3}x?"),
        Constraint.choice(["yes", "not at all", "nothing"]),
    ],
    SMALL: [Constraint.regex("x+"), Constraint.regex("(x|ab){2,5}"), Constraint.regex("aabx(bab)?")],
    ONE: [Constraint.regex("a{6}"), Constraint.regex("a{3,9}")],
}
MARKERS: dict[Vocabulary, list[str | list[int]]] = {
    VOCABULARY: ["a", "aab", '": ', '"}', "the", [CONTROL], [CONTROL, A, CONTROL], [A, A]],
    SMALL: ["a", "ab", "aab", "abab", "bb", [OPEN], [OPEN, 0, CLOSE], [0, 0], [0, OPEN, 0]],
    ONE: ["aa", "aaaaaa", "aaaaaaa", [0, 1]],
}


@functools.cache
def compiler(vocabulary: Vocabulary, backend: BackendChoice = "xgrammar") -> GrammarCompiler:
    return GrammarCompiler(vocabulary, max_threads=1, backend=backend)


class MarkerPair(LinkPair):
    """Requests of both libraries, most of them with a marker."""

    def __init__(self, *arguments: Any, bug: Callable[[NativeRow], None] | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bug, self.statuses = bug, set[int]()
        self.past_marker, self.num_taken_back = set[int](), 0  # requests past their marker; markers that were rolled back

    def admit_random(self, slot: int) -> None:
        random, vocabulary = self.random, self.vocabulary
        constraint = random.choice(INNER[vocabulary])
        if random.random() < 0.9:
            constraint = constraint.after(random.choice(MARKERS[vocabulary]), limit=random.choice([None, None, 1, 3]))
        grammar = compiler(vocabulary, random.choice(WITH_MARKER)).compile(constraint)
        self.admit(slot, grammar, [grammar.matcher() for _ in self.links])
        request = self.requests[slot]
        assert request is not None
        if self.bug:
            self.bug(request.rows[1])

    def legal(self, request: Request, drafts: int) -> list[int]:
        """Before the end of a marker, half of the time only tokens that continue it, so that it is reached."""
        legal, marker = super().legal(request, drafts), request.grammar.marker
        state = 0
        for token in [*request.history, *request.drafts[:drafts]]:
            after = marker.next_state(state, token) if marker and state < marker.complete and token < len(self.vocabulary.tokens) else None
            state = state if after is None else after
        if marker is None or state == marker.complete or self.random.random() < 0.5:
            return legal
        return [token for token in legal if (marker.next_state(state, token) or 0) > state] or legal

    def check(self) -> None:
        super().check()
        self.statuses.update(self.memories[1].tags[:, :, 3].flatten().tolist())
        for request in filter(None, self.requests):
            matcher = request.rows[0].matcher
            if isinstance(matcher, MarkerMatcher):
                self.num_taken_back += request.owner in self.past_marker and not matcher.past_marker
                (self.past_marker.add if matcher.past_marker else self.past_marker.discard)(request.owner)


schedules = st.tuples(
    st.integers(1, 5), st.integers(0, 5), st.booleans(), st.integers(1, 3), st.sampled_from([*INNER]), st.integers(0, 2**32)
)
Schedule = tuple[int, int, bool, int, Vocabulary, int]


def run_pair(schedule: Schedule, rounds: int, bug: Callable[[NativeRow], None] | None = None) -> MarkerPair:
    slots, drafts, masked, threads, vocabulary, seed = schedule
    pair = MarkerPair(slots, drafts, Random(seed), threads, vocabulary, bug=bug)
    pair.run(rounds, masked)
    return pair


@settings(max_examples=20)
@given(schedule=schedules)
def test_rows_with_markers_equal_the_python_links(schedule: Schedule) -> None:
    """Masks, tags, forced tokens, faults, counters and the state of each row, after every node of a random schedule."""
    run_pair(schedule, 12)


@pytest.mark.soak
@settings(max_examples=3000, derandomize=False)
@given(schedule=schedules)
def test_rows_with_markers_equal_the_python_links_in_long_runs(schedule: Schedule) -> None:
    run_pair(schedule, 40)


@pytest.mark.parametrize("vocabulary", [SMALL, pytest.param(VOCABULARY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [True, False])
def test_markers_that_end_inside_drafts_are_rolled_back(vocabulary: Vocabulary, masked: bool) -> None:
    pair = run_pair((5, 4, masked, 2, vocabulary, 8), 140)
    assert pair.num_taken_back > 5
    assert pair.statuses >= {MaskStatus.OK, MaskStatus.COMPLETE, MaskStatus.TERMINATED, MaskStatus.ILLEGAL}


def one_state_short(row: NativeRow) -> None:
    row.struct.marker.room = max(1, row.struct.marker.room - 1)


def one_symbol_short(row: NativeRow) -> None:
    if row.struct.marker.table:
        row._table.complete = max(1, row._table.complete - 1)


def no_fallback(row: NativeRow) -> None:
    """After a mismatch the marker is searched from its first symbol."""
    if row.struct.marker.table:
        row._table.fallback = ctypes.addressof(NO_FALLBACK)


NO_FALLBACK = (ctypes.c_int32 * 32)()


@pytest.mark.parametrize("bug", [one_state_short, one_symbol_short, no_fallback])
def test_the_comparison_detects_a_bug_in_the_marker(bug: Callable[[NativeRow], None]) -> None:
    with pytest.raises(AssertionError):
        run_pair((5, 4, True, 1, SMALL, 7), 200, bug)


def test_nothing_is_forced_before_the_end_of_a_marker() -> None:
    """Although all legal tokens start with the same byte."""
    pair = run_pair((5, 3, True, 1, ONE, 3), 40)
    assert pair.num_taken_back and pair.links[1].stats.looks > 50


@pytest.mark.parametrize("marker", MARKERS[SMALL], ids=str)
def test_every_token_in_every_marker_state_equals_the_python_link(marker: str | list[int]) -> None:
    grammar = compiler(SMALL).compile(Constraint.regex("x+").after(marker))
    assert grammar.marker
    tokens = [b"ab".index(byte) for byte in marker.encode()] if isinstance(marker, str) else marker
    for state in range(len(tokens)):
        written = []
        for native in (False, True):
            memory = Memory.make(40, 1, SMALL.mask_words, SMALL)
            link: HostLink = native_link(memory) if native else PythonLink(*memory.all, forcing=memory.forcing)
            rows = []
            for token in range(40):
                matcher = grammar.matcher()
                assert all(matcher.accept_token(part) for part in tokens[:state])
                rows.append(link.row(token + 1, matcher, committed=state))
                set_running(memory, rows[-1], token, history=state)
                memory.drafts[0, token] = token
            link.push_batch(rows)
            link.node((BEGIN_ROUND, COMMIT, advance(1), END_ROUND))()
            written.append((memory.tags.tolist(), memory.masks[0].tolist(), [row.fault for row in rows]))
            legal = memory.tags[1, :, 3] == MaskStatus.OK
            assert legal.nonzero().flatten().tolist() == legal_in_state(marker, state)
        assert written[0] == written[1]


# one row


@pytest.mark.parametrize("backend", WITH_MARKER)
@pytest.mark.parametrize(("function", "fault"), [("fill", "stuck"), ("accept", "stuck"), ("is_terminated", "stuck"), ("rollback", "")])
def test_a_library_failure_after_the_marker_is_the_rows_fault(function: str, fault: str, backend: BackendChoice) -> None:
    """Before its end the library is not called."""
    memory, grammar = Memory.make(1, 3), compiler(VOCABULARY, backend).compile(Constraint.regex("a+").after("ba"))
    link = native_link(memory)
    rows = [link.row(1, grammar.matcher())]
    plant(rows[0], function, lambda real, *arguments: fail(arguments[-1], b"stuck"))
    run_round(memory, link, rows, [A + 2, A + 3, A + 1])
    assert rows[0].fault == "" and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK] * 4
    run_round(memory, link, rows, [A + 1, A, A], 2, A + 1, 1)
    assert rows[0].fault == fault
    expected = {"fill": [1, 1, MaskStatus.FAULT, 0], "accept": [1, 1, 1, MaskStatus.FAULT], "is_terminated": [1, 1, MaskStatus.FAULT, 0]}
    assert memory.tags[:, 0, 3].tolist() == expected.get(function, [MaskStatus.OK] * 4)
    if function == "rollback":
        run_round(memory, link, rows, [], 4, A + 5, 1)
        assert rows[0].fault == "stuck" and not memory.tags[:, 0, 3].any()


def test_only_the_grammar_after_the_marker_uses_fuel() -> None:
    memory, grammar = Memory.make(1, 3), compiler(VOCABULARY).compile(Constraint.regex("a+").after("b"))
    link = native_link(memory)
    rows = [link.row(1, grammar.matcher())]
    rows[0].struct.fuel_seconds = -1.0
    run_round(memory, link, rows, [A, A + 1, A])
    assert rows[0].fault.startswith("one step of the grammar took")
    assert memory.tags[:, 0, 3].tolist() == [MaskStatus.OK, MaskStatus.OK, MaskStatus.FAULT, 0]


@pytest.mark.parametrize("backend", WITH_MARKER)
@pytest.mark.parametrize("history", [[A], [A, A + 1], [A, A + 1, A], [A, A + 1, A, A + 1], [A, A + 1, A, STOP]], ids=str)
@pytest.mark.parametrize(("first", "filled"), [(0, False), (1, False), (1, True)])
def test_a_row_continues_from_the_tokens_that_its_matcher_has_accepted(
    history: list[int], first: int, filled: bool, backend: BackendChoice
) -> None:
    """Its first token may have been chosen under a mask that the link has not filled."""
    faults = list[str]()
    grammar = compiler(VOCABULARY, backend).compile(Constraint.regex("a?b?").after("ab"))
    python, native = Memory.make(1, 3), Memory.make(1, 3)
    for memory, link in ((python, PythonLink(*python.all)), (native, native_link(native))):
        matcher = grammar.matcher()
        assert all(matcher.accept_token(token) for token in history)
        if filled:
            matcher.fill_next_token_bitmask(memory.masks[0], 0)
        row = link.row(1, matcher, committed=len(history))
        for round_index in range(first, first + 3):
            run_round(memory, link, [row], [A, A + 1, STOP], len(history) + round_index, A, 0)
        faults.append(row.fault)
    assert faults[0] == faults[1]
    assert torch.equal(python.masks, native.masks) and torch.equal(python.tags, native.tags)
