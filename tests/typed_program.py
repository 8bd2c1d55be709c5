"""A program of a user, for type checkers: mypy and pyright see the types of all public calls (make lint). It is not run."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel
from torch import Tensor
from typing_extensions import TypedDict, assert_type

from stepgraph import (
    AsyncEngine,
    CompiledConstraint,
    Constraint,
    DraftCounts,
    Engine,
    EngineConfig,
    EngineStats,
    FinishReason,
    GrammarLimits,
    Job,
    JobStream,
    ModelInput,
    ModelOutput,
    NoCache,
    Origin,
    Recording,
    RoundTimeoutError,
    SamplingParams,
    StepEvent,
    TextCodec,
    Vocabulary,
)
from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, capture, current_context
from stepgraph.graphs.model import History
from stepgraph.runtime.replay import read_recording, replay


class Person(BaseModel):
    name: str
    age: int


@dataclass
class Point:
    x: int


class Booking(TypedDict):
    room: str


class Colour(Enum):
    RED = "red"


def weather(city: str, days: int = 1) -> str:
    return city * days


class Bigram(torch.nn.Module, NoCache):
    vocab_size, feature_size, feature_dtype = 256, 16, torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.logits = torch.nn.Embedding(256, 16), torch.nn.Linear(16, 256)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        return ModelOutput(self.embedding(inputs.tokens))


class Repeat:
    def cache_specs(self, limits: Limits) -> list[BufferSpec]:
        return []

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return history.tokens[:, : history.num_drafts].long()


def draft(job: Job) -> Sequence[int]:
    return job.tokens[-2:]


config = EngineConfig(max_rows=2, num_speculative_tokens=4, rounds_in_flight=1, grammar_limits=GrammarLimits(compile_seconds=5))
engine = Engine.from_pretrained("demo", draft, config=config, record=Recording("run.jsonl"))
other = Engine.from_pretrained(Path("model"), Repeat(), config=config, weights="quantised", dtype=torch.bfloat16)
own = Engine(Bigram(), None, vocabulary=Vocabulary.printable())
EngineConfig(attention="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
EngineConfig(page_allocation="lazy")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
EngineConfig(draft_length="fast")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
Engine.from_pretrained("model", weights="int4")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
job = engine.generate("Ada", constraint=Person, max_new_tokens=5, sampling=SamplingParams(temperature=0.5, stop=["x"], stop_token_ids=[3]))
assert_type(job, Job[Person])
assert_type(job.text, str)
assert_type(job.tokens, list[int])
assert_type(job.origins, list[Origin])
assert_type(job.finish_reason, FinishReason | None)
assert_type(engine.stats(), EngineStats)
jobs = engine.generate(
    ["a", "b"], max_new_tokens=[3, None], sampling=[SamplingParams(temperature=None, seed=1), None], constraint=[None, Person]
)
assert_type(jobs, list[Job])
chat = engine.generate([{"role": "user", "content": "hi"}], constraint=Constraint.regex("a+"))
assert_type(chat, Job)
assert_type(engine.generate([1, 2, 3]), Job)
for each in (Literal["a", "b"], re.compile("x"), weather, Constraint.regex("x"), int | None):
    assert_type(engine.submit("x", constraint=each), Job)
assert_type(engine.submit("x", constraint=Person, max_new_tokens=2).parsed, Person)
assert_type(engine.submit("x", constraint=Booking).parsed, Booking)
assert_type(engine.generate("x", constraint=Colour, sampling=SamplingParams()).parsed, Colour)
assert_type(engine.generate(["x", "y"], constraint=Point, max_new_tokens=[1, 2])[0].parsed, Point)
assert_type(engine.generate([1, 2], constraint=dict[str, list[int]]).parsed, dict[str, list[int]])
assert_type(engine.compile(Person), CompiledConstraint)
try:
    for event in engine.step():
        assert_type(event, StepEvent)
        assert_type(event.drafts, DraftCounts)
except RoundTimeoutError:
    engine.close()
for piece in engine.stream_text("x", max_new_tokens=2):
    assert_type(piece, str)
codec = engine.tokenizer
assert_type(codec.encode("x"), list[int])
assert_type(codec.decode([1]), str)
assert_type(engine.vocabulary, Vocabulary)
with engine.trace(rounds=2) as trace:
    pass
trace.timeline.save_perfetto("x.json")
report = engine.capture(progress=True)
print(report)


async def main() -> None:
    async with AsyncEngine(engine) as serving:
        stream = serving.generate("x", constraint=Person, max_new_tokens=2)
        assert_type(stream, JobStream[Person])
        assert_type((await stream).parsed, Person)
        assert_type((await serving.submit("x", constraint=int)).job.parsed, int)
        text = "".join([piece async for piece in stream.text()])
        assert_type(await serving.generate([1]), Job)
        async with serving.generate([1]) as events:
            async for event in events:
                assert_type(event, StepEvent)
        waited = await serving.submit("x")
        print(text, waited, stream.job.parsed)


asyncio.run(main())
buffers = StaticBuffers([BufferSpec("x", (4,), torch.float32)])


def step(buffers: StaticBuffers) -> None:
    current_context()
    buffers.x.mul_(2)


recorded = capture(step, buffers, backend="tape", check="twice")
recorded.replay()
replay(read_recording("run.jsonl"), Bigram(), None, Vocabulary.printable())
TextCodec.open("model")
