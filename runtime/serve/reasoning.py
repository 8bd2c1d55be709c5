"""Reasoning between <think> and </think>, or in a channel of GPT-OSS: its split from the answer, and its limit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepgraph.runtime.serve.calls import FORMATS, PieceParser, Steps, choose_format
from stepgraph.runtime.text import TextCodec

THINK_BEGIN, THINK_END = "<think>", "</think>"
CHANNEL, MESSAGE, MESSAGE_END = "<|channel|>", "<|message|>", "<|end|>"
Piece = tuple[bool, str]  # of an answer; True: of the reasoning


@dataclass(frozen=True)
class Reasoning:
    """How an answer that begins with reasoning is read."""

    opened: bool  # the prompt ends inside the reasoning; otherwise the answer begins with <think>
    budget: int | None  # tokens, after which it is closed
    closing_ids: tuple[int, ...]  # the text that closes it
    in_channels: bool = False

    def marker(self, of_calls: bool, in_text: bool, closed: bool) -> str | None:
        """The text after which a constraint applies; None for the whole answer. in_text: of calls in free text. closed: the answer
        continues after closed reasoning."""
        if not self.in_channels:
            # The triggers of calls in free text apply from the start where the model may answer without reasoning.
            return None if closed or (in_text and not self.opened) else THINK_END
        if of_calls:
            return None if in_text or closed else MESSAGE_END  # free text with calls has triggers that occur nowhere else
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
    end = codec.decode(prompt_ids[-32:]).rstrip()
    opened = end.endswith(THINK_BEGIN)
    switched_on = codec.template_mentions("enable_thinking") and variables.get("enable_thinking", True) and not end.endswith(THINK_END)
    if not opened and not switched_on:
        return None
    return Reasoning(opened, budget, tuple(codec.encode(f"\n{THINK_END}\n\n", begins=False)))


class ReasoningSplitter(PieceParser[Piece]):
    """Splits the reasoning from the answer. Holds back what may be the beginning of a marker, and drops blanks between the two."""

    def __init__(self, reasoning: Reasoning | None, to_marker: bool = False) -> None:
        """to_marker: text without <think> is reasoning as well, up to </think>, where a constraint begins."""
        super().__init__()
        self.in_reasoning, self._to_marker = reasoning is not None and reasoning.opened, to_marker
        self._may_open = reasoning is not None and not reasoning.opened

    def _parse(self) -> Steps[Piece, None]:
        if self._may_open:
            while THINK_BEGIN.startswith(start := self._pending.lstrip()) and not self._ended:
                yield None
            self.in_reasoning = self._to_marker or start.startswith(THINK_BEGIN)
            self._pending = start.removeprefix(THINK_BEGIN) if self.in_reasoning else self._pending
        if self.in_reasoning:
            if not (yield from self._up_to([THINK_END], lambda text: (True, text))):
                return
            self.in_reasoning = False
            yield from self._skip(THINK_END)
            while not (rest := self._pending.lstrip()) and not self._ended:
                self._pending = ""
                yield None
            self._pending = rest
        yield from self._up_to((), lambda text: (False, text))


class ChannelSplitter(PieceParser[Piece]):
    """Splits the messages of GPT-OSS, which consist of a header, <|message|> and a text: those of the channel `analysis` are reasoning.
    The header of a call becomes the one of its format; the other headers are left out."""

    in_reasoning = False

    def _parse(self) -> Steps[Piece, None]:
        while True:
            while MESSAGE not in self._pending and not self._ended:
                yield None
            header, found, self._pending = self._pending.partition(MESSAGE)
            if not found:
                if header and "<|" not in header:
                    yield False, header
                return
            call = re.search(r" to=functions\.([\w-]+)", header)
            self.in_reasoning = call is None and f"{CHANNEL}analysis" in header
            if call:
                yield False, FORMATS["gpt-oss"].begin(call[1])
                yield from self._object(lambda text: (False, text))  # markers in strings of arguments end nothing
            end = yield from self._up_to([MESSAGE_END, "<|start|>"], lambda text: (self.in_reasoning, text))
            if not end:
                return
            self.in_reasoning = False
            yield from self._skip(end)
