"""The server with langchain-openai, instructor and pydantic-ai, which `make clients` installs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from stepgraph.runtime.serve.http import Bounds
from tests.helpers.running_server import RunningServer, engine_of, running

pytestmark = pytest.mark.clients


class Person(BaseModel):
    name: Literal["ada", "bob"]
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with engine_of() as engine, running(engine, Bounds()) as found:
        yield found


@pytest.mark.parametrize(("method", "strict"), [("json_schema", None), ("function_calling", None), ("function_calling", True)])
def test_langchain(server: RunningServer, method: str, strict: bool | None) -> None:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model="toy", base_url=str(server.client.base_url), api_key="none", temperature=0, max_retries=0)
    assert isinstance(model.with_structured_output(Person, method=method, strict=strict).invoke("who is it?"), Person)
    assert [*model.bind(max_tokens=10).stream("who is it?")]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(server: RunningServer, mode: str) -> None:
    library = pytest.importorskip("instructor")
    with openai.OpenAI(base_url=server.client.base_url, api_key="none", max_retries=0) as client:
        patched = library.from_openai(client, mode=library.Mode[mode])
        messages = [{"role": "user", "content": "who is it?"}]
        assert isinstance(patched.chat.completions.create(model="toy", response_model=Person, messages=messages, max_retries=1), Person)


@pytest.mark.parametrize("native", [False, True])
def test_pydantic_ai(server: RunningServer, native: bool) -> None:
    library = pytest.importorskip("pydantic_ai")
    models, providers = pytest.importorskip("pydantic_ai.models.openai"), pytest.importorskip("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=str(server.client.base_url), api_key="none")
    output = library.NativeOutput(Person) if native else Person
    found = library.Agent(models.OpenAIChatModel("toy", provider=provider), output_type=output).run_sync("who is it?").output
    assert isinstance(found, Person)
