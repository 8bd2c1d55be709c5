"""Mutations of inputs: of bytes, JSON structure and text tokens, with words of the entry point and pieces of other inputs."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tests.fuzz.values import Value, blob, bytes_of, form

MOST_CHARS = 4000  # per text
MOST_INPUT = 12_000  # characters of a whole input
NUMBERS: list[Any] = [0, 1, -1, 2, 7, 255, 1 << 31, -(1 << 31), 1 << 32, (1 << 53) + 1, 1 << 63, -(1 << 63), 1 << 64, 10**40]
NUMBERS += [0.5, -0.0, 1e308, -1e308, 1e-308, float("nan"), float("inf"), -float("inf"), 1.0, 3.0]
TEXTS = ["", "a", "0", "\x00", "\ud800", "\U0001f600", "é", "../x", "/", '"', "\\", "\n", " ", "null", "x" * 300, "%s{0}", "__class__"]
PLAIN: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": 1}, form("tuple", [1, 2]), form("same", 1, times=5000)]
PLAIN += [form("object", 0), blob(b"ab"), form("tensor", [1, 2], type="int64"), form("array", [1, 2]), form("number", 3)]
PLAIN += [form("pairs", [[1, 2.0]]), form("text", "a", times=5000), form("power", 5000)]
_TOKENS = re.compile(r"\w+|\s+|.", re.DOTALL)
_Position = tuple[Any, Any]  # a container, and a key or index in it


class Mutator:
    """Draws changed inputs from a corpus."""

    def __init__(self, random: Random, words: Sequence[str], hostile: bool = True) -> None:
        """hostile: whether values of any type may occur anywhere, not only values that JSON can express."""
        self._random, self._words = random, [*words] or ["a"]
        self._plain = PLAIN if hostile else [value for value in PLAIN if "$" not in repr(value)]

    def mutated(self, corpus: Sequence[Value]) -> Value:
        """An input of the corpus, changed once or several times; recent ones are chosen more often."""
        random = self._random
        late = random.random() < 0.5
        value = random.choice(corpus[-24:] if late else corpus)
        other = random.choice(corpus)
        holder = [copied(value)]
        for _ in range(random.choice((1, 1, 2, 4))):
            self._change(holder, other)
        return holder[0]

    def _change(self, holder: list[Value], other: Value) -> None:
        data, random = bytes_of(holder[0]), self._random
        if data is not None:
            holder[0] = blob(self._bytes(data, bytes_of(other) or b""))
        elif isinstance(holder[0], str):
            holder[0] = self._text(holder[0], other if isinstance(other, str) else "")
        else:
            container, key = random.choice([*_positions(holder)])
            data = bytes_of(container[key])
            if data is not None and random.random() < 0.9:
                container[key] = blob(self._bytes(data, _first_bytes(other)))
            else:
                self._structure(holder, container, key, other)

    def _bytes(self, data: bytes, other: bytes) -> bytes:
        random, changed = self._random, bytearray(data)
        index, size = random.randrange(len(data) + 1), random.choice((1, 1, 2, 4, 8, 40))
        kind = random.randrange(8)
        if kind == 0 and data:
            changed[min(index, len(data) - 1)] ^= 1 << random.randrange(8)
        elif kind == 1 and data:
            changed[min(index, len(data) - 1)] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
        elif kind == 2:
            del changed[index : index + size]
        elif kind == 3:
            changed[index:index] = random.choice(self._words).encode(errors="replace")
        elif kind == 4:
            packed = struct.pack("<q", random.choice((0, 1, -1, 1 << 31, 1 << 40, (1 << 63) - 1, len(data), random.randrange(1000))))
            width = random.choice((4, 8))
            changed[index : index + width] = packed[:width]
        elif kind == 5 and other:
            start = random.randrange(len(other))
            changed[index : index + size] = other[start : start + size]
        elif kind == 6:
            changed[index:index] = data[index : index + size] * random.choice((1, 2, 50))
        elif data:
            changed = changed[:index]
        return bytes(changed)

    def _text(self, text: str, other: str) -> str:
        """Delete, repeat, swap or replace tokens of a text; replacements are words and pieces of another text."""
        random, tokens = self._random, _TOKENS.findall(text)
        index = random.randrange(len(tokens) + 1)
        end = min(len(tokens), index + random.choice((0, 1, 1, 2, 5)))
        kind = random.randrange(6)
        if kind == 0:
            tokens[index:end] = [random.choice(self._words)]
        elif kind == 1:
            del tokens[index:end]
        elif kind == 2:
            tokens[index:index] = tokens[index:end] * random.choice((1, 2, 9))
        elif kind == 3 and other:
            pieces = _TOKENS.findall(other)
            start = random.randrange(len(pieces))
            tokens[index:end] = pieces[start : start + random.choice((1, 3, 12))]
        elif kind == 4 and len(tokens) > 1:
            left, right = random.sample(range(len(tokens)), 2)
            tokens[left], tokens[right] = tokens[right], tokens[left]
        else:
            number = random.choice((0, 1, 2, 3, 9, 100, 1000, 100_000, 1 << 31, 1 << 63))
            tokens[index:end] = [random.choice((random.choice(TEXTS), str(number), chr(random.randrange(0x20, 0x7F))))]
        return "".join(tokens)[:MOST_CHARS]

    def _structure(self, holder: list[Value], container: Any, key: Any, other: Value) -> None:
        random, value = self._random, container[key]
        kind = random.choices(range(10), (1, 1, 1, 1, 1, 1, 1, 1, 4, 4))[0]
        if kind == 0:
            container[key] = random.choice((random.choice(NUMBERS), random.choice(TEXTS), copied(random.choice(self._plain))))
        elif kind == 1 and isinstance(container, (dict, list)) and container is not holder:
            del container[key]
        elif kind == 2 and isinstance(container, dict):
            container[random.choice((*self._words, *TEXTS))] = container.pop(key)
        elif kind == 3:
            given, index = random.choice([*_positions([other])])
            container[key] = copied(given[index])
        elif kind == 4:
            container[key] = random.choice(([value], {random.choice(self._words): value}, [value, value]))
        elif kind == 5 and isinstance(value, list):
            value.insert(random.randrange(len(value) + 1), copied(random.choice([*value, *self._plain])))
        elif kind in (5, 6) and isinstance(value, dict):
            given, index = random.choice([*_positions([other])])
            value[random.choice(self._words)] = copied(given[index])
        elif kind == 7 and isinstance(container, list) and container is not holder:
            random.shuffle(container)
        else:
            container[key] = self._leaf(value)

    def _leaf(self, value: Value) -> Value:
        random = self._random
        if isinstance(value, str):
            return random.choice((random.choice(self._words), self._text(value, random.choice(self._words))))
        if isinstance(value, bool):
            return not value
        if isinstance(value, (int, float)):
            return _nudged(random, value)
        return random.choice((random.choice(NUMBERS), random.choice(self._words)))


def _nudged(random: Random, value: float) -> float:
    try:
        choices = (value + 1, value - 1, -value, value * 2, value // 2, float(value), random.choice(NUMBERS), random.randrange(12))
        return random.choice(choices) if abs(value) < 10**60 else 0
    except (OverflowError, ValueError):  # of a float
        return 0


def copied(value: Value) -> Value:
    """A deep copy of a JSON value."""
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def _first_bytes(value: Value) -> bytes:
    found = (bytes_of(container[key]) for container, key in _positions([value]))
    return next((data for data in found if data), b"")


def _positions(holder: Any) -> Iterator[_Position]:
    for key in holder if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], (dict, list)) and bytes_of(holder[key]) is None:
            yield from _positions(holder[key])


def fits(value: Value) -> bool:
    """Whether an input is short enough and not too deeply nested to serialise."""
    try:
        return len(json.dumps(value)) <= MOST_INPUT
    except (RecursionError, ValueError):
        return False
