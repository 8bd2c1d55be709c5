"""Calls in the formats of model families, whose markers are control tokens, by a model that prefers the tokens of a given text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jsonschema
import openai
import pytest
import torch
from torch import Tensor

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.files.tokenizer import ChatTemplate
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.serve.calls import choose_format
from stepgraph.runtime.serve.http import Bounds
from stepgraph.runtime.serve.reasoning import with_markers
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar.matchers.forced import token_lookup
from tests.helpers.running_server import CHAT, FORMAT, SCHEMA, TOOLS, RunningServer, running
from tests.runtime.serve.test_server import calls_of

MARKERS = "<tool_call> </tool_call> [TOOL_CALLS] [ARGS] <|start|> <|channel|> <|message|> <|constrain|> <|end|> <|ask|>".split()
TOKENS = [*(bytes([value]) for value in range(256)), *map(str.encode, MARKERS), b"<|stop|>"]
STOP = len(TOKENS) - 1
SPELLED = token_lookup(Vocabulary(TOKENS, [STOP]))
CALL = ("look_up", {"name": "ada", "age": 36})
GPT_OSS = "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>{{ call.arguments|tojson }}"
PAST = {  # how chat templates write earlier calls
    "hermes": '<tool_call>\n{"name": "{{ call.name }}", "arguments": {{ call.arguments|tojson }}}\n</tool_call>',
    "llama3": '{# "parameters": dictionary #}{"name": "{{ call.name }}", "parameters": {{ call.arguments|tojson }}}',
    "mistral": "[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments|tojson }}",
    "mistral-list": "[TOOL_CALLS] [{{ call|tojson }}]",
    "qwen3-coder": (
        "<tool_call>\n<function={{ call.name }}>\n{% for name, value in call.arguments|items %}<parameter={{ name }}>\n{{ value }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>"
    ),
    "gpt-oss": GPT_OSS,
}


def template(name: str) -> ChatTemplate:
    past = "{% for each in message.tool_calls %}{% set call = each.function %}" + PAST[name] + "{% endfor %}"
    return ChatTemplate(
        "{{ tools|tojson }}{% for message in messages %}{{ message.content }}{% if message.tool_calls %}"
        + past
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|ask|>{% endif %}"
    )


class Writer(ToyTarget):
    """Prefers the tokens of a script after the token <|ask|>, then the stop token."""

    script: Sequence[int] = ()
    asked_at = 0

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        found = inputs.positions[inputs.tokens == 256 + MARKERS.index("<|ask|>")]
        self.asked_at = int(found[-1]) if len(found) else self.asked_at
        hidden = inputs.positions[..., None].expand(*inputs.positions.shape, self.hidden_size).to(torch.float32)
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        index = hidden[..., 0].long() - self.asked_at
        script = torch.tensor([*self.script, STOP])
        return 9.0 * torch.nn.functional.one_hot(script[index.clamp(0, len(script) - 1)], self.vocab_size).float()


@contextmanager
def serving(name: str) -> Iterator[tuple[RunningServer, Writer]]:
    """A server of a model of this family."""
    vocabulary = Vocabulary(TOKENS, [STOP], control_token_ids=range(256, STOP))
    codec = with_markers(TextCodec(vocabulary, lambda text, begins: SPELLED.split_longest(text.encode()), template(name)), "auto")
    assert choose_format(codec).templated and choose_format(codec).call_format == choose_format(codec, name).call_format
    target = Writer(codec.vocabulary.logits_width)
    config = EngineConfig(max_rows=1, max_length=4096, eager=True, num_speculative_tokens=0, compile_isolation="none")
    with Engine(target, None, vocabulary=codec.vocabulary, tokenizer=codec, config=config) as engine, running(engine, Bounds()) as found:
        yield found, target


@pytest.mark.parametrize("name", PAST)
def test_calls_over_http(name: str) -> None:
    past = [{"role": "assistant", "content": "so ", "tool_calls": [{"function": {"name": CALL[0], "arguments": CALL[1]}}]}]
    request: Any = {"model": "toy", "messages": CHAT, "tools": TOOLS, "temperature": 0, "max_tokens": 300}
    with serving(name) as (server, target), server.client as client:
        target.script = SPELLED.split_longest(template(name).render(past, None, False).removeprefix("null").encode())
        for stream in (False, True):
            answer: Any = client.chat.completions.create(**request, stream=stream)
            ((called, arguments),), reason = calls_of(answer, stream)
            assert (called, json.loads(arguments), reason) == (*CALL, "tool_calls")
        message = client.chat.completions.create(**request).choices[0].message
        assert (message.content or "").strip() == ("" if name == "gpt-oss" else "so")
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
        target.script = []
        again: Any = [*CHAT, message.model_dump(exclude_none=True), result]
        assert client.chat.completions.create(**request | {"messages": again}).choices[0].finish_reason == "stop"
        if name == "gpt-oss":
            target.script = SPELLED.split_longest(b"<|channel|>analysis<|message|>well<|end|>")
        request["tools"] = TOOLS[:1]
        for choice in ("required", {"type": "function", "function": {"name": "look_up"}}):
            calls, reason = calls_of(client.chat.completions.create(**request, tool_choice=choice, parallel_tool_calls=False), False)
            ((called, arguments),) = calls
            assert reason == "tool_calls" and called == "look_up"
            jsonschema.validate(json.loads(arguments), SCHEMA)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", [name for name in PAST if name != "llama3"])
def test_a_format_of_answers_beside_tools(name: str, stream: bool) -> None:
    """The clients of agents send both: an answer is calls, or a text of the format."""
    call, analysis = choose_format(TextCodec(Vocabulary(TOKENS, [STOP]), lambda text, begins: [], template(name))).call_format, ""
    if name == "gpt-oss":
        analysis = "<|channel|>analysis<|message|>well<|end|>"
    request: Any = {"model": "toy", "messages": CHAT, "tools": TOOLS, "temperature": 0, "max_tokens": 300, "stream": stream}
    request["parallel_tool_calls"] = False
    with serving(name) as (server, target), server.client as client:
        for form, tool_choice, script in (
            (FORMAT, "auto", "{"),
            ({"type": "json_object"}, "auto", json.dumps({"name": call.trigger})),
            (FORMAT, "auto", call.opening + call.begin("look_up")),
            (FORMAT, "required", "{"),
        ):
            answered = script.startswith("{") and tool_choice == "auto"
            target.script = SPELLED.split_longest((analysis + (call.answer_begin if answered else "") + script).encode())
            answer: Any = client.chat.completions.create(**request, response_format=form, tool_choice=tool_choice)
            deltas = [chunk.choices[0] for chunk in answer] if stream else answer.choices
            parts = [delta.delta for delta in deltas] if stream else [deltas[0].message]
            text = "".join(part.content or "" for part in parts)
            called = [call.function.name for part in parts for call in part.tool_calls or () if call.function.name]
            assert deltas[-1].finish_reason == ("stop" if answered else "tool_calls")
            if answered:
                jsonschema.validate(json.loads(text), SCHEMA if form == FORMAT else {"type": "object"})
            assert (bool(text), bool(called)) == (answered, not answered)
            assert form == FORMAT or text == script


def test_a_format_of_answers_beside_calls_that_are_json_is_refused() -> None:
    with serving("llama3") as (server, _), server.client as client:
        request: Any = {"model": "toy", "messages": CHAT, "tools": TOOLS, "response_format": FORMAT, "max_tokens": 3}
        with pytest.raises(
            openai.BadRequestError, match=r"response_format: got .*, expected none beside tools whose calls are JSON as well"
        ):
            client.chat.completions.create(**request)
        assert client.chat.completions.create(**request, tool_choice="required").choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_of_answers_beside_tools_follows_the_reasoning(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAST, "hermes", PAST["hermes"] + "{# <think> enable_thinking #}")
    with serving("hermes") as (server, target), server.client as client:
        for script, called in (("so</think>{", False), ("so</think><tool_call>", True)):
            target.script = SPELLED.split_longest(script.encode())
            request: Any = {"tools": TOOLS, "response_format": FORMAT, "temperature": 0, "max_tokens": 300, "stream": stream}
            answer: Any = client.chat.completions.create(model="toy", messages=CHAT, **request)
            parts = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
            assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == "so"
            text = "".join(part.content or "" for part in parts)
            assert any(part.tool_calls for part in parts) == called == (text == "")
            if not called:
                jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_numbers_of_parameters_stay_exact(name: str) -> None:
    """A float would round the number. The templates write the tools as JSON, which has no Decimals."""
    number, schema = "0.1234567890123456789", {"properties": {"a": {"const": 0.5}}, "required": ["a"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    body = json.dumps({"messages": CHAT, "tools": tools, "tool_choice": "required", "temperature": 0, "max_tokens": 300})
    encoded = body.replace("0.5", number).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(encoded)}\r\n\r\n"
    with serving(name) as (server, _):
        answer = server.send(head.encode(), encoded, end=False)
    assert answer.startswith(b"HTTP/1.1 200 ") and f'\\"a\\": {number}}}'.encode() in answer


@pytest.mark.parametrize(("text", "content"), [("so</think>[]", SCHEMA), ("so", None)])
def test_a_format_is_enforced_after_reasoning_that_the_prompt_does_not_open(
    text: str, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAST, "hermes", PAST["hermes"] + "{# <think> enable_thinking #}")
    with serving("hermes") as (server, target), server.client as client:
        target.script = SPELLED.split_longest(text.encode())
        answer = client.chat.completions.create(model="toy", messages=CHAT, temperature=0, max_tokens=60, response_format=FORMAT)
        message = answer.choices[0].message
        assert message.reasoning_content.startswith("so") and (content is None) == (message.content == "")
        jsonschema.validate(json.loads(message.content or "0"), content or True)


@pytest.mark.parametrize(("text", "content", "called"), [("hello", "hello", []), ("<tool_call>\n<function=other>", None, ["give_up"])])
def test_calls_are_enforced_in_an_answer_without_reasoning(
    text: str, content: str | None, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAST, "qwen3-coder", PAST["qwen3-coder"] + "{# <think> enable_thinking #}")
    with serving("qwen3-coder") as (server, target), server.client as client:
        target.script = SPELLED.split_longest(text.encode())
        answer = client.chat.completions.create(model="toy", messages=CHAT, tools=TOOLS, temperature=0, max_tokens=60)
        message = answer.choices[0].message
        assert (message.content, [call.function.name for call in message.tool_calls or ()]) == (content, called)


def test_channels_are_text_with_each_format_of_calls() -> None:
    vocabulary = Vocabulary(TOKENS, [STOP], control_token_ids=range(256, STOP))
    text = "<|start|>assistant<|channel|>final<|message|>yes<|end|>"
    codec = TextCodec(vocabulary, lambda text, begins: SPELLED.split_longest(text.encode()), template("gpt-oss"))
    assert with_markers(codec, "hermes").decode(codec.encode(text)) == text


@pytest.mark.parametrize("stream", [False, True])
def test_channels_of_gpt_oss(stream: bool) -> None:
    def ask(text: str, **options: Any) -> tuple[str, str, str]:
        target.script = SPELLED.split_longest(text.encode())
        answer: Any = client.chat.completions.create(model="toy", messages=CHAT, temperature=0, max_tokens=300, stream=stream, **options)
        deltas = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
        return reasoning, "".join(delta.content or "" for delta in deltas), "".join(call.name or "" for call in calls)

    analysis, rest = "<|channel|>analysis<|message|>well, well<|end|>", "<|start|>assistant<|channel|>final<|message|>"
    with serving("gpt-oss") as (server, target), server.client as client:
        assert ask(f"{analysis}{rest}a < b") == ("well, well", "a < b", "")
        assert ask(f"{analysis}{rest}one two", stop=["well", " tw"]) == ("well, well", "one", "")
        preamble = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary"
        call = ' to=functions.look_up <|constrain|>json<|message|>{"name": "bob", "age": 5}'
        assert ask(f"{analysis}{preamble}{call}", tools=TOOLS) == ("well, well", "I look.", "look_up")
        reasoning, content, _ = ask(f"{analysis}{rest}[]", response_format=FORMAT)
        jsonschema.validate(json.loads(content), SCHEMA)
        assert reasoning == "well, well"
        budget = {"thinking_token_budget": 5}  # <|message|> counts, too
        assert ask(f"<|channel|>analysis<|message|>well<|end|>{rest}yes", extra_body=budget) == ("well", "yes", "")
        assert ask(analysis, extra_body=budget, tools=TOOLS[:1], tool_choice="required") == ("well", "", "look_up")
