"""advance_fill in Python: a second implementation of its rules and of how an image is read."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from stepgraph.sampling.grammar.automaton.library import IMAGE_VERSION, MOVE_INTS, Field, next_entries
from stepgraph.sampling.grammar.matchers.forced import FORCED_BYTES, KEY_FACTOR, ForcedText, TokenLookup, first_slot
from stepgraph.sampling.grammar.status import FinishCode, HostColumn, MaskStatus
from stepgraph.sampling.kernels.advance import ENDED, FORCED_PUSHES, HEADER_INTS, TEXT_COLUMNS, TOO_DEEP, PlaceColumn

COUNTERS = 3

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def advance_reference(*arguments: Tensor | int | None) -> None:
    """Takes the arguments of advance_fill, on the CPU."""
    states, offsets, batch, tokens, ints, *tables = (each.numpy() for each in arguments[:9] if isinstance(each, Tensor))
    *arrays, all_statuses = (each.numpy() for each in arguments[9:14] if isinstance(each, Tensor))
    first, last, fill_new, by_row = (each for each in arguments[14:18] if isinstance(each, int))
    *forcing, merges, takes_forced = arguments[18:]
    texts, slots, forced = (each.numpy() if isinstance(each, Tensor) else None for each in forcing)
    for slot, row in enumerate(batch.tolist()):
        offset, statuses = int(offsets[row]), all_statuses[first : last + 1, slot]
        statuses[:] = MaskStatus.NONE
        if 0 < offset <= len(ints) - HEADER_INTS and ints[offset] == IMAGE_VERSION:
            one = Row(states[row], ints[offset:], *tables, *(array[row] for array in arrays))
            if texts is not None and slots is not None:
                table = DeviceTokenTable(tables[0], tables[1], slots, bool(merges))
                one.forced = ForcedRow(texts[row], table, None if forced is None else forced[:, slot], bool(takes_forced))
            one.run(tokens[row if by_row else slot], first, last, bool(fill_new))
            statuses[:] = one.tags[first : last + 1, 3]


def text_key(text: bytes) -> int:
    """The key of a text in the slots of a TokenLookup, as an int64."""
    key = sum((byte + 1) * pow(KEY_FACTOR, index + 1, 1 << 64) for index, byte in enumerate(text)) % (1 << 64)
    return key - (key >> 63 << 64)


class DeviceTokenTable(TokenLookup):
    """The token table of a vocabulary in device memory."""

    def __init__(self, text: npt.NDArray[np.uint8], starts: Ints, slots: Longs, merges: bool) -> None:
        self.bytes, self.starts, self.slots, self.merges = text, starts, slots, merges
        self.num_tokens, self.max_token_bytes = len(starts) - 1, FORCED_BYTES

    def find(self, text: bytes) -> int:
        key = text_key(text)
        slot = first_slot(key, len(self.slots))
        while self.slots[slot, 1] >= 0 and self.slots[slot, 0] != key:
            slot = (slot + 1) % len(self.slots)
        return int(self.slots[slot, 1])


@dataclass
class ForcedRow:
    """The forced text of one row of the reference."""

    ints: Ints
    table: TokenLookup
    tokens: Longs | None  # after each mask
    takes: bool

    @property
    def text(self) -> ForcedText:
        start, size, count = self.ints[:TEXT_COLUMNS].tolist()
        raw = self.ints[TEXT_COLUMNS + FORCED_BYTES :].view(np.uint8)
        text = raw[FORCED_BYTES : FORCED_BYTES + size].tobytes()
        return ForcedText(start, text, self.ints[TEXT_COLUMNS : TEXT_COLUMNS + count].tolist(), raw[:count].tolist())

    @text.setter
    def text(self, kept: ForcedText) -> None:
        count, raw = len(kept.tokens), self.ints[TEXT_COLUMNS + FORCED_BYTES :].view(np.uint8)
        self.ints[:TEXT_COLUMNS] = kept.start, len(kept.text), count
        self.ints[TEXT_COLUMNS : TEXT_COLUMNS + count] = kept.tokens
        raw[:count] = kept.ends[:count]
        raw[FORCED_BYTES : FORCED_BYTES + len(kept.text)] = np.frombuffer(kept.text, np.uint8)

    def draft(self, index: int) -> int:
        """The token that replaces draft `index`, or -1."""
        return int(self.tokens[index - 1]) if self.takes and self.tokens is not None else -1

    def accepted(self, position: int, token: int) -> None:
        text = self.text
        text.accepted(position, token)
        self.text = text

    def propose(self, index: int, position: int, row: Row) -> None:
        if self.tokens is not None and index < len(self.tokens):
            text = self.text
            self.tokens[index] = text.propose(position, row.masks[index], self.table, PlaceMatcher(row, row._load(position)).forced_bytes)
            self.text = text


@dataclass
class Place:
    """The state of a grammar after a text."""

    state: int
    counters: list[int]
    stack: list[int]


class TooDeepError(Exception):
    """The text nests deeper than IMAGE_DEPTH."""


@dataclass
class Row:
    """One row of the reference."""

    state: Longs
    image: Ints
    text: npt.NDArray[np.uint8]
    starts: Ints
    plain: Ints
    stop_words: Ints
    places: Ints
    stacks: Ints
    masks: Ints
    tags: Longs
    forced: ForcedRow | None = field(default=None, init=False)

    def run(self, drafts: Longs, first: int, last: int, fill_new: bool) -> None:
        running = self.state[HostColumn.FINISH] == FinishCode.RUNNING and self.image[Field.DEPTH] <= self.stacks.shape[1]
        if self.forced and self.forced.tokens is not None:
            self.forced.tokens[first : last + 1] = -1
        if running and fill_new and not self._is_filled(self._generated, 0):
            self._commit()
        for index in range(first, last + 1):
            forced = self.forced.draft(index) if self.forced and index else -1
            token = int(drafts[index - 1]) if index and forced < 0 else forced
            if running and index == 0:
                self._commit()
            elif not running or token < 0 or not self._is_open(self._generated, index - 1):
                self.tags[index] = (0, 0, index, MaskStatus.NONE)
            elif self._step(self._generated + index - 1, index - 1, token):
                self._fill(index)
            else:
                self._tag(index, MaskStatus.ILLEGAL)

    @property
    def _generated(self) -> int:
        return int(self.state[HostColumn.GENERATED])

    def _tag(self, index: int, status: MaskStatus) -> None:
        self.tags[index] = (self.state[HostColumn.OWNER], self._generated, index, status)

    def _is_filled(self, generated: int, index: int) -> bool:
        """Whether mask `index` was filled when the history had `generated` tokens."""
        owner, tokens, at, status = (int(value) for value in self.tags[index])
        return (owner, tokens, at) == (self.state[HostColumn.OWNER], generated, index) and status != MaskStatus.NONE

    def _is_open(self, generated: int, index: int) -> bool:
        """Whether mask `index` is filled and allows a token; then its place is valid."""
        return self._is_filled(generated, index) and bool(self.tags[index, 3] == MaskStatus.OK)

    def _commit(self) -> None:
        """Accept the token that a round has added to the history since mask 0 was filled, and fill mask 0."""
        legal, before = True, int(self.tags[0, 1])
        if self._is_filled(self._generated, 0):
            pass
        elif self._generated == 0:
            counters = self.image[Field.START_COUNTERS : Field.START_COUNTERS + COUNTERS].tolist()
            self._store(0, Place(int(self.image[Field.START]), counters, []))
            if self.forced:
                self.forced.text = ForcedText()
        else:
            emitted = self._generated - before
            legal = 0 < emitted <= len(self.masks) and self._is_open(before, emitted - 1)
            legal = legal and self._step(self._generated - 1, emitted - 1, int(self.state[HostColumn.LAST_TOKEN]))
        if legal:
            self._fill(0)
        else:
            self.tags[0] = (0, 0, 0, MaskStatus.NONE)

    def _load(self, tokens: int) -> Place:
        slot = tokens % len(self.places)
        state, depth, *counters = self.places[slot, : PlaceColumn.FIRST_COUNTER + COUNTERS].tolist()
        return Place(state, counters, self.stacks[slot, :depth].tolist())

    def _store(self, tokens: int, place: Place) -> None:
        slot, depth = tokens % len(self.places), len(place.stack)
        self.places[slot, : PlaceColumn.FIRST_COUNTER + COUNTERS] = (place.state, depth, *place.counters)
        self.stacks[slot, :depth] = place.stack

    def _step(self, tokens: int, index: int, token: int) -> bool:
        """From the place after `tokens` tokens, whose mask is mask `index`, to the next one; False, and no change, if the token is not
        legal."""
        place = self._load(tokens)
        if not 0 <= token < len(self.starts) - 1 or not self.masks[index, token // 32] >> token % 32 & 1:
            return False
        if self.stop_words[token // 32] >> token % 32 & 1:
            place.state = ENDED
        else:
            try:
                if not self._follow(place, token):
                    return False
            except TooDeepError:
                place.state = TOO_DEEP
        free, limit, limited = (int(self.image[field]) for field in (Field.FREE, Field.LIMIT, Field.LIMITED))
        if free <= place.state < limited and tokens + 1 >= limit:
            place.state += limited - free
        self._store(tokens + 1, place)
        if self.forced:
            self.forced.accepted(tokens, token)
        return True

    def _at(self, table: Field, index: int) -> int:
        return int(self.image[int(self.image[table]) + index])

    def _follow(self, place: Place, token: int) -> bool:
        """Read the bytes of a token; False if they are not legal, or if there are none."""
        text = self.text[self.starts[token] : self.starts[token + 1]].tolist()
        return bool(text) and self._read(place, text, len(place.stack), int(self.image[Field.PUSHES])) is not None

    def _read(self, place: Place, text: list[int], kept: int, pushes: int) -> int | None:
        """Read bytes that push at most `pushes` symbols. Of the stack before a text, `kept` symbols were not popped; returns how many
        are not popped now. None if the bytes are not legal."""
        for byte in text:
            entry = self._next(place.state, self._at(Field.CLASS_OF, byte))
            if entry == -1:
                return None
            if entry >= 0:
                place.state = entry
            elif not self._move(place, -2 - entry, kept, pushes):
                return None
            while (finish_set := self._at(Field.LEAVE, place.state)) >= 0:
                symbol = place.stack.pop()
                kept = min(kept, len(place.stack))
                place.state = self._at(Field.RETURN, finish_set * int(self.image[Field.SYMBOLS]) + symbol)
                if place.state < 0:
                    return None
        return kept

    def _next(self, state: int, byte_class: int) -> int:
        return int(next_entries(self.image)[state, byte_class])

    def only_bytes(self, place: Place) -> bytes:
        """The bytes that must come next."""
        text, kept = bytearray(), len(place.stack)
        while len(text) < FORCED_BYTES and place.state >= 0 and self._at(Field.LEAVE, place.state) == -1:
            legal = [each for each in range(int(self.image[Field.CLASSES])) if self._next(place.state, each) != -1]
            if len(legal) != 1 or (byte := self._at(Field.BYTE_OF, legal[0])) < 0:
                break
            try:
                read = self._read(place, [byte], kept, FORCED_PUSHES)
            except TooDeepError:
                break
            if read is None:
                break
            kept = read
            text.append(byte)
        return bytes(text)

    def _move(self, place: Place, index: int, kept: int, pushes: int) -> bool:
        """Apply a move that changes counters or the stack; False if it is not legal."""
        start = int(self.image[Field.MOVES]) + index * MOVE_INTS
        target, push, counter, last_target, *pairs = self.image[start : start + MOVE_INTS].tolist()
        sets = pairs[:4]
        if counter >= 0:
            place.counters[counter] -= 1
            if place.counters[counter] == 0:
                target, sets = last_target, pairs[4:]
        for which, value in zip(sets[::2], sets[1::2], strict=True):
            if which >= 0:
                place.counters[which] = value
        if push >= 0:
            if len(place.stack) - kept >= pushes:
                return False
            if len(place.stack) >= self.image[Field.DEPTH]:
                raise TooDeepError
            place.stack.append(push)
        place.state = target
        return bool(target >= 0)

    def _fill(self, index: int) -> None:
        place, mask = self._load(self._generated + index), self.masks[index]
        if place.state < 0:
            mask[:] = 0
            return self._tag(index, MaskStatus.TERMINATED if place.state == ENDED else MaskStatus.FAULT)
        base, row_status, first, end = (self._at(Field.ROW_OF, 4 * place.state + column) for column in range(4))
        words, dense = len(mask), int(self.image[Field.DENSE])
        mask[:] = 0 if base == -1 else self.plain[-2 - base] if base < 0 else self.image[dense + base * words : dense + (base + 1) * words]
        for change in range(first, end):
            mask[self._at(Field.CHANGE_WORD, change)] = self._at(Field.CHANGE_VALUE, change)
        status = MaskStatus(row_status)
        for token in self._crossing(place.state):
            try:
                legal = self._follow(Place(place.state, [*place.counters], [*place.stack]), token)
            except TooDeepError:
                legal = False
            if legal:
                mask[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
                status = MaskStatus.OK
        self._tag(index, status)
        if self.forced and status == MaskStatus.OK:
            self.forced.propose(index, self._generated + index, self)

    def _crossing(self, state: int) -> list[int]:
        """The tokens whose legality depends on the stack."""
        if not self.image[Field.SYMBOLS]:
            return []
        return [self._at(Field.CROSS, at) for at in range(self._at(Field.CROSS_START, state), self._at(Field.CROSS_START, state + 1))]


@dataclass
class PlaceMatcher:
    """A place with the interface of a matcher, for a forced text."""

    row: Row
    place: Place

    def forced_bytes(self) -> bytes:
        return self.row.only_bytes(self.place)
