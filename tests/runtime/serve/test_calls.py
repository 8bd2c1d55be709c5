"""Calls in the text of an answer: their grammars, where they begin and end, and their parts as the text arrives."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Vocabulary
from stepgraph.runtime.models.files.tokenizer import ChatTemplate
from stepgraph.runtime.serve.calls import FORMATS, CallFormat, CallParser, Delta, choose_format, merge_deltas
from stepgraph.runtime.serve.tools import ToolUse, tool_use
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from tests.helpers.c_library import EACH_BACKEND

BYTES = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256])
COMPILER = GrammarCompiler(BYTES, max_threads=1)
SCHEMA = {  # Qwen3-Coder writes "s" without quotes
    "type": "object",
    "properties": {"s": {"type": "string"}, "x": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "y": {"$ref": "#/$defs/y"}},
    "$defs": {"y": {"type": "array", "items": {"type": "object", "properties": {"}{": {"type": "null"}}, "additionalProperties": False}}},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g_2")]
STOPS = ["stop", "\n<|"]
FREE = st.sampled_from(["a", "<", "<tool", "st", "op", "stop", "\n", "{}", "]", ", ", "</tool_call>"])
STRINGS = st.text(st.sampled_from('a}{"\\\n\t<é'), max_size=5) | st.sampled_from(["\n</parameter", "<tool_call>", "[TOOL_CALLS]", "1"])
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"s": STRINGS, "x": STRINGS | st.integers(), "y": st.lists(st.just({}) | st.just({"}{": None}), max_size=2)}
).map(lambda found: {name: found[name] for name in "sxy" if name in found})  # in the order of the schema
CALLS = st.tuples(st.sampled_from(["f", "g_2"]), ARGUMENTS)


def use_of(name: str, choice: Any = "auto", parallel: bool = True, template: str = "") -> ToolUse:
    codec = TextCodec(BYTES, lambda text, begins: list(text.encode()), ChatTemplate(template))
    found = tool_use(TOOLS, choice, parallel, choose_format(codec, name))
    assert found is not None
    return found


def written(form: CallFormat, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """The text of these calls, as a model writes them."""

    def text(name: str, arguments: dict[str, Any]) -> str:
        values = {key: value if key == "s" else json.dumps(value, ensure_ascii=False) for key, value in arguments.items()}
        parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        return form.begin(name) + (parameters if form.style == "qwen_xml" else json.dumps(arguments, ensure_ascii=False)) + form.suffix

    return form.opening + form.separator.join(text(*call) for call in calls) + form.closing


def read(pieces: list[str], use: ToolUse, stops: list[str] | None = None) -> list[Delta]:
    """The deltas of an answer, adjacent ones joined."""
    found: list[Delta] = []
    begins = [] if use.answer is None else map(use.call_format.begin_answer, use.functions)
    parser = CallParser(stops or [], use.call_format, use.texts, use.required, use.parallel, [*begins])
    for index in range(len(pieces) + 1):
        for delta in parser.push(pieces[index]) if index < len(pieces) else parser.push("", ended=True):
            both = merge_deltas(found[-1], delta) if found else None
            found[-1:] = [both] if both is not None else [*found[-1:], delta]
    return found


def pieces_of(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def without_ids(deltas: list[Delta]) -> list[Delta]:
    for delta in deltas:
        for call in delta.get("tool_calls", ()):
            assert call.pop("id").isalnum()
    return deltas


def calls_in(deltas: list[Delta]) -> list[tuple[str, dict[str, Any]]]:
    functions = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
    assert [delta["tool_calls"][0]["index"] for delta in deltas if "tool_calls" in delta] == [*range(len(functions))]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def accepted(use: ToolUse, text: str, backend: BackendChoice = "auto") -> bool:
    """Whether the constraint allows the whole text."""
    matcher = COMPILER.compile(replace(use.constraint(), backend=backend)).matcher()
    return all(map(matcher.accept_token, text.encode())) and matcher.accept_token(256)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), data=st.data())
def test_grammar_and_parser_agree_on_required_calls(name: str, calls: Any, data: st.DataObject) -> None:
    use = use_of(name, "required")
    calls = calls if use.call_format.parallel else calls[:1]
    text = written(use.call_format, calls)
    assert accepted(use, text) and not accepted(use, text + "x") and not accepted(use, "x" + text)
    assert accepted(use_of(name, "required", parallel=False), text) == (len(calls) == 1)
    whole = without_ids(read([text], use))
    assert calls_in(whole) == calls and len(whole) == len(calls)
    assert without_ids(read(pieces_of(text, data), use)) == whole


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25)
@given(parts=st.lists(FREE | st.lists(CALLS, min_size=1, max_size=2), max_size=6), data=st.data())
def test_calls_in_free_text_do_not_depend_on_the_pieces(name: str, parts: list[Any], data: st.DataObject) -> None:
    use = use_of(name)
    grouped = [[part] if isinstance(part, str) or use.call_format.is_list else [[call] for call in part] for part in parts]
    parts = [part for group in grouped for part in group]
    text = "".join(part if isinstance(part, str) else written(use.call_format, part) for part in parts)
    assert accepted(use, text)
    whole = without_ids(read([text], use, STOPS))
    assert without_ids(read(pieces_of(text, data), use, STOPS)) == whole
    given_calls = [call for part in parts if not isinstance(part, str) for call in part]
    assert calls_in(whole) == given_calls[: len(calls_in(whole))]
    content = [delta.get("content", "") for delta in whole]
    assert not any("stop" in part for part in content)
    if not any(stop in "".join(part for part in parts if isinstance(part, str)) for stop in STOPS) and not use.call_format.opening:
        assert calls_in(whole) == given_calls


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("llama3", "qwen3-coder")])
def test_an_answer_is_calls_or_a_value_of_its_schema(name: str, backend: BackendChoice) -> None:
    """A value may have the text of a call, or a stop text, in its strings."""
    use = replace(use_of(name), answer={"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"]})
    begin, call = use.call_format.answer_begin, written(use.call_format, [("f", {"x": 1})])
    values = [json.dumps({"t": text}) for text in ("", use.call_format.begin("f"), use.call_format.trigger)]
    assert all(accepted(use, begin + value, backend) for value in values) and accepted(use, call, backend)
    refused = ["so", "so " + call, call + values[0], begin + values[0] + call, begin + '{"t": 1}', call.replace("1", "null")]
    assert not any(accepted(use, text, backend) for text in refused)
    assert accepted(use, written(use.call_format, [("f", {"x": 1})] * 2), backend) == use.call_format.parallel
    for value in values:
        assert read([value], use) == read([*value], use) == [{"content": value}]
    parsed = call if use.call_format.is_list else call.removeprefix(use.call_format.opening)
    assert calls_in(read([*parsed], use, ["x"])) == [("f", {"x": 1})]
    assert read(['{"t": "so'], use) == [{"content": '{"t": "so'}] and read([parsed[:5]], use) == []


@pytest.mark.parametrize("stop", ["<tool", "tool"])
def test_a_stop_text_within_a_trigger_does_not_depend_on_the_pieces(stop: str) -> None:
    use = use_of("hermes")
    text = written(use.call_format, [("f", {})])
    assert read([text], use, [stop]) == read([*text], use, [stop])


@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_free_text_has_the_arguments_of_its_schema(name: str, backend: BackendChoice) -> None:
    use = use_of(name)
    if use.call_format.style == "qwen_xml" and backend == "llguidance":
        with pytest.raises(ValueError, match="qwen_xml: is a style that only automata and xgrammar enforce"):
            COMPILER.compile(replace(use.constraint(), backend=backend))
        return
    text = written(use.call_format, [("f", {"x": 1})])
    assert accepted(use, f"so {text}", backend) and accepted(use, "so", backend)
    for wrong in (text.replace("1", "null"), text.replace("x", "z"), text[:-1]):
        assert not accepted(use, wrong, backend), wrong
    required = use_of(name, "required")
    assert accepted(required, text, backend) and not accepted(required, f"so {text}", backend)
    twice = written(use.call_format, [("f", {"x": 1})] * 2)
    assert accepted(required, twice, backend) == use.call_format.parallel


def test_a_call_that_is_cut_short() -> None:
    use = use_of("hermes")
    assert read(["so: <tool_call>\n", '{"name": "f'], use) == [{"content": "so: "}]
    assert read(["<tool_call>\n", '{"name": "f'], use_of("hermes", "required")) == []
    (call,) = read([use.call_format.begin("f") + '{"x": [1, {}'], use)
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": [1, {}'}
    (call,) = read(['<tool_call>\n<function=f>\n<parameter=s>\na"\n</para'], use_of("qwen3-coder"))
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"s": "a\\"\\n</para'}


@pytest.mark.parametrize("name", FORMATS)
def test_a_parameter_may_have_a_large_limit_of_characters(name: str) -> None:
    """Qwen3-Coder's texts are narrowed, since their states count characters."""
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 1000}}, "required": ["s"]}
    use = replace(use_of(name, "required", parallel=False), allowed=({"function": {"name": "f", "parameters": schema}},))
    fits = {size: accepted(use, written(use.call_format, [("f", {"s": "a" * size})])) for size in (0, 200, 1000, 1001)}
    assert fits == {0: True, 200: True, 1000: name != "qwen3-coder", 1001: False}


@pytest.mark.parametrize(
    ("template", "name", "templated"),
    [("", "hermes", False), ("<tool_call>", "hermes", True), ("<tool_call><function=f>", "qwen3-coder", True), ("[ARGS]", "mistral", True)],
)
def test_call_format_follows_the_chat_template(template: str, name: str, templated: bool) -> None:
    codec = TextCodec(Vocabulary.printable(), lambda text, begins: [], ChatTemplate(template))
    assert choose_format(codec) == (FORMATS[name], templated)
    assert choose_format(codec, "llama3") == (FORMATS["llama3"], False)
    without_blank = choose_format(TextCodec(Vocabulary.printable(), lambda text, begins: [], ChatTemplate("[TOOL_CALLS][")))
    assert without_blank.call_format.opening == "[TOOL_CALLS]["
