"""Calls in the text of an answer: where they begin and end, and their parts as the text arrives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph import Vocabulary
from stepgraph.runtime.models.files.chat_template import ChatTemplate
from stepgraph.runtime.serve.calls import FORMATS, CallReader, Delta, Splitter, call_style, joined
from stepgraph.runtime.text import TextCodec

STOPS = ["stop", "\n<"]
FREE = st.sampled_from(["a", "<", "<tool", "st", "op", "stop", "\n", "{}", '{"name"', "</tool_call>"])
VALUES = st.recursive(
    st.sampled_from([1, "}", '"{', "\\", 'a\\"b', "<tool_call>", None]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "}{"]), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["x", "y", "{"]), VALUES, max_size=2)


def read(pieces: list[str], splitter: Splitter, opening: str = "") -> list[Delta]:
    """The deltas of an answer, adjacent ones joined."""
    found: list[Delta] = []
    reader: CallReader | None = None
    calls = 0

    def add(delta: Delta) -> None:
        both = joined(found[-1], delta) if found else None
        found[-1:] = [both] if both is not None else [*found[-1:], delta]

    for text in pieces:
        for kind, part in splitter.push(text):
            if kind == "text":
                add({"content": part})
                continue
            reader = reader or CallReader(calls, "id", opening)
            for delta in reader.push(part) if kind == "call" else reader.finish():
                add(delta)
            if kind == "end":
                reader, calls = None, calls + 1
    if rest := splitter.finish():
        add({"content": rest})
    for delta in reader.finish(cut_short=True) if reader else ():
        add(delta)
    return found


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", FORMATS)
@given(parts=st.lists(FREE | ARGUMENTS, max_size=8), data=st.data())
def test_calls_in_free_text_do_not_depend_on_the_pieces(name: str, parts: list[str | dict[str, Any]], data: st.DataObject) -> None:
    form = FORMATS[name]
    text = "".join(part if isinstance(part, str) else form.begin("f") + json.dumps(part) + "}" + form.closing for part in parts)
    whole = read([text], Splitter(STOPS, form), form.opening)
    assert read(pieces_of(text, data), Splitter(STOPS, form), form.opening) == whole
    calls = [delta["tool_calls"][0] for delta in whole if "tool_calls" in delta]
    given_arguments = [part for part in parts if isinstance(part, dict)]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == given_arguments[: len(calls)]
    assert [call["index"] for call in calls] == [*range(len(calls))]
    content = [delta.get("content", "") for delta in whole]
    free = "".join(part for part in parts if isinstance(part, str))
    assert free.startswith("".join(content)) and not any("stop" in part for part in content)
    if not any(stop in text for stop in STOPS) and all(isinstance(part, dict) for part in parts):
        assert len(calls) == len(given_arguments)


@given(lists=st.booleans(), arguments=st.lists(ARGUMENTS, min_size=1, max_size=3), data=st.data())
def test_an_answer_of_calls_only(lists: bool, arguments: list[dict[str, Any]], data: st.DataObject) -> None:
    calls = [{"name": f"f{index}", "arguments": each} for index, each in enumerate(arguments if lists else arguments[:1])]
    text = json.dumps(calls if lists else calls[0])
    found = read(pieces_of(text, data), Splitter((), FORMATS["hermes"], only_calls=True))
    functions = [delta["tool_calls"][0]["function"] for delta in found]
    assert [{**function, "arguments": json.loads(function["arguments"])} for function in functions] == calls


def test_a_call_that_is_cut_short() -> None:
    form = FORMATS["hermes"]
    (text,) = read(["so: <tool_call>\n", '{"name": "f'], Splitter((), form), form.opening)
    assert text == {"content": 'so: <tool_call>\n{"name": "f'}
    (call,) = read([form.begin("f") + '{"x": [1, {}'], Splitter((), form), form.opening)
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": [1, {}'}


@pytest.mark.parametrize(
    ("template", "name", "templated"),
    [
        ("", "hermes", False),
        ("For each call write <tool_call>\n{json}\n</tool_call>", "hermes", True),
        ('Respond with {"name": function name, "parameters": dictionary of argument names}', "llama3", True),
        ("<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>", "hermes", False),
        ("[TOOL_CALLS]", "hermes", False),
    ],
)
def test_format_is_that_of_the_chat_template(template: str, name: str, templated: bool) -> None:
    codec = TextCodec(Vocabulary.printable(), lambda text, begins: [], ChatTemplate(template))
    assert call_style(codec) == (FORMATS[name], templated)
    assert call_style(codec, "llama3") == (FORMATS["llama3"], name == "llama3")
