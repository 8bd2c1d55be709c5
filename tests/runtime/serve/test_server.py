"""The server with OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import openai
import pytest
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.parser import text_string_to_metric_families

from stepgraph import Engine, FinishReason, Job, SamplingParams
from stepgraph.runtime import cli
from stepgraph.runtime.commands import terminal
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.request import StepEvent
from stepgraph.runtime.request_queue import QueueFullError
from stepgraph.runtime.serve.calls import FORMATS
from stepgraph.runtime.serve.gate import Gate, Ticket
from stepgraph.runtime.serve.http import Bounds
from stepgraph.runtime.serve.serving import EngineServing
from tests.helpers.adapters import save_adapter
from tests.helpers.aio_runs import Gate as Steps
from tests.helpers.c_library import needs_c
from tests.helpers.command_models import model_folder, tiny_model
from tests.helpers.grammar_texts import TAGS
from tests.helpers.running_server import CHAT, FLAGS, FORMAT, ON, SCHEMA, SECONDS, TOOLS, RunningServer, engine_of, running
from tests.runtime.test_cli import handle_sigint
from tests.sampling.grammar.compile.test_compiler import waited

USAGE: Any = {"include_usage": True, "include_obfuscation": False}
ONE_ROW = ["serve", "toy", "--eager", "-k", "2", "--max-rows", "1"]


def message_of(error: openai.APIStatusError) -> str:
    """The message in the response, which some versions of the client quote in a message of their own."""
    found = error.response.json()["error"]["message"]
    assert isinstance(found, str)
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = engine_of()
    with engine, running(engine, Bounds(head_bytes=4096, body_bytes=100_000, waiting=2)) as found:
        yield found


def test_streamed_chat_equals_whole_chat(server: RunningServer) -> None:
    request: Any = {"model": "toy", "messages": CHAT, "max_tokens": 25, "temperature": 0.8, "seed": 5, "extra_body": ON}
    with server.client as client:
        whole = client.chat.completions.create(**request, logprobs=True)
        chunks = [*client.chat.completions.create(**request, logprobs=True, stream=True, stream_options=USAGE)]
    (choice,) = whole.choices
    assert choice.finish_reason == "length" and choice.message.role == "assistant"
    assert whole.usage is not None and (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (
        25,
        len("user: who is it?\nassistant: "),
    )
    *pieces, last = chunks
    assert all("usage" in piece.model_fields_set and piece.usage is None for piece in pieces), "null before the last event"
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 25
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert pieces[0].choices[0].delta.role == "assistant" and len(pieces) > 3
    assert choice.logprobs is not None and choice.logprobs.content is not None
    logprobs = [entry for piece in pieces if piece.choices[0].logprobs for entry in piece.choices[0].logprobs.content or []]
    assert logprobs == choice.logprobs.content and len(logprobs) == 25
    assert bytes(byte for entry in logprobs for byte in entry.bytes or []).decode("utf-8", "replace") == choice.message.content


def test_requests_select_adapters_by_the_name_of_the_model(tmp_path: Path) -> None:
    save_adapter(tmp_path / "sql", tiny_model(), 4)
    engine = engine_of(["serve", str(model_folder()), "--eager", "-k", "0", "--max-length", "200", "--lora-modules", "sql=sql"])
    engine.add_lora("sql", tmp_path / "sql")
    prompt = engine.tokenizer.chat(CHAT)
    expected = {name: engine.generate(prompt, max_new_tokens=12, lora_name=name).text for name in ("", "sql")}
    assert expected[""] != expected["sql"]
    with engine, running(engine, Bounds()) as server, server.client as client:
        assert [each.id for each in client.models.list()] == ["toy", "sql"]
        assert client.models.retrieve("sql").parent == "toy"
        for name, lora_name in (("toy", ""), ("sql", "sql")):
            answer = client.chat.completions.create(model=name, messages=CHAT, max_tokens=12, temperature=0)
            assert (answer.model, answer.choices[0].message.content) == (name, expected[lora_name])
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="other", messages=CHAT)
        assert message_of(caught.value) == """model: got "other", expected 'toy' or 'sql'"""


def test_most_probable_tokens_are_reported_beside_the_chosen_one(server: RunningServer) -> None:
    """The most probable token of a greedy answer is the chosen one."""
    request: Any = {"model": "toy", "max_tokens": 8, "temperature": 0, "extra_body": ON}
    with server.client as client:
        answer = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=3, **request)
        completion = client.completions.create(prompt="abc", logprobs=2, **request)
        drawn = client.completions.create(prompt="abc", logprobs=1, seed=3, **request | {"temperature": 2.0}).choices[0].logprobs
    found = answer.choices[0].logprobs
    assert found is not None and found.content is not None and len(found.content) == 8
    for entry in found.content:
        values = [each.logprob for each in entry.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        first = entry.top_logprobs[0]
        assert (first.token, first.bytes, first.logprob) == (entry.token, entry.bytes, pytest.approx(entry.logprob, abs=1e-5))
    listed = completion.choices[0].logprobs
    assert listed is not None and listed.top_logprobs is not None and listed.token_logprobs is not None and listed.tokens is not None
    for token, value, top in zip(listed.tokens, listed.token_logprobs, listed.top_logprobs, strict=True):
        assert 1 <= len(top) <= 2 and top[token] == pytest.approx(value, abs=1e-5) == max(top.values())
    assert drawn is not None and drawn.top_logprobs is not None and drawn.tokens is not None
    assert all(token in top and len(top) <= 2 for token, top in zip(drawn.tokens, drawn.top_logprobs, strict=True))
    assert max(map(len, drawn.top_logprobs)) == 2, "a drawn token is reported beside the most probable one"


def test_completion_of_text_or_ids_ends_at_a_stop_text(server: RunningServer) -> None:
    request: Any = {"model": "toy", "max_tokens": 40, "temperature": 0, "extra_body": ON}
    with server.client as client:
        text = client.completions.create(prompt="abc", **request).choices[0].text
        assert client.completions.create(prompt=[97, 98, 99], **request).choices[0].text == text
        stop = text[9:12]
        index = text.find(stop)
        before = server.count("stop"), server.count("cancelled")
        for stream in (False, True):
            stops = ["never there", *(f"{text[at]}\0" for at in (3, 6)), stop]  # some begin with a character of the answer
            answer: Any = client.completions.create(prompt="abc", stop=stops, stream=stream, logprobs=0, **request)
            choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
            assert ("".join(choice.text for choice in choices), choices[-1].finish_reason) == (text[:index], "stop")
            tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens]
            assert index < len(tokens) < 40
            offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
            spans = [(token, text[start:end]) for token, start, end in zip(tokens, offsets, offsets[1:], strict=False)]
            assert all(part.endswith(token) for token, part in spans if "\ufffd" not in token)  # others are parts of characters
            assert offsets[0] == 0 and len({*offsets}) > 3
        request["extra_body"] = ON | {"stop_token_ids": [*text[9].encode()], "top_k": -1}
        assert client.completions.create(prompt="abc", **request).choices[0].text == text.partition(text[9])[0]
    assert (server.count("stop"), server.count("cancelled")) == (before[0] + 3, before[1])


def test_a_stop_text_ends_an_answer_whose_last_event_is_an_error(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream(SimpleNamespace):
        async def __aiter__(self) -> AsyncIterator[StepEvent]:
            yield StepEvent(1, tuple(b"ab. c"), finish_reason=FinishReason.ERROR, error="no more tokens")

    async def generate(*_: object, **__: object) -> Stream:
        job = SimpleNamespace(finish_reason=FinishReason.ERROR, first_token_seconds=0.1, num_cached_tokens=0, rounds=3, constraint=None)
        return Stream(job=job, cancel=lambda reason: None)

    monkeypatch.setattr(EngineServing, "generate", generate)
    with server.client as client:
        choice = client.completions.create(model="toy", prompt="abc", stop=".").choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "stop")


def test_a_stop_text_beside_tools_counts_as_stop(server: RunningServer) -> None:
    request: Any = {"model": "toy", "messages": CHAT, "tools": TOOLS, "temperature": 0}
    with server.client as client:
        text = client.chat.completions.create(**request, max_tokens=30, extra_body={"min_tokens": 30}).choices[0].message.content
        before = server.count("stop"), server.count("cancelled")
        answer = client.chat.completions.create(**request, stop=text[5], max_tokens=2000, extra_body={"min_tokens": 2000}).choices[0]
    assert (answer.message.content, answer.finish_reason) == (text.partition(text[5])[0], "stop")
    waited(lambda: server.count("stop") == before[0] + 1, "the row of an answer at its stop text still decodes")
    assert server.count("cancelled") == before[1]


@pytest.mark.parametrize("stream", [False, True])
def test_answer_matches_its_response_format(server: RunningServer, stream: bool) -> None:
    with server.client as client:
        request: Any = {"model": "toy", "messages": CHAT, "max_completion_tokens": 60, "seed": 1, "stream": stream}
        for format in (FORMAT, {"type": "json_object"}):
            answer: Any = client.chat.completions.create(response_format=format, temperature=0.3, logit_bias={"125": 9}, **request)
            if stream:
                chunks = [*answer]
                content, reason = "".join(chunk.choices[0].delta.content or "" for chunk in chunks), chunks[-1].choices[0].finish_reason
            else:
                content, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
            assert reason == "stop"
            jsonschema.validate(json.loads(content), SCHEMA if format is FORMAT else {"type": "object"})


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"json": {"enum": [12, 13]}, "regex": None}, "12|13"),
        ({"json": '{"enum": [12, 13]}'}, "12|13"),
        ({"regex": "[xy]{3}"}, "[xy]{3}"),
        ({"regex": "[xy]{3}", "json_object": None, "disable_fallback": False, "disable_any_whitespace": False}, "[xy]{3}"),
        ({"json_object": True}, r"(?s)\{.*"),
        ({"choice": ["maybe", "perhaps"]}, "maybe|perhaps"),
        ({"grammar": 'root ::= "<" [a-c] ">"'}, "<[a-c]>"),
    ],
    ids=str,
)
def test_structured_outputs_are_enforced_in_chats_and_completions(server: RunningServer, outputs: Any, pattern: str) -> None:
    request: Any = {"model": "toy", "max_tokens": 20, "extra_body": {"structured_outputs": outputs}}
    with server.client as client:
        chat = client.chat.completions.create(messages=CHAT, **request).choices[0].message.content
        completion = client.completions.create(prompt="a", **request).choices[0].text
    assert chat is not None and re.fullmatch(pattern, chat) and re.fullmatch(pattern, completion), (chat, completion)


def calls_of(answer: Any, stream: bool) -> tuple[list[tuple[str, str]], str]:
    """Names and arguments of an answer's calls, and its finish reason. In a stream, an entry with an id begins a call."""
    if not stream:
        (choice,) = answer.choices
        return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()], choice.finish_reason
    found: list[tuple[str, str]] = []
    for chunk in answer:
        (choice,) = chunk.choices
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(found) and call.type == "function"
                found.append((call.function.name, ""))
            assert call.index == len(found) - 1
            found[-1] = (found[-1][0], found[-1][1] + call.function.arguments)
    return found, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_tool_is_called(server: RunningServer, stream: bool) -> None:
    request: Any = {"model": "toy", "messages": [{"role": "system", "content": "be brief"}, *CHAT], "tools": TOOLS, "temperature": 0}
    named = {"type": "function", "function": {"name": "look_up"}}
    with server.client as client:
        for choice, parallel in ((named, True), ("required", False)):
            answer: Any = client.chat.completions.create(tool_choice=choice, parallel_tool_calls=parallel, stream=stream, **request)
            ((name, arguments),), reason = calls_of(answer, stream)
            assert reason == "tool_calls" and (name == "look_up" or choice == "required")
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "look_up" else {"type": "object"})
        for name, mode in (("look_up", "required"), ("give_up", "required"), ("give_up", "auto")):
            subset = {"mode": mode, "tools": [{"type": "function", "function": {"name": name}}]}
            allowed: Any = {"type": "allowed_tools", "allowed_tools": subset}
            answer = client.chat.completions.create(tool_choice=allowed, stream=stream, max_tokens=60, **request)
            calls, reason = calls_of(answer, stream)
            assert {called for called, _ in calls} == ({name} if mode == "required" else set())
        free = client.chat.completions.create(tool_choice="auto", max_tokens=9, **request)
        assert free.choices[0].finish_reason in ("length", "stop") and free.choices[0].message.tool_calls is None
        plain = client.chat.completions.create(tool_choice="none", max_tokens=9, **request)
        assert free.usage is not None and plain.usage is not None and plain.usage.prompt_tokens < free.usage.prompt_tokens


def test_tools_that_a_format_cannot_express_are_refused_and_free_their_place() -> None:
    def ask(schema: Any) -> Any:
        tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", **schema}}}]
        with found.client as client:
            return client.chat.completions.create(model="toy", messages=CHAT, tools=tools, max_tokens=4)

    slow = {"properties": {"a": {"type": "string", "pattern": "^(a{1,30}){1,30}$"}}}
    with engine_of() as engine, running(engine, Bounds(), tool_format="qwen3-coder") as found:
        refused_schemas: Any = ({"minProperties": 2}, {"properties": {"a<": {}}}, {"minProperties": 2}, {"minProperties": 2})
        for schema in refused_schemas:
            with pytest.raises(openai.BadRequestError, match="tools: 'look_up': #: properties: ") as refused:
                ask(schema)
            assert refused.value.param == "tools"
        analysis, answered = threading.Thread(target=ask, args=(slow,)), 0
        analysis.start()
        while analysis.is_alive():
            assert found.statuses(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", end=False) == [200]
            answered += 1
            time.sleep(0.02)
        assert answered > 3, "an analysis of seconds delays no other request"
        assert ask({}).choices[0].finish_reason in ("length", "stop")


def test_several_calls_may_be_required_and_the_last_may_be_cut_short(server: RunningServer) -> None:
    """A bias towards line ends makes the toy model start the next call."""
    request: Any = {"model": "toy", "messages": CHAT, "tools": TOOLS, "tool_choice": "required", "temperature": 0, "max_tokens": 300}
    request["logit_bias"] = {str(ord("\n")): 100}
    with server.client as client:
        whole, reason = calls_of(client.chat.completions.create(**request), False)
        streamed = calls_of(client.chat.completions.create(**request, stream=True), True)
        assert streamed == (whole, reason) and reason == "length" and len(whole) > 2
        for name, arguments in whole[:-1]:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "look_up" else {"type": "object"})
        name, arguments = whole[0]
        request["max_tokens"] = len(FORMATS["hermes"].begin(name)) + 1  # a token of the toy model is a byte
        for stream in (False, True):
            assert calls_of(client.chat.completions.create(**request, stream=stream), stream) == ([(name, arguments[:1])], "length")


INTERNAL = re.compile(r"Constraint|constraint|SamplingParams|EngineConfig|max_new_tokens|Engine\\.")
OPTIONS = (("include_obfuscation", True), ("include_obfuscation", 0), ("include_usage", 1), ("continuous_usage_stats", True), ("x", False))
GIVE_UP: Any = {"type": "function", "function": {"name": "give_up"}}
ALLOWED: Any = {"mode": "auto", "tools": [GIVE_UP]}
SUBSETS: Any = (
    *(ALLOWED | {"mode": mode} for mode in ("none", None)),
    *(ALLOWED | {"tools": tools} for tools in ([], GIVE_UP, [{"type": "function", "function": {"name": "other"}}], [GIVE_UP, "give_up"])),
    *(ALLOWED | {"other": 1}, {"mode": "auto"}, None),
)
REFUSED: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 17}, "n"),
    ({"priority": "high"}, "priority"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": "all", "logprobs": True}, "top_logprobs"),
    ({"user": 5}, "user"),
    ({"metadata": "x"}, "metadata"),
    *(({name: value}, name) for name in ("store", "echo", "suffix", "modalities", "service_tier") for value in (0, True, ["audio"], "x")),
    ({"skip_special_tokens": 1}, "skip_special_tokens"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"seed": 1 << 63}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 99999}, "max_tokens"),
    ({"max_tokens": "many", "max_completion_tokens": 5}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 9}, "min_tokens"),
    ({"stop_token_ids": [*range(99)]}, "stop_token_ids"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"\u0665": 1}}, "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    *(({"stream": True, "stream_options": {name: value}}, "stream_options") for name, value in OPTIONS),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "structures": [], "triggers": []}}, "response_format.triggers"),
    ({"response_format": {"type": "structural_tag", **TAGS}, "tools": TOOLS}, "response_format"),
    ({"response_format": FORMAT | {"json_schema": {"name": "a", "schema": {"type": "person"}}}, "tools": TOOLS}, "response_format"),
    ({"structured_outputs": {"regex": "a"}, "tools": TOOLS}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "structured_outputs"),
    *(
        ({"structured_outputs": value}, "structured_outputs")
        for value in (5, {}, {"regex": "("}, {"regex": 5}, {"json": [5]}, {"json": "{"}, {"choice": "a"}, {"choice": [5]}, {"grammar": 5})
    ),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs"),
    *(({"structured_outputs": {"regex": "a", name: True}}, "structured_outputs") for name in ("json_object", "disable_any_whitespace")),
    *(({"structured_outputs": value}, "structured_outputs") for value in ({"json_object": False}, {"regex": "a", "other": False})),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "a", "description": 5}}]}, "tools[0].function.description"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": TOOLS[:1] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    *(({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": subset}}, "tool_choice") for subset in SUBSETS),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED, "other": 1}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, None),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}]}, None),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": NaN}'}}]}]}, None),
    ({"messages": [{"role": "user", "content": "x", "name": {"a": 1}}]}, "messages[0].name"),
    ({"messages": []}, "messages"),
    ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ({"messages": [{"role": "assistant", "content": "x", "annotations": [{}]}]}, "messages[0].annotations"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
]


def test_unsupported_fields_are_refused_by_name(server: RunningServer) -> None:
    submitted = server.engine.stats().submitted
    with server.client as client:
        for given_too, name in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**{"model": "toy", "messages": CHAT}, extra_body=given_too)
            name = name or "messages[0].tool_calls[0].function.arguments"
            assert caught.value.param == name, given_too
            assert name in caught.value.message and not INTERNAL.search(caught.value.message), caught.value.message
        with pytest.raises(openai.BadRequestError, match="suffix"):
            client.completions.create(model="toy", prompt="a", suffix="b")
        with pytest.raises(openai.BadRequestError, match=r"guided_json: .*, expected structured_outputs or response_format"):
            client.completions.create(model="toy", prompt="a", extra_body={"guided_json": {}})
        with pytest.raises(openai.BadRequestError, match=r"repeat_penalty: got 1\.1, but .* is not supported, expected repetition_penalty"):
            client.completions.create(model="toy", prompt="a", extra_body={"repeat_penalty": 1.1})
        for name, wrong in (("logprobs", 6), ("best_of", 2), ("best_of", True)):
            with pytest.raises(openai.BadRequestError, match=name):
                client.completions.create(model="toy", prompt="a", extra_body={name: wrong})
        with pytest.raises(openai.NotFoundError) as missing:
            client.completions.create(model="gpt", prompt="a")
        assert message_of(missing.value).endswith("expected 'toy'")
        assert server.engine.stats().submitted == submitted
        unknown = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}
        malformed = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
        impossible: Any = {"response_format": FORMAT, "logit_bias": {}, "extra_body": {"stop_token_ids": [123], "min_tokens": 5}}
        with pytest.raises(openai.BadRequestError, match="no token may follow"):
            client.chat.completions.create(model="toy", messages=CHAT, max_tokens=9, **impossible)
        before = server.count("error"), server.count("refused")
        with pytest.raises(openai.BadRequestError, match=r"structured_outputs: .*uniqueItems"):
            client.completions.create(model="toy", prompt="a", extra_body={"structured_outputs": {"json": {"uniqueItems": True}}})
        for format, word in ((unknown, "uniqueItems"), (malformed, "strange")):
            with pytest.raises(openai.BadRequestError, match=word) as caught:
                client.chat.completions.create(**{"model": "toy", "messages": CHAT, "response_format": format, "stream": True})
            assert caught.value.param == "response_format" and not INTERNAL.search(caught.value.message), caught.value.message
    assert (server.count("error"), server.count("refused")) == (before[0], before[1] + 2), (
        "an alert on errors does not count wrong requests"
    )


@needs_c
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_beyond_a_limit_of_its_constraint_is_a_wrong_request(server: RunningServer, stream: bool) -> None:
    opening = {str(server.engine.vocabulary.tokens.index(b"(")): 100}
    outputs = {"structured_outputs": {"grammar": 'root ::= "(" root ")" | "a"'}}
    before = server.count("error"), server.count("refused")
    with server.client as client:
        request: Any = {"model": "toy", "prompt": "a", "max_tokens": 400, "logit_bias": opening, "extra_body": outputs}
        with pytest.raises(openai.APIError, match=r"structured_outputs: no valid grammar mask: .*automaton_depth") as refused:
            list(client.completions.create(**request, stream=stream))
    assert (refused.value.param, refused.value.type) == ("structured_outputs", "invalid_request_error")
    assert isinstance(refused.value, openai.BadRequestError) != stream, "an error after a stream has begun is its last event"
    assert (server.count("error"), server.count("refused")) == (before[0], before[1] + 1)


def test_disconnect_frees_the_row(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    before = server.count("cancelled")
    with caplog.at_level(logging.INFO, "stepgraph.serve"), server.client as client:
        request: Any = {"model": "toy", "messages": CHAT, "max_tokens": 4000, "extra_body": ON}
        with client.chat.completions.create(stream=True, **request) as stream:
            for chunk in stream:
                assert chunk.choices[0].finish_reason is None
                break
        waited(lambda: server.count("cancelled") == before + 1, "the row of a closed stream still decodes")
        # a request of an earlier test may be logged here, too
        waited(lambda: '"disconnected"' in caplog.text, "no line for a request")
    (line,) = (found for record in caplog.records if (found := json.loads(record.message))["status"] == "disconnected")
    assert line["finish_reasons"] == ["cancelled"]
    body = json.dumps({"prompt": "x", "max_tokens": 4000, **ON}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert server.send(head + body) == b""  # not streamed; disconnects right after the request
    waited(lambda: server.count("cancelled") == before + 2, "the row of a client that left still decodes")
    assert server.engine.stats().running == 0


@pytest.mark.parametrize("stream", [False, True])
def test_choices_equal_requests_with_their_seeds(server: RunningServer, stream: bool) -> None:
    request: Any = {"model": "toy", "messages": CHAT, "max_tokens": 12, "temperature": 0.9, "extra_body": ON}
    with server.client as client:
        alone = [client.chat.completions.create(**request, seed=7 + index).choices[0].message.content for index in range(3)]
        answer: Any = client.chat.completions.create(**request, seed=7, n=3, stream=stream, user="me", metadata={"a": "b"})
        if stream:
            texts = ["", "", ""]
            for chunk in answer:
                texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        else:
            texts = [choice.message.content for choice in answer.choices]
            assert answer.usage.completion_tokens == 36
    assert texts == alone


def test_accepted_fields_and_roles(server: RunningServer) -> None:
    messages: Any = [{"role": "developer", "content": "be brief"}, *CHAT]
    system: Any = [{"role": "system", "content": "be brief"}, *CHAT]
    request: Any = {"model": "toy", "max_tokens": 5, "temperature": 0, "extra_body": ON}
    with server.client as client:
        texts = [client.chat.completions.create(**request, messages=each).choices[0].message.content for each in (messages, system)]
        assert texts[0] == texts[1]
        same = client.chat.completions.create(**request, messages=system, reasoning_effort="low", safety_identifier="x")
        assert same.choices[0].message.content == texts[0]
        called = client.chat.completions.create(
            model="toy", messages=CHAT, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0
        )
        assert called.choices[0].finish_reason == "tool_calls"
        past: Any = [*CHAT, {**called.choices[0].message.model_dump(), "annotations": []}]  # as OpenAI's API answers
        past.append({"role": "tool", "tool_call_id": called.choices[0].message.tool_calls[0].id, "content": "done"})
        assert client.chat.completions.create(**request, messages=past).choices[0].message.content is not None
        assert client.models.retrieve("toy").id == "toy" and client.models.list().data[0].max_model_len == 4096
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("gpt/4")
        assert caught.value.code == "model_not_found"


def test_a_body_of_three_megabytes_is_status_413() -> None:
    with engine_of() as engine, running(engine, Bounds()) as found, found.client as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="toy", prompt="x" * (3 << 20))
        assert caught.value.status_code == 413


def test_keys_and_time_limit() -> None:
    with engine_of() as engine, running(engine, Bounds(answer_seconds=0.2), ["secret", "other", "clé"]) as found, found.client as client:
        assert client.with_options(api_key="secret").models.retrieve("toy").id == "toy"
        utf8 = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer clé\r\n\r\n".encode()
        assert found.statuses(utf8, end=False) == [200]
        for key in ("none", "secret2", ""):
            with pytest.raises(openai.AuthenticationError) as caught:
                client.with_options(api_key=key or "x").completions.create(model="toy", prompt="a")
            assert caught.value.code == "invalid_api_key" and "secret" not in caught.value.message
            assert caught.value.response.headers["www-authenticate"] == "Bearer"
        long: Any = {"model": "toy", "prompt": "a", "max_tokens": 4000, "extra_body": ON}
        allowed = client.with_options(api_key="other")
        with pytest.raises(openai.InternalServerError, match=r"not complete after 0\.2 seconds"):
            allowed.completions.create(**long)
        with pytest.raises(openai.APIError, match=r"not complete after 0\.2 seconds"):
            list(allowed.completions.create(**long, stream=True))
        waited(lambda: found.count("cancelled") == 2, "jobs beyond the time limit still decode")


def test_smaller_priority_numbers_enter_first() -> None:
    async def order() -> list[int]:
        gate, entered = Gate(1, 8), list[int]()
        tickets = [gate.tickets(1, priority)[0] for priority in (0, 5, 1, 0)]
        for _ in tickets:
            (one,) = [ticket for ticket in tickets if ticket in gate._entered]
            entered.append(tickets.index(one))
            gate.leave(one)
            gate.leave(one)
        assert gate.waiting == 0
        return entered

    assert asyncio.run(order()) == [0, 3, 2, 1]


def test_more_important_requests_enter_a_full_engine() -> None:
    """Requests with larger priority numbers enter only below the capacity, and the number of all requests is still bounded."""

    async def entered() -> list[bool]:
        gate = Gate(2, 3)
        tickets = [gate.tickets(1, priority)[0] for priority in (5, 5, 5, 0, 0)]
        found = [ticket.entered.done() for ticket in tickets]
        with pytest.raises(QueueFullError, match="3 requests are waiting already, of at most 3"):
            gate.tickets(1, -1)
        gate.leave(tickets[3])
        gate.leave(tickets[0])
        found.append(tickets[2].entered.done())
        gate.leave(tickets[1])
        return [*found, tickets[2].entered.done()]

    assert asyncio.run(entered()) == [True, True, False, True, True, False, True]


def post(server: RunningServer, key: str, priority: int, tokens: int) -> socket.socket:
    """A connection whose answer is not read."""
    wire = socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS)
    body = json.dumps({"prompt": "x", "max_tokens": tokens, "temperature": 0, "priority": priority, **ON}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nConnection: close\r\nContent-Length: {len(body)}"
    wire.sendall(head.encode() + b"\r\n\r\n" + body)
    return wire


def spied_jobs(engine: Engine) -> list[Job]:
    """Collects the jobs that are submitted to the engine from now on."""
    jobs, submit = list[Job](), engine.submit

    def submitted(*arguments: Any, **options: Any) -> Job:
        jobs.append(submit(*arguments, **options))
        return jobs[-1]

    engine.submit = submitted  # type: ignore[method-assign]
    return jobs


def answers_of(wires: list[socket.socket]) -> list[str]:
    answers = [b"".join(iter(partial(wire.recv, 65536), b"")) for wire in wires]
    for wire, answer in zip(wires, answers, strict=True):
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        wire.close()
    return [json.loads(answer[answer.index(b"{") :])["choices"][0]["text"] for answer in answers]


def in_order(jobs: list[Job]) -> list[Job]:
    return sorted(jobs, key=lambda job: job.submitted_at + (job.queue_seconds or 0.0))


def test_requests_get_rows_by_priority_and_then_by_caller() -> None:
    """While one answer runs, others fill the engine's queue. They get the row by priority, then in turns of the callers."""
    asks = [(0, "a"), (7, "a"), (3, "a"), (3, "a"), (3, "b"), (0, "b"), (0, "b"), (0, "a")]  # the first one runs
    with engine_of([*ONE_ROW, "--max-length", "128"]) as engine:
        jobs, steps, wires = spied_jobs(engine), Steps(engine), list[socket.socket]()
        with running(engine, Bounds(), ["a", "b"]) as server:
            for index, (priority, key) in enumerate(asks):
                wires.append(post(server, key, priority, 10 + index))
                waited(lambda: sum(counts_of(server)) == len(wires), "a request was not queued")
                if index == 0:
                    steps.allow(2)
                    waited(lambda: engine.stats().running == 1, "the first request has no row")
            steps.open()
            answers_of(wires)
        assert [job.max_new_tokens - 10 for job in in_order(jobs)] == [0, 5, 6, 7, 2, 4, 3, 1]
        assert all(job.tenant and job.tenant == job.cache_salt for job in jobs)


@pytest.mark.parametrize("flag", ["", "--preemption"])
def test_preemption_gives_the_row_to_the_smaller_priority_number(flag: str) -> None:
    """Other requests have the row and the place in the engine's queue. A preempted answer equals the answer alone."""
    with engine_of([*ONE_ROW, "--max-length", "256", *filter(None, [flag])]) as engine:
        alone = engine.generate("x", max_new_tokens=120, sampling=SamplingParams(temperature=0, ignore_eos=True)).text
        jobs, steps, wires = spied_jobs(engine), Steps(engine), list[socket.socket]()
        with running(engine, Bounds()) as server:
            for priority, tokens in ((5, 120), (5, 9), (-1, 3)):
                wires.append(post(server, "", priority, tokens))
                waited(lambda: sum(counts_of(server)) == len(wires), "a request was not queued")
                if len(wires) == 1:
                    steps.allow(3)
                    waited(lambda: steps.steps_made == 3 and engine.stats().running == 1, "the first request has no row")
            steps.allow(30)  # fewer rounds than 120 tokens take
            waited(lambda: steps.steps_made == 33, "the engine made too few steps")
            assert server.count("length") == (2 if flag else 1)  # the answer above, and the urgent one
            steps.open()
            assert answers_of(wires)[0] == alone
        assert in_order(jobs)[-1].max_new_tokens == 9
        assert [job.num_preemptions for job in jobs] == [int(bool(flag)), 0, 0]
        assert f"stepgraph_preemptions_total {int(bool(flag))}.0" in engine.metrics()


def test_preemption_is_refused_with_tensor_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "model", "--preemption", "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel: got 2 with --preemption, expected 1" in capsys.readouterr().err


def test_pages_of_answers_grow_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["serve", "toy", "--eager", "--port", "0", "--max-rows", "2", "--max-length", "256", "--num-pages", "16"]
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    for allocation, rows in (("reserve", 1), ("grow", 2)):
        with engine_of([*flags, "--page-allocation", allocation]) as engine:
            jobs = [engine.submit(text, max_new_tokens=150, sampling=greedy) for text in "xy"]
            while not jobs[0].tokens:
                engine.step()
            assert engine.stats().running == rows
            for _ in engine.stream():
                pass
            assert [len(job.tokens) for job in jobs] == [150, 150] and (engine.stats().preemptions > 0) == (allocation == "grow")
    assert cli.main([*flags[:-1], "15"]) == 2
    assert "--num-pages: got 15, expected >= 16 for one row of --max-length 256" in capsys.readouterr().err
    for text, message in (("0.5", "got 0.5 on cpu, expected a whole number, or None"), ("1.5", "got 1.5, expected a whole number >= 1")):
        assert cli.main([*flags[:-1], text]) == 2
        assert f"--num-pages: {message}" in capsys.readouterr().err


def test_tenants_take_turns() -> None:
    """A tenant that arrives late waits for one answer of each other tenant, and gets no turns for the time before it arrived."""

    async def order() -> str:
        gate, entered, tickets = Gate(1, 20), "", list[tuple[str, Ticket]]()

        def leave() -> str:
            name, one = next(pair for pair in tickets if pair[1] in gate._entered)
            gate.leave(one)
            return name

        for tenant, count in (("a", 5), ("b", 2)):
            tickets += [(tenant, ticket) for ticket in gate.tickets(count, 0, tenant)]
        entered += leave() + leave() + leave()
        tickets += [("c", ticket) for ticket in gate.tickets(3, 0, "c")]
        while gate.waiting:
            entered += leave()
        return entered + leave()

    assert asyncio.run(order()) == "ababcacaca"


def test_metrics_are_those_of_the_engine(server: RunningServer) -> None:
    with server.client as client:
        client.completions.create(model="toy", prompt="abc", max_tokens=4)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        assert answer.headers["content-type"] == CONTENT_TYPE_LATEST
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    finished = {sample.labels["reason"]: sample.value for sample in families["stepgraph_finished"].samples}
    assert finished == dict(server.engine.stats().finished) and sum(finished.values()) > 0
    assert families["stepgraph_first_token_seconds"].type == "histogram" and families["stepgraph_http_waiting"].type == "gauge"
    page = (
        Path("docs/serve.md").read_text(encoding="utf-8").partition("| `vllm:` | here: `stepgraph_` |\n|---|---|\n")[2].partition("\n\n")[0]
    )
    named = {name.removesuffix("_total") for line in page.split("\n") for name in re.findall("`([a-z_]+)`", line.split("|")[2])}
    assert len(named) > 10 and {f"stepgraph_{name}" for name in named - {"reason", "status"}} <= families.keys()


def counts_of(server: RunningServer) -> tuple[int, int]:
    """The numbers of requests that run, and that wait in the engine or at the gate."""
    stats, waiting = server.engine.stats(), re.search(r"http_waiting (\d+)", server.metrics())
    assert waiting is not None
    return stats.running, stats.waiting + int(waiting[1])


def test_full_queue_is_status_429(server: RunningServer) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True, **ON}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    wires = []
    try:
        for counts in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3)):  # running, waiting
            wires.append(socket.create_connection(("127.0.0.1", server.port)))
            wires[-1].sendall(request)
            waited(partial(lambda counts: counts_of(server) == counts, counts), "the request was not queued")
        with server.client as client, pytest.raises(openai.RateLimitError, match="2 requests are waiting already") as caught:
            client.completions.create(model="toy", prompt="x", max_tokens=4)
        assert caught.value.response.headers["retry-after"] == "1"
    finally:
        for wire in wires:
            wire.close()
    waited(lambda: not server.engine.has_work, "rows of clients that left still decode")


def test_a_request_that_waits_when_the_engine_is_closed_is_status_503() -> None:
    with engine_of(ONE_ROW) as engine:
        steps, wires = Steps(engine), list[socket.socket]()
        with running(engine, Bounds()) as server:
            for _ in range(4):
                wires.append(post(server, "", 0, 9))
                waited(lambda: sum(counts_of(server)) == len(wires), "a request was not queued")
            engine.close()
            steps.open()
            answers = [b"".join(iter(partial(wire.recv, 65536), b"")) for wire in wires]
            assert all(answer.startswith(b"HTTP/1.1 503 ") and b'"message":"the server is shutting down"' in answer for answer in answers)
            for wire in wires:
                wire.close()


@pytest.mark.parametrize(("number", "signals"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGTERM, 2)])
def test_a_signal_lets_answers_end_and_a_second_one_cancels_them(number: signal.Signals, signals: int) -> None:
    text, errors = list[str](), list[str]()

    def ask(port: int) -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
            length = 300 if signals == 1 else 4000
            chunks = client.completions.create(model="toy", prompt="x", max_tokens=length, stream=True, extra_body=ON)
            try:
                for index, chunk in enumerate(chunks):
                    text.append(chunk.choices[0].text)
                    if index == 0:
                        for _ in range(signals):
                            os.kill(os.getpid(), number)
                            waited(lambda: not listens(port), "the first signal has no effect")  # two signals at once may arrive as one
            except openai.APIError as error:
                errors.append(error.message)
            if signals == 1:  # after a second one the server may answer on an open connection until its last answer has ended
                with pytest.raises(openai.APIConnectionError):
                    client.models.list()

    def on_listening(line: str) -> None:
        matched = re.fullmatch(r"listening on http://127\.0\.0\.1:(\d+)/v1", line)
        assert matched is not None
        asking.append(threading.Thread(target=ask, args=(int(matched[1]),)))
        asking[0].start()

    asking: list[threading.Thread] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(terminal, "print_text", on_listening)
        assert cli.main([*FLAGS, "--port", "0"]) == 0
    asking[0].join()
    assert errors == ([] if signals == 1 else ["the server is shutting down"])
    assert len("".join(text)) > 100 if signals == 1 else len(text) < 4000


SERVER_WITH_A_HANGING_DRAFTER = """
import sys, threading
from stepgraph import Engine, EngineConfig, TextCodec, Vocabulary
from stepgraph.runtime import cli
from stepgraph.runtime.commands import serve
from stepgraph.runtime.models.toy import ToyTarget

def hang(job):
    print("hanging", flush=True)
    threading.Event().wait()

def ready_engine(options, progress):
    vocabulary = Vocabulary([*(bytes([value]) for value in range(256)), b"<end>"], [256])
    config = EngineConfig(num_speculative_tokens=2, rounds_in_flight=1, eager=True)
    return Engine(ToyTarget(257), hang, vocabulary=vocabulary, tokenizer=TextCodec.of_bytes(vocabulary), config=config)

serve.ready_engine = ready_engine
sys.exit(cli.main(["serve", "toy", "--port", "0"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_third_signal_ends_a_process_whose_step_hangs(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVER_WITH_A_HANGING_DRAFTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=handle_sigint) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline().rsplit(":", 1)[1].removesuffix("/v1\n"))
            with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as wire:
                body = b'{"model": "toy", "prompt": "x"}'
                wire.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                assert process.stdout.readline() == "hanging\n"
                for count in range(3):
                    assert process.poll() is None
                    process.send_signal(number)
                    if count == 0:
                        waited(lambda: not listens(port), "the first signal has no effect")
                while process.poll() is None and count < 1000:  # the second and the third may arrive as one
                    process.send_signal(number)
                    time.sleep(0.02)
                    count += 1
            assert process.poll() == -number
        finally:
            process.kill()


def test_a_body_that_has_not_arrived_at_the_end_of_the_grace_period_ends_with_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wires = list[socket.socket]()

    def on_listening(line: str) -> None:
        wires.append(socket.create_connection(("127.0.0.1", int(line.rsplit(":", 1)[1].removesuffix("/v1"))), timeout=SECONDS))
        wires[0].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n{")
        threading.Thread(target=stop).start()

    def stop() -> None:
        assert wires[0].recv(99).startswith(b"HTTP/1.1 100 ")  # the server waits for the body
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(terminal, "print_text", on_listening)
    assert cli.main([*FLAGS, "--port", "0", "--grace", "0.1"]) == 0
    with wires[0] as wire, contextlib.suppress(ConnectionResetError):
        assert wire.recv(99) == b""
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_collections_of_garbage_do_not_visit_what_exists_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = list[int]()

    def on_listening(line: str) -> None:
        frozen.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(terminal, "print_text", on_listening)
    assert cli.main([*FLAGS, "--port", "0"]) == 0
    assert frozen[0] > 100_000 and gc.get_freeze_count() == 0


def test_limits_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Any]()

    def ask(port: int) -> None:
        try:
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=SECONDS) as client:
                for prompt in ("x" * 1000, "x"):
                    with pytest.raises(openai.APIStatusError) as caught:
                        client.completions.create(model="toy", prompt=prompt, max_tokens=4000, extra_body=ON)
                    found.append((caught.value.status_code, caught.value.body))
                with socket.create_connection(("127.0.0.1", port)) as second:  # the client keeps its own open
                    found.append(second.recv(1))
        except ConnectionResetError:
            found.append(b"")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    asking: list[threading.Thread] = []

    def on_listening(line: str) -> None:
        asking.append(threading.Thread(target=ask, args=(int(line.rsplit(":", 1)[1].removesuffix("/v1")),)))
        asking[0].start()

    monkeypatch.setattr(terminal, "print_text", on_listening)
    flags = "--port 0 --max-body-bytes 900 --answer-seconds 0.25 --max-connections 1".split()
    assert cli.main([*FLAGS, *flags]) == 0
    asking[0].join()
    (large, late, second) = found
    assert large[0] == 413 and "expected at most 900" in large[1]["message"]
    assert late[0] == 504 and "not complete after 0.25 seconds" in late[1]["message"]
    assert second == b""


def listens(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_a_time_limit_does_not_wait_for_the_step_in_progress() -> None:
    """A request beyond its time limit is answered while the engine is blocked inside a step."""
    with engine_of() as engine:
        steps = Steps(engine)
        with running(engine, Bounds(answer_seconds=0.3)) as found, found.client as client:
            for count in range(4):  # two get rows later, the others wait in the engine and at the gate
                with pytest.raises(openai.InternalServerError, match="not complete"):
                    client.completions.create(model="toy", prompt="x" * (count + 1), max_tokens=4)
            steps.open()
            waited(lambda: not engine.has_work, "abandoned requests still decode")


def test_each_request_is_one_line_of_the_log_without_its_text(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stepgraph.serve"), server.client as client:
        found = [
            client.completions.create(model="toy", prompt="secret", max_tokens=4, stream=stream, extra_body=ON) for stream in (False, True)
        ]
        ids = [found[0].id, next(iter({chunk.id for chunk in found[1]}))]
        for refused in ({"extra_body": {"min_p": "secret"}}, {"max_tokens": 99999}):
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="toy", prompt="secret", **refused)
        lines = lines_of(caplog, 4)
    assert "secret" not in caplog.text and found[0].choices[0].text not in caplog.text
    assert [(line["status"], line["param"]) for line in lines[2:]] == [(400, "min_p"), (400, "max_tokens")]
    assert [line["id"] for line in lines[:2]] == ids
    for line in lines[:2]:
        assert (line["status"], line["prompt_tokens"], line["completion_tokens"], line["finish_reasons"]) == (200, 6, 4, ["length"])


def lines_of(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    waited(lambda: len(caplog.records) == count, "no line for a request")
    return [json.loads(record.message) for record in caplog.records]


def test_refused_requests_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    asked = (
        (("GET", "/v1/models"), 401),
        (("POST", "/chat/completions"), 404),
        (("GET", "/v1/completions"), 405),
        (("POST", "/v1/completions"), 401),
    )
    with caplog.at_level(logging.INFO, "stepgraph.serve"), engine_of() as engine, running(engine, Bounds(), ["secret"]) as found:
        for (method, path), status in asked:
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
            assert found.statuses(head.encode(), end=False) == [status]
        lines = lines_of(caplog, 4)
        assert [(line["request"], line["status"]) for line in lines] == [(" ".join(request), status) for request, status in asked]
        families = {family.name: family for family in text_string_to_metric_families(found.metrics().partition("\r\n\r\n")[2])}
    counted = {sample.labels["status"]: sample.value for sample in families["stepgraph_http_requests"].samples}
    assert counted == {"401": 2, "404": 1, "405": 1}


def test_a_client_that_leaves_within_its_body_is_no_wrong_request(caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with caplog.at_level(logging.INFO, "stepgraph.serve"), engine_of() as engine, running(engine, Bounds()) as found:
        assert found.send(head + b"{") == b""
        (line,) = lines_of(caplog, 1)
        assert (line["request"], line["status"]) == ("POST /v1/completions", "disconnected")
        assert 'stepgraph_http_requests_total{status="disconnected"} 1.0' in found.metrics()


def test_an_answer_that_ends_within_its_stream_is_logged_with_its_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stepgraph.serve"), engine_of() as engine:
        steps = Steps(engine, 4)
        with running(engine, Bounds()) as found, found.client as client:
            chunks = client.completions.create(model="toy", prompt="x", max_tokens=4000, stream=True, extra_body=ON)
            assert next(chunks).choices
            engine.close()
            steps.open()
            with pytest.raises(openai.APIError, match="the server is shutting down"):
                list(chunks)
            (line,) = lines_of(caplog, 1)
            assert line["status"] == 503 and 'stepgraph_http_requests_total{status="503"} 1.0' in found.metrics()


def test_times_contain_the_time_before_an_answer_reaches_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    """One request runs, one waits in the engine, one at the gate."""
    with caplog.at_level(logging.INFO, "stepgraph.serve"), engine_of(ONE_ROW) as engine:
        jobs, steps, wires = spied_jobs(engine), Steps(engine), list[socket.socket]()
        with running(engine, Bounds()) as server:
            for count in range(3):
                wires.append(post(server, "", 0, 9))
                waited(lambda: sum(counts_of(server)) == len(wires), "a request was not queued")
                if count == 0:
                    steps.allow(2)
                    waited(lambda: engine.stats().running == 1, "the first request has no row")
            time.sleep(0.2)
            steps.open()
            answers_of(wires)
            lines = sorted(line["first_token_seconds"] for line in lines_of(caplog, 3))
            (first,) = (job.first_token_seconds for job in in_order(jobs)[2:])
            assert first is not None and lines[2] >= first + 0.19
            families = {family.name: family for family in text_string_to_metric_families(server.metrics().partition("\r\n\r\n")[2])}
    for name in ("stepgraph_http_first_token_seconds", "stepgraph_http_seconds"):
        found = {sample.name.removeprefix(name): sample.value for sample in families[name].samples}
        assert found["_count"] == 3 and found["_sum"] >= sum(lines) - 0.001


def test_a_failure_of_the_engine_is_the_error_of_its_requests_and_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process ends, so that its supervisor starts another one."""
    messages = list[str]()

    def fail(*_: object) -> None:
        raise ValueError("the device is lost")

    def ask(url: str) -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS) as client:
            chunks = client.completions.create(model="toy", prompt="x", max_tokens=4000, stream=True, extra_body=ON)
            assert next(chunks).choices
            monkeypatch.setattr(ToyTarget, "forward", fail)
            with pytest.raises(openai.APIError) as caught:
                list(chunks)
            messages.append(caught.value.message)

    asking: list[threading.Thread] = []

    def on_listening(line: str) -> None:
        asking.append(threading.Thread(target=ask, args=(line.removeprefix("listening on "),)))
        asking[0].start()

    monkeypatch.setattr(terminal, "print_text", on_listening)
    assert cli.main([*FLAGS, "--port", "0"]) == terminal.FAILED
    asking[0].join()
    assert len(messages) == 1 and "ValueError: the device is lost" in messages[0]
    errors = capsys.readouterr().err
    assert "ValueError: the device is lost" in errors and errors.endswith("RuntimeError: the engine failed\n")
