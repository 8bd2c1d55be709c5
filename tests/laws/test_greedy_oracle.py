"""Speculation changes speed, never output: for every drafter, grammar and batch composition, tokens equal plain greedy decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph import Constraint, Engine, Job, SamplingParams
from tests.helpers.c_library import needs_c
from tests.helpers.oracles import Answer, accepts
from tests.helpers.toy_engines import CONSTRAINTS, VOCABULARY, Setup, compiled, finish, plain, shared_engine

SETUPS = [
    Setup(k=0),
    Setup(k=1),
    Setup(k=1, draft_masks=False, drafter="perfect"),
    Setup(k=2, drafter="perfect"),
    Setup(k=2, draft_masks=False, drafter="random"),
    Setup(k=3, drafter="stopper"),
    Setup(k=3, draft_masks=False, drafter="stopper", rounds_in_flight=3),
    Setup(k=4, drafter="fair", rounds_in_flight=1, buckets=(1, 2, 4)),
    Setup(k=4, draft_masks=False, drafter="illegal"),
    Setup(k=5, drafter="adversarial"),
    Setup(k=6, drafter="random", max_rows=3),
    Setup(k=7, draft_masks=False, drafter="fair", asynchronous=False),
    Setup(k=8, drafter="perfect", rounds_in_flight=4),
    Setup(k=3, drafter="half"),
    Setup(k=4, draft_masks=False, drafter="half"),
    Setup(k=2, drafter="ngram", buckets=(4,)),
    Setup(k=4, drafter="parrot", buckets=(4,)),
    Setup(k=5, drafter="adversarial", look_up=2, buckets=(4,)),
    Setup(k=2, drafter="fair", buckets=(4,), eager=True),
]
ON_HOST = [
    replace(setup, grammar_lane="host")
    for setup in (
        Setup(k=0),
        Setup(k=1, drafter="illegal"),
        Setup(k=4, drafter="fair", rounds_in_flight=3, buckets=(1, 2, 4)),
        Setup(k=3, drafter="stopper", draft_masks=False),
        Setup(k=8, drafter="perfect", buckets=(4,)),
        Setup(k=3, drafter="half", eager=True),
    )
]
SWITCHING = [
    Setup(k=5, drafter="fair", buckets=(4,), switching=True),
    Setup(k=7, drafter="perfect", buckets=(4,), switching=True, rounds_in_flight=3),
    Setup(k=4, drafter="fair", buckets=(4,), switching=True, draft_masks=False, look_up=1),
    Setup(k=3, drafter="ngram", buckets=(4,), switching=True, forced_drafts=True),
    Setup(k=5, drafter="half", buckets=(4,), switching=True, look_up=2),
    Setup(k=5, drafter="fair", buckets=(4,), switching=True, grammar_lane="host", look_up=1),
    Setup(k=4, drafter="function", buckets=(4,), switching=True, rounds_in_flight=1),
    Setup(k=4, drafter="function", buckets=(4,), switching=True, rounds_in_flight=1, grammar_lane="host"),
]
LOOPS = [
    replace(setup, loops=True, grammar_backend="automaton", grammar_lane="device", buckets=(4,))
    for setup in (
        Setup(k=0, rounds_in_flight=1),
        Setup(k=4, drafter="fair"),
        Setup(k=3, drafter="perfect", asynchronous=False),
        Setup(k=3, drafter="ngram", rounds_in_flight=3),
    )
]
ANYWHERE = [*SETUPS, *ON_HOST, *SWITCHING]


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    constraint: Constraint | None
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    drafts: int | None
    cancel_after: int | None  # steps after submission
    draft_ids: tuple[int, ...] | None = None


def answer(ask: Ask) -> Answer:
    return plain(ask.prompt, ask.max_new_tokens, ask.constraint, ask.stop_ids)


def submit(engine: Engine, ask: Ask) -> Job:
    drafts = None if ask.drafts is None else min(ask.drafts, engine.limits.num_speculative_tokens)
    return engine.submit(
        list(ask.prompt),
        constraint=ask.constraint,
        sampling=SamplingParams(temperature=0, stop_token_ids=ask.stop_ids),
        max_new_tokens=ask.max_new_tokens,
        num_speculative_tokens=drafts,
        draft_ids=ask.draft_ids if drafts != 0 else None,
    )


def check(ask: Ask, job: Job) -> None:
    expected = answer(ask)
    if job.finish_reason == "cancelled":
        assert job.tokens == expected.tokens[: len(job.tokens)]
    else:
        assert (job.tokens, job.finish_reason, job.error) == (expected.tokens, expected.reason, "")
    grammar = compiled(ask.constraint)
    if grammar:
        assert accepts(grammar, job.tokens, finished=job.finish_reason == "constraint_complete")


words = st.text("abx,0-", min_size=1, max_size=6)
constraints = st.one_of(
    st.sampled_from(CONSTRAINTS),
    st.sampled_from(CONSTRAINTS[1:]).map(lambda constraint: replace(constraint, backend="xgrammar")),
    st.lists(words, min_size=1, max_size=4, unique=True).map(Constraint.choice),
    st.builds(lambda low, extra: Constraint.regex(f"[ab]{{{low},{low + extra}}}(,[0-9]+)?"), st.integers(0, 4), st.integers(0, 4)),
)
asks = st.builds(
    Ask,
    prompt=st.lists(st.integers(0, len(VOCABULARY.tokens) - 1), min_size=1, max_size=13).map(tuple),
    constraint=constraints,
    max_new_tokens=st.one_of(st.integers(1, 4), st.integers(5, 40)),
    stop_ids=st.lists(st.integers(0, 95), max_size=2).map(tuple),
    drafts=st.one_of(st.none(), st.integers(0, 8)),
    cancel_after=st.one_of(st.none(), st.none(), st.integers(0, 8)),
)


@pytest.mark.parametrize("draft_masks", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6, 7, 8])
def test_a_stop_token_at_every_draft_position(k: int, draft_masks: bool) -> None:
    """A perfect drafter gives 1 token in the first round, then K + 1 per round: n tokens stop at position (n - 2) mod (K + 1)."""
    engine = shared_engine(Setup(k=k, draft_masks=draft_masks, drafter="perfect", max_rows=1))
    positions: set[int] = set()
    for seed in range(200):
        ask = Ask((seed % 90, seed), None, 40, (), None, None)
        expected = answer(ask)
        position = (len(expected.tokens) - 2) % (k + 1)
        if expected.reason == "stop" and len(expected.tokens) > 1 and position not in positions:
            job = submit(engine, ask)
            finish(engine)
            check(ask, job)
            assert job.rounds == 1 + -(-(len(job.tokens) - 1) // (k + 1)), "the drafter is perfect"
            positions.add(position)
        if len(positions) == k + 1:
            return
    raise AssertionError(f"stops occurred only at positions {sorted(positions)} of {k + 1}")


def run_schedule(setup: Setup, batch: list[tuple[Ask, int]]) -> list[Job]:
    """Submit each request, then step `pause` times; cancel as requested; step until idle; compare every job with the oracle."""
    engine = shared_engine(setup)
    jobs: list[tuple[Ask, Job, int]] = []
    events: dict[int, list[int]] = {}
    step = 0

    def advance() -> None:
        nonlocal step
        for ask, job, submitted_at in jobs:
            if ask.cancel_after == step - submitted_at:
                engine.cancel(job)
        step += 1
        for event in engine.step():
            events.setdefault(event.job_id, []).extend(event.tokens)

    for ask, pause in batch:
        jobs.append((ask, submit(engine, ask), step))
        for _ in range(pause):
            advance()
    while engine.has_work:
        advance()
    for ask, job, _ in jobs:
        check(ask, job)
        assert events.get(job.id, []) == job.tokens
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, engine.limits.num_pages)
    return [job for _, job, _ in jobs]


batches = st.lists(st.tuples(asks, st.integers(0, 3)), min_size=1, max_size=6)


EVERY_SECOND = [*ANYWHERE[::2], *(pytest.param(each, marks=needs_c) for each in LOOPS[::2])]
OTHERS = [*ANYWHERE[1::2], *(pytest.param(each, marks=needs_c) for each in LOOPS[1::2])]


@pytest.mark.parametrize("setup", EVERY_SECOND, ids=str)
@settings(max_examples=6)
@given(batch=batches)
def test_every_job_equals_plain_greedy(setup: Setup, batch: list[tuple[Ask, int]]) -> None:
    run_schedule(setup, batch)


@pytest.mark.slow
@pytest.mark.parametrize("setup", OTHERS, ids=str)
@settings(max_examples=6)
@given(batch=batches)
def test_every_job_equals_plain_greedy_in_other_setups(setup: Setup, batch: list[tuple[Ask, int]]) -> None:
    run_schedule(setup, batch)


@pytest.mark.soak
@pytest.mark.parametrize("setup", [*EVERY_SECOND, *OTHERS], ids=str)
@settings(max_examples=1000, derandomize=False)
@given(batch=batches)
def test_every_job_equals_plain_greedy_long(setup: Setup, batch: list[tuple[Ask, int]]) -> None:
    run_schedule(setup, batch)
