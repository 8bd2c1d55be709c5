"""Reasoning between <think> and </think>, or in a channel of GPT-OSS: its split from the answer, and its limit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.serve.calls import FORMATS, ObjectEnd, choose_format
from stepgraph.runtime.text import TextCodec, partial_match

THINK_BEGIN, THINK_END = "<think>", "</think>"
CHANNEL, MESSAGE, MESSAGE_END = "<|channel|>", "<|message|>", "<|end|>"


@dataclass(frozen=True)
class Reasoning:
    """How an answer that begins with reasoning is read."""

    opened: bool  # the prompt ends inside the reasoning; otherwise the answer begins with <think>
    budget: int | None  # tokens, after which it is closed
    closing_ids: tuple[int, ...]  # the text that closes it
    in_channels: bool = False

    def marker(self, of_calls: bool, required: bool, closed: bool) -> str | None:
        """The text after which a constraint applies; None for the whole answer. closed: the answer continues after closed reasoning."""
        if not self.in_channels:
            # The triggers of calls in free text apply from the start where the model may answer without reasoning.
            return None if closed or (of_calls and not required and not self.opened) else THINK_END
        if of_calls:
            return MESSAGE_END if required and not closed else None  # free text with calls has triggers that occur nowhere else
        return f"{CHANNEL}final{MESSAGE}"


def with_markers(codec: TextCodec, tool_format: str) -> TextCodec:
    """The codec in which markers of reasoning and calls are text, even if they are control tokens."""
    markers = {
        *([THINK_BEGIN, THINK_END] if codec.template_mentions(THINK_BEGIN) else ()),
        *([MESSAGE_END, *FORMATS["gpt-oss"].markers] if codec.template_mentions(CHANNEL) else ()),
    }
    return codec.with_text(choose_format(codec, tool_format).call_format.markers | markers)


def reasoning_of(prompt_ids: Sequence[int], codec: TextCodec, variables: Mapping[str, Any], budget: int | None) -> Reasoning | None:
    """The reasoning of an answer; None if the template has no reasoning or it was switched off."""
    if codec.template_mentions(CHANNEL):
        return Reasoning(False, budget, tuple(codec.encode(MESSAGE_END, begins=False)), in_channels=True)
    if not codec.template_mentions(THINK_BEGIN):
        return None
    end = codec.vocabulary.decode(prompt_ids[-32:]).decode("utf-8", "replace").rstrip()
    opened = end.endswith(THINK_BEGIN)
    switched_on = codec.template_mentions("enable_thinking") and variables.get("enable_thinking", True) and not end.endswith(THINK_END)
    if not opened and not switched_on:
        return None
    return Reasoning(opened, budget, tuple(codec.encode(f"\n{THINK_END}\n\n", begins=False)))


class ReasoningSplitter:
    """Splits text that arrives in pieces; holds back what may be the beginning of a marker, and blanks between reasoning and answer."""

    def __init__(self, reasoning: Reasoning | None, to_marker: bool = False) -> None:
        """to_marker: text without <think> is reasoning as well, up to </think>, where a constraint begins."""
        self.in_reasoning, self._to_marker = reasoning is not None and reasoning.opened, to_marker
        self._may_open = reasoning is not None and not reasoning.opened
        self._pending, self._trim_blanks = "", False

    def push(self, text: str, ended: bool = False) -> Iterator[tuple[bool, str]]:
        """Yields pieces, with True for reasoning. ended: no more text follows."""
        self._pending += text
        if self._may_open:
            start = self._pending.lstrip()
            if THINK_BEGIN.startswith(start) and not ended:
                return
            self._may_open, self.in_reasoning = False, self._to_marker or start.startswith(THINK_BEGIN)
            self._pending = start.removeprefix(THINK_BEGIN) if self.in_reasoning else self._pending
        if self.in_reasoning:
            piece, found, rest = self._pending.partition(THINK_END)
            if found:
                self.in_reasoning, self._trim_blanks, self._pending = False, True, rest
            else:
                held = 0 if ended else partial_match(piece, [THINK_END])
                piece, self._pending = piece[: len(piece) - held], piece[len(piece) - held :]
            if piece:
                yield True, piece
        if not self.in_reasoning:
            self._pending = self._pending.lstrip() if self._trim_blanks else self._pending
            if self._pending:
                self._trim_blanks = False
                yield False, self._pending
                self._pending = ""


class ChannelSplitter:
    """Splits the messages of GPT-OSS, which consist of a header, <|message|> and a text: those of the channel `analysis` are reasoning.
    The header of a call becomes the one of its format; the other headers are left out."""

    def __init__(self) -> None:
        self.in_reasoning = False
        self._pending, self._in_header = "", True
        self._arguments: ObjectEnd | None = None  # of the call that is read

    def push(self, text: str, ended: bool = False) -> Iterator[tuple[bool, str]]:
        """Yields pieces, with True for reasoning. ended: no more text follows."""
        self._pending += text
        while True:
            if self._in_header:
                header, found, rest = self._pending.partition(MESSAGE)
                if not found:
                    if ended and header and "<|" not in header:
                        yield False, header
                    return
                self._in_header, self._pending = False, rest
                call = re.search(r" to=functions\.([\w-]+)", header)
                self.in_reasoning = call is None and f"{CHANNEL}analysis" in header
                if call:
                    self._arguments = ObjectEnd()
                    yield False, FORMATS["gpt-oss"].begin(call[1])
            inside = self._arguments.find(self._pending) if self._arguments else 0  # markers in strings of arguments end nothing
            self._arguments = self._arguments if inside is None else None
            end = None if inside is None else re.compile(r"<\|end\|>|<\|start\|>").search(self._pending, inside)
            held = 0 if ended or inside is None else partial_match(self._pending, [MESSAGE_END, "<|start|>"])
            size = end.start() if end else len(self._pending) - held
            piece, self._pending = self._pending[:size], self._pending[end.end() if end else size :]
            if piece:
                yield self.in_reasoning, piece
            if end is None:
                return
            self._in_header, self.in_reasoning = True, False


def make_splitter(reasoning: Reasoning | None, to_marker: bool) -> ReasoningSplitter | ChannelSplitter:
    return ChannelSplitter() if reasoning is not None and reasoning.in_channels else ReasoningSplitter(reasoning, to_marker)
