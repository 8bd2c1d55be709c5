"""The context of a check: device, size of the run, time budget; factories for backends, engines and jobs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from stepgraph import Constraint, Engine, EngineConfig, Job, Vocabulary
from stepgraph.graphs import Backend, make_backend
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling.grammar import CompiledConstraint, GrammarCompiler
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice

Figures = dict[str, object]
Check = Callable[["Context"], Figures]

VOCABULARY = Vocabulary.printable(logits_width=160)
STOP = VOCABULARY.stop_token_ids[0]
ORACLE_TARGET = ToyTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})  # on the CPU
CONSTRAINTS = (
    None,
    Constraint.json_schema(
        {
            "type": "object",
            "properties": {"name": {"enum": ["ada", "bob"]}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
    Constraint.regex("[a-c]{2,9}x?"),
    Constraint.choice(["yes", "no", "nothing"]),
)


class Skipped(Exception):
    """The check cannot run here; the message has the reason."""


@dataclass(frozen=True)
class Context:
    """`rehearsal` runs the same code at small sizes, on the tape or, with `on_gpu`, on a CUDA device.

    `budget_seconds`: seconds for this check. `folder`: where to save pictures, if any.
    `figures` are reported even if the check fails later. An error inside a `part` does not stop the other parts.
    """

    rehearsal: bool
    quick: bool
    budget_seconds: float = math.inf
    folder: Path | None = None
    started: float = field(default_factory=time.monotonic)
    figures: Figures = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    on_gpu: bool = False

    @property
    def on_tape(self) -> bool:
        return self.rehearsal and not self.on_gpu

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.on_tape else torch.device("cuda", torch.cuda.current_device())

    def most(self, elements: int) -> int:
        """Elements of an input in a rehearsal: fewer on a CUDA device, since a stub interprets its kernels."""
        return elements if self.on_tape else elements // 20

    def count(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def turns(self, most: int, least: int = 1, share: float = 1.0) -> Iterator[int]:
        """0, 1, 2, ...: at least `least` times, then up to `most` times while less than `share` of the budget is spent."""
        for turn in range(most):
            if turn >= least and self.budget_used > share:
                return
            yield turn

    @property
    def budget_used(self) -> float:
        """Share of the budget that is spent."""
        return (time.monotonic() - self.started) / self.budget_seconds

    def fits(self, name: str) -> bool:
        """True if the budget allows another part; otherwise the part is reported as cut."""
        if self.rehearsal or self.budget_used <= 1:
            return True
        self.cut.append(name)
        return False

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record an error inside, which fails the check at its end."""
        try:
            yield
        except Skipped:
            raise
        except Exception as failure:
            traceback.print_exc(file=sys.stderr)
            self.failures.append(f"{name}: {type(failure).__name__}: {str(failure)[:300]}")

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """On a GPU every call that waits for the device raises."""
        if not self.on_tape:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if not self.on_tape:
                torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def backend(self, *, asynchronous: bool = False) -> Iterator[Backend]:
        backend = make_backend("tape" if self.on_tape else "cuda", asynchronous=asynchronous)
        try:
            yield backend
        finally:
            backend.close()

    @contextlib.contextmanager
    def engine(
        self,
        k: int,
        *,
        draft_masks: bool = True,
        agreement: float = 0.7,
        eager: bool = False,
        rows: int = 4,
        library: BackendChoice = "auto",
        buckets: bool = False,
        sampled: bool = False,
        prompt_graphs: bool | None = None,
    ) -> Iterator[Engine]:
        """A captured engine over the toy pair; captures the largest batch only, unless `buckets` is set, since captures are slow.

        Rehearsals capture sampled rounds only if `sampled` is set.
        """
        config = EngineConfig(
            max_rows=rows,
            num_speculative_tokens=k,
            draft_length=k,
            max_length=96,
            page_size=8,
            num_pages=12 * rows,
            prefill_chunk=5,
            draft_masks=draft_masks,
            eager=eager,
            greedy_only=self.rehearsal and not sampled,
            grammar_backend=library,
            buckets=None if buckets else (rows,),
            compile_isolation="process" if library == "auto" else "none",
            prompt_graphs=prompt_graphs,
        )
        with self.engine_of(toy_target(self.device), toy_draft(self.device, agreement) if k else None, config) as engine:
            yield engine

    @contextlib.contextmanager
    def engine_of(self, target: object, drafter: Drafter | str | None, config: EngineConfig) -> Iterator[Engine]:
        """A captured engine over these models."""
        # FlashInfer has its own check and may have to be compiled
        config = dataclasses.replace(config, filters="auto" if self.on_tape else "triton")
        with self.backend(asynchronous=True) as backend:
            engine = Engine(target, drafter, vocabulary=VOCABULARY, config=config, backend=backend)  # type: ignore[arg-type]
            try:
                engine.capture()
                yield engine
            finally:
                engine.close()


def toy_target(device: torch.device) -> ToyTarget:
    return ToyTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0}).to(device)


def toy_draft(device: torch.device, agreement: float) -> ToyDraft:
    return ToyDraft(toy_target(device), agreement).to(device)


@functools.cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(VOCABULARY)


def compiled(constraint: Constraint | None) -> CompiledConstraint | None:
    return None if constraint is None else _compiler().compile(constraint)


class RandomRequest(NamedTuple):
    """One request of a random batch."""

    prompt: tuple[int, ...]
    constraint: Constraint | None
    max_new_tokens: int
    drafts: int
    pause: int  # steps before the next request is submitted
    cancel_after: int | None  # steps


def random_requests(seed: int, count: int, k: int, constraints: Sequence[Constraint | None] = CONSTRAINTS) -> list[RandomRequest]:
    pick = random.Random(seed)
    return [
        RandomRequest(
            prompt=tuple(pick.randrange(len(VOCABULARY.tokens)) for _ in range(pick.randint(1, 13))),
            constraint=pick.choice(constraints),
            max_new_tokens=pick.randint(1, 40),
            drafts=pick.randint(0, k),
            pause=pick.randint(0, 3),
            cancel_after=pick.choice([None, None, None, pick.randint(0, 8)]),
        )
        for _ in range(count)
    ]


def serve(engine: Engine, reqs: Sequence[RandomRequest]) -> list[Job]:
    """Submit, cancel and step until all requests have ended."""
    jobs: list[tuple[RandomRequest, Job, int]] = []
    steps = 0

    def advance() -> None:
        nonlocal steps
        for req, job, submitted_at in jobs:
            if req.cancel_after == steps - submitted_at:
                engine.cancel(job)
        engine.step()
        steps += 1

    for req in reqs:
        if req.constraint:
            engine.compile(req.constraint)  # before the rounds that are counted
        job = engine.submit(req.prompt, constraint=req.constraint, max_new_tokens=req.max_new_tokens, num_speculative_tokens=req.drafts)
        jobs.append((req, job, steps))
        for _ in range(req.pause):
            advance()
    while engine.has_work:
        advance()
    return [job for _, job, _ in jobs]


def outcome(job: Job) -> tuple[list[int], str, str]:
    return job.tokens, str(job.finish_reason), job.error


def summary(times: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "max": round(ordered[-1], 2),
    }
