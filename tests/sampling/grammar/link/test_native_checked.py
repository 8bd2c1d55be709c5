"""`check_masks` on the native link: what the Python link finds, told in the same words, and without the GIL."""

from __future__ import annotations

import copy
import ctypes
from random import Random
from typing import Any

import numpy as np
from torch import Tensor

from stepgraph.sampling.grammar import Constraint, MaskStatus, Matcher
from stepgraph.sampling.grammar.compile.backends import BACKENDS
from stepgraph.sampling.grammar.link.native_row import NativeRow
from stepgraph.sampling.grammar.link.protocol import HostLink
from stepgraph.sampling.grammar.link.python import PythonLink
from stepgraph.sampling.grammar.matchers.checked import CheckedMatcher
from stepgraph.sampling.grammar.matchers.marker import MarkerMatcher
from tests.helpers.link_bench import A, Guest, Memory, native_link
from tests.helpers.planted import plant
from tests.helpers.toy_engines import CONTROL, VOCABULARY, needs_native
from tests.sampling.grammar.link.test_native_marker import Marked, compiler, walk
from tests.sampling.grammar.matchers.test_marker import SMALL

pytestmark = needs_native
LYING_MARKERS: list[str | list[int]] = ["b", "ab", [CONTROL], [A, CONTROL]]


def test_a_disagreement_in_front_of_the_marker() -> None:
    grammar = compiler(SMALL, "xgrammar", False).compile(Constraint.regex("x+").after("ab"))
    marker = copy.copy(grammar.marker)
    assert marker
    marker.masks = marker.masks ^ np.array([1 << 7 | 1 << 10, 0], np.int32)  # without "x", and with a control token
    for draft, told in ((7, "forbids token 7 behind 1 tokens, accept_token takes it"), (10, "allows token 10 behind 1 tokens, accept_")):
        written = []
        for native in (False, True):
            memory = Memory.make(1, 3, SMALL.mask_words, SMALL)
            link: HostLink = native_link(memory) if native else PythonLink(*memory.all, forcing=memory.forcing)
            row = link.row(1, CheckedMatcher(MarkerMatcher(grammar.grammar.matcher(), marker, SMALL), "xgrammar"))
            walk(memory, link, [row], [0, draft, 0])
            written.append((memory.tags.tolist(), memory.masks[: 2 + (draft == 7)].tolist(), row.fault))
            assert told in row.fault
        assert written[0] == written[1]


class Liar:
    """A matcher whose masks lack a token that it takes, or have one that it does not take, at one place."""

    fault = ""

    def __init__(self, inner: Matcher, place: int, token: int) -> None:
        self._inner, self._place, self._token, self._accepted = inner, place, token, 0

    def accept_token(self, token_id: int) -> bool:
        taken = self._inner.accept_token(token_id)
        self._accepted += taken
        return taken

    def fill_next_token_bitmask(self, masks: Tensor, index: int) -> MaskStatus:
        status = self._inner.fill_next_token_bitmask(masks, index)
        if self._accepted == self._place and status == MaskStatus.OK:
            masks[index, self._token // 32] ^= 1 << self._token % 32
        return status

    def rollback(self, num_tokens: int) -> None:
        self._inner.rollback(num_tokens)
        self._accepted -= num_tokens


def lie(row: NativeRow, place: int, token: int) -> list[Any]:
    """The same below a native row. Returns what has to live as long as it."""
    accepted, kept = [0], []

    def accept(real: Any, *arguments: Any) -> int:
        taken = int(real(*arguments))
        accepted[0] += taken
        return taken

    def rollback(real: Any, library: int, matcher: int, count: int, why: int) -> int:
        accepted[0] -= count
        return int(real(library, matcher, count, why))

    def fill(real: Any, library: int, matcher: int, words: int, count: int, why: int) -> int:
        answer = int(real(library, matcher, words, count, why))
        if accepted[0] == place and answer == 0:
            ctypes.c_uint32.from_address(words + token // 32 * 4).value ^= 1 << token % 32
        return answer

    for name, bug in (("accept", accept), ("rollback", rollback), ("fill", fill)):
        plant(row, name, bug)
        kept.append(row.planted)  # type: ignore[attr-defined]
    return kept


class Lied(Marked):
    """Checked requests whose grammars are of two minds about a token."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.faults, self.kept, self.lies = set[str](), list[Any](), dict[int, int]()

    def seat(self, slot: int) -> None:
        constraint, random = Constraint.regex("[a-c]+"), self.random
        if random.random() < 0.7:
            constraint = constraint.after(random.choice(LYING_MARKERS))
        grammar = compiler(VOCABULARY, random.choice(BACKENDS), True).compile(constraint)
        place, token = random.randrange(5), random.choice([A, A + 1, A + 7, CONTROL - 20])
        ours: Any = grammar.matcher()
        around = ours.inner if isinstance(ours.inner, MarkerMatcher) else ours
        around._inner = Liar(around.inner, place, token)
        self.sit(slot, grammar, [ours, grammar.matcher()])
        guest = self.guests[slot]
        assert guest is not None and isinstance(guest.rows[1], NativeRow)
        self.kept.append(lie(guest.rows[1], place, token))
        self.lies[guest.owner] = token

    def legal(self, guest: Guest, drafts: int) -> list[int]:
        return [self.lies[guest.owner]] if self.random.random() < 0.3 else super().legal(guest, drafts)

    def check(self) -> None:
        super().check()
        self.faults.update(guest.rows[0].fault for guest in filter(None, self.guests))


def test_a_disagreement_is_found_and_told_as_the_python_link_does() -> None:
    faults = set[str]()
    for seed in range(8):
        twins = Lied(4, 4, Random(seed), 1 + seed % 3)
        for _ in range(20):
            twins.round(masked=seed % 2 == 0)
        faults |= twins.faults
    told = [fault.split() for fault in faults if fault.startswith("check_masks: the mask of ")]
    assert {words[4] for words in told} == set(BACKENDS) and {words[9] for words in told} >= set("01234")
    for says, does in (("allows", "refuses"), ("forbids", "takes")):
        assert sum((words[5], words[-2]) == (says, does) for words in told) > 5
