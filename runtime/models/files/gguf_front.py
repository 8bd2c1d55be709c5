"""The front of a GGUF file, walked before the gguf package reads it: that one goes on for ever where a length is a lie."""

from __future__ import annotations

import mmap
from pathlib import Path

from stepgraph.sampling.grammar.tokenizers.table import MAX_IDS

MOST_VALUES = 2 * MAX_IDS  # of all arrays together; the package makes objects of 200 bytes and more of each
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def check_front(path: Path) -> None:
    """ValueError where the metadata is longer than the file, or too much."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ValueError("it is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Front(data).walk()


class _Front:
    def __init__(self, data: mmap.mmap) -> None:
        self._data, self._place, self._values = data, 8, 0
        # Files of the other byte order have their version in the upper half.
        self._big = len(data) >= 8 and not int.from_bytes(data[4:6], "little")

    def walk(self) -> None:
        self._count(self._number(8))  # tensors
        pairs = self._number(8)
        self._count(pairs)
        for _ in range(pairs):
            self._skip(self._number(8))
            self._value(self._number(4))

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip(self._number(8))
        elif kind == _ARRAY:
            inner, count = self._number(4), self._number(8)
            if inner not in _SIZES and inner != _STRING:
                raise ValueError(f"an array of kind {inner}")
            self._count(count)
            for _ in range(count if inner == _STRING else 0):
                self._skip(self._number(8))
            self._skip(count * _SIZES.get(inner, 0))
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value of kind {kind}")

    def _count(self, count: int) -> None:
        self._values += count
        if self._values > MOST_VALUES:
            raise ValueError(f"got {self._values} tensors, fields and values of arrays, want at most {MOST_VALUES}")

    def _number(self, size: int) -> int:
        place = self._place
        self._skip(size)
        return int.from_bytes(self._data[place : self._place], "big" if self._big else "little")

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._place:
            raise ValueError(f"it ends at byte {len(self._data)}, within what begins at {self._place}")
        self._place += size
