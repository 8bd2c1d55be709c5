"""Pages that are allocated while requests decode: equal outputs, requests suspended for want of pages, progress, uploads by count."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, Job, SamplingParams
from stepgraph.sampling import native
from tests.helpers.simulation import check_pages
from tests.helpers.stat_checks import check_invariants
from tests.helpers.toy_engines import Setup, finish, make_engine, plain, shared_engine

PLAIN = Setup(k=0, greedy_only=False, buckets=(4,), num_pages=12)  # pages of eight tokens, rows of up to twelve pages
DRAFTED = replace(PLAIN, k=3)
SETUPS = {
    "plain": PLAIN,
    "drafted": replace(DRAFTED, num_pages=14),
    "three rounds in flight": replace(DRAFTED, drafter="half", draft_masks=False, rounds_in_flight=3),
    "one round in flight": replace(DRAFTED, drafter="perfect", rounds_in_flight=1),
    "look-up": replace(DRAFTED, drafter="ngram"),
    "host": replace(DRAFTED, grammar_lane="host"),
    "Python link": replace(DRAFTED, grammar_lane="host", host_link="python"),
    "loops": replace(PLAIN, loops=True),
    "loops with drafts": replace(DRAFTED, loops=True, drafter="perfect"),
    "loops, one in flight": replace(DRAFTED, loops=True, rounds_in_flight=1),
    "eager": replace(DRAFTED, eager=True),
}
NEEDS_C = ("loops", "loops with drafts", "loops, one in flight")
SLOW = ("three rounds in flight", "one round in flight", "look-up", "Python link", "loops", "loops, one in flight", "eager")
PREEMPTING = ("drafted", "three rounds in flight", "host", "loops", "eager")
LASTING = SamplingParams(ignore_eos=True)
LONG = Constraint.regex("([a-f]{3}-){12}")
ASKS: list[dict[str, Any]] = [
    {"sampling": LASTING},
    {"constraint": LONG},
    {"sampling": SamplingParams(temperature=0, ignore_eos=True, repetition_penalty=1.4, frequency_penalty=0.9, logprobs=True)},
    {"sampling": SamplingParams(temperature=1.3, top_p=0.95, seed=11, ignore_eos=True), "num_speculative_tokens": 0},
    {"sampling": SamplingParams(stop="zz", ignore_eos=True)},
]
SHARED = [*range(1, 18)]  # more than two pages


def growing(setup: Setup, **config: Any) -> Engine:
    return make_engine(setup, page_allocation="grow", **config)


def step(engine: Engine) -> None:
    engine.step()
    check_pages(engine)
    check_invariants(engine.stats())


def run_schedule(engine: Engine, seed: int) -> list[tuple[Job, dict[str, Any]]]:
    """Twelve requests that arrive while others decode; some share a prefix, and some are cancelled."""
    draw, jobs = Random(seed), list[tuple[Job, dict[str, Any]]]()
    while len(jobs) < 12 or engine.has_work:
        if len(jobs) < 12 and draw.random() < 0.5:
            prompt = [*(SHARED if draw.random() < 0.4 else ()), 20 + draw.randrange(3), 7]
            ask = {**draw.choice(ASKS), "prompt": prompt, "max_new_tokens": draw.choice((6, 30, 50, 70))}
            jobs.append((engine.submit(**ask, priority=draw.randrange(2)), ask))
        if jobs and draw.random() < 0.02:
            engine.cancel(draw.choice(jobs)[0])
        step(engine)
    return jobs


def parameters(names: Any) -> list[Any]:
    unbuilt = pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
    marks = {name: [*[unbuilt] * (name in NEEDS_C), *[pytest.mark.slow] * (name in SLOW)] for name in names}
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


@pytest.mark.parametrize("name", parameters(SETUPS))
def test_outputs_equal_those_of_single_requests(name: str) -> None:
    with growing(SETUPS[name], preemption=name in PREEMPTING) as engine:
        for seed in range(2):
            for job, ask in run_schedule(engine, seed):
                expected = shared_engine(replace(PLAIN, max_rows=1, buckets=(1,))).generate(**ask)
                if job.finish_reason == FinishReason.CANCELLED:
                    assert job.tokens == expected.tokens[: len(job.tokens)]
                else:
                    assert (job.tokens, job.finish_reason, job.error) == (expected.tokens, expected.finish_reason, "")
                    assert job.text == expected.text
                assert [each.masked for each in job.logprobs] == [each.masked for each in expected.logprobs[: len(job.tokens)]]
        stats = engine.stats()
        assert stats.added_pages > 20 and stats.preemptions > 3 and stats.most_used_pages == stats.pages
        assert stats.free_pages == stats.pages and stats.running == stats.waiting == 0


def test_more_requests_run_at_once_than_with_reserved_pages() -> None:
    setup = replace(PLAIN, max_rows=8, buckets=(8,), num_pages=24)
    with make_engine(setup) as reserving, growing(setup) as engine:
        for each, expected in ((reserving, 2), (engine, 8)):
            running = list[int]()
            for index in range(8):
                each.submit([5, index], max_new_tokens=80, sampling=LASTING)
            while each.has_work:
                step(each)
                running.append(each.stats().running)
            assert max(running) == expected
        assert engine.stats().rounds < reserving.stats().rounds
        assert (reserving.stats().added_pages, reserving.stats().preemptions) == (0, 0)


@pytest.mark.parametrize("preemption", [False, True])
def test_the_first_request_in_order_keeps_its_row_and_all_end(preemption: bool) -> None:
    with growing(replace(PLAIN, prefill_chunk=96), preemption=preemption) as engine:
        jobs = [engine.submit([5, index], max_new_tokens=90, sampling=LASTING) for index in range(4)]  # twelve pages each, of twelve
        for first in jobs:
            before = first.num_preemptions
            while not first.finished:
                known = len(first.tokens)
                for _ in range(3):
                    step(engine)
                assert first.finished or len(first.tokens) > known, "it proceeds in all steps"
            assert first.num_preemptions == before and len(first.tokens) == 90
        assert 3 <= sum(job.num_preemptions for job in jobs) == engine.stats().preemptions < 20


def test_a_request_of_higher_priority_keeps_its_pages() -> None:
    with growing(PLAIN) as engine:
        jobs = [engine.submit([5, index], max_new_tokens=80, sampling=LASTING, priority=priority) for index, priority in enumerate((1, 0))]
        finish(engine)
        assert (jobs[0].num_preemptions > 0, jobs[1].num_preemptions) == (True, 0)


@pytest.mark.parametrize(
    "setup", [DRAFTED, pytest.param(replace(PLAIN, loops=True), marks=pytest.mark.skipif(bool(native.why_not()), reason="needs C"))]
)
def test_pages_of_suspended_requests_are_for_the_one_that_waits(setup: Setup) -> None:
    """Requests that grow in the same step do not take them."""
    with growing(replace(setup, num_pages=96), preemption=True, page_size=1) as engine:
        others = [engine.submit([5, index], max_new_tokens=80, sampling=LASTING, priority=1) for index in range(3)]
        for index in range(15):
            for _ in range(2 + index % 4):
                step(engine)
            others = [job if not job.finished else engine.submit([5, index], max_new_tokens=80, priority=1) for job in others]
            urgent = engine.submit([7] * 20 + [index], max_new_tokens=2, sampling=LASTING)
            step(engine)
            assert urgent in [request.job for request in engine._scheduler.active], f"request {index} got no row in its first step"
            while not urgent.finished:
                step(engine)
        assert engine.stats().preemptions >= 5


def test_pages_of_unused_prefixes_are_taken_before_those_of_requests() -> None:
    with growing(replace(PLAIN, num_pages=24)) as engine:
        for index in range(3):
            engine.generate([5, index], max_new_tokens=60, sampling=LASTING)
        assert engine.stats().cached_pages > 18 and not engine.stats().evicted_pages
        engine.generate([6], max_new_tokens=90, sampling=LASTING)
        assert engine.stats().evicted_pages and not engine.stats().preemptions


def test_pages_added_to_a_request_are_shared_after_its_end() -> None:
    with growing(PLAIN) as engine:
        first = engine.generate([5, 6], max_new_tokens=60, sampling=LASTING)
        again = engine.generate([5, 6, *first.tokens[:50]], max_new_tokens=10, sampling=LASTING)
        assert (again.tokens, again.num_cached_tokens) == (first.tokens[50:], 48)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"sampling": SamplingParams(temperature=1.0, ignore_eos=True)}, 1),
        ({"sampling": SamplingParams(temperature=1.0, ignore_eos=True, seed=3)}, 3),
        ({"sampling": SamplingParams(temperature=1.0, ignore_eos=True), "num_speculative_tokens": 0}, 3),
    ],
)
def test_requests_whose_draws_depend_on_drafts_reserve_their_pages(options: dict[str, Any], expected: int) -> None:
    with growing(DRAFTED) as engine:
        jobs = [engine.submit([5, index], max_new_tokens=80, **options) for index in range(3)]
        while not jobs[0].tokens:
            step(engine)
        assert engine.stats().running == expected
        finish(engine)
        assert [len(job.tokens) for job in jobs] == [80] * 3 and (expected > 1) == (engine.stats().preemptions > 0)


@pytest.mark.parametrize("allocation", ["reserve", "grow"])
def test_only_a_step_that_adds_pages_uploads_them(allocation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(replace(PLAIN, num_pages=48), page_allocation=allocation) as engine:
        for index in range(4):
            engine.submit([5, index], max_new_tokens=90, sampling=LASTING)
        while not engine._scheduler.active or any(not request.decoding for request in engine._scheduler.active):
            engine.step()
        runs, run, grew = list[object](), engine.backend.run, 0
        monkeypatch.setattr(engine.backend, "run", lambda step: run(runs.append(step) or step))  # type: ignore[func-returns-value]
        while engine.has_work:
            before = engine.stats().added_pages
            engine.step()
            grew += engine.stats().added_pages > before
        assert len(runs) == grew and (10 < grew < 40 if allocation == "grow" else grew == 0)
        assert not engine.stats().preemptions, "the pages suffice for all"


def test_rounds_after_added_pages_are_timed() -> None:
    """The number of drafts is chosen by the times of rounds before which nothing else was launched."""
    with growing(replace(PLAIN, num_pages=48)) as engine:
        job, grew = engine.submit([5, 6], max_new_tokens=90, sampling=LASTING), 0
        while not job.tokens:
            engine.step()
        while not job.finished:
            before = engine.stats().added_pages
            engine.step()
            if engine.stats().added_pages > before:
                grew += 1
                assert engine._in_flight.pending[-1].launched_at < math.inf
    assert grew > 5


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
def test_a_loop_ends_when_its_rows_need_pages_and_few_are_launched() -> None:
    with growing(replace(PLAIN, loops=True, num_pages=48)) as engine:
        before = engine.backend.stats.replays
        job = engine.generate([5, 6], max_new_tokens=90, sampling=LASTING)
        assert job.tokens == plain([5, 6], 90, sampling=LASTING).tokens
        assert 3 <= engine.backend.stats.replays - before <= 6


def test_the_policy_is_checked_and_noted() -> None:
    with pytest.raises(ValueError, match=r"^EngineConfig.page_allocation: got 'lazy', expected one of 'reserve', 'grow'"):
        EngineConfig(page_allocation="lazy")  # type: ignore[arg-type]
    with growing(PLAIN) as engine, make_engine(PLAIN) as other:
        assert [("pages: added while requests decode" in each.notes) for each in (engine, other)] == [True, False]
