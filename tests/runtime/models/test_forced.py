"""Forced acceptance: benchmarks set the acceptance rate of each draft; the grammar is still enforced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepgraph import Constraint, EngineConfig, FinishReason, SamplingParams
from stepgraph.sampling.params import GREEDY
from tests.helpers.oracles import accepts
from tests.helpers.toy_engines import COMPILER, STOP, Setup, finish, make_engine, shared_engine

PAIRS = Constraint.regex("([a-z][0-9])*")


@pytest.mark.parametrize("drafter", ["adversarial", "perfect"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_of_one_or_zero_is_exact(drafter: str, temperature: float) -> None:
    engine = shared_engine(Setup(k=3, drafter=drafter, max_rows=1, greedy_only=False, forced_acceptance=(1.0, 1.0, 0.0)))
    for seed in range(6):
        sampling = SamplingParams(temperature=temperature, seed=seed, bad_token_ids=(STOP,))
        job = engine.submit([seed, 9], sampling=sampling, max_new_tokens=1 + 3 * 10)
        for event in engine.stream():
            stopped = event.finish_reason == FinishReason.STOP
            assert stopped or (len(event.tokens), event.num_accepted_drafts) in ((1, 0), (3, 2))
        assert job.rounds == 11 or job.finish_reason == FinishReason.STOP


def test_shorter_rounds_take_a_rate_for_each_of_their_drafts() -> None:
    with make_engine(Setup(k=4, max_rows=1, forced_acceptance=(1.0, 0.0)), draft_length=2) as engine:
        job = engine.generate([1, 9], sampling=SamplingParams(temperature=0, ignore_eos=True), max_new_tokens=1 + 2 * 10)
    assert (job.rounds, job.num_accepted_drafts) == (11, 10)


def test_forced_acceptance_is_the_acceptance_rate() -> None:
    many = {"max_rows": 20, "buckets": (20,), "num_pages": 180}
    engine = make_engine(Setup(k=2, drafter="adversarial", forced_acceptance=(0.75, 0.4), greedy_only=False, **many))  # type: ignore[arg-type]
    counts = [0, 0, 0]
    for prompt in range(60):
        engine.submit([prompt, 1], sampling=SamplingParams(temperature=0, bad_token_ids=(STOP,)), max_new_tokens=60)
    for event in engine.stream():
        if event.finish_reason is None and len(event.tokens) == event.num_accepted_drafts + 1:
            counts[event.num_accepted_drafts] += 1
    rounds = sum(counts) - 60  # every first round has no drafts
    counts[0] -= 60
    assert rounds > 600
    for found, share in zip(counts, (0.25, 0.75 * 0.6, 0.75 * 0.4), strict=True):
        assert abs(found / rounds - share) < 5 * (share * (1 - share) / rounds) ** 0.5
    engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, replace(GREEDY, logprobs=True), SamplingParams(seed=1)])
@pytest.mark.parametrize("draft_masks", [True, False])
def test_forced_acceptance_obeys_the_grammar(draft_masks: bool, sampling: SamplingParams) -> None:
    """The token after the accepted drafts is legal, too; no two consecutive positions allow the same tokens."""
    engine = shared_engine(Setup(k=4, drafter="random", draft_masks=draft_masks, greedy_only=False, forced_acceptance=(1.0,) * 4))
    jobs = [engine.submit([token], constraint=PAIRS, sampling=sampling, max_new_tokens=40) for token in range(8)]
    finish(engine)
    for job in jobs:
        assert job.error == "" and accepts(COMPILER.compile(PAIRS), job.tokens, finished=False)
    if draft_masks:
        assert sum(job.num_accepted_drafts for job in jobs) > 0.6 * sum(len(job.tokens) for job in jobs)


@pytest.mark.parametrize("forced", [(0.5,), (0.5, 0.5, 1.5, 0.0), (True,) * 4, [0.5] * 4, 0.5, ("a",) * 4])
def test_bad_forced_acceptance_is_refused(forced: object) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.forced_acceptance: got .*, expected a (tuple of|number for each of 4)"):
        EngineConfig(forced_acceptance=forced)  # type: ignore[arg-type]


def test_capture_report_names_forced_acceptance() -> None:
    engine = make_engine(Setup(k=1, forced_acceptance=(0.5,)))
    assert "acceptance is forced: the texts are not the models'" in engine.notes
    engine.close()
