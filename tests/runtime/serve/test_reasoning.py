"""Reasoning: split from the answer, limited by a budget, and followed by a constrained answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph.runtime.models.files.tokenizer import ChatTemplate
from stepgraph.runtime.serve.http import Bounds
from stepgraph.runtime.serve.reasoning import THINK_BEGIN, THINK_END, ChannelSplitter, Reasoning, ReasoningSplitter
from stepgraph.runtime.text import TextCodec
from tests.helpers.running_server import CHAT, FORMAT, ON, SCHEMA, TOOLS, RunningServer, engine_of, running

TEMPLATE = """{% for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}assistant: {% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% else %}<think>
{% endif %}"""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with engine_of() as engine:
        codec = engine.tokenizer
        engine.__dict__["tokenizer"] = TextCodec(codec.vocabulary, lambda text, begins: codec.encode(text, begins), ChatTemplate(TEMPLATE))
        with running(engine, Bounds()) as found:
            yield found


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_ends_the_reasoning_and_the_grammar_follows(server: RunningServer, stream: bool) -> None:
    request: Any = {"model": "toy", "messages": CHAT, "response_format": FORMAT, "temperature": 0, "max_tokens": 200, "stream": stream}
    with server.client as client:
        answer: Any = client.chat.completions.create(**request, extra_body={"thinking_token_budget": 10})
        deltas = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
    reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert len(reasoning.removesuffix("\n").encode()) > 0 and THINK_END not in reasoning
    jsonschema.validate(json.loads("".join(delta.content or "" for delta in deltas)), SCHEMA)
    if not stream:
        assert answer.usage.completion_tokens_details.reasoning_tokens == 10


def test_an_answer_that_ends_within_its_reasoning_has_reached_its_length(server: RunningServer) -> None:
    """The text that closes the reasoning does not fit into 8 or 16 tokens."""
    request: Any = {"model": "toy", "messages": CHAT, "temperature": 0}
    with server.client as client:
        for budget, most in ((5, 4), (5, 8), (5, 16), (5, 17), (60, 120)):
            answer = client.chat.completions.create(**request, max_tokens=most, extra_body={"thinking_token_budget": budget, **ON})
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage.prompt_tokens_details.cached_tokens <= answer.usage.prompt_tokens
        least = client.chat.completions.create(**request, max_tokens=100, extra_body={"thinking_token_budget": 30, "min_tokens": 60})
        assert least.usage.completion_tokens >= 60, "tokens of the reasoning count"


def test_tokens_that_the_answer_itself_has_cached_are_not_reported(server: RunningServer) -> None:
    """After closed reasoning the answer continues as a second request, which finds the pages of the first one. Both count as `length`."""
    before = server.count("length"), server.count("cancelled")
    with server.client as client:
        answers = [
            client.chat.completions.create(
                model="toy",
                messages=[{"role": "user", "content": "a prompt of this test only"}],
                max_tokens=60,
                extra_body={"thinking_token_budget": 20, **ON},
            )
            for _ in range(2)
        ]
    assert all(answer.usage.completion_tokens == 60 for answer in answers)
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 48]
    assert (server.count("length"), server.count("cancelled")) == (before[0] + 4, before[1])


def test_reasoning_can_be_switched_off_and_calls_follow_it(server: RunningServer) -> None:
    request: Any = {"model": "toy", "messages": CHAT, "temperature": 0, "max_tokens": 300}
    with server.client as client:
        plain = client.chat.completions.create(**request, response_format=FORMAT, reasoning_effort="none").choices[0].message
        jsonschema.validate(json.loads(plain.content), SCHEMA)
        assert not hasattr(plain, "reasoning_content")
        called = client.chat.completions.create(
            **request, tools=TOOLS, tool_choice="required", extra_body={"thinking_token_budget": 5}
        ).choices[0]
        assert called.finish_reason == "tool_calls" and called.message.reasoning_content
        unfinished = client.chat.completions.create(**request | {"max_tokens": 20}, extra_body=ON).choices[0]
        assert (unfinished.finish_reason, unfinished.message.content) == ("length", "") and unfinished.message.reasoning_content
        for refused in ({"reasoning_effort": "none", "thinking_token_budget": 5}, {"thinking_token_budget": 2**31 - 1}):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**request, response_format=FORMAT, extra_body=refused)
            assert caught.value.param == "thinking_token_budget"


PIECES = st.lists(st.sampled_from(["a", "<", " ", "\n", "think>", "/think>", THINK_BEGIN, THINK_END]), max_size=10)


@given(PIECES, st.booleans())
def test_splits_do_not_depend_on_the_pieces(pieces: list[str], opened: bool) -> None:
    def split(texts: list[str]) -> tuple[str, str]:
        splitter, found = ReasoningSplitter(Reasoning(opened, None, ())), {True: "", False: ""}
        for text in texts:
            for inside, piece in splitter.push(text):
                found[inside] += piece
        for inside, piece in splitter.push("", ended=True):
            found[inside] += piece
        return found[True], found[False]

    text = "".join(pieces)
    reasoning, answer = split(pieces)
    assert (reasoning, answer) == split([text])
    if opened:
        assert (reasoning, answer) == (text.partition(THINK_END)[0], text.partition(THINK_END)[2].lstrip())


HEADERS = {
    "<|channel|>analysis": True,
    "<|channel|>final": False,
    "<|start|>assistant<|channel|>commentary": False,
    "<|channel|>commentary to=functions.f <|constrain|>json": False,
    " to=functions.f<|channel|>commentary json": False,
}
MESSAGES = st.lists(st.tuples(st.sampled_from([*HEADERS]), st.sampled_from(["", "a", "<", "<|", "to=functions.", "<|end"])), max_size=4)
MARKED_CALL = (" to=functions.f<|channel|>commentary json", '{"s": ["}<|end|>\\"<|start|>"]}')


@given(MESSAGES.map(lambda messages: [MARKED_CALL, *messages]), st.sets(st.integers(0, 300), max_size=8))
def test_channels_do_not_depend_on_the_pieces(messages: list[tuple[str, str]], cuts: set[int]) -> None:
    text = "".join(f"{header}<|message|>{body}<|end|>" for header, body in messages)
    splitter, found = ChannelSplitter(), {True: "", False: ""}
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 1000], strict=True):
        for inside, piece in splitter.push(text[start:end]):
            found[inside] += piece
    assert [*splitter.push("", ended=True)] == []
    call = " to=functions.f <|constrain|>json<|message|>"
    bodies = [(HEADERS[header], (call if "to=" in header else "") + body) for header, body in messages]
    assert found == {kind: "".join(body for inside, body in bodies if inside is kind) for kind in (True, False)}
