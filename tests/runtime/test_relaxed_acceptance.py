"""Relaxed acceptance: only for requests that ask for it, only drafts near the target's choice, and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph import EngineConfig, Job, SamplingParams
from stepgraph.sampling.params import GREEDY
from tests.helpers.oracles import accepts, prefix_logits, processed
from tests.helpers.toy_engines import CONSTRAINTS, STOP, TARGET, VOCABULARY, Setup, compiled, finish, make_engine, plain

WIDTH = len(VOCABULARY.tokens)
BASE = Setup(k=4, drafter="fair", greedy_only=False, buckets=(4,))
PROMPTS = [[seed, 9] for seed in range(12)]


def departures(job: Job, top_n: int, delta: float) -> int:
    """How many tokens are not the most probable legal one; each is an accepted draft within top_n and delta. All in float64."""
    grammar = compiled(job.constraint)
    matcher, masks = grammar.matcher() if grammar else None, torch.zeros(1, VOCABULARY.mask_words, dtype=torch.int32)
    count = 0
    for index, token in enumerate(job.tokens):
        logits = prefix_logits(TARGET, [*job.prompt_ids, *job.tokens[:index]])[:WIDTH]
        left = processed(logits, job.sampling, job.prompt_ids, job.tokens[:index], job.stop_ids)
        if matcher:
            matcher.fill_next_token_bitmask(masks, 0)
            words = masks[0].tolist()
            left = [value if words[i // 32] >> (i % 32) & 1 else -torch.inf for i, value in enumerate(left)]
            assert matcher.accept_token(token)
        shares = torch.tensor(left, dtype=torch.float64).softmax(0)
        if left[token] == max(left):
            continue
        count += 1
        assert job.origins[index] != "target"
        assert int((shares > shares[token]).sum()) < top_n
        assert float(shares.max() - shares[token]) <= delta + 1e-6
    return count


@pytest.mark.parametrize("setup", [BASE, replace(BASE, drafter="random"), replace(BASE, drafter="half", draft_masks=False)], ids=str)
def test_drafts_near_the_most_probable_token_are_accepted_and_counted(setup: Setup) -> None:
    top_n, delta = 8, 0.3
    relaxed = SamplingParams(temperature=0, relaxed_top_n=top_n, relaxed_delta=delta)
    with make_engine(setup, relaxed_acceptance=True) as engine:
        jobs = [
            engine.submit(prompt, constraint=constraint, sampling=relaxed, max_new_tokens=24)
            for prompt in PROMPTS
            for constraint in (None, CONSTRAINTS[1])
        ]
        exact = [engine.submit(prompt, sampling=SamplingParams(temperature=0, logprobs=True), max_new_tokens=24) for prompt in PROMPTS]
        finish(engine)
        counts = [departures(job, top_n, delta) for job in jobs]
        assert sum(counts) > 3 and engine.stats().drafts.accepted_relaxed == sum(counts)
        assert f"stepgraph_relaxed_drafts_total {sum(counts)}.0\n" in engine.metrics()
        assert all(accepts(found, job.tokens, finished=False) for job in jobs if (found := compiled(job.constraint)))
        assert [job.tokens for job in exact] == [plain(prompt, 24).tokens for prompt in PROMPTS], "in the same rounds"
        assert "relaxed acceptance: requests may accept drafts that are not the target's choice" in engine.notes


def test_wide_limits_accept_more_drafts_and_minimal_limits_change_no_token() -> None:
    with make_engine(BASE, relaxed_acceptance=True) as engine:
        accepted = dict[tuple[int, float], int]()
        for top_n, delta in ((0, 0.0), (1, 1.0), (8, 0.0), (50, 1.0)):
            sampling = SamplingParams(temperature=0, relaxed_top_n=top_n, relaxed_delta=delta)
            jobs = [engine.submit(prompt, sampling=sampling, max_new_tokens=24) for prompt in PROMPTS]
            finish(engine)
            accepted[top_n, delta] = sum(job.num_accepted_drafts for job in jobs)
            if top_n < 50:
                assert [job.tokens for job in jobs] == [plain(prompt, 24).tokens for prompt in PROMPTS], (top_n, delta)
        assert accepted[50, 1.0] > accepted[0, 0.0]


def test_bans_and_minimum_lengths_hold() -> None:
    banned = tuple(range(0, 96, 2))
    sampling = SamplingParams(temperature=0, relaxed_top_n=96, relaxed_delta=1.0, bad_token_ids=banned, min_new_tokens=12)
    with make_engine(replace(BASE, drafter="stopper"), relaxed_acceptance=True) as engine:
        jobs = [engine.submit(prompt, sampling=sampling, max_new_tokens=24) for prompt in PROMPTS]
        finish(engine)
    for job in jobs:
        assert not {*job.tokens} & {*banned} and STOP not in job.tokens[:12]


def test_relaxed_requests_are_refused_without_the_engine_option() -> None:
    with make_engine(BASE) as engine:
        assert "row_relaxed" not in engine.buffers and not engine.config.relaxed_acceptance
        with pytest.raises(ValueError, match=r"sampling.relaxed_top_n: got 3, expected 0, or EngineConfig\(relaxed_acceptance=True\)"):
            engine.submit([1], sampling=SamplingParams(relaxed_top_n=3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"relaxed_top_n": -1}, r"SamplingParams.relaxed_top_n: got -1, expected a whole number from 0"),
        ({"relaxed_top_n": 3, "relaxed_delta": 1.5}, r"SamplingParams.relaxed_delta: got 1.5, expected a number from 0 to 1"),
        ({"relaxed_delta": 0.5}, r"SamplingParams.relaxed_delta: got 0.5 with relaxed_top_n=0, expected 0, or relaxed_top_n >= 1"),
        (
            {"relaxed_top_n": 3, "temperature": 0.7},
            r"SamplingParams.relaxed_top_n: got 3 with temperature=0.7, expected 0, or temperature=0",
        ),
    ],
)
def test_wrong_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


def test_relaxed_acceptance_is_refused_with_greedy_only_and_resume_from() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig.relaxed_acceptance: got True with greedy_only=True"):
        EngineConfig(relaxed_acceptance=True, greedy_only=True)
    expected = r"sampling.relaxed_top_n: got 3 with resume_from, expected 0"
    with make_engine(BASE, relaxed_acceptance=True) as engine, pytest.raises(ValueError, match=expected):
        engine.submit([1], sampling=replace(GREEDY, relaxed_top_n=3), resume_from=[4], max_new_tokens=9)


def test_a_request_without_drafts_is_resumed_under_relaxed_acceptance() -> None:
    options: dict[str, Any] = {"sampling": replace(GREEDY, relaxed_top_n=3, ignore_eos=True), "num_speculative_tokens": 0}
    with make_engine(BASE, relaxed_acceptance=True) as engine:
        whole = engine.generate([1], max_new_tokens=20, **options)
        assert engine.generate([1], max_new_tokens=20, resume_from=whole.tokens[:4], **options).tokens == whole.tokens[4:]
