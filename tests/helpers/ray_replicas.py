"""Engines for replicas under Ray Serve, and a bare deployment to compare with. Imported in the processes of Ray, too."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, SamplingParams, StepEvent, Vocabulary
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.replicas.replica import AnswerPart, EngineInfo, ReplicaRequest, Tokens, info_of

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = Vocabulary.printable()
ROWS, LENGTH = 8, 400
Request = tuple[list[int], dict[str, Any]]


class BreakableTarget(ToyTarget):
    """Raises, or does not return, in the first process that finds the file `flag`, and writes the time into another file."""

    def __init__(self, flag: Path, hangs: bool) -> None:
        super().__init__(VOCABULARY.logits_width, seed=3)
        self.flag, self.hangs = flag, hangs

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        found = self.flag.with_suffix(".found")
        try:
            self.flag.rename(found)
        except FileNotFoundError:
            return super().forward(inputs, buffers)
        found.write_text(f"{os.getpid()} {time.time()}", encoding="ascii")
        found.rename(self.flag.with_suffix(".time"))
        time.sleep(600 * self.hangs)
        raise RuntimeError("the device has failed")


class SlowTarget(ToyTarget):
    """Each call takes `seconds` more."""

    def __init__(self, seconds: float) -> None:
        super().__init__(VOCABULARY.logits_width, seed=3)
        self.seconds = seconds

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        time.sleep(self.seconds)
        return super().forward(inputs, buffers)


def make_engine(flag: Path | None = None, seconds: float = 0.0, hangs: bool = False, **changes: Any) -> Engine:
    """Eager with a flag or seconds, since a replay calls no `forward`."""
    target = BreakableTarget(flag, hangs) if flag else SlowTarget(seconds) if seconds else ToyTarget(VOCABULARY.logits_width, seed=3)
    eager = bool(flag or seconds)
    sizes: dict[str, Any] = {"max_rows": ROWS, "max_length": 512, "num_speculative_tokens": 2, "draft_length": 2, "max_queued": 4096}
    config = EngineConfig(**sizes | changes, buckets=(ROWS,), eager=eager, compile_isolation="none")
    engine = Engine(target, ToyDraft(target, 0.8), vocabulary=VOCABULARY, config=config)
    if not eager:
        engine.ensure_captured()
    return engine


def requests(count: int, length: int) -> list[Request]:
    """Greedy and sampled, with drafts and without, free and under grammars, some with a prefix in common."""
    found: list[Request] = []
    for index in range(count):
        draws: dict[str, Any] = {"temperature": 1.0, "seed": index} if index % 2 else {}
        sampling = SamplingParams(ignore_eos=index % 3 < 2, **draws)
        options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": length, "cache_salt": f"tenant {index % 2}"}
        if index % 3 == 2:
            options["constraint"] = Constraint.regex(f"[a-z ]{{{length - 5},{length - 2}}}")
        if index % 4 == 3:
            options["num_speculative_tokens"] = 0
        found.append(([*[7] * 20 * (index % 5 == 0), 1 + index, 2, 3], options))
    return found


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray of this process."""
    import ray

    from stepgraph.runtime.commands.serve import connect

    os.environ["PYTHONPATH"] = str(ROOT)
    connect(4)
    try:
        yield
    finally:
        ray.shutdown()


class Canned:
    """Returns one part per requested token without an engine, to measure what Replica adds to Ray."""

    def __init__(self) -> None:
        self._engine: Engine | None = None

    async def describe(self) -> EngineInfo:
        self._engine = self._engine or make_engine()
        return info_of(self._engine, "canned")

    async def generate(self, ask: ReplicaRequest) -> AsyncIterator[AnswerPart]:
        count = ask.options["max_new_tokens"]
        for index in range(count):
            part = Tokens(StepEvent(0, (index,), finish_reason=None if index < count - 1 else FinishReason.LENGTH))
            yield part if index else part._replace(replica="canned", identity="x")


class Bare:
    """The same with Ray alone."""

    async def generate(self, prompt_ids: list[int], count: int) -> AsyncIterator[tuple[tuple[int, ...], str]]:
        for index in range(count):
            yield (index,), "" if index < count - 1 else "length"


async def expected(asks: list[Request]) -> list[tuple[list[int], str]]:
    """The results of one engine in this process."""
    with make_engine() as engine:
        async with AsyncEngine(engine) as serving:
            streams = [await serving.submit(prompt, **options) for prompt, options in asks]
            jobs = [await stream.result() for stream in streams]
    return [(job.tokens, str(job.finish_reason)) for job in jobs]
