"""The tables of an automaton's image, read in Python: a second implementation of its moves, and a text that reaches each state."""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from stepgraph.sampling.grammar.automaton.library import MOVE_INTS, Field, Image, next_entries


class AutomatonState(NamedTuple):
    state: int
    stack: tuple[int, ...]
    counters: tuple[int, int, int]


class ReferenceAutomaton:
    def __init__(self, image: Image) -> None:
        self.next = next_entries(image).tolist()
        self.tables = [int(value) for value in image]
        self.class_of, self.leave = self.tables[Field.CLASS_OF], self.tables[Field.LEAVE]
        one, two, three = self.tables[Field.START_COUNTERS : Field.START_COUNTERS + 3]
        self.start = AutomatonState(self.tables[Field.START], (), (one, two, three))

    def at(self, field: Field, index: int) -> int:
        return self.tables[self.tables[field] + index]

    def step(self, place: AutomatonState, byte: int) -> AutomatonState | None:
        """The place after one byte; None if it is not legal."""
        entry = self.next[place.state][self.tables[self.class_of + byte]]
        if entry == -1:
            return None
        state, stack, counters = self._special(place, -2 - entry) if entry < 0 else (entry, place.stack, place.counters)
        while (finish_set := self.tables[self.leave + state]) >= 0:
            state, stack = self.at(Field.RETURN, finish_set * self.tables[Field.SYMBOLS] + stack[-1]), stack[:-1]
            assert state >= 0
        return AutomatonState(state, stack, counters)

    def _special(self, place: AutomatonState, index: int) -> AutomatonState:
        target, push, counter, last_target, *pairs = (self.at(Field.MOVES, index * MOVE_INTS + column) for column in range(MOVE_INTS))
        counters, is_last = list(place.counters), False
        if counter >= 0:
            counters[counter] -= 1
            is_last = counters[counter] == 0
        sets = pairs[4:] if is_last else pairs[:4]
        for which, value in zip(sets[::2], sets[1::2], strict=True):
            if which >= 0:
                counters[which] = value
        stack = (*place.stack, push) if push >= 0 else place.stack
        return AutomatonState(last_target if is_last else target, stack, (counters[0], counters[1], counters[2]))

    def walk(self, place: AutomatonState, text: bytes) -> AutomatonState | None:
        found: AutomatonState | None = place
        for byte in text:
            if found is None:
                break
            found = self.step(found, byte)
        return found

    def accepts(self, place: AutomatonState) -> bool:
        return self.at(Field.LEAVE, place.state) == -2

    def texts(self, per_state: int = 3, deepest: int = 4) -> list[tuple[AutomatonState, bytes]]:
        """Places with a shortest text that leads to them: every state, with all its counters and up to `per_state` stacks."""
        return [(place, text) for place, text, is_new in self.moves(per_state, deepest) if is_new]

    def moves(self, per_state: int = 3, deepest: int = 4) -> list[tuple[AutomatonState, bytes, bool]]:
        """The results of `texts` and the places after each move from them, each with whether the place is new."""
        todo, seen, count = deque([(self.start, b"")]), {self.start}, Counter[tuple[int, tuple[int, int, int]]]()
        found = [(self.start, b"", True)]
        bytes_of = {self.at(Field.CLASS_OF, byte): byte for byte in (*range(256), *range(0x20, 0x7F))}
        while todo:
            place, text = todo.popleft()
            if count[place.state, place.counters] >= per_state or len(place.stack) > deepest:
                continue
            count[place.state, place.counters] += 1
            for byte in bytes_of.values():
                after = self.step(place, byte)
                if after is None:
                    continue
                found.append((after, text + bytes([byte]), after not in seen))
                if after not in seen:
                    seen.add(after)
                    todo.append((after, text + bytes([byte])))
        return found
