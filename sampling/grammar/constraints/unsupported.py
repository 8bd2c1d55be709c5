"""The error for a part of a constraint that would not be enforced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from stepgraph.sampling.fields import clip_repr


@dataclass(frozen=True)
class Unsupported:
    """One part of a constraint that a grammar library does not enforce."""

    where: str  # a JSON pointer into the schema; "#" is the whole constraint
    keyword: str
    reason: str

    @property
    def split(self) -> tuple[str, str]:
        """The reason without its last part, which says what to write instead, and that part; empty if there is none."""
        at, mark = max((self.reason.rfind(mark), mark) for mark in ("; ", ", expected "))
        alternative = self.reason[at + len(mark) :]
        return (self.reason, "") if at < 0 else (self.reason[:at], f"use {alternative}" if mark == ", expected " else alternative)

    def __str__(self) -> str:
        return f"{self.where}: {self.keyword}: {self.reason}"


class UnsupportedError(ValueError):
    def __init__(self, where: str, keyword: str, reason: str) -> None:
        super().__init__(where, keyword, reason)
        self.unsupported = Unsupported(where, keyword, reason)

    def __str__(self) -> str:
        return str(self.unsupported)


@contextlib.contextmanager
def naming_schema(name: str) -> Iterator[None]:
    """An UnsupportedError names the one of several schemas into which it points."""
    try:
        yield
    except UnsupportedError as error:
        part = error.unsupported
        raise UnsupportedError(f"{clip_repr(name)}: {part.where}", part.keyword, part.reason) from None


def reject(where: str, keyword: str, reason: str) -> NoReturn:
    raise UnsupportedError(where, keyword, reason)
