"""The server with the demonstration's model pair and OpenAI's client. Run by `make models`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from stepgraph.runtime.serve.http import Bounds
from tests.helpers.running_server import SECONDS, RunningServer, engine_of, running
from tests.sampling.grammar.compile.test_compiler import waited

pytestmark = pytest.mark.models
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
PARAMETERS = {
    "type": "object",
    "properties": {"recipient": {"type": "string", "maxLength": 30}, "message": {"type": "string", "maxLength": 60}},
    "required": ["recipient", "message"],
    "additionalProperties": False,
}
TELL = {"name": "send_message", "description": "Send a message to a person", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": each} for each in (TELL, {"name": "open_doors", "description": "Open all doors"})]
GREEDY: Any = {"model": "toy", "temperature": 0}
EXTRACT = GREEDY | {"messages": [{"role": "user", "content": "Extract as JSON: Ada Lovelace is 36 years old."}]}
POEM = GREEDY | {"messages": [{"role": "user", "content": "Write a poem about the sea."}]}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=30)
    age: int = pydantic.Field(ge=0, le=120)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    try:
        engine = engine_of(["serve", "demo", "-k", "7", "--max-rows", "2", "--max-length", "1024"])
    except ValueError as error:
        pytest.skip(f"{error}: make models")
    with engine:
        engine.capture()
        with running(engine, Bounds()) as found:
            yield found


def test_a_record_is_extracted_streamed_or_not(server: RunningServer) -> None:
    with server.client as client:
        whole = client.chat.completions.create(**EXTRACT, response_format=FORMAT, max_tokens=100).choices[0]
        chunks = [*client.chat.completions.create(**EXTRACT, response_format=FORMAT, max_tokens=100, stream=True)]
        parsed = client.chat.completions.parse(**EXTRACT, response_format=Person, max_tokens=200).choices[0].message.parsed
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    assert whole.finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert 2 < len(chunks) < len(whole.message.content), "several chunks, not one per letter"
    assert isinstance(parsed, Person)


def test_tool_result_is_used(server: RunningServer) -> None:
    requested: Any = [{"role": "user", "content": "Please tell Theodora that the course begins at 18:30."}]
    with server.client as client:

        def output(messages: Any, choice: str) -> Any:
            options = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
            return client.chat.completions.create(**GREEDY, **options, messages=messages).choices[0]

        called = output(requested, "required")
        (call,) = called.message.tool_calls
        assert called.finish_reason == "tool_calls" and call.function.name in ("send_message", "open_doors")
        expected = PARAMETERS if call.function.name == "send_message" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), expected)
        result = {"role": "tool", "tool_call_id": call.id, "content": "sent"}
        free = output([*requested, called.message.model_dump(exclude_none=True), result], "auto")
    assert free.message.content or free.message.tool_calls


def test_concurrent_clients_and_a_disconnect(server: RunningServer) -> None:
    """Answers do not depend on concurrent requests."""
    before = server.count("cancelled")

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=str(server.client.base_url), api_key="none", max_retries=0, timeout=SECONDS) as client:

            async def text(**options: Any) -> Any:
                return (await client.chat.completions.create(**options, max_tokens=50)).choices[0].message.content

            async def endless(begun: asyncio.Event) -> None:
                async for _ in await client.chat.completions.create(**POEM, max_tokens=900, stream=True, extra_body={"ignore_eos": True}):
                    begun.set()

            alone = await text(**POEM), await text(**EXTRACT, response_format=FORMAT)
            together = await asyncio.gather(text(**POEM), text(**EXTRACT, response_format=FORMAT))
            assert tuple(together) == alone
            begun = asyncio.Event()
            leaving, beside = asyncio.ensure_future(endless(begun)), asyncio.ensure_future(text(**POEM))
            await begun.wait()
            leaving.cancel()
            assert await beside == alone[0]
            with pytest.raises(asyncio.CancelledError):
                await leaving

    asyncio.run(ask())
    waited(lambda: server.count("cancelled") == before + 1, "the row of a client that left still decodes")


BAD: list[dict[str, Any]] = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "x" * 9000}]},
    {"max_tokens": 5000},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}},
    {"tools": TOOLS, "tool_choice": "sometimes"},
    {"temperature": -1},
]


def test_bad_body_is_refused_and_the_next_is_answered(server: RunningServer) -> None:
    with server.client as client:
        for spoilt in BAD:
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**{**EXTRACT, **spoilt})
            assert "got" in caught.value.message and caught.value.param
        assert client.chat.completions.create(**POEM, max_tokens=2).choices[0].finish_reason == "length"
