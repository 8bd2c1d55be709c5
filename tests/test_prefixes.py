"""Requests that begin alike share pages: the same tokens as without, fewer of them computed, and no page changes that others may read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, TapeBackend
from stepgraph.graphs.buffers import storage_key
from stepgraph.graphs.model import DraftModel, ModelInput, ModelOutput
from stepgraph.runtime import Constraint, Engine, EngineConfig, Job
from stepgraph.runtime.models import toy
from stepgraph.runtime.models.toy import ToyDraft
from tests.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, plain

PAGE, K = 4, 3
CONFIG = EngineConfig(
    max_rows=3, num_speculative_tokens=K, max_length=48, page_size=PAGE, num_pages=30, prefill_chunk=7, backend="tape", buckets=(3,)
)
SYSTEM = [(place * 5 + 3) % 90 for place in range(17)]


class AheadDraft(ToyDraft):
    """Keeps a token's entry `lookahead` positions in front of it, as trained heads do; one wrong entry ends all agreement."""

    def __init__(self, lookahead: int) -> None:
        super().__init__(TARGET)
        self.lookahead = lookahead

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return tuple(BufferSpec(f"ahead_{name}", (limits.cache_slots,), torch.int64) for name in ("first", "later"))

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        size, ahead, positions = inputs.page_size, self.lookahead, inputs.positions
        early, entry = positions < ahead, (positions - ahead).clamp(min=0)
        slots = inputs.block_tables.gather(1, entry // size) * size + entry % size
        mine = (inputs.slots >= size) & ~early & (positions >= inputs.shared + ahead)
        buffers.ahead_first.index_put_((torch.where(early, inputs.slots, 0),), inputs.tokens)
        buffers.ahead_later.index_put_((torch.where(mine, slots, 0),), inputs.tokens)
        entries = (inputs.block_tables[:, :, None] * size + torch.arange(size, device=positions.device)).flatten(1)
        places = torch.arange(entries.shape[1], device=positions.device)
        text = torch.where(places < ahead, buffers.ahead_first[entries], buffers.ahead_later[entries].roll(ahead, 1))
        own = toy._fold(toy._mix(text, places).cumsum(1).gather(1, positions))
        told = toy._fold(toy._from_limbs(inputs.features) + toy._mix(inputs.tokens, positions))
        hidden = toy._to_limbs(torch.where(own == told, own, own ^ 1))
        return ModelOutput(hidden, hidden)


DRAFTS: dict[str, Callable[[], DraftModel | None]] = {
    "none": lambda: None,
    "at its token": lambda: ToyDraft(TARGET),
    "one ahead": lambda: AheadDraft(1),
    "two ahead": lambda: AheadDraft(2),
}


def make_engine(draft: str, asynchronous: bool = True, **changes: Any) -> Engine:
    drafts = K if draft != "none" else 0
    config = replace(CONFIG, **{"num_speculative_tokens": drafts, "greedy_only": True} | changes)
    engine = Engine(TARGET, DRAFTS[draft](), vocabulary=VOCABULARY, config=config, backend=TapeBackend(asynchronous=asynchronous))
    engine.capture()
    return engine


class NoSharedWrites(TorchDispatchMode):
    """Fails on any write to a page that a request could find, whatever it writes. For an engine that runs eagerly and at once."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        models = [model for model in engine._models if model is not None]
        self.caches = {storage_key(engine.buffers[spec.name]) for model in models for spec in model.cache_specs(engine.limits)}
        self.prefixes, self.writes = engine._desk.rows._prefixes, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and storage_key(args[0]) in self.caches:
            assert func is torch.ops.aten.index_put_.default, f"{func} of a cache"
            self.writes += 1
            written, known = set((args[1][-1] // PAGE).flatten().tolist()), {page.page for page in self.prefixes._known.values()}
            assert not written & known, f"pages {written & known} are known, and written"
        return func(*args, **kwargs or {})


@functools.cache
def watched_engine(draft: str) -> Engine:
    return make_engine(draft, asynchronous=False, eager=True)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, engine.limits.num_pages)


def ask(engine: Engine, prompt: Sequence[int], count: int = 9, **options: Any) -> Job:
    return engine.submit(list(prompt), max_new_tokens=count, **options)


def rounds_of(job: Job, drafts: int) -> int:
    """Of a perfect draft: the first round has no drafts, all others take them all."""
    return 1 + -(-(len(job.tokens) - 1) // (drafts + 1))


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_second_request_computes_what_the_first_did_not(draft: str) -> None:
    with make_engine(draft) as engine:
        drafts, cached = engine.limits.num_speculative_tokens, []
        for length in (17, 17, 18, 16, 13, 12, 14):
            job = ask(engine, SYSTEM[:length] if length < 18 else [*SYSTEM, 7])
            finish(engine)
            assert job.tokens == plain(job.prompt_ids, 9).tokens
            assert job.rounds == rounds_of(job, drafts), "the draft never erred: its entries are right"
            cached.append(job.num_cached_tokens)
        # Of 17 and more tokens four pages lie in front of the last one; a draft at its token wants one more position behind them,
        # one that looks ahead is not served by a page that was made for other tokens behind.
        wanted = {
            "none": [0, 16, 16, 12, 12, 8, 12],
            "at its token": [0, 12, 16, 12, 8, 8, 12],
            "one ahead": [0, 16, 16, 12, 12, 8, 12],
            "two ahead": [0, 12, 12, 12, 8, 8, 12],
        }
        assert cached == wanted[draft]
        assert engine.stats().reused_tokens == sum(cached)


def test_a_prompt_of_whole_pages_and_a_chunk_of_one_token() -> None:
    """Behind shared pages a draft's first chunk takes two positions at least, whatever the chunk: the first of them is not written."""
    with make_engine("at its token", prefill_chunk=1) as engine:
        for length in (9, 9, 10, 12):
            job = ask(engine, SYSTEM[:length])
            finish(engine)
            assert (job.tokens, job.rounds) == (plain(SYSTEM[:length], 9).tokens, rounds_of(job, K))
        assert job.num_cached_tokens == 8


@dataclass(frozen=True)
class Ask:
    """A prompt that shares its beginning, or goes on where an earlier request has come to."""

    length: int  # of SYSTEM
    tail: tuple[int, ...]
    follows: int | None
    constraint: Constraint | None
    count: int
    salt: str
    cancel_after: int | None
    pause: int


asks = st.builds(
    Ask,
    length=st.integers(0, len(SYSTEM)),
    tail=st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple),
    follows=st.one_of(st.none(), st.integers(0, 5)),
    constraint=st.sampled_from([None, None, None, CONSTRAINTS[1], CONSTRAINTS[3]]),
    count=st.integers(1, 16),
    salt=st.sampled_from(["", "", "", "tenant"]),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 5)),
    pause=st.integers(0, 4),
)


def run_schedule(engine: Engine, batch: list[Ask]) -> None:
    """Submit with pauses, cancel on the way; then hold every text against the oracle, and the books against what they should be."""
    drafts = engine.limits.num_speculative_tokens
    jobs: list[Job] = []
    cancels: dict[Job, int | None] = {}
    for ask_ in batch:
        front = SYSTEM[: ask_.length]
        if ask_.follows is not None and ask_.follows < len(jobs):
            before = jobs[ask_.follows]
            front = [*before.prompt_ids, *before.tokens]
        prompt = [*front, *ask_.tail][: engine.limits.max_length - 16]
        jobs.append(ask(engine, prompt, ask_.count, constraint=ask_.constraint, cache_salt=ask_.salt))
        cancels[jobs[-1]] = ask_.cancel_after
        for _ in range(ask_.pause):
            cancels = {job: left if left is None else left - 1 for job, left in cancels.items()}
            for job, left in cancels.items():
                if left is not None and left < 0:
                    engine.cancel(job)
            engine.step()
    for job, left in cancels.items():
        if left is not None:
            engine.cancel(job)
    finish(engine)
    for job in jobs:
        expected = plain(job.prompt_ids, job.max_new_tokens, job.constraint)
        if job.finish_reason == "cancelled":
            assert job.tokens == expected.tokens[: len(job.tokens)]
            continue
        assert (job.tokens, job.finish_reason, job.error) == (expected.tokens, expected.reason, "")
        if job.constraint is None:
            assert job.rounds == rounds_of(job, drafts), "a wrong entry of the draft would cost a round"


@pytest.mark.parametrize("draft", DRAFTS)
@settings(max_examples=12)
@given(batch=st.lists(asks, min_size=2, max_size=9))
def test_no_page_that_others_may_read_is_ever_written(draft: str, batch: list[Ask]) -> None:
    engine = watched_engine(draft)
    with NoSharedWrites(engine) as watch:
        run_schedule(engine, batch)
    assert watch.writes > 0
