"""Tool calls in the text of an answer: how a family of models writes them, and their parts as the text arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stepgraph.runtime.text import TextCodec

Delta = dict[str, Any]  # content or reasoning_content: some text, or tool_calls: the next part of one call
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')


@dataclass(frozen=True)
class CallFormat:
    """A call in free text: an object of JSON with a name and arguments between two texts, which may be empty."""

    opening: str
    arguments: str  # the name of the field with the arguments
    closing: str

    @property
    def trigger(self) -> str:
        """The text that begins a call and nothing else."""
        return self.opening or '{"name": '

    def begin(self, name: str) -> str:
        """The text of a call before its arguments."""
        return f'{self.opening}{{"name": {json.dumps(name)}, "{self.arguments}": '


FORMATS = {"hermes": CallFormat("<tool_call>\n", "arguments", "\n</tool_call>"), "llama3": CallFormat("", "parameters", "")}


class CallStyle(NamedTuple):
    form: CallFormat
    templated: bool  # the chat template describes this format; otherwise a system message has to


def call_style(codec: TextCodec, name: str = "auto") -> CallStyle:
    """The format of that name, or the one that the chat template describes; Hermes' where it describes none or another."""
    found = ""
    if codec.template_mentions('"parameters": dictionary'):
        found = "llama3"
    elif codec.template_mentions("<tool_call>") and not codec.template_mentions("<function="):  # those arguments are no JSON
        found = "hermes"
    chosen = (found or "hermes") if name == "auto" else name
    return CallStyle(FORMATS[chosen], chosen == found)


class Piece(NamedTuple):
    """Free text, text of a call's object, or the end of that object."""

    kind: Literal["text", "call", "end"]
    text: str = ""


class Splitter:
    """Splits text that arrives in pieces into free text and calls, up to a stop text; holds back what may begin one of them.

    only_calls: the text is one object, or a list of them, as a grammar requires; what is between them is dropped.
    """

    def __init__(self, stops: Sequence[str], form: CallFormat | None, only_calls: bool = False) -> None:
        self._stops, self._only_calls = tuple(stops), only_calls
        self._opening, self._closing = ("{", "") if only_calls else (form.trigger, form.closing) if form else ("", "")
        self._dropped = len(form.opening) if form and not only_calls else 0  # characters of the opening that are not the object's
        self._delimiters = (*stops, *([self._opening] if self._opening else ()))
        self._pending, self._object, self._to_skip = "", None, 0
        self.stopped = False

    _object: _ObjectEnd | None  # inside a call

    def push(self, text: str) -> Iterator[Piece]:
        self._pending += text
        while self._pending and not self.stopped:
            if self._object is not None:
                yield from self._call()
            elif self._to_skip:
                skipped = min(self._to_skip, len(self._pending))
                self._pending, self._to_skip = self._pending[skipped:], self._to_skip - skipped
            elif found := [(start, -len(each), each) for each in self._delimiters if (start := self._pending.find(each)) >= 0]:
                start, _, delimiter = min(found)
                yield from self._text(start)
                self.stopped = delimiter in self._stops
                if not self.stopped:
                    self._pending, self._object = self._pending[self._dropped :], _ObjectEnd()
            else:
                yield from self._text(len(self._pending) - self._held_back())
                return

    def finish(self) -> str:
        """The free text that was held back."""
        inside = self.stopped or self._only_calls or self._object is not None or self._to_skip
        rest = "" if inside else self._pending
        self._pending = ""
        return rest

    def _call(self) -> Iterator[Piece]:
        assert self._object is not None
        end = self._object.find(self._pending)
        text, self._pending = self._pending[:end], "" if end is None else self._pending[end:]
        yield Piece("call", text)
        if end is not None:
            self._object, self._to_skip = None, len(self._closing)
            yield Piece("end")

    def _text(self, count: int) -> Iterator[Piece]:
        text, self._pending = self._pending[:count], self._pending[count:]
        if text and not self._only_calls:
            yield Piece("text", text)

    def _held_back(self) -> int:
        """Characters at the end that may begin a delimiter."""
        longest = max(map(len, self._delimiters), default=1) - 1
        sizes = range(min(longest, len(self._pending)), 0, -1)
        return next((size for size in sizes if any(each.startswith(self._pending[-size:]) for each in self._delimiters)), 0)


class _ObjectEnd:
    """Where an object of JSON ends, in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The index after the object; None if it goes on."""
        for index, char in enumerate(text):
            if self._in_string:
                self._in_string = char != '"' or self._escaped
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None


class CallReader:
    """The deltas of one call: first its id and name, then the text of its arguments."""

    def __init__(self, index: int, answer_id: str, opening: str = "") -> None:
        """opening: the text before the object, for a call that is cut short before its name is known."""
        self._index, self._answer_id, self._opening, self._named = index, answer_id, opening, False
        self._held = ""  # before the arguments: all; then what may be the object's end

    def push(self, text: str) -> Iterator[Delta]:
        self._held += text
        if not self._named:
            header = _HEADER.match(self._held)
            if header is None:
                return
            self._named, self._held = True, self._held[header.end() :]
            call_id = f"call_{self._answer_id}_{self._index}"
            function = {"name": json.loads(header[1]), "arguments": ""}
            yield {"tool_calls": [{"index": self._index, "id": call_id, "type": "function", "function": function}]}
        certain = len(self._held.rstrip("} \t\r\n"))
        yield from self._arguments(certain)

    def finish(self, cut_short: bool = False) -> Iterator[Delta]:
        """The rest: of a whole object without its end, of one that was cut short as it is."""
        if not self._named:
            yield {"content": self._opening + self._held}
            return
        if not cut_short:
            self._held = self._held.rstrip()[:-1].rstrip()
        yield from self._arguments(len(self._held))

    def _arguments(self, count: int) -> Iterator[Delta]:
        text, self._held = self._held[:count], self._held[count:]
        if text:
            yield {"tool_calls": [{"index": self._index, "function": {"arguments": text}}]}


def joined(first: Delta, then: Delta) -> Delta | None:
    """Two deltas as one; None where that is not possible."""
    if first.keys() != then.keys():
        return None
    if "tool_calls" not in first:
        return {kind: first[kind] + text for kind, text in then.items()}
    (call,), (rest,) = first["tool_calls"], then["tool_calls"]
    if call["index"] != rest["index"] or "id" in rest:
        return None
    function = {**call["function"], "arguments": call["function"]["arguments"] + rest["function"]["arguments"]}
    return {"tool_calls": [{**call, "function": function}]}
