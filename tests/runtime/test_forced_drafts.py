"""Forced drafts in an engine: the same tokens in fewer rounds, counters, and the switch."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams, Vocabulary
from stepgraph.graphs import TapeBackend, host_nodes
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.sampling.grammar import GrammarCompiler
from stepgraph.sampling.grammar.link.protocol import HostStep, advance
from stepgraph.sampling.grammar.matchers.forced import ForcedText
from tests.helpers.c_library import needs_c
from tests.helpers.oracles import Answer, greedy
from tests.helpers.proposers import draft_ids_then_noise, noise, parrot
from tests.helpers.toy_engines import finish, needs_native, switch_draft_lengths

WORDS = ("total", "quantity", "unit_price", "currency", '":', '",', ' "', "alpha", "alphabet", "bet")
VOCABULARY = Vocabulary.printable(word.encode() for word in WORDS)
STOP = VOCABULARY.stop_token_ids[0]
# Like a trained model, the target prefers longer tokens.
LENGTHS = {index: 9.0 * len(token) for index, token in enumerate(VOCABULARY.tokens) if len(token) > 1 and index != STOP}
TARGET = ToyTarget(VOCABULARY.logits_width, seed=5, biases=LENGTHS)
CHOICE = Constraint.choice(["alpha", "alphabet", "alpha_bet"])
ORDER = Constraint.json_schema(
    {
        "type": "object",
        "properties": {"quantity": {"type": "integer"}, "unit_price": {"type": "boolean"}, "currency": {"enum": ["alpha", "alphabet"]}},
        "required": ["quantity", "unit_price", "currency"],
        "additionalProperties": False,
    }
)
COMPILER = GrammarCompiler(VOCABULARY)
CONSTRAINTS = (None, ORDER, CHOICE, Constraint.regex("(total: [0-9]{1,3}, ){2}"), ORDER.after("|"), replace(ORDER, backend="llguidance"))
K = 4
BUCKETS = (4,)


@functools.cache
def engine(k: int = K, agreement: float = 0.0, link: str = "auto", forced: bool = True, greedy_only: bool = True) -> Engine:
    return make(ToyDraft(TARGET, agreement), k, host_link=link, forced_drafts=forced, greedy_only=greedy_only)


def config_of(k: int, **options: Any) -> EngineConfig:
    sizes = {
        "max_rows": 4,
        "buckets": BUCKETS,
        "max_length": 96,
        "page_size": 8,
        "prefill_chunk": 8,
        "backend": "tape",
        "compile_isolation": "none",
        "grammar_lane": "host",
    }
    return EngineConfig(num_speculative_tokens=k, draft_length=k, **{**sizes, **options})


def make(draft: ToyDraft, k: int = K, **options: Any) -> Engine:
    config = config_of(k, **options)
    return Engine(TARGET, draft, vocabulary=VOCABULARY, config=config, backend=TapeBackend(asynchronous=True))


@functools.cache
def answer(prompt: tuple[int, ...], constraint: Constraint | None) -> Answer:
    compiled = COMPILER.compile(constraint) if constraint else None
    return greedy(TARGET, prompt, 32, [STOP], compiled, len(VOCABULARY.tokens))


def run(made: Engine, **options: Any) -> list[tuple[Answer, Job]]:
    """Every constraint with its own prompt, a few at a time."""
    requests = [((7, index, 1), constraint) for index, constraint in enumerate(CONSTRAINTS)]
    jobs = [(ask, made.submit(list(ask[0]), constraint=ask[1], max_new_tokens=32, **options)) for ask in requests]
    finish(made)
    return [(answer(*ask), job) for ask, job in jobs]


def counts(made: Engine) -> tuple[int, int, int, int]:
    stats = made.stats()
    return stats.drafts.forced, stats.drafts.accepted_forced, stats.forced_looks, stats.rounds


def check(jobs: list[tuple[Answer, Job]]) -> None:
    for expected, job in jobs:
        assert (job.tokens, job.finish_reason, job.error) == (expected.tokens, expected.reason, ""), job.constraint


@pytest.mark.parametrize(
    ("k", "link", "agreement"),
    [(1, "auto", 0.0), (2, "auto", 0.6), (3, "python", 0.0), (4, "auto", 0.0), (5, "python", 0.9), (6, "auto", 0.3)],
)
def test_output_equals_plain_greedy_decoding(k: int, link: str, agreement: float) -> None:
    made = engine(k, agreement, link)
    before = made.stats()
    jobs = run(made)
    check(jobs)
    after = made.stats()
    assert after.drafts.accepted_forced > before.drafts.accepted_forced
    fills = after.mask_fills - before.mask_fills
    assert fills <= sum((k + 1) * job.rounds for _, job in jobs if job.constraint) + len(jobs) * (k + 1) * made.limits.rounds_in_flight


def test_forced_drafts_save_rounds_with_a_random_drafter() -> None:
    """For a target that prefers long tokens, like the tokenizer."""
    forced, free = engine(), engine(forced=False)
    with_forced, without = run(forced), run(free)
    check(without)
    proposed, accepted, looks, _ = counts(forced)
    assert counts(free)[:3] == (0, 0, 0)
    assert accepted > 10 and looks < proposed, "one query of the grammar may force several drafts"
    rounds = [sum(job.rounds for _, job in jobs if job.constraint == ORDER) for jobs in (with_forced, without)]
    assert rounds[0] < rounds[1], rounds


@needs_native
def test_both_host_links_force_the_same_drafts() -> None:
    native, python = engine(link="native"), engine(link="python")
    check(run(native))
    check(run(python))
    assert native.stats().drafts.forced > 0
    assert counts(native)[:3] == counts(python)[:3]


def test_events_count_forced_and_accepted_drafts() -> None:
    """Per request and round: none without a grammar, and at most num_speculative_tokens."""
    made = engine()
    before = made.stats()
    plain = made.submit([1, 2], max_new_tokens=24)
    few = made.submit([1, 2], constraint=ORDER, max_new_tokens=32, num_speculative_tokens=2)
    many = made.submit([1, 2], constraint=ORDER, max_new_tokens=32)
    events = list(made.stream())
    after = made.stats()
    assert sum(event.drafts.forced for event in events) == after.drafts.forced - before.drafts.forced
    assert sum(event.drafts.accepted_forced for event in events) == after.drafts.accepted_forced - before.drafts.accepted_forced
    most = {job.id: max(event.drafts.forced for event in events if event.job_id == job.id) for job in (plain, few, many)}
    assert most == {plain.id: 0, few.id: 2, many.id: K}
    assert all(event.drafts.accepted_forced <= min(event.drafts.forced, event.num_accepted_drafts) for event in events)
    former = made.submit([1, 2], constraint=Constraint.choice(["total currency " * 6]), max_new_tokens=32)  # all its tokens are forced
    while not any(event.drafts.forced for event in made.step()):
        pass
    made.cancel(former)
    alone = made.submit([1, 2], max_new_tokens=24)
    later = [event for event in made.stream() if event.job_id == alone.id]
    assert alone.tokens == plain.tokens and not any(event.drafts.forced for event in later), "forced drafts of the row's last request"


def test_token_outside_the_draft_vocabulary_is_forced() -> None:
    known = [index for index, token in enumerate(VOCABULARY.tokens) if len(token) == 1]
    made = make(ToyDraft(TARGET, 1.0, d2t=known), greedy_only=True, forced_drafts=True)
    check(run(made))
    assert made.stats().drafts.accepted_forced > 8
    made.close()


@pytest.mark.parametrize("wrong", [0, STOP, len(VOCABULARY.tokens) - 2], ids=["any", "stop", "longest"])
def test_wrong_forced_draft_is_rejected(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    made = engine(3, 0.0, "python")
    monkeypatch.setattr(ForcedText, "propose", lambda *_: wrong)
    before = counts(made)
    check(run(made))
    after = counts(made)
    assert after[0] - before[0] > 20 and after[1] - before[1] < 0.5 * (after[0] - before[0])


def test_sampled_output_depends_only_on_its_seed() -> None:
    """In any batch, and with either host link."""
    texts = []
    for link in ("auto", "python"):
        made = engine(3, 0.6, link, greedy_only=False)
        options: dict[str, Any] = {"sampling": SamplingParams(temperature=0.9, seed=11), "max_new_tokens": 32}
        texts.append([made.generate([7, 1], constraint=ORDER, **options).tokens])
        jobs = [made.submit([7, 1], constraint=constraint, **options) for constraint in (None, ORDER, CHOICE)]
        finish(made)
        texts[-1].append(jobs[1].tokens)
        assert made.stats().drafts.accepted_forced > 0
    assert texts[0][0] == texts[0][1] == texts[1][0] == texts[1][1]


def test_bad_token_ids_override_forced_drafts() -> None:
    """Another spelling is used; a dead end where the grammar allows no other token."""
    names = {token: index for index, token in enumerate(VOCABULARY.tokens)}
    made, alone = engine(3, 0.6, greedy_only=False), Constraint.regex("zzz")
    for banned, constraint, reason in (((b"currency", b"alpha"), ORDER, ""), ((b"z",), alone, "dead_end")):
        sampling = SamplingParams(temperature=0, bad_token_ids=tuple(names[token] for token in banned), min_new_tokens=8)
        expected = greedy(TARGET, [7, 1], 48, [STOP], COMPILER.compile(constraint), len(VOCABULARY.tokens), sampling)
        before = made.stats().drafts.forced
        job = made.generate([7, 1], constraint=constraint, sampling=sampling, max_new_tokens=48)
        assert (job.tokens, job.finish_reason) == (expected.tokens, reason or expected.reason)
        assert reason or made.stats().drafts.forced > before


def test_forced_drafts_is_reported_and_validated() -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.forced_drafts: got 'yes', expected True or False, or None"):
        EngineConfig(forced_drafts="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"EngineConfig\.forced_drafts: got True with draft_masks=False, expected draft_masks=True"):
        EngineConfig(forced_drafts=True, draft_masks=False)
    with pytest.raises(ValueError, match=r"Engine\.draft: got a function with forced_drafts=True, expected forced_drafts=False"):
        Engine(TARGET, draft_ids_then_noise, vocabulary=VOCABULARY, config=config_of(3, forced_drafts=True, rounds_in_flight=1))
    reports = []
    drafters: list[Any] = [ToyDraft(TARGET), "ngram", draft_ids_then_noise]
    for draft, forced in itertools.product(drafters, (None, True, False)):
        if draft is draft_ids_then_noise and forced:
            continue
        config = EngineConfig(max_rows=1, backend="tape", eager=True, forced_drafts=forced, rounds_in_flight=1)
        with Engine(TARGET, draft, vocabulary=VOCABULARY, config=config) as made:
            reports.append("forced drafts: on" in made.capture().notes)
    assert reports == [False, True, False, True, True, False, False, False]


@pytest.mark.parametrize(
    ("k", "draft", "link"),
    [
        (1, "ngram", "python"),
        (2, parrot(), "auto"),
        (4, "ngram", "auto"),
        (6, noise(len(VOCABULARY.tokens)), "auto"),
        (3, parrot(), "auto"),
    ],
    ids=["ngram 1", "parrot 2", "ngram 4", "noise 6", "parrot 3"],
)
def test_forced_drafts_replace_proposed_ones(k: int, draft: Any, link: str) -> None:
    """Greedy and sampled, with and without draft_ids: same tokens, K + 1 fills, and no fewer accepted drafts."""
    rounds, sampled = list[tuple[int, int]](), dict[str, Any](sampling=SamplingParams(temperature=0.9, seed=3), max_new_tokens=32)
    for forced in (True, False):
        made = Engine(TARGET, draft, vocabulary=VOCABULARY, config=config_of(k, forced_drafts=forced, host_link=link))
        report = made.capture()
        assert f"drafts are proposed whole, {'each is kept while its mask allows it' if forced else 'without masks'}" in report.notes
        assert {len(each.host_nodes) for key, each in report.keys if key.constrained and not key.device} == {2 if forced else 1}
        check(jobs := run(made))
        before = made.stats()
        foreseen = [
            (expected, made.generate(job.prompt_ids, constraint=job.constraint, max_new_tokens=32, draft_ids=expected.tokens))
            for expected, job in jobs
        ]
        check(foreseen)
        after, total = made.stats(), sum(job.rounds for _, job in foreseen if job.constraint)
        assert after.mask_fills - before.mask_fills <= (k + 1) * (total + len(jobs) * made.limits.rounds_in_flight)
        assert (after.drafts.accepted_forced > 0) == forced
        drawn = [made.generate([7, 1], constraint=ORDER, **sampled).tokens]
        batch = [made.submit([7, 1], constraint=constraint, **sampled) for constraint in (None, ORDER, CHOICE)]
        finish(made)
        assert drawn == [batch[1].tokens]
        rounds.append((sum(job.rounds for _, job in jobs), total))
        made.close()
    assert rounds[0][0] < rounds[1][0], rounds
    assert k < 3 or not isinstance(draft, str) or rounds[0][1] <= rounds[1][1] + len(jobs), "the drafter continues after the forced draft"


def first_byte(token: int) -> int:
    """The token of the first byte: in a draft, another spelling of the same text."""
    return VOCABULARY.tokens.index(VOCABULARY.tokens[token][:1])


def jobs_at_random(made: Engine, batches: int) -> list[tuple[Answer, Job]]:
    """Requests in random batches, greedy and sampled. With draft_length="auto" every round has random sources and lengths.

    top_k=1 leaves the token that greedy decoding chooses, so all texts are known. Some texts are given as draft_ids, with errors.
    """
    random, jobs = Random(batches), list[tuple[Answer, Job]]()
    if made.config.draft_length == "auto":
        switch_draft_lengths(made)
    for _ in range(batches):
        for _ in range(random.randrange(1, 5)):
            ask = (random.randrange(9), random.randrange(9)), random.choice((*CONSTRAINTS, ORDER, ORDER))
            expected = answer(*ask)
            given = [random.choice((token, token, first_byte(token), random.randrange(STOP))) for token in expected.tokens]
            job = made.submit(
                list(ask[0]),
                constraint=ask[1],
                max_new_tokens=32,
                num_speculative_tokens=(most := random.choice((None, None, 1, 0))),
                draft_ids=given if given and most != 0 and random.random() < 0.7 else None,
                sampling=random.choice((SamplingParams(temperature=0), SamplingParams(temperature=1.0, top_k=1))),
            )
            jobs.append((expected, job))
            for _ in range(random.randrange(4)):
                made.step()
        finish(made)
    return jobs


Source = tuple[Any, int, dict[str, Any]]
SOURCES: dict[str, Source] = {
    "ngram 2": ("ngram", 2, {"host_link": "auto"}),
    "ngram 4": ("ngram", 4, {"host_link": "python"}),
    "model 2": (ToyDraft(TARGET, 0.6), 2, {"host_link": "python", "look_up": 1}),
    "model 4": (ToyDraft(TARGET, 0.6), 4, {"host_link": "auto", "look_up": 2}),
    "device ngram 3": ("ngram", 3, {"grammar_lane": "device"}),
    "device model 4": (ToyDraft(TARGET, 0.6), 4, {"grammar_lane": "device", "look_up": 2}),
}


def engine_of(source: Source, **options: Any) -> Engine:
    draft, k, sizes = source
    config = config_of(k, forced_drafts=True, **sizes)
    return Engine(TARGET, draft, vocabulary=VOCABULARY, config=replace(config, **options))


EACH_SOURCE = [
    pytest.param(source, id=name, marks=[*([needs_c] if "device" in name else []), *([] if "4" in name else [pytest.mark.slow])])
    for name, source in SOURCES.items()
]


@pytest.mark.parametrize("source", EACH_SOURCE)
def test_random_switching_with_looked_up_and_forced_drafts_keeps_the_tokens(source: Source) -> None:
    modelled = not isinstance(source[0], str)
    with engine_of(source, draft_length="auto") as made:
        check(jobs_at_random(made, 10))
        stats = made.stats()
        keys = {graph.key.drafting for graph in stats.graphs}
        assert len(keys) == (4 if modelled else 2) and {graph.key.sampled for graph in stats.graphs} == {True, False}
        assert stats.drafts.accepted_forced > 8 and stats.drafts.accepted_looked_up > 20
        assert (stats.drafts.accepted > stats.drafts.accepted_forced + stats.drafts.accepted_looked_up) == modelled


@pytest.mark.parametrize(
    ("source", "name", "wrong"),
    [
        ("ngram 2", "follow", advance),
        pytest.param("model 2", "follow", advance, marks=pytest.mark.slow),
        ("ngram 2", "fill_next", lambda stage: advance(stage)),
        pytest.param("model 2", "fill_next", lambda stage: advance(stage), marks=pytest.mark.slow),
    ],
)
def test_random_requests_detect_a_wrong_grammar_step(
    monkeypatch: pytest.MonkeyPatch, source: str, name: str, wrong: Callable[[int], HostStep]
) -> None:
    """Planted bugs: masks of a chain ignore forced tokens; the last mask of a round is filled as if all rounds had as many drafts."""
    monkeypatch.setattr(host_nodes, name, wrong)
    with engine_of(SOURCES[source], draft_length="auto") as made, pytest.raises(AssertionError):
        check(jobs_at_random(made, 10))


def test_engine_with_forced_drafts_only() -> None:
    """`draft="forced"` without a draft model. Greedy and sampled, beside requests without drafts."""
    made = Engine(TARGET, "forced", vocabulary=VOCABULARY, config=config_of(4))
    report = made.capture()
    assert "draft: tokens forced by grammars" in report.notes
    assert {len(each.host_nodes) for key, each in report.keys if key.constrained and not key.device} == {2}, "one follows a whole chain"
    with pytest.raises(ValueError, match="draft_ids: got 2 tokens, expected None: the engine has no look-up drafter"):
        made.submit([1], draft_ids=[5, 6])
    jobs = run(made)
    check(jobs)
    stats = made.stats()
    assert stats.drafts.accepted == stats.drafts.accepted_forced > 10
    assert all(job.rounds == len(job.tokens) for _, job in jobs if not job.constraint)
    assert all(job.rounds < 0.8 * len(job.tokens) for _, job in jobs if job.constraint == ORDER)
    sampled: dict[str, Any] = {"sampling": SamplingParams(temperature=0.9, seed=3), "max_new_tokens": 32}
    drawn = [made.generate([7, 1], constraint=ORDER, **sampled) for _ in range(2)]
    assert drawn[0].tokens == drawn[1].tokens and drawn[0].num_accepted_drafts > 0
    made.close()


@needs_native
@pytest.mark.parametrize(
    ("k", "draft"),
    [(1, "forced"), (4, "forced"), (3, "ngram"), (4, ToyDraft(TARGET, 0.6)), (6, noise(len(VOCABULARY.tokens)))],
    ids=["forced 1", "forced 4", "ngram 3", "model 4", "noise 6"],
)
def test_device_forces_the_drafts_of_the_host(k: int, draft: Any) -> None:
    """Alone and beside rows on the host, greedy and sampled: same tokens, and the same drafts in every round."""
    found = []
    for lane in ("device", "host"):
        made = Engine(TARGET, draft, vocabulary=VOCABULARY, config=config_of(k, forced_drafts=True, grammar_lane=lane))
        nodes = [(key.device, len(report.host_nodes)) for key, report in made.capture().keys if key.constrained]
        assert (True, 0) in nodes or lane == "host"
        check(run(made))
        sampled: dict[str, Any] = {"sampling": SamplingParams(temperature=0.9, seed=5), "max_new_tokens": 32}
        jobs = [made.submit([7, index, 1], constraint=constraint, **sampled) for index, constraint in enumerate(CONSTRAINTS)]
        events = [(event.job_id, event.tokens, event.drafts) for event in made.stream()]
        device = [job for job in jobs if job.grammar_lane == "device"]
        assert len(device) == (4 if lane == "device" else 0)
        alone = made.generate([7, 1], constraint=ORDER, **sampled)
        stats = made.stats()
        assert stats.drafts.accepted_forced > 0
        found.append((sorted(events, key=lambda event: event[0]), alone.tokens, alone.rounds, stats.drafts))
        made.close()
    assert found[0] == found[1]


def test_forced_drafter_without_masks_raises() -> None:
    with pytest.raises(ValueError, match=r"Engine\.draft: got 'forced' with draft_masks=False"):
        Engine(TARGET, "forced", vocabulary=VOCABULARY, config=config_of(4, draft_masks=False))
