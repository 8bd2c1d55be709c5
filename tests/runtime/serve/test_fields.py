"""Bodies of requests: lists of prompts, `echo`, and the fields that clients send by default."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from stepgraph.runtime.request_queue import RequestQueue
from stepgraph.runtime.serve import app
from stepgraph.runtime.serve.http import Bounds
from stepgraph.sampling.grammar.compile import backends
from tests.helpers.running_server import CHAT, FORMAT, ON, RunningServer, engine_of, running

PROMPTS = ["ab", "the second one", "c"]
SAMPLED: Any = {"model": "toy", "max_tokens": 9, "temperature": 0.9, "seed": 7, "extra_body": ON}
GREEDY: Any = {"model": "toy", "max_tokens": 6, "temperature": 0, "extra_body": ON}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with engine_of() as engine, running(engine, Bounds(waiting=4)) as found:
        yield found


def texts_of(answer: Any, count: int) -> list[str]:
    """The texts of a streamed answer, by index; checks that each choice has one finish reason, in its last event."""
    texts, reasons = [""] * count, dict[int, str]()
    for chunk in answer:
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.text
            reasons |= {choice.index: choice.finish_reason} if choice.finish_reason else {}
    assert sorted(reasons) == [*range(count)]
    return texts


@pytest.mark.parametrize("as_ids", [False, True])
def test_prompts_of_a_list_are_answered_as_alone(server: RunningServer, as_ids: bool) -> None:
    """Choice j of prompt i has the index i * n + j; the usage counts each prompt once."""
    prompts: Any = [[*prompt.encode()] for prompt in PROMPTS] if as_ids else PROMPTS
    with server.client as client:
        alone = [choice.text for prompt in PROMPTS for choice in client.completions.create(prompt=prompt, n=2, **SAMPLED).choices]
        answer = client.completions.create(prompt=prompts, n=2, best_of=2, **SAMPLED)
        *chunks, last = client.completions.create(prompt=prompts, n=2, stream=True, stream_options={"include_usage": True}, **SAMPLED)
    assert len({*alone}) == 6
    assert [choice.text for choice in answer.choices] == alone and [choice.index for choice in answer.choices] == [*range(6)]
    assert texts_of(chunks, 6) == alone
    for usage in (answer.usage, last.usage):
        assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (len("".join(PROMPTS)), 54)
        assert usage.total_tokens == usage.prompt_tokens + 54


def test_an_echoed_prompt_precedes_its_answers_and_has_no_stop_text(server: RunningServer) -> None:
    with server.client as client:
        plain = client.completions.create(prompt=PROMPTS, **GREEDY)
        expected = [prompt + choice.text for prompt, choice in zip(PROMPTS, plain.choices, strict=True)]
        request: Any = GREEDY | {"echo": True, "stop": ["second"]}
        ids: Any = [[*prompt.encode()] for prompt in PROMPTS]
        for prompts in (PROMPTS, ids):
            assert [choice.text for choice in client.completions.create(prompt=prompts, **request).choices] == expected
            assert texts_of(client.completions.create(prompt=prompts, stream=True, **request), 3) == expected
        assert client.completions.create(prompt="ab", **request).choices[0].text == expected[0]
        empty = request | {"extra_body": {"structured_outputs": {"regex": "x{0}"}}}
        assert texts_of(client.completions.create(prompt="ab", stream=True, **empty), 1) == ["ab"]


def test_each_prompt_has_its_own_room(server: RunningServer) -> None:
    """By default an answer has 16 tokens, fewer where the prompt leaves less room."""
    with server.client as client:
        answer = client.completions.create(model="toy", prompt=["x" * 4090, "x"], temperature=0, logprobs=0, extra_body=ON)
    assert [len(choice.logprobs.tokens) for choice in answer.choices if choice.logprobs and choice.logprobs.tokens] == [6, 16]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"prompt": ["x", ""]}, "prompt[1]", r"prompt\[1\]: got 0 tokens, expected 1 to 4095"),
        ({"prompt": ["x", "y" * 5000]}, "prompt[1]", r"prompt\[1\]: got 5000 tokens"),
        ({"prompt": ["x", "y" * 4090], "max_tokens": 9}, "max_tokens", r"expected a whole number from 1 to 6: .* less 4090 of prompt\[1\]"),
        ({"prompt": [[1, 2], [3, 999]]}, "prompt[1]", r"prompt\[1\]\[1\]: got 999, expected a token id from 0 to 256"),
        ({"prompt": [[1, 2], [[3]]]}, "prompt[1]", r"prompt\[1\]\[0\]: got \[3\]"),
        ({"prompt": ["x", 5]}, "prompt[1]", r"prompt\[1\]: got 5, expected a text or a list of token ids"),
        ({"prompt": [5, "x"]}, "prompt", r"prompt\[1\]: got 'x', expected a token id"),
        ({"prompt": []}, "prompt", "prompt: got 0 tokens"),
        ({"prompt": None}, "prompt", "prompt: got null, expected a text or a list of token ids"),
        ({"prompt": ["x"] * 8}, "prompt", "prompt: got 8, expected at most 7 choices"),  # 2 rows, one in the engine's queue, 4 at the gate
        ({"prompt": ["", *["x"] * 8]}, "prompt", "prompt: got 9, expected at most 7 choices"),
        ({"prompt": ["x", "y"], "n": 4}, "prompt", "prompt: got 8, expected at most 7 choices"),
        ({"prompt": ["x", "y"], "n": 2, "best_of": 3}, "best_of", "best_of: got 3, expected n, which is 2"),
        ({"prompt": "x", "echo": True, "logprobs": 0}, "echo", "prompts have no log-probabilities"),
        ({"prompt": "x", "echo": 1}, "echo", "echo: got 1, expected true or false"),
    ],
)
def test_a_wrong_prompt_refuses_all_of_them(server: RunningServer, fields: Any, param: str, message: str) -> None:
    submitted = server.engine.stats().submitted
    with server.client as client, pytest.raises(openai.BadRequestError, match=message) as refused:
        client.completions.create(model="toy", prompt="x", extra_body=ON | fields)
    assert refused.value.param == param
    assert server.engine.stats().submitted == submitted


def test_more_choices_than_the_server_holds_are_no_overload(server: RunningServer) -> None:
    """429 would let a client repeat the request for ever."""
    with server.client as client, pytest.raises(openai.BadRequestError, match="n: got 8, expected at most 7 choices") as refused:
        client.chat.completions.create(model="toy", messages=CHAT, n=8)
    assert refused.value.param == "n"


def test_an_answer_beyond_the_context_has_the_code_of_a_prompt_beyond_it(server: RunningServer) -> None:
    """Routers choose a model with a longer context by this code."""
    with server.client as client:
        for prompt, max_tokens, code in (("x" * 5000, 1, True), ("x", 4096, True), ("x", 0, False), ("x", -1, False)):
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model="toy", prompt=prompt, max_tokens=max_tokens)
            assert refused.value.code == ("context_length_exceeded" if code else None), (len(prompt), max_tokens)
            assert ("This model's maximum context length is 4096 tokens" in refused.value.message) == code, "LiteLLM looks for this text"


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": []},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tool_choice": "auto"},
        {"stop": [f"never {index}" for index in range(32)]},
        {"stream": False, "stream_options": None},
        {"prompt_cache_retention": "24h", "store": False, "metadata": {}, "user": "", "service_tier": "auto"},
        {"suffix": "", "skip_special_tokens": True, "include_stop_str_in_output": False},
        {"response_format": {"type": "text", "json_schema": None}},
        {"logit_bias": {}, "top_logprobs": 0, "logprobs": False, "n": 1, "functions": None, "modalities": ["text"]},
    ],
    ids=str,
)
def test_fields_without_effect_change_nothing(server: RunningServer, fields: Any) -> None:
    request = GREEDY | {"extra_body": ON | fields}
    with server.client as client:
        plain = client.chat.completions.create(messages=CHAT, **GREEDY).choices[0].message
        assert client.chat.completions.create(messages=CHAT, **request).choices[0].message == plain


def test_the_first_of_several_unknown_fields_is_named(server: RunningServer) -> None:
    unknown = {f"field{index}": 1 for index in range(40)}
    function = {"type": "function", "function": {"name": "f", **unknown}}
    bodies: Any = ({**unknown}, {"messages": [{**CHAT[0], **unknown}]}, {"tools": [function]})
    with server.client as client:
        for body, path in zip(bodies, ("", "messages[0].", "tools[0].function."), strict=True):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(model="toy", messages=CHAT, extra_body=body)
            assert refused.value.param == f"{path}field0"


def test_whole_numbers_may_have_a_point(server: RunningServer) -> None:
    """JSON has one type of numbers; libraries that read every number as a double write 5 as 5.0."""
    counts: Any = {"max_tokens": 5, "n": 2, "seed": 3, "top_k": 4, "min_tokens": 1, "priority": -1, "best_of": 2, "logprobs": 1, "top_p": 1}
    with server.client as client:
        whole = client.completions.create(model="toy", prompt="a", extra_body=ON | counts)
        points = {name: float(value) for name, value in counts.items()}
        assert client.completions.create(model="toy", prompt="a", extra_body=ON | points).choices == whole.choices
        for value in (5.5, "5", True, 1e300):
            with pytest.raises(openai.BadRequestError, match="max_tokens: got "):
                client.completions.create(model="toy", prompt="a", extra_body={"max_tokens": value})


def test_options_of_streams_may_be_null_or_off(server: RunningServer) -> None:
    valid: Any = (({"include_usage": None}, 0), ({"include_usage": True, "continuous_usage_stats": False}, 1))
    with server.client as client:
        for options, usages in valid:
            chunks = [*client.completions.create(prompt="x", stream=True, stream_options=options, **GREEDY)]
            assert sum(chunk.usage is not None for chunk in chunks) == usages


@pytest.mark.parametrize("field", ["structured_outputs", "response_format"])
def test_numbers_of_schemas_stay_exact(server: RunningServer, field: str) -> None:
    """A number with as many digits in another field is a float."""
    number, schema = "0.1234567890123456789", {"const": 0.5}
    value: Any = {"json": schema} if field == "structured_outputs" else FORMAT | {"json_schema": {"name": "x", "schema": schema}}
    body = json.dumps({"prompt": "a", "temperature": 0.25, "max_tokens": 40, field: value})
    encoded = body.replace("0.5", number).replace("0.25", "0.30000000000000000001").encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(encoded)}\r\n\r\n"
    answer = server.send(head.encode(), encoded, end=False)
    assert answer.startswith(b"HTTP/1.1 200 ") and f'"text":"{number}"'.encode() in answer


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32-le"])
def test_bodies_are_read_as_utf_8_only(server: RunningServer, encoding: str) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode(encoding)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    assert server.statuses(head.encode(), body, end=False) == [200 if encoding.startswith("utf-8") else 400]


def test_a_body_of_any_depth_is_answered_or_refused(server: RunningServer) -> None:
    """Near the limit of depth, JSON that can be read cannot be written into the prompt."""
    statuses = set[int]()
    for depth in range(940, 1000):
        nested = f"{'[' * depth}{']' * depth}"
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": "nested"}}}]
        body = json.dumps({"messages": CHAT, "max_tokens": 1, "tools": tools}).replace('"nested"', nested).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        statuses |= {*server.statuses(head.encode(), body, end=False)}
    assert statuses <= {200, 400}


def test_long_bodies_are_read_and_their_constraints_checked_once_outside_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, list[int]] = {"enqueue": [], "parse_body": [], "check_size": []}  # the threads of the calls

    def spy(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            called[name].append(threading.get_ident())
            return function(*arguments)

        monkeypatch.setattr(owner, name, call)

    spy(RequestQueue, "enqueue")
    spy(app, "parse_body")
    spy(backends, "check_size")
    regex = {"structured_outputs": {"regex": "(a|b)" * 5000}}
    schema = {"structured_outputs": {"json": {"enum": [f"value {index}" for index in range(2000)]}}}
    grammar = {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}  # its first check imports a library
    with server.client as client:
        for fields in (regex, schema, grammar, regex):
            client.completions.create(model="toy", prompt="x", max_tokens=4, extra_body=fields)
    (loop,) = set(called["enqueue"])
    assert len(called["parse_body"]) == 4 and called["parse_body"].count(loop) == 1 and loop not in called["check_size"]
    assert len(called["check_size"]) == 6, "of each constraint one call before its request, and one by its compile"
