"""The prompts of the demonstration, and variants of decoding the same requests with one pair of models. The head was not trained on the
prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.demo.pair import head_path, target_path
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, WeightsMode
from stepgraph.runtime.models.files.loading import load_models
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.request import Job, StepEvent
from stepgraph.runtime.text import TextCodec
from stepgraph.sampling.grammar import Constraint, Vocabulary

LOOK_UP = 2  # minimum match in tokens; single tokens match by chance


class Pair(NamedTuple):
    name: str
    target: TargetModel
    draft: Drafter | None
    codec: TextCodec

    @property
    def vocabulary(self) -> Vocabulary:
        return self.codec.vocabulary


def open_pair(drafts: int, progress: bool = False, weights: WeightsMode = DEQUANTISED) -> Pair:
    """The demonstration's models in bfloat16, or with the target's weights kept quantised."""
    path = target_path()
    config = EngineConfig(max_rows=1, num_speculative_tokens=drafts)
    loaded = load_models(path, head_path(), config, dtype=torch.bfloat16, progress=progress, weights=weights)
    return Pair("SmolLM2-135M-Instruct with an EAGLE-3 head", loaded.target, loaded.draft, TextCodec.open(path, loaded.vocabulary))


def toy_pair() -> Pair:
    """The toy models, with a draft that agrees on 80% of prefixes. Texts are legal but have no meaning. Needs no files."""
    vocabulary = Vocabulary.printable()
    target = ToyTarget(vocabulary.logits_width, seed=7)
    return Pair("the toy pair", target, ToyDraft(target, 0.8), TextCodec.of_bytes(vocabulary))


@dataclass(frozen=True)
class Variant:
    name: str
    drafts: int  # in every round, unless `options` has a draft_length
    constrained: bool
    options: Mapping[str, Any] = field(default_factory=dict)  # further arguments for EngineConfig


def variants(
    drafts: int, look_up: int = LOOK_UP, forced_drafts: bool | None = True, draft_length: int | str = "auto"
) -> tuple[Variant, ...]:
    sources = {"look_up": look_up, "draft_length": draft_length}
    return (
        Variant("plain", 0, False),
        Variant("plain + grammar", 0, True),
        Variant("speculative", drafts, False, sources),
        Variant("speculative + grammar", drafts, True, {**sources, "forced_drafts": forced_drafts}),
    )


def tokens_per_second(times: Iterable[tuple[int, float]]) -> float:
    """times: tokens and seconds of each answer."""
    tokens, seconds = map(sum, zip(*times, strict=True))
    return tokens / seconds if tokens else 0.0


class Case:
    """One variant's engine, with one row. Tokens per second exclude the prompt: they count from a request's first token."""

    def __init__(self, variant: Variant, pair: Pair, max_length: int) -> None:
        self.variant = variant
        self.times: list[tuple[int, float]] = []  # for each answer: tokens after the first event, and their seconds
        self.rounds = 0  # in which answers were decoded: without those that were in flight when they ended
        config = EngineConfig(
            max_rows=1,
            num_speculative_tokens=variant.drafts,
            max_length=max_length,
            greedy_only=True,
            prefix_reuse=False,  # repeated prompts are computed again
            **({"draft_length": variant.drafts, **variant.options}),
        )
        self.engine = Engine(pair.target, pair.draft if variant.drafts else None, vocabulary=pair.vocabulary, config=config)

    def run(
        self,
        prompt: Sequence[int],
        constraint: Constraint | None,
        new_tokens: int,
        show: Callable[[StepEvent], object] = lambda event: None,
    ) -> Job:
        """constraint: ignored if the variant is unconstrained. show: called with every event."""
        constraint = constraint if self.variant.constrained else None
        if constraint is not None:
            self.engine.compile(constraint)  # not part of the measured time
        job = self.engine.submit(prompt, constraint=constraint, max_new_tokens=new_tokens)
        first, seen = 0.0, 0
        for event in self.engine.stream():
            if not seen:
                first, seen = time.perf_counter(), len(event.tokens)
            show(event)
        self.times.append((len(job.tokens) - seen, time.perf_counter() - first))
        self.rounds += job.rounds
        return job

    def figures(self) -> dict[str, Any]:
        """Counts over the lifetime of the engine."""
        stats = self.engine.stats()
        counts = {name: getattr(stats, name) for name in ("tokens", "rounds", "mask_fills", "replays", "host_syncs")}
        counts |= {"accepted_drafts": stats.drafts.accepted, "accepted_forced_drafts": stats.drafts.accepted_forced}
        return {"variant": self.variant.name, **counts, "tokens_per_round": round(stats.tokens / max(1, self.rounds), 2)}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_TEXT = {"type": "string", "maxLength": 40}


@dataclass(frozen=True)
class Scenario:
    name: str
    user: str
    system: str = ""
    schema: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def messages(self) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.user}]

    @property
    def constraint(self) -> Constraint | None:
        return None if self.schema is None else Constraint.json_schema(self.schema)


SCENARIOS = (
    Scenario(
        "extraction",
        "Extract the booking as JSON with guest, email, room, nights, arrival and breakfast.\n\n"
        "Good evening, I am Miriam Castellan (miriam.castellan@quartz.example). I would like the garden room from 2027-05-14, for "
        "3 nights, with breakfast if possible.",
        schema=record(
            guest=_TEXT,
            email={"type": "string", "maxLength": 60},
            room=_TEXT,
            nights={"type": "integer", "minimum": 1, "maximum": 60},
            arrival={"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"},
            breakfast={"type": "boolean"},
        ),
    ),
    Scenario(
        "tool call",
        "Please remind Theodora Blum that the kiln course begins at 18:30 on Thursday.",
        'You call tools. Answer with JSON: {"name": tool, "arguments": {...}}. Tools:\n'
        "- send_message(recipient, message): Send a message to a person\n"
        "- open_door(floor): Open the door of a floor",
        schema={
            "anyOf": [
                record(name={"const": "send_message"}, arguments=record(recipient=_TEXT, message={"type": "string", "maxLength": 100})),
                record(name={"const": "open_door"}, arguments=record(floor={"type": "integer", "minimum": 0, "maximum": 20})),
            ]
        },
    ),
    Scenario("free text", "Why does a candle flame point upwards?"),
)
