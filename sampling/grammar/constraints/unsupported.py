"""The error for a part of a constraint that would not be enforced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Unsupported:
    """One part of a constraint that a grammar library does not enforce."""

    where: str  # a JSON pointer into the schema; "#" is the whole constraint
    keyword: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.keyword}: {self.reason}"


class UnsupportedError(ValueError):
    def __init__(self, unsupported: Unsupported) -> None:
        super().__init__(str(unsupported))
        self.unsupported = unsupported


def reject(where: str, keyword: str, reason: str) -> NoReturn:
    """Raise UnsupportedError."""
    raise UnsupportedError(Unsupported(where, keyword, reason))
