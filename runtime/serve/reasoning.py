"""Reasoning between <think> and </think>: whether an answer begins with it, its split from the answer, and its limit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.text import TextCodec

OPENING, CLOSING = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoning:
    """How an answer that begins with reasoning is read."""

    opened: bool  # the prompt ends inside the reasoning; otherwise the answer begins with <think>
    budget: int | None  # tokens, after which it is closed
    closing_ids: tuple[int, ...]  # the text that closes it


def reasoning_of(prompt_ids: Sequence[int], codec: TextCodec, variables: Mapping[str, Any], budget: int | None) -> Reasoning | None:
    """None if the answer has no reasoning: the template has none, or it was switched off."""
    if not codec.template_mentions(OPENING):
        return None
    end = codec.vocabulary.decode(prompt_ids[-32:]).decode("utf-8", "replace").rstrip()
    opened = end.endswith(OPENING)
    switched_on = codec.template_mentions("enable_thinking") and variables.get("enable_thinking", True) and not end.endswith(CLOSING)
    if not opened and not switched_on:
        return None
    return Reasoning(opened, budget, tuple(codec.encode(f"\n{CLOSING}\n\n", begins=False)))


class ReasoningSplitter:
    """Splits text that arrives in pieces; holds back what may be the beginning of a marker, and blanks between reasoning and answer."""

    def __init__(self, reasoning: Reasoning | None) -> None:
        self.inside = reasoning is not None and reasoning.opened
        self._may_open = reasoning is not None and not reasoning.opened
        self._pending, self._trims = "", False

    def push(self, text: str) -> Iterator[tuple[bool, str]]:
        """Pieces; True with reasoning."""
        self._pending += text
        if self._may_open:
            start = self._pending.lstrip()
            if OPENING.startswith(start):
                return
            self._may_open, self.inside = False, start.startswith(OPENING)
            self._pending = start.removeprefix(OPENING) if self.inside else self._pending
        if self.inside:
            piece, found, rest = self._pending.partition(CLOSING)
            if found:
                self.inside, self._trims, self._pending = False, True, rest
            else:
                held = next((size for size in range(len(CLOSING) - 1, 0, -1) if piece.endswith(CLOSING[:size])), 0)
                piece, self._pending = piece[: len(piece) - held], piece[len(piece) - held :]
            if piece:
                yield True, piece
        if not self.inside:
            self._pending = self._pending.lstrip() if self._trims else self._pending
            if self._pending:
                self._trims = False
                yield False, self._pending
                self._pending = ""

    def finish(self) -> Iterator[tuple[bool, str]]:
        if self._pending:
            yield self.inside, self._pending
            self._pending = ""
