"""Sampled requests in an engine: the distribution of outputs, and reproducibility by seed."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stepgraph import Constraint, Engine, SamplingParams
from stepgraph.sampling.kernels import processors
from stepgraph.sampling.kernels.processors import RowSettings
from stepgraph.sampling.native import why_not
from tests.helpers.c_library import needs_c, run_references
from tests.helpers.chi_square import chi_square_p
from tests.helpers.law import forget_certain_drafts
from tests.helpers.oracles import filtered, prefix_logits, processed
from tests.helpers.pairs import pairs
from tests.helpers.toy_engines import COMPILER, CONSTRAINTS, STOP, TARGET, VOCABULARY, Setup, finish, make_engine, plain, shared_engine

PROMPT = [5, 6]
GRAMMAR = Constraint.regex("[a-c]{1,2}[xy]")
REPEATS = Constraint.regex("[a-c]{2,4}")
SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.3, seed=2),
    SamplingParams(temperature=2.5, seed=3),
    SamplingParams(temperature=1.0, top_k=5, seed=4),
    SamplingParams(temperature=1.0, top_p=0.6, seed=5),
    SamplingParams(temperature=1.0, min_p=0.2, seed=6),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.8, min_p=0.01, seed=7),
    SamplingParams(temperature=1e-3, seed=8),
    SamplingParams(temperature=0.9, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.4, bad_token_ids=(30, 31)),
    SamplingParams(temperature=1.2, frequency_penalty=1.5, presence_penalty=-0.5, logprobs=True, seed=11),
    SamplingParams(temperature=0.0, min_new_tokens=20, frequency_penalty=0.7, logprobs=True, ignore_eos=True),
    SamplingParams(temperature=0.8, logit_bias={40: 6.0, 41: -100.0}, top_k=30, min_new_tokens=5, seed=13),
]
PENALTIES = SamplingParams(
    temperature=1.2,
    top_p=0.98,
    repetition_penalty=1.2,
    frequency_penalty=2.0,
    presence_penalty=1.0,
    logit_bias={66: 1.5},
    bad_token_ids=(67,),
    min_new_tokens=3,
)


@functools.cache
def law(sampling: SamplingParams, grammar: Constraint = GRAMMAR) -> dict[tuple[int, ...], float]:
    """Probability of every text of a grammar after PROMPT, by enumeration in float64."""
    texts: dict[tuple[int, ...], float] = {}

    def walk(tokens: tuple[int, ...], probability: float) -> None:
        matcher = COMPILER.compile(grammar).matcher()
        assert all(matcher.accept_token(token) for token in tokens)
        masks = torch.zeros(1, VOCABULARY.mask_words, dtype=torch.int32)
        if matcher.fill_next_token_bitmask(masks, 0).name != "OK":
            texts[tokens] = probability
            return
        logits = prefix_logits(TARGET, [*PROMPT, *tokens])[: len(VOCABULARY.tokens)]
        logits = processed(logits, sampling, PROMPT, tokens, [STOP])
        words = masks[0].tolist()
        legal = [words[token // 32] >> (token % 32) & 1 for token in range(len(logits))]
        masked = [value if ok else -math.inf for value, ok in zip(logits, legal, strict=True)]
        for token, share in enumerate(filtered(masked, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)):
            if share:
                walk((*tokens, token), probability * share)

    walk((), 1.0)
    return texts


def law_p(engine: Engine, sampling: SamplingParams, grammar: Constraint, seeds: int = 500, host_every: int = 0) -> float:
    """P-value of the outputs of `seeds` seeds under the exact distribution. One of `host_every` requests has its grammar on the host.

    Half of the seeds are negative, so that drafts are judged by rejection."""
    on_host = replace(grammar, backend="xgrammar")
    texts = law(sampling, grammar)
    assert len(texts) > 6 and math.isclose(sum(texts.values()), 1.0)
    jobs = []
    for seed in range(seeds):
        constraint = on_host if host_every and seed % host_every == 0 else grammar
        random = replace(sampling, seed=seed if seed % 2 else -1 - seed)
        jobs.append(engine.submit(PROMPT, constraint=constraint, sampling=random, max_new_tokens=8))
        while engine.stats().waiting >= 1000:  # max_queued
            engine.step()
    finish(engine)
    counts = Counter(tuple(job.tokens) for job in jobs)
    if not set(counts) <= set(texts):
        return 0.0
    observed = torch.tensor([counts[text] for text in texts])
    return chi_square_p(observed, torch.tensor(list(texts.values()), dtype=torch.float64))


def crowd(k: int, drafter: str = "fair", draft_masks: bool = True) -> Setup:
    """One batch size, with pages for that many requests."""
    return Setup(k, draft_masks, drafter, max_rows=32, buckets=(32,), num_pages=64, greedy_only=False)


CROWDS = [crowd(0), crowd(3), replace(crowd(3), grammar_lane="host"), crowd(3, "adversarial", False), crowd(3, "half")]
CROWDS += [crowd(1, "perfect"), crowd(2, "random", False), replace(crowd(2, "ngram"), grammar_lane="host")]
LAWS = {
    "free": (SamplingParams(temperature=1.5), GRAMMAR),
    "filtered": (SamplingParams(temperature=2.0, top_k=3, top_p=0.9, min_p=0.05), GRAMMAR),
    "penalties": (PENALTIES, REPEATS),
}


@pytest.mark.parametrize(("setup", "name"), pairs(CROWDS, list(LAWS), quick=4), ids=str)
def test_outputs_follow_the_target_distribution(setup: Setup, name: str) -> None:
    engine = shared_engine(setup)
    assert law_p(engine, *LAWS[name]) > 1e-9
    assert rounds_by_lane(engine)["host" if setup.grammar_lane == "host" or why_not() else "device"] > 10


@pytest.mark.soak
@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("setup", CROWDS, ids=str)
def test_outputs_of_many_seeds_follow_the_target_distribution(setup: Setup, name: str) -> None:
    assert law_p(shared_engine(setup), *LAWS[name], seeds=5000) > 1e-9


SWITCHING = [replace(crowd(4, "half"), switching=True), replace(crowd(3, "ngram"), switching=True, grammar_lane="host")]


@pytest.mark.parametrize(("setup", "name"), pairs(SWITCHING, list(LAWS), quick=2), ids=str)
def test_outputs_follow_the_target_distribution_at_random_draft_lengths(setup: Setup, name: str) -> None:
    engine = shared_engine(setup)
    before = rounds_by_length(engine)
    assert law_p(engine, *LAWS[name]) > 1e-9
    rounds = rounds_by_length(engine) - before
    assert len(rounds) > 1 and min(rounds.values()) > 10


@needs_c
@pytest.mark.parametrize(
    ("setup", "name"),
    [
        (crowd(3), "free"),
        pytest.param(crowd(2, "random", False), "penalties", marks=pytest.mark.slow),
        pytest.param(replace(crowd(2), eager=True), "filtered", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_outputs_follow_the_target_distribution_when_batches_change_between_lanes(setup: Setup, name: str) -> None:
    """Most rounds have all grammars on the device; a few requests with a grammar on the host join them and leave again."""
    engine = shared_engine(setup)
    before = rounds_by_lane(engine)
    assert law_p(engine, *LAWS[name], host_every=100) > 1e-9
    rounds = rounds_by_lane(engine) - before
    assert rounds["device"] > 10 and rounds["host"] > 5


@needs_c
@pytest.mark.parametrize("planted", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "forced drafts verified as sampled ones"])
def test_drafts_forced_on_the_device_keep_the_target_distribution(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    if planted:
        forget_certain_drafts(monkeypatch)
    with make_engine(replace(crowd(3), forced_drafts=True)) as engine:
        chance = law_p(engine, SamplingParams(temperature=1.5), Constraint.regex("[ab]10(, |true)[xy]"))
        assert rounds_by_lane(engine).keys() == {"device"} and engine.stats().drafts.forced > 300
        assert (chance < 1e-9) == planted, chance


def rounds_by_lane(engine: Engine) -> Counter[str]:
    found: Counter[str] = Counter()
    for graph in engine.stats().graphs:
        if graph.key.constrained:
            found["device" if graph.key.device else "host"] += graph.rounds
    return found


def rounds_by_length(engine: Engine) -> Counter[int]:
    found: Counter[int] = Counter()
    for graph in engine.stats().graphs:
        found[graph.key.drafting.length] += graph.rounds
    return Counter({length: rounds for length, rounds in found.items() if rounds})


@pytest.mark.slow
def test_negative_control_penalties_ignore_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planted bug, every position counts only tokens emitted before the round."""
    real = processors.apply_settings

    def forgetful(logits: Tensor, rows: RowSettings, before: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
        return real(logits, rows, torch.full_like(before, -1), first, ids)

    run_references(monkeypatch)
    monkeypatch.setattr(processors, "apply_settings", forgetful)
    with make_engine(crowd(3, "perfect")) as engine:
        assert law_p(engine, replace(PENALTIES, top_p=1.0), REPEATS) < 1e-9


TEN = Setup(k=3, greedy_only=False, max_rows=10, buckets=(1, 2, 4, 8, 10))


def run(engine: Engine, order: list[int], together: bool, most: int = 24) -> dict[int, list[int]]:
    tokens = {}
    jobs = []
    for index in order:
        job = engine.submit([index, 7], constraint=CONSTRAINTS[index % 3], sampling=SETTINGS[index], max_new_tokens=most)
        jobs.append((index, job))
        while not together and not job.finished:
            engine.step()
    finish(engine)
    for index, job in jobs:
        assert job.error == ""
        tokens[index] = list(job.tokens)
    return tokens


def test_output_is_independent_of_the_batch() -> None:
    """Also of the number of rows, and captured or eager. The next test has every row and batch size."""
    alone = run(shared_engine(TEN), list(range(len(SETTINGS))), together=False)
    for other in (Setup(k=3, greedy_only=False, max_rows=4), replace(TEN, eager=True)):
        engine = make_engine(other)
        assert run(engine, [*reversed(range(len(SETTINGS)))], together=True) == alone
        engine.close()
    assert alone[0] == plain([0, 7], 24, CONSTRAINTS[0]).tokens, "temperature 0 is greedy, also among sampled rows"
    assert alone[8] == plain([8, 7], 24, CONSTRAINTS[2]).tokens, "and so is a temperature near 0"
    for index in (10, 12):
        assert alone[index] == plain([index, 7], 24, CONSTRAINTS[index % 3], sampling=SETTINGS[index]).tokens
    assert alone[1] != alone[9]


def test_seed_gives_the_same_tokens_in_every_row_and_batch_size() -> None:
    """The lowest free row is allocated first, so rotations bring every request to each of ten rows, at all batch sizes."""
    count, most = len(SETTINGS), 20  # three pages each: ten are active at once
    engine = shared_engine(TEN)
    alone = run(engine, list(range(count)), together=False, most=most)
    for order in [[(turn + row) % count for row in range(10)] for turn in range(count)] + [
        [(5 * size + row) % count for row in range(size)] for size in range(1, 10)
    ]:
        assert run(engine, order, together=True, most=most) == {index: alone[index] for index in order}


@pytest.mark.parametrize("k", range(7))
def test_greedy_output_is_independent_of_the_draft_length(k: int) -> None:
    """It is also independent of concurrent sampled requests. Few tokens compete, so that every token count matters."""
    few = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.3, logit_bias={40: 50.0, 41: 50.0, 42: 50.0})
    with make_engine(Setup(k=k, greedy_only=False, max_rows=2, drafter="perfect", eager=True)) as engine:
        job = engine.submit([3], sampling=few, max_new_tokens=60)
        tokens = run(engine, [12, 1, 10, 0, 13], together=True)
    assert job.tokens == plain([3], 60, sampling=few).tokens
    for index in (0, 10, 12):
        assert tokens[index] == plain([index, 7], 24, CONSTRAINTS[index % 3], sampling=SETTINGS[index]).tokens


@pytest.mark.slow
def test_greedy_rows_share_rounds_with_sampled_rows() -> None:
    """A greedy row's drafts may come from a round without draft distributions, and be verified in one with them."""
    engine = make_engine(Setup(k=4, greedy_only=False, drafter="fair"))
    steady = engine.submit([3, 1], max_new_tokens=80)
    for seed in range(6):
        engine.step()
        engine.step()
        engine.submit([seed], sampling=SamplingParams(seed=seed), max_new_tokens=3)
    finish(engine)
    assert steady.tokens == plain([3, 1], 80).tokens
    engine.close()


@pytest.mark.parametrize(
    "setup",
    [
        Setup(k=3, greedy_only=False),
        Setup(k=4, greedy_only=False, drafter="half", switching=True, look_up=1),
        Setup(k=2, greedy_only=False, drafter="adversarial", draft_masks=False, grammar_lane="host"),
        Setup(k=3, greedy_only=False, drafter="ngram", forced_drafts=True),
        pytest.param(Setup(k=5, greedy_only=False, drafter="perfect", eager=True), marks=pytest.mark.slow),
        pytest.param(Setup(k=3, greedy_only=False, drafter="fair", loops=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_seed_gives_the_same_tokens_with_any_drafts(setup: Setup) -> None:
    indices = list(range(len(SETTINGS)))
    engine = shared_engine(setup)
    before = engine.stats().drafts.accepted
    assert run(engine, indices, together=True) == run(shared_engine(Setup(k=0, greedy_only=False)), indices, together=True)
    assert engine.stats().drafts.accepted > before
    unlike = replace(SETTINGS[1], seed=-2)
    texts = [run_one(shared_engine(each), unlike) for each in (setup, Setup(k=0, greedy_only=False))]
    assert texts[0] != texts[1] or setup.drafter == "ngram", "tokens of a negative seed depend on the drafts of a model"


def run_one(engine: Engine, sampling: SamplingParams) -> list[int]:
    return engine.generate(PROMPT, sampling=replace(sampling, ignore_eos=True), max_new_tokens=60).tokens


@pytest.mark.parametrize("seed", [None, -1])
def test_random_seed_is_reported_and_reproduces_the_output(seed: int | None) -> None:
    engine = shared_engine(TEN)
    first, second = (engine.generate([1, 2], sampling=SamplingParams(temperature=1, seed=seed), max_new_tokens=30) for _ in range(2))
    assert first.seed != second.seed and first.tokens != second.tokens
    again = engine.generate([1, 2], sampling=SamplingParams(seed=first.seed), max_new_tokens=30)
    assert again.tokens == first.tokens
