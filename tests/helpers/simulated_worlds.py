"""Parts of the simulation: engine configurations, random requests, delays, and reference results of single requests."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs import StaticBuffers, TapeBackend
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.sampling.params import GREEDY
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, STOP, VOCABULARY

POISON = 13  # a token after which the target has no finite logits
MAX_LENGTH, PAGE_SIZE, NUM_PAGES, MAX_QUEUED = 48, 8, 11, 5
NUM_ASKS = 400
UNCOMPILABLE = Constraint.json_schema(
    {"type": "integer", "minimum": 2, "maximum": 1}
)  # refused when it is compiled, not when it is submitted
ALL_CONSTRAINTS = (
    *CONSTRAINTS,
    Constraint.regex("[0-9]{1,8}").after("a"),
    Constraint.lark('start: "ab"+ | /[x-z]{2,5}/'),
    Constraint.json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, any_whitespace=True),
    UNCOMPILABLE,
)


@dataclass(frozen=True)
class World:
    """An engine configuration of the simulation."""

    k: int
    drafter: str = "fair"
    draft_masks: bool = True
    rounds_in_flight: int = 2
    max_rows: int = 3
    look_up: int = 0
    forced_drafts: bool | None = None
    grammar_lane: str = "auto"
    host_link: str = "auto"
    prefill_chunk: int = 5
    prefix_reuse: bool = True
    eager: bool = False


WORLDS = (
    World(4),
    World(3, "perfect", draft_masks=False, rounds_in_flight=3),
    World(2, "ngram", max_rows=2, grammar_lane="host"),
    World(0, rounds_in_flight=4),
    World(3, look_up=2, forced_drafts=True, grammar_lane="host"),
    World(2, "adversarial", rounds_in_flight=1),
    World(5, "half", prefill_chunk=16),
    World(3, "parrot", grammar_lane="host", host_link="python"),
    World(2, "stopper", prefix_reuse=False, grammar_lane="host"),
    World(8, "perfect", prefill_chunk=3),
    World(4, "noise", draft_masks=False),
    World(1, "illegal", max_rows=4, grammar_lane="host", host_link="python"),
)


@dataclass(frozen=True)
class Ask:
    """A request. Options that a world does not support are dropped there."""

    prompt: tuple[int, ...]
    constraint: Constraint | None
    sampling: SamplingParams
    max_new_tokens: int
    drafts: int | None
    draft_ids: tuple[int, ...]
    salt: str

    def submit(self, engine: Engine) -> Job:
        most = engine.limits.num_speculative_tokens
        drafts = most if self.drafts is None else min(self.drafts, most)
        return engine.submit(
            self.prompt,
            constraint=self.constraint,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            num_speculative_tokens=drafts,
            draft_ids=self.draft_ids if drafts and self.draft_ids and engine._parts.models.reads_text else None,
            cache_salt=self.salt,
        )


@functools.cache
def ask(number: int) -> Ask:
    rng = random.Random(f"ask {number}")
    prompt = (*[(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)[:8], ()][number % 2], *rng.choices(range(len(VOCABULARY.tokens)), k=rng.randint(1, 12)))
    constraint = rng.choice(ALL_CONSTRAINTS) if rng.random() < 0.6 else None
    stops = tuple(rng.sample(range(95), rng.choice((0, 0, 0, 2))))
    sampling, new_tokens = replace(GREEDY, stop_token_ids=stops), rng.choice((1, 2, 4, 8, 8, 12, 12, 24))
    if rng.random() < 0.4:
        sampling = replace(
            sampling,
            repetition_penalty=rng.choice((1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.7)),
            logit_bias={rng.randrange(95): rng.uniform(-5, 5) for _ in range(3)},
            bad_token_ids=tuple(rng.sample(range(95), 2)),
            min_new_tokens=min(new_tokens, rng.choice((0, 4))),
            ignore_eos=constraint is None and rng.random() < 0.3,
            logprobs=rng.random() < 0.3,
        )
    if rng.random() < 0.3:
        sampling = replace(
            sampling,
            temperature=rng.choice((0.5, 1.0)),
            top_p=rng.choice((1.0, 0.8)),
            top_k=rng.choice((0, 20)),
            seed=rng.getrandbits(40),
        )
    draft_ids = tuple(rng.choices(range(95), k=rng.choice((0, 0, 6, 20))))
    return Ask(prompt, constraint, sampling, new_tokens, rng.choice((None, None, None, 0, 1, 3)), draft_ids, rng.choice(("", "", "b")))


class PoisonedTarget(ToyTarget):
    """A toy target with NaN logits after the token POISON."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        output = super().forward(inputs, buffers)
        poisoned = (inputs.tokens == POISON)[..., None]
        return output._replace(hidden=torch.where(poisoned, torch.full_like(output.hidden, -1.0), output.hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where((hidden[..., :1] < 0), float("nan"), super().logits(hidden.clamp(min=0)))


class Delays:
    """Sleeps before host nodes and stream segments. The seed and the name of each fix which ones sleep, and how long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.start(0)

    def start(self, seed: int) -> None:
        with self._lock:
            self._seed, self._share = seed, random.Random(f"delays {seed}").choice((0.0, 0.02, 0.1))
            self._rngs = dict[str, random.Random]()

    def __call__(self, name: str) -> None:
        with self._lock:
            rng = self._rngs.setdefault(name, random.Random(f"{self._seed} {name}"))
            pause = rng.choice((1e-4, 4e-4)) if rng.random() < self._share else 0.0
        if pause:
            time.sleep(pause)


def make_engine(world: World, delays: Delays | None = None) -> Engine:
    config = EngineConfig(
        max_rows=world.max_rows,
        num_speculative_tokens=world.k,
        draft_length=world.k,
        max_length=MAX_LENGTH,
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        rounds_in_flight=world.rounds_in_flight,
        prefill_chunk=world.prefill_chunk,
        prefix_reuse=world.prefix_reuse,
        draft_masks=world.draft_masks,
        forced_drafts=world.forced_drafts,
        look_up=world.look_up,
        max_queued=MAX_QUEUED,
        buckets=(world.max_rows,),
        grammar_lane=world.grammar_lane,
        host_link=world.host_link,
        eager=world.eager,
        compile_isolation="none",
        backend="tape",
    )
    target = PoisonedTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})
    backend = TapeBackend(asynchronous=delays is not None, delay=delays)
    engine = Engine(target, DRAFTERS[world.drafter]() if world.k else None, vocabulary=VOCABULARY, config=config, backend=backend)
    engine.capture()
    for constraint in filter(None, ALL_CONSTRAINTS):
        with contextlib.suppress(ValueError):
            engine.compile(constraint)
    return engine


@functools.cache
def single_request_engine(world: World) -> Engine:
    """An engine for one request at a time, in one thread."""
    return make_engine(replace(world, eager=True, rounds_in_flight=1, max_rows=1))


@functools.cache
def alone(request: Ask, world: World) -> tuple[tuple[int, ...], str]:
    """Tokens and finish reason of a request alone in an engine, without drafts if it is greedy."""
    with_drafts = not request.sampling.greedy
    engine = single_request_engine(replace(world, prefix_reuse=False) if with_drafts else World(0, prefix_reuse=False))
    job = request.submit(engine)
    for _ in engine.stream():
        pass
    return tuple(job.tokens), str(job.finish_reason)
