"""Published pages are never written, and output, drafts and cache entries equal those without sharing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph import Constraint, Engine, Job, SamplingParams
from stepgraph.graphs import TapeBackend
from stepgraph.graphs.graph_key import PLAIN, Drafting
from stepgraph.graphs.model import DraftModel
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import Eagle3Config
from stepgraph.runtime.models.mtp import Mtp
from tests.helpers.prefix_engines import (
    CONFIG,
    DRAFTS,
    PAGE,
    SYSTEM,
    K,
    NoSharedWrites,
    ask,
    finish,
    make_engine,
    rounds_of,
    small_llama,
    watched_engine,
)
from tests.helpers.toy_engines import CONSTRAINTS, plain
from tools.random_weights import randomised

RULED = (CONSTRAINTS[1], CONSTRAINTS[3])


@dataclass(frozen=True)
class Ask:
    """A prompt that shares a prefix of SYSTEM, or continues an earlier request."""

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
    constraint=st.sampled_from([None, None, None, *RULED]),
    count=st.integers(1, 16),
    salt=st.sampled_from(["", "", "", "tenant"]),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 5)),
    pause=st.integers(0, 4),
)


def run_schedule(engine: Engine, batch: list[Ask]) -> list[Job]:
    """Submit with pauses and cancels; then compare every output with the oracle, and check that all pages are free."""
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
            assert job.rounds == rounds_of(job, drafts), "a wrong draft entry would cost a round"
    return jobs


@pytest.mark.parametrize("draft", DRAFTS)
@settings(max_examples=5)
@given(batch=st.lists(asks, min_size=2, max_size=7))
def test_published_pages_are_never_written(draft: str, batch: list[Ask]) -> None:
    engine = watched_engine(draft)
    for constraint in RULED:
        engine.compile(constraint)  # a request that waits for its grammar would be overtaken at a random step
    with NoSharedWrites(engine) as watch:
        jobs = run_schedule(engine, batch)
    assert watch.writes > 0 or all(job.finish_reason == "cancelled" for job in jobs)


def heads(target: Llama) -> dict[str, tuple[Llama, DraftModel]]:
    """EAGLE-3, and MTP with a module for every draft."""
    layer = replace(target.config, windows=(None,))
    eagle = randomised(Eagle3(Eagle3Config(layer, (0, 1, 2), 16, 8), embedding=target.embedding), 4)
    plain_target = randomised(Llama(target.config), 3)
    assert plain_target.head is not None
    mtp = randomised(Mtp(replace(target.config, windows=(None,) * K), embedding=plain_target.embedding, head=plain_target.head), 5)
    return {"eagle3": (target, eagle), "mtp": (plain_target, mtp)}


@pytest.mark.parametrize("head", ["eagle3", "mtp"])
def test_trained_heads_draft_the_same_after_a_reused_prefix(head: str) -> None:
    """All drafts and cache entries are equal, and no published entry was written."""
    target, draft = heads(small_llama())[head]
    drafts: list[list[list[int]]] = []
    entries: list[list[Tensor]] = []
    for reuse in (False, True):
        config = replace(CONFIG, greedy_only=True, eager=True, rounds_in_flight=1, prefix_reuse=reuse)
        with Engine(target, draft, config=config, backend=TapeBackend()) as engine, NoSharedWrites(engine) as watch:
            engine.capture()
            drafts.append([])
            entries.append([])
            for index in range(5):
                spans = {8: torch.full((1, 16), float(index))} if index > 2 else None  # after two pages
                job = ask(engine, [token % 7 for token in SYSTEM[: 9 + index % 5]] + [index % 2], 8 + index, prompt_embeddings=spans)
                while engine.has_work:
                    before = job.rounds
                    engine.step()
                    if job.rounds > before:
                        drafts[-1].append(engine.buffers.row_drafts[0].tolist())
                    if index == 2 and job.rounds == 4:
                        engine.cancel(job)
                kept = torch.arange(len(job.prompt_ids) + len(job.tokens) - 1 - K)
                slots = engine.buffers.row_block_tables[0, kept // PAGE] * PAGE + kept % PAGE
                entries[-1].append(engine.buffers.draft_keys[:, slots].clone())
            assert watch.writes > 0 and (engine.stats().reused_tokens >= 16) == reuse
    assert drafts[0] == drafts[1] and len({tuple(chain) for chain in drafts[0]}) > 3
    assert all(torch.equal(*pair) for pair in zip(*entries, strict=True)) and len(entries[0]) == 5


@pytest.mark.parametrize("draft", ["at its token", "one ahead", "two ahead"])
def test_pages_with_tokens_that_the_draft_model_skipped_are_not_shared(draft: str) -> None:
    """Every other request has no drafts. Sampled tokens of the others depend on their drafts, which one wrong entry changes."""
    found: list[list[list[int]]] = []
    for reuse in (False, True):
        with make_engine(draft, asynchronous=False, eager=True, greedy_only=False, draft_length="auto", prefix_reuse=reuse) as engine:
            prompt, lengths = SYSTEM[:9], engine._parts.draft_lengths
            assert lengths is not None
            found.append([])
            for index in range(4):
                lengths.fixed_drafting = Drafting(K) if index % 2 else PLAIN
                job = engine.generate(prompt, max_new_tokens=8, sampling=SamplingParams(seed=index, ignore_eos=True))
                found[-1].append(job.tokens)
                assert (job.num_cached_tokens > 0) == (reuse and index > 0)
                prompt = [*prompt, *job.tokens, index]
    assert found[0] == found[1]
