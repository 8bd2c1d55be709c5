"""Tool calls in the text of an answer: how a family of models writes them, and their parts as the text arrives."""

from __future__ import annotations

import json
import re
import uuid
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from stepgraph.runtime.text import TextCodec, partial_match
from stepgraph.sampling.grammar.schema.parameters import PARAMETER_END

Delta = dict[str, Any]  # content or reasoning_content: some text, or tool_calls: the next part of one call
TextParameters = Mapping[str, frozenset[str]]  # by function, the parameters whose values are plain text
Part = TypeVar("Part")
Result = TypeVar("Result")
Steps = Generator[Part | None, None, Result]  # None: more text is needed


@dataclass(frozen=True)
class CallFormat:
    """A call is `prefix`, the function's name, `infix`, its arguments, `suffix`. A text of calls alone has `separator` between them."""

    template_words: str  # in chat templates that describe the format
    trigger: str  # the text that begins a call, or a list of calls, and nothing else
    prefix: str
    infix: str
    suffix: str
    separator: str = ""
    opening: str = ""  # before the calls of a list; empty: calls in free text form no list
    closing: str = ""  # after the calls of a list
    style: str = "json"  # of the arguments: see structural tags
    other_infixes: tuple[str, ...] = ()  # infixes that a model may write instead; `ChannelSplitter` replaces them
    parallel: bool = True  # whether an answer that consists of calls can have several
    answer_begin: str = ""  # before an answer without calls, where a format of answers applies to it

    @property
    def is_list(self) -> bool:
        return bool(self.opening) and self.opening.startswith(self.trigger)

    @property
    def markers(self) -> set[str]:
        """The parts of the format that may be control tokens."""
        texts = (self.trigger, self.opening, self.prefix, self.infix, *self.other_infixes, self.suffix, self.closing)
        return {marker for text in texts for marker in re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", text)}

    @property
    def example(self) -> str:
        arguments = f"<parameter=...>\n...{PARAMETER_END}\n" if self.style == "qwen_xml" else "{...}"
        return f"{self.begin_answer('...')}{arguments}{self.suffix}{self.closing}"

    def begin(self, name: str) -> str:
        """The text of a call before its arguments."""
        return f"{self.prefix}{name}{self.infix}"

    def begin_answer(self, name: str) -> str:
        """The text of an answer that begins with a call, before its arguments."""
        return f"{self.opening if self.is_list else ''}{self.begin(name)}"

    def structural_tag(self, functions: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any]:
        """Free text with calls or, if they are required, calls and nothing else. functions: schemas of the arguments, by name."""
        structures = [
            {"begin": f"{self.prefix}{name}{infix}", "schema": schema, "end": self.suffix, "style": self.style}
            for name, schema in functions.items()
            for infix in ((self.infix,) if required else (self.infix, *self.other_infixes))
        ]
        tag: dict[str, Any] = {"structures": structures, "closing": self.closing}
        tag |= {"opening": self.opening} if required or self.is_list else {}
        tag |= {} if required else {"triggers": [self.trigger]}
        return tag | ({"separator": self.separator} if parallel and self.parallel and (required or self.is_list) else {})


FORMATS = {  # in this order they are looked for in a chat template
    "gpt-oss": CallFormat(
        "<|channel|>",
        " to=functions.",
        " to=functions.",
        " <|constrain|>json<|message|>",
        "",
        opening="<|start|>assistant<|channel|>commentary",
        other_infixes=("<|channel|>commentary json<|message|>",),  # as chat templates write earlier calls
        parallel=False,  # a stop token follows a call
        answer_begin="<|start|>assistant<|channel|>final<|message|>",
    ),
    "mistral": CallFormat("[ARGS]", "[TOOL_CALLS]", "[TOOL_CALLS]", "[ARGS]", ""),
    "mistral-list": CallFormat("[TOOL_CALLS]", "[TOOL_CALLS]", '{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
    "llama3": CallFormat('"parameters": dictionary', '{"name":', '{"name": "', '", "parameters": ', "}", "; "),
    "qwen3-coder": CallFormat(
        "<function=", "<tool_call>", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", style="qwen_xml"
    ),
    "hermes": CallFormat("<tool_call>", "<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
}


class ChosenFormat(NamedTuple):
    call_format: CallFormat
    templated: bool  # the chat template describes this format; otherwise a system message does


def choose_format(codec: TextCodec, name: str = "auto") -> ChosenFormat:
    """The format of that name, or the one that the chat template describes; Hermes if it describes no known format."""
    found = next((name for name, fmt in FORMATS.items() if codec.template_mentions(fmt.template_words)), "")
    chosen = (found or "hermes") if name == "auto" else name
    fmt = FORMATS[chosen]
    if codec.template_mentions(fmt.opening.replace(" ", "")):  # "[TOOL_CALLS][" of some Mistral models
        fmt = replace(fmt, opening=fmt.opening.replace(" ", ""))
    return ChosenFormat(fmt, chosen == found)


class PieceParser(Generic[Part]):
    """Parses a text that arrives in pieces into parts."""

    def __init__(self) -> None:
        self._pending, self._ended = "", False
        self._steps = self._parse()

    def push(self, text: str, ended: bool = False) -> Iterator[Part]:
        """Yields the next parts. ended: no more text follows."""
        self._pending, self._ended = self._pending + text, ended
        for part in self._steps:
            if part is None:
                return
            yield part

    @abstractmethod
    def _parse(self) -> Steps[Part, None]:
        """Runs over the whole text."""

    def _object(self, part: Callable[[str], Part]) -> Steps[Part, bool]:
        """Yield the text of a JSON object, if the text begins with one. Returns whether it is complete."""
        end, size = ObjectEnd(), None
        while size is None:
            if not self._pending:
                if self._ended:
                    return False
                yield None
            size = end.find(self._pending)
            text, self._pending = self._pending[:size], "" if size is None else self._pending[size:]
            if text:
                yield part(text)
        return True

    def _up_to(self, delimiters: Sequence[str], part: Callable[[str], Part] | None) -> Steps[Part, str]:
        """Yield the text up to the delimiter that ends first. Returns it; the rest begins with it. Empty if the text ended before.
        part: None drops the text."""
        while True:
            found = [(start + len(each), start, each) for each in delimiters if (start := self._pending.find(each)) >= 0]
            _, start, delimiter = min(found, default=(0, len(self._pending), ""))
            size = start if found or self._ended else start - partial_match(self._pending, delimiters)
            text, self._pending = self._pending[:size], self._pending[size:]
            if text and part:
                yield part(text)
            if found or self._ended:
                return delimiter
            yield None

    def _match(self, pattern: str) -> Steps[Part, re.Match[str] | None]:
        """Skip a match of the pattern and return it; None if the text ended before."""
        while (found := re.match(pattern, self._pending)) is None and not self._ended:
            yield None
        self._pending = self._pending[found.end() :] if found else self._pending
        return found

    def _skip(self, text: str) -> Steps[Part, bool]:
        """Skip a text, or the part of it before the end. Returns False if the rest does not begin with the whole text."""
        while text.startswith(self._pending) and self._pending != text and not self._ended:
            yield None
        size = len(text) if self._pending.startswith(text) else len(self._pending) if text.startswith(self._pending) else 0
        self._pending = self._pending[size:]
        return size == len(text)


class CallParser(PieceParser[Delta]):
    """The deltas of a text: content up to a stop text, and calls. What may begin a stop text or a call is held back. A call that is cut
    short is reported up to there; one without arguments yet is left out.

    only_calls: a grammar allows calls only; text between them is dropped.
    begins: how an answer of calls begins; another answer has none. Empty: content may have calls.
    """

    def __init__(
        self,
        stops: Sequence[str],
        fmt: CallFormat | None,
        texts: TextParameters,
        only_calls: bool,
        parallel: bool,
        begins: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._stops, self._format, self._texts, self._only_calls, self._parallel = tuple(stops), fmt, texts, only_calls, parallel
        self._begins = tuple(begins)
        self.calls = 0  # number of complete calls
        self.at_stop_text = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text was found, or the only allowed call is complete."""
        return self.at_stop_text or (self.calls > 0 and not self._parallel)

    def _parse(self) -> Steps[Delta, None]:
        fmt = self._format
        if self._begins:
            while not self._ended and any(begin != self._pending and begin.startswith(self._pending) for begin in self._begins):
                yield None
            self._only_calls = any(begin.startswith(self._pending) or self._pending.startswith(begin) for begin in self._begins)
            fmt, self._stops = (fmt, ()) if self._only_calls else (None, self._stops)
        delimiters = (*self._stops, *([fmt.trigger] if fmt else ()))
        while not self.stopped:
            found = yield from self._up_to(delimiters, None if self._only_calls else lambda text: {"content": text})
            if not found:
                return
            self.at_stop_text = found in self._stops
            if fmt is None or self.at_stop_text:
                continue
            if fmt.is_list:
                yield from self._skip(fmt.opening)
            while (yield from self._call(fmt)) and fmt.is_list and not self.stopped and (yield from self._skip(fmt.separator)):
                pass
            yield from self._skip(fmt.closing)

    def _call(self, fmt: CallFormat) -> Steps[Delta, bool]:
        """Parse one call. Returns whether it is complete."""
        header = yield from self._match(re.escape(fmt.prefix) + r"([\w-]+)" + re.escape(fmt.infix))
        if header is None:
            self._pending = ""
            return False
        call_id = uuid.uuid4().hex[:9]  # templates of Mistral accept exactly nine characters
        function = {"name": header[1], "arguments": ""}
        yield {"tool_calls": [{"index": self.calls, "id": call_id, "type": "function", "function": function}]}
        if not (yield from self._parameters(self._texts[header[1]]) if fmt.style == "qwen_xml" else self._object(self._arguments)):
            return False
        yield from self._skip(fmt.suffix)
        self.calls += 1
        return True

    def _parameters(self, texts: frozenset[str]) -> Steps[Delta, bool]:
        """Parse arguments between <parameter=NAME> and </parameter>. texts: names of parameters whose values are not JSON."""
        before = "{"
        while True:
            header = yield from self._match(r"<parameter=([^<>\n]+)>\n|(?=</)")
            if header is None:
                self._pending = ""
                return False
            if not header[1]:
                yield self._arguments("{}" if before == "{" else "}")
                return True
            quote, delta = ('"', self._quoted) if header[1] in texts else ("", self._arguments)
            yield self._arguments(f"{before}{json.dumps(header[1], ensure_ascii=False)}: {quote}")
            found = yield from self._up_to((PARAMETER_END,), delta)
            if not found:
                return False
            yield from self._skip(PARAMETER_END + "\n")
            if quote:
                yield self._arguments(quote)
            before = ", "

    def _arguments(self, text: str) -> Delta:
        return {"tool_calls": [{"index": self.calls, "function": {"arguments": text}}]}

    def _quoted(self, text: str) -> Delta:
        """A part of a text inside a string of the arguments."""
        return self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])


class ObjectEnd:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The index after the object, 0 if the text is no object; None if the object continues."""
        if not self._depth and text and text[0] != "{":
            return 0
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


def merge_deltas(first: Delta, following: Delta) -> Delta | None:
    """Two deltas as one; None if that is not possible."""
    if first.keys() != following.keys():
        return None
    if "tool_calls" not in first:
        return {kind: first[kind] + text for kind, text in following.items()}
    (call,), (rest,) = first["tool_calls"], following["tool_calls"]
    if call["index"] != rest["index"] or "id" in rest:
        return None
    function = {**call["function"], "arguments": call["function"]["arguments"] + rest["function"]["arguments"]}
    return {"tool_calls": [{**call, "function": function}]}
