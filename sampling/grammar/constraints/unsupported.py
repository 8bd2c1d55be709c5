"""A refusal to take a constraint that would not be enforced: where in the schema, which keyword, why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True)
class Refusal:
    where: str  # a JSON pointer, "#" for the whole
    keyword: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.keyword}: {self.reason}"


class RefusedError(ValueError):
    def __init__(self, refusal: Refusal) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


def refuse(where: str, keyword: str, reason: str) -> NoReturn:
    raise RefusedError(Refusal(where, keyword, reason))


def step(where: str, *names: str | int) -> str:
    """The pointer to something below `where`."""
    return "/".join([where, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)])
