"""Messages of the first rank to the others: contents in memory that the processes share, and a socket to each that wakes it.

The memory has no name, so nothing of it is left when the processes end, however they end. Positions go through the sockets, which orders
the accesses: a reader has read up to its last answer, and the first rank has written up to its last notice.
"""

from __future__ import annotations

import mmap
import multiprocessing.connection
import os
import sys
import tempfile
from collections.abc import Sequence

SIZE = 1 << 20  # bytes that the first rank is ahead of a reader, at most
Link = multiprocessing.connection.Connection
_LENGTH = 8  # bytes of a number


def anonymous_file(size: int = SIZE) -> int:
    """The descriptor of a file without a name."""
    if sys.platform == "linux":
        found = os.memfd_create("stepgraph-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.truncate(found, size)
    return found


class MessageWriter:
    """links: to the readers. seconds: that a reader has for making room."""

    def __init__(self, file: int, links: Sequence[Link], seconds: float) -> None:
        self._memory, self._links, self._seconds = mmap.mmap(file, 0), links, seconds
        self._written, self._read = 0, [0] * len(links)  # bytes since the start

    def send(self, message: bytes) -> None:
        """OSError or EOFError for a reader that is lost, or makes no room in time."""
        size, rest = len(self._memory), memoryview(_number(len(message)) + message)
        while rest:
            for index, link in enumerate(self._links):
                while self._written - self._read[index] == size:
                    if not link.poll(self._seconds):
                        raise TimeoutError(f"a rank has read nothing for {self._seconds:g} s")
                    self._read[index] = int.from_bytes(link.recv_bytes(), "little")
            at, room = self._written % size, size - (self._written - min(self._read))
            part = rest[: min(room, size - at)]
            self._memory[at : at + len(part)] = part
            self._written, rest = self._written + len(part), rest[len(part) :]
            for link in self._links:
                link.send_bytes(_number(self._written))


class MessageReader:
    def __init__(self, file: int, link: Link) -> None:
        self._memory, self._link = mmap.mmap(file, 0), link
        self._written = self._read = self._answered = 0

    def receive(self) -> bytes:
        """The next message. EOFError or OSError if the first rank has ended."""
        return self._take(int.from_bytes(self._take(_LENGTH), "little"))

    def _take(self, count: int) -> bytes:
        found, size = bytearray(), len(self._memory)
        while (missing := count - len(found)) > 0:
            if self._read == self._written:
                self._written = int.from_bytes(self._link.recv_bytes(), "little")
            at = self._read % size
            part = self._memory[at : min(size, at + min(missing, self._written - self._read))]
            found += part
            self._read += len(part)
            if self._read - self._answered >= size // 4:  # seldom, and before the writer has no room
                self._link.send_bytes(_number(self._read))
                self._answered = self._read
        return bytes(found)


def _number(value: int) -> bytes:
    return value.to_bytes(_LENGTH, "little")
