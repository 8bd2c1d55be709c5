"""Bodies of requests: lists of prompts, `echo`, and the fields that clients send by default."""

from __future__ import annotations

import codecs
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from stepgraph import Engine, EngineConfig, SamplingParams, TextCodec, Vocabulary
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.runtime.request_queue import RequestQueue
from stepgraph.runtime.serve import app
from stepgraph.runtime.serve.http import Bounds, json_response
from stepgraph.runtime.serve.replies import Reply
from stepgraph.sampling.grammar.compile import backends
from tests.helpers.c_library import needs_c
from tests.helpers.running_server import CHAT, FORMAT, ON, TOOLS, RunningServer, engine_of, running

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
        ({"prompt": "x", "max_tokens": 0, "logprobs": 1}, "max_tokens", "max_tokens: got 0, expected a whole number from 1 to 4095"),
        ({"prompt": "x", "max_tokens": -1, "echo": True}, "max_tokens", "max_tokens: got -1, expected a whole number from 0 to 4095"),
        ({"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs: got 21, expected a whole number from 0 to 20"),
        ({"prompt": "x", "prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "got 0, expected none with stream: true"),
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


@pytest.mark.parametrize("tools", [[], TOOLS])
def test_an_answer_may_continue_the_last_message(server: RunningServer, tools: Any) -> None:
    """As in vLLM, which requires `add_generation_prompt: false` with it."""
    messages: Any = [*CHAT, {"role": "assistant", "content": "The "}]
    flags = ON | {"continue_final_message": True, "add_generation_prompt": False}
    request: Any = GREEDY | {"messages": messages, "tools": tools, "tool_choice": "none"}
    with server.client as client:
        answer = client.chat.completions.create(**request | {"extra_body": flags})
        prompt = [*server.engine.tokenizer.chat(CHAT), *b"The "]
        assert answer.choices[0].message.content == client.completions.create(prompt=prompt, **GREEDY).choices[0].text
        assert answer.usage.prompt_tokens == len(prompt)
        assert client.chat.completions.create(**request | {"extra_body": ON | {"add_generation_prompt": True}}).usage.prompt_tokens > len(
            prompt
        )
        for wrong, param in (
            (flags | {"add_generation_prompt": True}, "add_generation_prompt"),
            (ON | {"add_generation_prompt": False}, "add_generation_prompt"),
            (flags | {"add_generation_prompt": 0}, "add_generation_prompt"),
            (flags | {"continue_final_message": 1}, "continue_final_message"),
            (flags | {"messages": CHAT}, "messages"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**request | {"extra_body": wrong})
            assert refused.value.param == param


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


@needs_c  # xgrammar takes more memory than a compile may
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


def test_log_probabilities_of_prompts_are_written_outside_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 4,000 tokens, with 20 other tokens each, take a third of a second."""
    threads = list[str]()

    def spy(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return json_response(*given)

    monkeypatch.setattr(app, "json_response", spy)
    with server.client as client:
        for logprobs in (1, None):
            client.completions.create(model="toy", prompt="abc", max_tokens=0, echo=True, logprobs=logprobs, extra_body=ON)
    assert [name.startswith("asyncio") for name in threads] == [True, False]


@pytest.mark.parametrize("stream", [True, False])
def test_log_probabilities_of_an_echo_are_made_outside_the_event_loop(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    threads, real = list[str](), Reply._prompt_offsets

    def spy(reply: Reply) -> Any:
        threads.append(threading.current_thread().name)
        return real(reply)

    monkeypatch.setattr(Reply, "_prompt_offsets", spy)
    with server.client as client:
        answer = client.completions.create(prompt="abc", echo=True, logprobs=1, stream=stream, **GREEDY)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    assert [name.startswith("asyncio") for name in threads] == [True] and choices[0].logprobs.tokens[:3] == ["a", "b", "c"]


def scores(client: Any, **request: Any) -> list[list[tuple[float, bool]]]:
    """What the model `local-completions` of lm-evaluation-harness reads of an answer: for each prompt after its context of three tokens,
    the value of each token, and whether it is the most probable one."""
    answer = client.completions.create(model="toy", temperature=0, seed=1234, logprobs=1, echo=True, extra_body=ON, **request)
    read = slice(3, -1 if request["max_tokens"] else None)
    found = list[list[tuple[float, bool]]]()
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        pairs = zip(choice.logprobs.token_logprobs[read], choice.logprobs.top_logprobs[read], strict=True)
        found.append([(value, value == max(top.values())) for value, top in pairs])
    return found


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
def test_an_evaluation_harness_scores_prompts(server: RunningServer, max_tokens: int, as_ids: bool) -> None:
    """With and without a token after the prompts."""
    texts = ["abcdef", "abc" + "\0" * 5, "the third one"]
    prompts: Any = [[*text.encode()] for text in texts] if as_ids else texts
    expected = list[list[tuple[float, bool]]]()
    for text in texts:
        job = server.engine.submit([*text.encode()], sampling=SamplingParams(prompt_logprobs=1), max_new_tokens=1)
        while not job.finished:
            time.sleep(0.01)
        entries = [entry for entry in job.prompt_logprobs[3:] if entry]
        expected.append([(entry.raw, entry.top_raw[0][1] == entry.raw) for entry in entries])
    with server.client as client:
        assert scores(client, prompt=prompts, max_tokens=max_tokens) == expected


def test_echoed_log_probabilities_precede_those_of_the_answer(server: RunningServer) -> None:
    """In whole answers and in streams; the text of each token is at its offset; a greedy answer that is echoed has the same values."""
    letters: Any = GREEDY | {"logprobs": 2, "extra_body": {"structured_outputs": {"regex": "[a-z]{9}"}}}
    request = letters | {"echo": True}
    with server.client as client:
        (first, second) = client.completions.create(prompt=["abc", "d"], **request).choices
        chunks = [chunk.choices[0] for chunk in client.completions.create(prompt="abc", stream=True, **request)]
        plain = client.completions.create(prompt="abc", **letters).choices[0]
        again = client.completions.create(prompt=first.text, **request | {"max_tokens": 0})
    found = first.logprobs
    assert first.text == "abc" + plain.text and (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    assert (found.tokens[3:], found.token_logprobs[3:]) == (plain.logprobs.tokens, plain.logprobs.token_logprobs)
    assert found.top_logprobs[3:] == plain.logprobs.top_logprobs and all(1 <= len(top) <= 3 for top in found.top_logprobs[1:])
    assert found.tokens[:3] == ["a", "b", "c"] and found.text_offset == [*range(len(first.text))] and second.logprobs.tokens[0] == "d"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        pieces = [getattr(chunk.logprobs, name) for chunk in chunks if chunk.logprobs]
        assert [value for piece in pieces for value in piece] == getattr(found, name), name
    assert (again.choices[0].text, again.choices[0].finish_reason, again.usage.completion_tokens) == (first.text, "length", 0)
    assert again.choices[0].logprobs.tokens == found.tokens
    assert again.choices[0].logprobs.token_logprobs[1:] == pytest.approx(found.token_logprobs[1:], abs=1e-5)


def test_text_offsets_are_exact_where_characters_are_divided_among_tokens(server: RunningServer) -> None:
    """A token without text, such as the first byte of a character, has the offset of the text so far."""
    body = {"structured_outputs": {"regex": "[\u00e9\u2603x]{9}"}}
    with server.client as client:
        for prompt in ("a\u00e9\u2603\U0001f600b", [*"a\u00e9\u2603".encode(), 0xE2, 98]):
            for echo in (True, False):
                request: Any = GREEDY | {"prompt": prompt, "logprobs": 0, "extra_body": body, "echo": echo, "max_tokens": 30}
                (whole,) = client.completions.create(**request).choices
                chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **request)]
                assert "".join(chunk.text for chunk in chunks) == whole.text
                offsets, tokens = whole.logprobs.text_offset, whole.logprobs.tokens
                assert [each for chunk in chunks if chunk.logprobs for each in chunk.logprobs.text_offset] == offsets
                answer = whole.text[-9:] if echo else whole.text
                ids = [*(prompt.encode() if isinstance(prompt, str) else prompt)] * echo + [*answer.encode()]
                assert len(answer) == 9 < len(answer.encode()) and len(ids) <= len(tokens)
                texts = [codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(ids[:end])) for end in range(len(ids))]
                assert offsets[: len(ids)] == [*map(len, texts)] and {*offsets[len(ids) :]} <= {len(whole.text)}


def test_text_offsets_of_a_prompt_follow_what_the_tokenizer_adds() -> None:
    """A begin token and a blank before the prompt; and control tokens, whose spellings are part of it."""
    table = [bytes([value]) for value in range(256)]
    vocabulary = Vocabulary([*table, b"<s>", b"<user>", b"<end>"], [258], 384, [256, 257])

    def encode(text: str, begins: bool) -> list[int]:
        first, *parts = f" {text}".split("<user>")
        return [*[256] * begins, *first.encode(), *(token for part in parts for token in (257, *part.encode()))]

    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=64, max_top_logprobs=1, eager=True)
    engine = Engine(ToyTarget(384), vocabulary=vocabulary, config=config, tokenizer=TextCodec(vocabulary, encode))
    with engine, running(engine, Bounds()) as server, server.client as client:
        (choice,) = client.completions.create(
            model="toy", prompt="a\u00e9<user>b", max_tokens=2, logprobs=0, echo=True, temperature=0, extra_body=ON
        ).choices
    assert choice.text.startswith("a\u00e9<user>b")
    assert choice.logprobs.text_offset[:8] == [0, 0, 0, 1, 1, 2, 8, 9]  # begin, blank, a, two bytes, user, b, the answer


def test_prompt_logprobs_are_those_of_vllm(server: RunningServer) -> None:
    """By id: the token of the prompt, and the most probable ones with their ranks."""
    with server.client as client:
        body = ON | {"prompt_logprobs": 2}
        answer = client.completions.create(model="toy", prompt=["abc", [100]], max_tokens=3, temperature=0, extra_body=body)
        echoed = client.completions.create(model="toy", prompt="abc", max_tokens=0, logprobs=5, echo=True, extra_body=body).choices[0]
    first, *found = answer.choices[0].prompt_logprobs
    assert first is None and len(found) == 2 and answer.choices[1].prompt_logprobs == [None] and answer.choices[0].logprobs is None
    for entry, token, value, top in zip(found, (98, 99), echoed.logprobs.token_logprobs[1:], echoed.logprobs.top_logprobs[1:], strict=True):
        assert {rank for rank in (each["rank"] for each in entry.values()) if rank} == {1, 2} and str(token) in entry
        assert entry[str(token)]["logprob"] == value and entry[str(token)]["decoded_token"] == chr(token)
        assert {each["logprob"] for each in entry.values()} <= {*top.values()} and 2 <= len(entry) <= 3 < len(top)
    assert echoed.prompt_logprobs == answer.choices[0].prompt_logprobs


def test_a_prompt_token_that_is_excluded_has_the_least_number_of_json() -> None:
    engine = engine_of()
    engine._parts.models.target.bias[120] = -float("inf")  # type: ignore[attr-defined]
    with engine, running(engine, Bounds()) as server, server.client as client:
        body = ON | {"prompt_logprobs": 0}
        (choice,) = client.completions.create(model="toy", prompt="xx", max_tokens=0, logprobs=0, echo=True, extra_body=body).choices
    assert choice.logprobs.token_logprobs == [None, -9999.0] and choice.prompt_logprobs[1]["120"]["logprob"] == -9999.0
