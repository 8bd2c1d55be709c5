"""Rows that begin after a marker are driven from C, with and without `check_masks`: as the Python link drives them, bit for bit."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.sampling.grammar import CompiledConstraint, Constraint, GrammarCompiler, MaskStatus, Matcher, Vocabulary
from stepgraph.sampling.grammar.compile.backends import BACKENDS
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from stepgraph.sampling.grammar.link.native_row import NativeRow
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, advance
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.checked import CheckedMatcher
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from tests.helpers.link_bench import WALK, A, Foreign, Guest, Memory, Twins, native_link, running
from tests.helpers.planted import fail, plant
from tests.helpers.toy_engines import CONTROL, STOP, VOCABULARY, needs_native
from tests.sampling.grammar.matchers.test_marker import CLOSE, OPEN, SMALL

pytestmark = needs_native

ONE = Vocabulary([b"a", b"aa", b"aaaa", b""], stop_token_ids=[3])  # no two of its tokens begin differently
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
def compiler(vocabulary: Vocabulary, backend: BackendChoice, checked: bool) -> GrammarCompiler:
    return GrammarCompiler(vocabulary, max_threads=1, backend=backend, check_masks=checked)


class Marked(Twins):
    """Requests of both libraries, most of them behind a marker, some of them checked."""

    def __init__(self, *arguments: Any, bug: Callable[[NativeRow], None] | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.bug, self.crossed, self.begun, self.statuses = bug, 0, set[int](), set[int]()

    def seat(self, slot: int) -> None:
        random, vocabulary = self.random, self.vocabulary
        constraint = random.choice(INNER[vocabulary])
        if random.random() < 0.9:
            constraint = constraint.after(random.choice(MARKERS[vocabulary]))
        grammar = compiler(vocabulary, random.choice(BACKENDS), random.random() < 0.4).compile(constraint)
        foreign = grammar.marker and random.random() < 0.1
        self.sit(slot, grammar, [behind_foreign(grammar) if foreign else grammar.matcher() for _ in self.links])
        guest = self.guests[slot]
        assert guest is not None and isinstance(guest.rows[1], NativeRow)
        assert foreign or not hasattr(guest.rows[1], "_callbacks")
        if self.bug and not foreign:
            self.bug(guest.rows[1])

    def legal(self, guest: Guest, drafts: int) -> list[int]:
        """In front of a marker, every other time only what carries it on: it has to end somewhere."""
        legal, marker = super().legal(guest, drafts), guest.grammar.marker
        state = 0
        for token in [*guest.history, *guest.drafts[:drafts]]:
            after = marker.after(state, token) if marker and state < marker.complete and token < len(self.vocabulary.tokens) else None
            state = state if after is None else after
        if marker is None or state == marker.complete or self.random.random() < 0.5:
            return legal
        return [token for token in legal if (marker.after(state, token) or 0) > state] or legal

    def check(self) -> None:
        super().check()
        self.statuses.update(self.memories[1].tags[:, :, 3].flatten().tolist())
        for guest in filter(None, self.guests):
            matcher = guest.rows[0].matcher
            matcher = matcher.inner if isinstance(matcher, CheckedMatcher) else matcher
            if isinstance(matcher, MarkerMatcher):
                self.crossed += guest.owner in self.begun and not matcher.begun
                (self.begun.add if matcher.begun else self.begun.discard)(guest.owner)


def behind_foreign(grammar: CompiledConstraint) -> Matcher:
    """The marker in C, the matcher behind it in Python."""
    assert grammar.marker
    return MarkerMatcher(Foreign(grammar.grammar.matcher()), grammar.marker, grammar.vocabulary)


schedules = st.tuples(
    st.integers(1, 5), st.integers(0, 5), st.booleans(), st.integers(1, 3), st.sampled_from([*INNER]), st.integers(0, 2**32)
)
Schedule = tuple[int, int, bool, int, Vocabulary, int]


def walked(schedule: Schedule, rounds: int, bug: Callable[[NativeRow], None] | None = None) -> Marked:
    slots, drafts, masked, threads, vocabulary, seed = schedule
    twins = Marked(slots, drafts, Random(seed), threads, vocabulary, bug=bug)
    for _ in range(rounds):
        twins.round(masked)
    return twins


@settings(max_examples=20)
@given(schedule=schedules)
def test_marked_and_checked_rows_equal_the_python_links_bit_for_bit(schedule: Schedule) -> None:
    """Masks, tags, forced tokens, faults, counts and what each row believes, after every node of a random schedule."""
    walked(schedule, 12)


@pytest.mark.soak
@settings(max_examples=3000, derandomize=False)
@given(schedule=schedules)
def test_marked_and_checked_rows_at_length(schedule: Schedule) -> None:
    walked(schedule, 40)


@pytest.mark.parametrize("vocabulary", [SMALL, VOCABULARY])
@pytest.mark.parametrize("masked", [True, False])
def test_markers_end_inside_drafts_and_are_taken_back(vocabulary: Vocabulary, masked: bool) -> None:
    twins = walked((5, 4, masked, 2, vocabulary, 7), 50)
    assert twins.crossed > 5
    assert twins.statuses >= {MaskStatus.OK, MaskStatus.COMPLETE, MaskStatus.TERMINATED, MaskStatus.ILLEGAL}


def one_state_short(row: NativeRow) -> None:
    row.struct.marker.room = max(1, row.struct.marker.room - 1)


def one_symbol_short(row: NativeRow) -> None:
    if row.struct.marker.table:
        row._table.complete = max(1, row._table.complete - 1)


def no_second_chance(row: NativeRow) -> None:
    """After a part of the marker that was none, it is looked for from its first symbol only."""
    if row.struct.marker.table:
        row._table.shorter = ctypes.addressof(NO_SHORTER)


NO_SHORTER = (ctypes.c_int32 * 32)()


@pytest.mark.parametrize("bug", [one_state_short, one_symbol_short, no_second_chance])
def test_the_comparison_finds_a_marker_that_errs(bug: Callable[[NativeRow], None]) -> None:
    with pytest.raises(AssertionError):
        walked((5, 4, True, 1, SMALL, 7), 50, bug)


def test_nothing_is_forced_in_front_of_a_marker() -> None:
    """Though all that may come there begins alike."""
    twins = walked((5, 3, True, 1, ONE, 3), 40)
    assert twins.crossed and twins.links[1].stats.looks > 50


@pytest.mark.parametrize("marker", MARKERS[SMALL], ids=str)
def test_every_token_in_every_state(marker: str | list[int]) -> None:
    grammar = compiler(SMALL, "xgrammar", True).compile(Constraint.regex("x+").after(marker))
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
                assert all(matcher.accept_token(one) for one in tokens[:state])
                rows.append(link.row(token + 1, matcher, committed=state))
                running(memory, rows[-1], token, history=state)
                memory.drafts[0, token] = token
            link.push_batch(rows)
            link.node((BEGIN_ROUND, COMMIT, advance(1), END_ROUND))()
            written.append((memory.tags.tolist(), memory.masks[0].tolist(), [row.fault for row in rows]))
            legal = memory.tags[1, :, 3] == MaskStatus.OK
            assert legal.tolist() == [token < 12 and grammar.marker.after(state, token) is not None for token in range(40)]
        assert written[0] == written[1]


# one row


def open_rows(memory: Memory, matchers: Sequence[Matcher]) -> tuple[Any, list[NativeRow]]:
    link = native_link(memory)
    rows = [link.row(1 + slot, matcher) for slot, matcher in enumerate(matchers)]
    return link, rows


def walk(memory: Memory, link: Any, rows: Sequence[Any], drafts: Sequence[int], history: int = 0, last: int = 0, accepted: int = 0) -> None:
    for slot, row in enumerate(rows):
        running(memory, row, slot, history, last, accepted)
    for place, token in enumerate(drafts):
        memory.drafts[place] = token
    link.push_batch(rows)
    link.node(WALK)()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("function", "faults"),
    [("fill", "stuck"), ("accept", "stuck"), ("is_terminated", "stuck"), ("rollback", "")],
)
def test_what_the_library_fails_at_behind_the_marker_is_the_rows_fault(function: str, faults: str, backend: BackendChoice) -> None:
    """In front of it the library is not asked."""
    memory, grammar = Memory.make(1, 3), compiler(VOCABULARY, backend, True).compile(Constraint.regex("a+").after("ba"))
    link, rows = open_rows(memory, [grammar.matcher()])
    plant(rows[0], function, lambda real, *arguments: fail(arguments[-1], b"stuck"))
    walk(memory, link, rows, [A + 2, A + 3, A + 1])
    assert rows[0].fault == "" and memory.tags[:, 0, 3].tolist() == [MaskStatus.OK] * 4
    walk(memory, link, rows, [A + 1, A, A], 2, A + 1, 1)
    assert rows[0].fault == faults
    expected = {"fill": [1, 1, MaskStatus.FAULT, 0], "accept": [1, 1, 1, MaskStatus.FAULT], "is_terminated": [1, 1, MaskStatus.FAULT, 0]}
    assert memory.tags[:, 0, 3].tolist() == expected.get(function, [MaskStatus.OK] * 4)
    if function == "rollback":
        walk(memory, link, rows, [], 4, A + 5, 1)
        assert rows[0].fault == "stuck" and not memory.tags[:, 0, 3].any()


def test_only_the_grammar_behind_the_marker_takes_fuel() -> None:
    memory, grammar = Memory.make(1, 3), compiler(VOCABULARY, "xgrammar", False).compile(Constraint.regex("a+").after("b"))
    link, rows = open_rows(memory, [grammar.matcher()])
    rows[0].struct.fuel_seconds = -1.0
    walk(memory, link, rows, [A, A + 1, A])
    assert rows[0].fault.startswith("one step of the grammar took")
    assert memory.tags[:, 0, 3].tolist() == [MaskStatus.OK, MaskStatus.OK, MaskStatus.FAULT, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("history", [[A], [A, A + 1], [A, A + 1, A], [A, A + 1, A, A + 1], [A, A + 1, A, STOP]], ids=str)
@pytest.mark.parametrize(("first", "looked"), [(0, False), (1, False), (1, True)])
def test_a_row_goes_on_from_what_its_matcher_has_accepted(history: list[int], first: int, looked: bool, backend: BackendChoice) -> None:
    """It may begin with a token that was chosen under a mask that the link has not filled."""
    faults = list[str]()
    grammar = compiler(VOCABULARY, backend, True).compile(Constraint.regex("a?b?").after("ab"))
    ours, theirs = Memory.make(1, 3), Memory.make(1, 3)
    for memory, link in ((ours, PythonLink(*ours.all)), (theirs, native_link(theirs))):
        matcher = grammar.matcher()
        assert all(matcher.accept_token(token) for token in history)
        if looked:
            matcher.fill_next_token_bitmask(memory.masks[0], 0)
        row = link.row(1, matcher, committed=len(history))
        for turn in range(first, first + 3):
            walk(memory, link, [row], [A, A + 1, STOP], len(history) + turn, A, 0)
        faults.append(row.fault)
    assert faults[0] == faults[1]
    assert torch.equal(ours.masks, theirs.masks) and torch.equal(ours.tags, theirs.tags)


def test_masks_of_another_width_are_refused() -> None:
    link = native_link(Memory.make(2, 3, words=9))
    for grammar in (Constraint.regex("a+"), Constraint.regex("a+").after("b")):
        for checked in (False, True):
            with pytest.raises(ValueError, match=r"row.matcher: got masks of \d words, want 9"):
                link.row(1, compiler(VOCABULARY, "xgrammar", checked).compile(grammar).matcher())
