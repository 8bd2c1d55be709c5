"""Parts of the simulation: random engine configurations, random requests, delays, and reference results of single requests."""

from __future__ import annotations

import atexit
import contextlib
import functools
import random
import shutil
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams, Vocabulary
from stepgraph.graphs import StaticBuffers, TapeBackend
from stepgraph.graphs.model import TargetModel
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.job import TokenLogprob
from stepgraph.runtime.models.toy import ToyTarget
from stepgraph.sampling.grammar.link.native import HostLinkName
from stepgraph.sampling.native import why_not
from stepgraph.sampling.params import GREEDY
from tests.helpers.adapters import ALL, save_adapter
from tests.helpers.draft_engines import DRAFTERS as DRAFT_CASES
from tests.helpers.draft_engines import DraftCase
from tests.helpers.families import hf_model
from tests.helpers.prefix_engines import DRAFTS
from tests.helpers.toy_engines import CONSTRAINTS, DRAFTERS, STOP, VOCABULARY, finish
from tests.runtime.test_logits_processors import PROCESSORS

POISON = 13  # a token after which the toy target has no finite logits
FAMILY_TOKENS = 110  # of the tokenizer of the families
MAX_LENGTH, MAX_QUEUED, NUM_ASKS, MAX_DRAFTS = 64, 5, 600, 8
UNCOMPILABLE = Constraint.json_schema(
    {"type": "integer", "minimum": 2, "maximum": 1}
)  # refused when it is compiled, not when it is submitted
ALL_CONSTRAINTS = (
    *CONSTRAINTS,
    *(replace(constraint, backend="xgrammar") for constraint in CONSTRAINTS[1::2] if constraint),
    *(replace(constraint, backend="llguidance") for constraint in CONSTRAINTS[3:6] if constraint),
    Constraint.regex("[0-9]{1,8}").after("a"),
    Constraint.lark('start: "ab"+ | /[x-z]{2,5}/'),
    Constraint.json_schema({"type": "array", "items": {"type": "boolean"}, "maxItems": 4}, any_whitespace=True),
    UNCOMPILABLE,
)
AHEAD = ("one ahead", "two ahead")  # drafts of prefix_engines with a lookahead
EXACT_DRAFTS = ("perfect", *AHEAD)  # propose the target's choice, if their caches are right
MODELS = ("perfect", *AHEAD, "fair", "random", "adversarial", "illegal", "stopper", "half")
PROPOSERS = ("ngram", "parrot", "noise", "stops", "outside", "function", "forced", "none")
CASES = {case.name: case for case in DRAFT_CASES}  # of small models with keys and values
LORAS = ("all", "some")


@dataclass(frozen=True)
class World:
    """An engine of the simulation."""

    drafter: str
    config: EngineConfig
    family: str = ""  # of the target; empty: the toy
    saves: bool = False  # hidden states
    records: bool = False  # its steps, for a replay
    switches: float = 0.0  # share of rounds with a change to a random draft length; 0: lengths are not random
    threaded: bool = False  # another thread steps the engine, as fast as it can

    def __str__(self) -> str:
        default = vars(EngineConfig())
        changed = {name: value for name, value in vars(self.config).items() if value != default[name]}
        processors = [each.name for each in changed.pop("logits_processors", ())]
        flags = [name for name in ("saves", "records", "switches", "threaded") if getattr(self, name)]
        return f"{self.family or 'toy'}, {self.drafter}, {flags}, processors={processors}, {changed}"

    @property
    def case(self) -> DraftCase:
        """The models of a family. Those of a case whose drafter is not used are its target."""
        return CASES.get(self.drafter) or next(case for case in DRAFT_CASES if case.family == self.family)

    @property
    def alone(self) -> World:
        """An engine for one request at a time, in one thread, with the same drafts."""
        others: dict[str, Any] = {name: getattr(PLAIN, name) for name in WITHOUT_EFFECT}
        return replace(self, config=replace(self.config, eager=True, **others), saves=False, records=False, switches=0.0, threaded=False)

    @property
    def plain(self) -> World:
        """The reference: one row, no drafts, no shared pages, masks of grammar libraries, which are filled on the host."""
        names = (*OPTIONS, "kv_cache_dtype", "max_loras", "logits_processors")
        return World("none", replace(PLAIN, **{name: getattr(self.config, name) for name in names}), self.family)


WITHOUT_EFFECT = (  # settings that change neither tokens nor drafts
    *("max_rows", "rounds_in_flight", "rounds_per_launch", "page_size", "num_pages", "prefill_chunk", "prompt_graphs", "prefix_reuse"),
    *("page_allocation", "prefix_cache_pages", "preemption", "buckets", "grammar_lane", "grammar_arena_bytes", "host_link", "check_masks"),
)
OPTIONS: dict[str, Any] = {"max_top_logprobs": 3, "max_bad_words": 2, "max_bad_word_tokens": 3, "relaxed_acceptance": True}
PLAIN = EngineConfig(
    max_rows=1,
    num_speculative_tokens=0,
    draft_length=0,
    max_length=MAX_LENGTH,
    page_size=16,
    prefill_chunk=64,
    prefix_reuse=False,
    rounds_in_flight=1,
    max_queued=MAX_QUEUED,
    grammar_lane="host",
    compile_isolation="none",
    backend="tape",
)


def draw_world(number: int) -> World:
    """An engine whose settings are drawn. A setting that excludes another one is drawn first."""
    rng = random.Random(f"world {number}")

    def chance(share: float) -> bool:
        return rng.random() < share

    toy = chance(0.85)
    case = rng.choice(DRAFT_CASES)
    drafter = rng.choice((*MODELS, *MODELS, *AHEAD, *EXACT_DRAFTS, *PROPOSERS) if toy else (case.name, case.name, "ngram"))
    models = drafter in MODELS or drafter in CASES
    k = 0 if drafter == "none" else rng.randint(1, min(MAX_DRAFTS, MAX_DRAFTS if toy else case.max_drafts))
    records = toy and chance(0.1)
    function, masks, plain, saves = drafter == "function", chance(0.75) or drafter == "forced", chance(0.25), toy and chance(0.12)
    auto, max_rows, page_size = bool(k) and chance(0.35), rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 2, 3, 4, 4, 8, 13, 16))
    loops = not (auto or function or saves or records or why_not()) and chance(0.2)
    eager, least_pages = not loops and chance(0.3), -(-MAX_LENGTH // page_size)
    link: HostLinkName = rng.choice(("auto", "auto", "python"))
    options = {} if plain else OPTIONS | {"logits_processors": () if records else PROCESSORS[: 3 if toy else 2]}
    config = EngineConfig(
        max_rows=max_rows,
        num_speculative_tokens=k,
        draft_length="auto" if auto else k,
        max_length=MAX_LENGTH,
        page_size=page_size,
        num_pages=rng.choice((None, least_pages, least_pages + 3, least_pages + 6)),
        prefix_reuse=chance(0.85),
        prefix_cache_pages=rng.choice((None, None, None, 0, 3)),
        kv_cache_dtype="auto" if toy or chance(0.7) else "fp8_e4m3",
        rounds_in_flight=1 if function else rng.choice((1, 2, 2, 3, 4)),
        rounds_per_launch="until_event" if loops else 1,
        prefill_chunk=rng.choice((1, 3, 5, 7, 16, 64)),
        prompt_graphs=chance(0.15) and not eager,
        preemption=not (saves or records) and chance(0.6),
        max_loras=0 if toy else rng.choice((0, 2, 3)),
        max_lora_rank=8,
        max_queued=MAX_QUEUED,
        forced_drafts=False if function or not masks else rng.choice((None, None, True, False)),
        look_up=rng.choice((0, 0, 1, 2)) if models else 0,
        draft_masks=masks,
        greedy_only=plain,
        buckets=rng.choice(((max_rows,), (max_rows,), (max_rows,), None)),
        grammar_lane=rng.choice(("auto", "auto", "host")),
        grammar_arena_bytes=rng.choice((1 << 24, 1 << 24, 1 << 14)),
        host_link=link,
        check_masks=link == "python" and chance(0.5),
        round_timeout_seconds=rng.choice((None, None, 60.0)),
        compile_isolation="none",
        eager=eager,
        backend="tape",
        **options,
    )
    switches, threaded = rng.choice((0.0, 0.1, 1.0)) if auto else 0.0, chance(0.2)
    config = replace(config, page_allocation="grow" if not (saves or records) and chance(0.5) else "reserve")
    return World(drafter, config, "" if toy else case.family, saves, records, switches, threaded)


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    constraint: Constraint | None
    sampling: SamplingParams
    max_new_tokens: int
    drafts: int  # at most
    draft_ids: tuple[int, ...]
    salt: str
    priority: int
    tenant: str
    lora: str
    embedded: int  # seed of the embeddings of some prompt tokens; 0: none

    @property
    def depends_on_drafts(self) -> bool:
        return self.drafts > 0 and bool(self.sampling.temperature or self.sampling.relaxed_top_n)

    def fitted(self, world: World) -> Ask:
        """The request without the options that the engines of a world do not have."""
        config, sampling, drafts = world.config, self.sampling, min(self.drafts, world.config.num_speculative_tokens)
        if config.greedy_only:
            sampling = replace(GREEDY, stop=sampling.stop, stop_token_ids=sampling.stop_token_ids, ignore_eos=sampling.ignore_eos)
        known = {each.name for each in config.logits_processors}
        used = {name: values for name, values in sampling.logits_processors.items() if name in known}
        of_prompt = None if self.embedded and world.family else sampling.prompt_logprobs
        found = replace(self, sampling=replace(sampling, logits_processors=used, prompt_logprobs=of_prompt), drafts=drafts)
        varies = world.switches > 0 or (
            config.draft_length == "auto" and sampling.greedy
        )  # seeded requests have equal lengths in all rounds
        drafts = 0 if varies and found.depends_on_drafts else drafts
        found = replace(
            found,
            prompt=tuple(token % FAMILY_TOKENS for token in self.prompt) if world.family else self.prompt,
            drafts=drafts,
            draft_ids=(),
            lora=self.lora if config.max_loras else "",
            embedded=self.embedded if world.family else 0,
        )
        looks_up = drafts > 0 and (config.look_up > 0 or world.drafter in {*PROPOSERS} - {"none", "forced"})
        return replace(found, draft_ids=found.likely_text(world, self.draft_ids)) if looks_up and self.draft_ids else found

    def likely_text(self, world: World, others: tuple[int, ...]) -> tuple[int, ...]:
        """The output with another token at every fifth position, then `others`."""
        tokens = alone(replace(self, drafts=0), world).tokens
        return (*(others[0] if index % 5 == others[0] % 5 else token for index, token in enumerate(tokens)), *others)[:MAX_LENGTH]

    def submit(self, engine: Engine, given: tuple[int, ...] = ()) -> Job:
        size = getattr(engine._parts.models.target, "embedding_size", 0)
        values = torch.randn(2, size, generator=torch.Generator().manual_seed(self.embedded)) if self.embedded else None
        return engine.submit(
            self.prompt,
            constraint=self.constraint,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            num_speculative_tokens=self.drafts,
            draft_ids=self.draft_ids or None,
            cache_salt=self.salt,
            priority=self.priority,
            tenant=self.tenant,
            lora_name=self.lora,
            prompt_embeddings=None if values is None else {len(self.prompt) // 2 - 1: values},
            resume_from=given,
        )


def draw_sampling(rng: random.Random, constrained: bool, new_tokens: int) -> SamplingParams:
    few = rng.sample(range(65, 91), 4)  # with biases, most of the text consists of these letters, so that bad words and stop texts occur
    ids, biases = (
        (range(95), {rng.randrange(95): rng.uniform(-5, 5) for _ in range(3)}) if rng.random() < 0.6 else (few, dict.fromkeys(few, 6.0))
    )
    letters = [VOCABULARY.tokens[token].decode() for token in ids]
    texts = tuple("".join(rng.choices(letters, k=rng.choice((1, 2, 3)))) for _ in range(rng.choice((0, 0, 0, 0, 2))))
    stops = tuple(rng.sample(ids, rng.choice((0, 0, 0, 0, 1))))
    sampling = replace(GREEDY, stop_token_ids=stops, stop=texts, ignore_eos=not constrained and rng.random() < 0.8)
    if ids is few or rng.random() < 0.4:
        sampling = replace(
            sampling,
            repetition_penalty=rng.choice((1.0, 1.3, 0.8)),
            presence_penalty=rng.choice((0.0, 0.7)),
            frequency_penalty=rng.choice((0.0, 0.0, 0.9, -0.5)),
            logit_bias=biases,
            bad_token_ids=tuple(rng.sample(range(95), rng.choice((0, 0, 2)))),
            bad_words=tuple(tuple(rng.choices(ids, k=rng.randint(1, 3))) for _ in range(rng.choice((0, 1, 2)))),
            min_new_tokens=min(new_tokens, rng.choice((0, 0, 4, 9))),
        )
    if rng.random() < 0.3:
        top = rng.choice((0, 0, 3))
        sampling = replace(sampling, logprobs=True, top_logprobs=top, prompt_logprobs=top or None)
    if rng.random() < 0.2:
        named: dict[str, tuple[float, ...]] = {"add_to_one": (rng.randrange(95), 2.5), "ban_repeats": (), "parity": ()}
        sampling = replace(sampling, logits_processors={name: named[name] for name in rng.sample(sorted(named), rng.randint(1, 2))})
    if rng.random() < 0.35:
        filters: dict[str, Any] = {"top_p": rng.choice((1.0, 0.8)), "top_k": rng.choice((0, 20)), "min_p": rng.choice((0.0, 0.05))}
        return replace(sampling, temperature=rng.choice((0.5, 1.0)), seed=rng.getrandbits(40), **filters)
    return replace(sampling, relaxed_top_n=3, relaxed_delta=0.3) if rng.random() < 0.08 else sampling


@functools.cache
def ask(number: int) -> Ask:
    rng = random.Random(f"ask {number}")
    prompt = (*range(1, 1 + rng.choice((0, 0, 0, 8, 8, 11, 16))), *rng.choices(range(len(VOCABULARY.tokens)), k=rng.randint(1, 8)))
    constraint = rng.choice(ALL_CONSTRAINTS) if rng.random() < 0.5 else None
    new_tokens = rng.choice((1, 3, 8, 16, 16, 24, 24, 40))
    return Ask(
        prompt,
        constraint,
        draw_sampling(rng, constraint is not None, new_tokens),
        new_tokens,
        drafts=rng.choice((MAX_DRAFTS, MAX_DRAFTS, MAX_DRAFTS, 0, 1, 3)),
        draft_ids=tuple(rng.choices(range(95), k=rng.choice((0, 0, 6, 20)))),
        salt=rng.choice(("", "", "", "b")),
        priority=rng.choice((0, 1, 1, 2)),
        tenant=rng.choice(("", "c")),
        lora=rng.choice(("", *LORAS)),
        embedded=rng.choice((0, 0, 0, 1)) * number if len(prompt) > 5 else 0,
    )


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


@functools.cache
def temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="simulation-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def add_adapter(engine: Engine, world: World, name: str) -> None:
    folder = temporary() / f"{world.family} {name}"
    if not folder.exists():
        save_adapter(folder, hf_model(world.family), 4, ALL if name == "all" else "k_proj v_proj up_proj", seed=len(name))
    engine.add_lora(name, folder)


def models_of(world: World) -> tuple[TargetModel, Drafter | str | None, Vocabulary]:
    if world.family:
        target, draft, vocabulary, _ = world.case.loaded
        return target, draft if world.drafter in CASES else world.drafter, vocabulary
    poisoned = PoisonedTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0})
    return poisoned, world.drafter if world.drafter in ("forced", "none") else (DRAFTS | DRAFTERS)[world.drafter](), VOCABULARY


def make_engine(world: World, delays: Delays | None = None) -> Engine:
    """delays: of an engine with threads; None: everything runs in the caller's thread."""
    folder = Path(tempfile.mkdtemp(dir=temporary())) if world.saves or world.records else None
    config = replace(world.config, save_hidden_states=folder if world.saves else None)
    backend = TapeBackend(asynchronous=delays is not None, delay=delays)
    target, drafter, vocabulary = models_of(world)
    record = folder / "run.jsonl" if folder and world.records else None
    engine = Engine(target, drafter, vocabulary=vocabulary, config=config, backend=backend, record=record)
    engine.ensure_captured()
    for name in LORAS if config.max_loras else ():
        add_adapter(engine, world, name)
    for constraint in filter(None, ALL_CONSTRAINTS):
        with contextlib.suppress(ValueError):
            engine.compile(constraint)
    return engine


@functools.lru_cache(maxsize=6)
def single_request_engine(world: World) -> Engine:
    return make_engine(world)


class Expected(NamedTuple):
    """The result of a request alone."""

    tokens: tuple[int, ...]
    reason: str
    error: str
    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: str  # NaN equals NaN there
    drafts: tuple[int, int]  # rounds, accepted drafts


def alone(request: Ask, world: World) -> Expected:
    """The result in an engine with the same drafts, if it depends on them, otherwise in one without drafts and with other masks."""
    return alone_with_drafts(request, world) if request.depends_on_drafts else _alone(request.fitted(world.plain), world.plain)


def alone_with_drafts(request: Ask, world: World) -> Expected:
    return _alone(request, world.alone)


@functools.lru_cache(maxsize=5000)
def _alone(request: Ask, world: World) -> Expected:
    engine, constraint = single_request_engine(world), request.constraint
    if constraint and world == world.plain:
        with contextlib.suppress(ValueError):  # of a constraint that only another library has
            engine.compile(replace(constraint, backend="xgrammar"))
            constraint = replace(constraint, backend="xgrammar")
    job = replace(request, constraint=constraint).submit(engine)
    finish(engine)
    reason, drafts = str(job.finish_reason), (job.rounds, job.num_accepted_drafts)
    return Expected(tuple(job.tokens), reason, job.error, job.text, tuple(job.logprobs), repr(job.prompt_logprobs), drafts)
