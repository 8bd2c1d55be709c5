"""The choice of draft lengths, over simulated drafters: never much slower than plain decoding, and close to the best fixed length."""

from __future__ import annotations

import collections
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams
from stepgraph.graphs import StaticBuffers
from stepgraph.graphs.graph_key import PLAIN, Drafting, GraphKey
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.graphs.round_specs import MAX_SKIPPED
from stepgraph.graphs.tape.backend import Tape
from stepgraph.runtime.calibration import REPLAYS_PER_MEASUREMENT
from stepgraph.runtime.draft_length import Acceptances, Costs, Counts, DraftPolicy, RoundCosts, counts_of, initial_account
from stepgraph.runtime.draft_tuning import DRAFT_RUN, SLACK
from stepgraph.runtime.job import Origin
from stepgraph.runtime.models.toy import ToyDraft
from tests.graphs.test_graph_set import Refusing
from tests.helpers.c_library import needs_c
from tests.helpers.toy_engines import DRAFTERS, TARGET, VOCABULARY, Setup, finish, make_engine, plain

LENGTHS = (0, 1, 3, 5, 7)


def costs_of(seconds: dict[int, float]) -> Costs:
    return {Drafting(length): each for length, each in seconds.items()}


CPU_COSTS = costs_of({0: 24.0, 1: 27.5, 3: 30.2, 5: 36.0, 7: 41.0})
GPU_COSTS = costs_of({0: 4.0, 1: 4.3, 3: 4.9, 5: 5.5, 7: 6.1})
BATCH_COSTS = costs_of({0: 16.0, 3: 31.0, 7: 57.0})  # of four rows of the demonstration on one core
TILES_COSTS = costs_of({0: 25.6, 3: 33.8, 7: 45.0})  # the same on a processor with matrix tiles
IN_FLIGHT = 2
IGNORE_EOS = SamplingParams(temperature=0, ignore_eos=True)

Drafter = Callable[[random.Random, int], int]  # generator and round -> how many of the drafts would be accepted


def geometric(rate: float) -> Drafter:
    def drafter(generator: random.Random, step: int) -> int:
        accepted = 0
        while accepted < LENGTHS[-1] and generator.random() < rate:
            accepted += 1
        return accepted

    return drafter


def alternating(first: Drafter, second: Drafter, period: int) -> Drafter:
    return lambda generator, step: (second if step // period % 2 else first)(generator, step)


def of_model(row: Acceptances, offered: int, accepted: int) -> tuple[Acceptances, Counts]:
    return row, counts_of(True, offered, accepted, offered, 0)


class Run:
    """Decodes with drafters, one per row, and counts time and tokens. A round accepts at most the drafts of the round before.

    renew: new requests begin every `renew` rounds. calibrated: the costs that the choice knows at first.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: Costs,
        rounds: int,
        choose: Callable[[], int] | None = None,
        seed: int = 0,
        renew: int = 0,
        calibrated: Costs | None = None,
    ) -> None:
        generator, lengths = random.Random(seed), DraftPolicy(list(costs))
        key, known = GraphKey(len(drafters), False), RoundCosts(list(costs))
        for drafting, seconds in (calibrated or costs).items():
            known.calibrate(key.with_drafting(drafting), seconds)
        rows = [lengths.row() for _ in drafters]
        self.seconds, self.tokens, self.lengths = 0.0, 0, list[int]()
        in_flight: collections.deque[tuple[Drafting, list[tuple[Acceptances, Counts]]]] = collections.deque()
        before = 0
        for step in range(rounds):
            if renew and step % renew == 0:
                rows = [lengths.row() for _ in drafters]
            drafting = Drafting(choose()) if choose else lengths.choose([(row, LENGTHS[-1]) for row in rows], known.of(key))
            length = drafting.length
            offered = min(before, length)
            accepted = [min(offered, drafter(generator, step)) for drafter in drafters]
            self.seconds += costs[drafting]
            self.tokens += len(rows) + sum(accepted)
            self.lengths.append(length)
            before = length
            if choose is None:
                in_flight.append((drafting, [of_model(row, offered, count) for row, count in zip(rows, accepted, strict=True)]))
            if len(in_flight) == IN_FLIGHT:
                ended, results = in_flight.popleft()
                known.add(key, ended, costs[ended])
                lengths.add(ended, results, known.of(key))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def undrafted(costs: Costs, rows: int) -> float:
    return rows / costs[PLAIN]


def best_fixed(drafters: Sequence[Drafter], costs: Costs, rounds: int, seed: int = 0) -> float:
    return max(Run(drafters, costs, rounds, lambda each=each: each.length, seed).rate for each in costs)  # type: ignore[misc]


def settings() -> Iterator[object]:
    for name, costs in (("cpu", CPU_COSTS), ("gpu", GPU_COSTS)):
        for rate in (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            for rows in (1, 4, 8):
                yield pytest.param(costs, rate, rows, id=f"{name}-{rate}-{rows}")


@pytest.mark.parametrize(("costs", "rate", "rows"), list(settings()))
def test_rate_is_close_to_the_best_fixed_length(costs: Costs, rate: float, rows: int) -> None:
    """Where drafts gain little, the bound on the loss leaves less for trying them."""
    drafters = [geometric(rate)] * rows
    adaptive, best, alone = Run(drafters, costs, 600).rate, best_fixed(drafters, costs, 600), undrafted(costs, rows)
    assert adaptive >= 0.98 * alone
    assert adaptive >= (0.95 if best > 1.2 * alone else 0.9) * best


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["cpu", "gpu"])
def test_drafter_that_is_never_right_costs_at_most_two_percent(costs: Costs) -> None:
    assert Run([geometric(0)], costs, 300).rate >= 0.98 * undrafted(costs, 1)
    assert Run([geometric(0)], costs, 4000).rate >= 0.996 * undrafted(costs, 1)


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["cpu", "gpu"])
def test_drafter_that_was_never_right_is_still_tried(costs: Costs) -> None:
    drafter: Drafter = lambda generator, step: 7 if step >= 5000 else 0  # noqa: E731
    plain, run = Run([geometric(0)], costs, 5000), Run([drafter], costs, 6000)
    assert run.tokens - plain.tokens > 7 * 500


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["cpu", "gpu"])
def test_draft_length_follows_a_changing_acceptance(costs: Costs) -> None:
    """Most drafts are accepted for 60 rounds, and few for the next 60. The mean of six texts, which differ by 4%."""
    drafters, seeds = [alternating(geometric(0.85), geometric(0.15), 60)], range(6)
    rates = [Run(drafters, costs, 1200, seed=seed).rate / best_fixed(drafters, costs, 1200, seed) for seed in seeds]
    assert sum(rates) / len(rates) >= 0.93, rates


def test_drafts_that_double_the_time_are_tried_for_long_enough() -> None:
    """New requests accept few drafts at first; 3 drafts in every round gain 17%. The mean of twelve texts."""
    drafters = [lambda generator, step: geometric(0.45 if step % 30 < 4 else 0.65)(generator, step)] * 4
    rates = [Run(drafters, BATCH_COSTS, 270, seed=seed, renew=30).rate / best_fixed(drafters, BATCH_COSTS, 270, seed) for seed in range(12)]
    assert sum(rates) / len(rates) >= 0.92, rates


def test_a_batch_keeps_drafting_while_few_drafts_are_accepted() -> None:
    """3 drafts in every round gain two thirds for 60 rounds and lose a sixth in the next 60. The mean of twelve texts."""
    drafters = [alternating(geometric(0.6), geometric(0.1), 60)] * 4
    rates = [Run(drafters, TILES_COSTS, 600, seed=seed).rate / best_fixed(drafters, TILES_COSTS, 600, seed) for seed in range(12)]
    assert sum(rates) / len(rates) >= 0.95, rates


def test_drafts_pay_although_the_calibration_measured_plain_rounds_at_less_than_their_time() -> None:
    """Plain rounds were measured at 70% of their time, so that drafts seem to lose at first. The mean of sixteen texts."""
    drafters, calibrated = [geometric(0.4)] * 4, {**TILES_COSTS, PLAIN: 0.7 * TILES_COSTS[PLAIN]}
    runs = [Run(drafters, TILES_COSTS, 300, None, seed, 60, calibrated) for seed in range(16)]
    rates = [run.rate / best_fixed(drafters, TILES_COSTS, 300, seed) for seed, run in enumerate(runs)]
    assert sum(rates) / len(rates) >= 0.96, rates


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["cpu", "gpu"])
def test_rows_with_rejected_drafts_do_not_slow_the_others(costs: Costs) -> None:
    drafters = [geometric(0.85)] * 4 + [geometric(0.15)] * 4
    assert Run(drafters, costs, 600).rate >= 0.95 * best_fixed(drafters, costs, 600)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=150), st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4), st.integers(1, 4))
def test_loss_is_bounded_for_every_acceptance(accepts: list[int], steps: list[float], rows: int) -> None:
    """The time is at most (1 + slack) that of plain decoding and the first account, with rounds in flight."""
    costs, total = dict[Drafting, float](), 1.0
    for length, step in zip(LENGTHS, [0.0, *steps], strict=True):
        total += step
        costs[Drafting(length)] = total
    drafter: Drafter = lambda generator, step: accepts[step % len(accepts)]  # noqa: E731
    for rounds in (10, len(accepts), 3 * len(accepts)):
        run = Run([drafter] * rows, costs, rounds)
        plain_seconds = run.tokens / rows * costs[PLAIN]
        assert run.seconds <= plain_seconds * (1 + SLACK) + initial_account(costs) + 1e-9


def test_row_without_requested_drafts_gets_plain_rounds() -> None:
    lengths = DraftPolicy(list(map(Drafting, LENGTHS)))
    row = lengths.row()
    assert [lengths.choose([(row, 0)], CPU_COSTS) for _ in range(5)] == [PLAIN] * 5


def test_length_never_exceeds_the_longest_request() -> None:
    lengths = DraftPolicy(list(map(Drafting, LENGTHS)))
    rows = [(lengths.row(), 3), (lengths.row(), 1)]
    assert max(lengths.choose(rows, GPU_COSTS).length for _ in range(20)) <= 3


def test_request_with_an_upper_bound_between_two_lengths_gets_drafts() -> None:
    """The next longer graph drafts for it; it verifies no more than it requested."""
    lengths = DraftPolicy([PLAIN, Drafting(7)])
    row, chosen = lengths.row(), list[Drafting]()
    for _ in range(20):
        chosen.append(lengths.choose([(row, 3)], GPU_COSTS))
        lengths.add(chosen[-1], [of_model(row, 3, 3)], GPU_COSTS)
    assert chosen[-10:] == [Drafting(7)] * 10


def test_new_row_starts_from_the_results_of_the_rows_before() -> None:
    lengths = DraftPolicy(list(map(Drafting, LENGTHS)))
    first = lengths.row()
    for _ in range(100):
        lengths.choose([(first, 7)], GPU_COSTS)
        lengths.add(Drafting(7), [of_model(first, 7, 7)], GPU_COSTS)
    assert lengths.row()[True].expected[7] > 6 > DraftPolicy(list(map(Drafting, LENGTHS))).row()[True].expected[7]


WITH_TEXT = [*map(Drafting, LENGTHS), Drafting(7, model=False)]


@pytest.mark.parametrize(
    ("modelled", "looked_up", "expected"), [(7, 7, Drafting(7, False)), (7, 0, Drafting(7)), (0, 0, PLAIN)], ids=["text", "model", "none"]
)
def test_source_with_the_most_tokens_per_second_is_chosen(modelled: int, looked_up: int, expected: Drafting) -> None:
    """The model continues the chains of the look-up: it accepts `modelled` drafts, the look-up alone the first `looked_up` of these."""
    costs, lengths = {**GPU_COSTS, Drafting(7, False): 5.2}, DraftPolicy(WITH_TEXT)
    row, before, chosen = lengths.row(), PLAIN, list[Drafting]()
    for _ in range(300):
        chosen.append(lengths.choose([(row, 7)], costs))
        offered = min(before.length, chosen[-1].length)
        drafts = offered if before.model else min(offered, looked_up)
        accepted = min(modelled if before.model else looked_up, offered)
        lengths.add(chosen[-1], [(row, counts_of(before.model, offered, accepted, drafts, looked_up))], costs)
        before = chosen[-1]
    if expected == PLAIN:
        assert sum(costs[each] for each in chosen) <= 1.02 * len(chosen) * costs[PLAIN], collections.Counter(chosen)
    else:
        assert chosen.count(expected) > 0.85 * len(chosen), collections.Counter(chosen)


def test_rounds_with_the_model_show_what_the_look_up_alone_would_have_accepted() -> None:
    assert counts_of(True, offered=7, accepted=5, drafts=7, num_before_model=2) == {True: (7, 5), False: (7, 2)}
    of_text = counts_of(False, offered=7, accepted=5, drafts=5, num_before_model=5)
    assert of_text == {True: (5, 5), False: (7, 5)}, "the model would have continued after the fifth draft"


def test_code_editing_runs_rounds_without_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is known in advance, and the draft model is never right."""
    monkeypatch.setattr(RoundCosts, "of", lambda *_: {**costs_of({0: 4.0, 3: 4.9, 7: 6.1}), Drafting(7, False): 5.2})
    engine = make_engine(Setup(k=7, drafter="adversarial", max_rows=1, buckets=(1,), look_up=2), draft_length="auto", all_graphs=True)
    expected = plain([5, 6], 80, sampling=IGNORE_EOS).tokens
    chooser = engine._parts.draft_lengths
    assert chooser is not None
    chooser.choice_log = []
    job = engine.generate([5, 6], max_new_tokens=80, sampling=IGNORE_EOS, draft_ids=expected)
    drafting = [choice for choice, _ in chooser.choice_log]
    assert job.tokens == expected and job.rounds < 15
    assert len(drafting) >= 12 and set(drafting[7:]) == {Drafting(7, False)}, drafting
    assert job.origins.count(Origin.LOOK_UP) == job.num_accepted_drafts > 50
    stages = [run.name for run in engine._graphs[GraphKey(1, False, False, False, 7, False)].report.stages]
    assert not any(name.startswith("draft_") for name in stages)
    engine.close()


@pytest.mark.parametrize("drafter", ["perfect", "adversarial"])
def test_engine_follows_its_drafter(monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """With given costs, since measured ones differ from run to run."""
    monkeypatch.setattr(RoundCosts, "of", lambda *_: GPU_COSTS)
    engine = make_engine(Setup(k=7, drafter=drafter, max_rows=1, buckets=(1,)), draft_length="auto", all_graphs=True)
    job = engine.generate([5, 6], max_new_tokens=80, sampling=IGNORE_EOS)
    rounds = {graph.key.draft_length: graph.rounds for graph in engine.stats().graphs}
    assert sum(rounds.values()) >= job.rounds
    if drafter == "perfect":
        assert len(job.tokens) / job.rounds > 4
    else:
        assert rounds[0] > 0.7 * job.rounds
    engine.close()


@pytest.mark.parametrize("right", [True, False])
def test_engine_follows_a_draft_function(monkeypatch: pytest.MonkeyPatch, right: bool) -> None:
    """The function has drafts for the first half of the text only, all right or all wrong."""
    monkeypatch.setattr(RoundCosts, "of", lambda *_: GPU_COSTS)
    expected = plain([5, 6], 80, sampling=IGNORE_EOS).tokens

    def draft(job: Job) -> list[int]:
        following = expected[len(job.tokens) : 40][:5]
        return following if right else [(token + 1) % 90 for token in following]

    monkeypatch.setitem(DRAFTERS, "of the text", lambda: draft)
    with make_engine(
        Setup(k=7, drafter="of the text", max_rows=1, buckets=(1,), rounds_in_flight=1), draft_length="auto", all_graphs=True
    ) as engine:
        job = engine.generate([5, 6], max_new_tokens=80, sampling=IGNORE_EOS)
        rounds = {graph.key.draft_length: graph.rounds for graph in engine.stats().graphs}
    assert job.tokens == expected
    if right:
        assert (rounds[7], job.num_accepted_drafts) == (7, 34) and rounds[0] == 39, "rounds without drafts are plain"
    else:
        assert rounds[7] <= 4, "the account allows few rounds with drafts"


def test_costs_are_measured_for_every_length() -> None:
    engine = make_engine(Setup(k=3, max_rows=2), draft_length="auto", all_graphs=True)
    assert (engine.stats().replays, engine.stats().host_syncs) == (0, 0), "calls that measure are not rounds"
    engine.generate([5, 6], max_new_tokens=20, sampling=IGNORE_EOS)
    lengths = engine._parts.draft_lengths
    assert lengths is not None and lengths.choices == tuple(map(Drafting, (0, 1, 3)))
    for rows, constrained in itertools.product((1, 2), (False, True)):
        assert all(0 < seconds < 10 for seconds in lengths.costs.of(GraphKey(rows, constrained)).values())
    assert lengths.costs.catch_up_seconds.keys() == {1, 2} and all(seconds > 0 for seconds in lengths.costs.catch_up_seconds.values())
    engine.close()


def test_the_capture_runs_the_draft_model_over_skipped_tokens_of_every_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """These runs are eager: on a GPU the first one of a shape loads kernels and initialises products."""
    sizes, forward = list[tuple[int, ...]](), ToyDraft.forward

    def logged(draft: ToyDraft, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        sizes.append(tuple(inputs.tokens.shape))
        return forward(draft, inputs, buffers)

    monkeypatch.setattr(ToyDraft, "forward", logged)
    make_engine(Setup(k=3, max_rows=4, buckets=(1, 2, 4)), draft_length="auto", all_graphs=True).close()
    assert {(rows, MAX_SKIPPED) for rows in (1, 2, 4)} <= set(sizes)


@pytest.mark.parametrize("number", [10, 12])
def test_a_graph_that_is_not_captured_has_the_cost_of_the_one_that_runs(number: int) -> None:
    options: dict[str, Any] = {"draft_length": "auto", "on_capture_failure": "eager"}
    with make_engine(Setup(k=4, max_rows=2), Refusing(number), **options, all_graphs=True) as engine:
        found = engine.generate([1, 2], max_new_tokens=30, sampling=IGNORE_EOS).tokens
    assert found == plain([1, 2], 30, sampling=IGNORE_EOS).tokens


def test_costs_include_what_the_draft_model_does_later_for_skipped_tokens() -> None:
    choices = PLAIN, Drafting(7), Drafting(7, False)
    key, costs = GraphKey(2, False), RoundCosts(choices)
    costs.catch_up_seconds[2] = 3.2  # for 32 tokens
    for drafting in choices:
        costs.calibrate(key.with_drafting(drafting), 5.0 if drafting.length else 4.0)
    assert costs.of(key) == pytest.approx({PLAIN: 4.1, Drafting(7): 5.0, Drafting(7, False): 5.8})
    for _ in range(2):  # as predicted: nothing changes
        costs.add(key, Drafting(7, False), 5.0)
    assert costs.of(key)[Drafting(7, False)] == pytest.approx(5.8)
    for seconds in (8.2, 8.2, 90.0):  # as predicted; then an interrupted one counts as twice the time
        costs.add_catch_up(key, Drafting(7), seconds, 0)
        costs.add_catch_up(key, PLAIN, seconds - 1.0, 0)
    assert costs.catch_up_seconds[2] == pytest.approx(3.2 * 1.1**2)


def test_the_account_pays_for_skipped_tokens_before_a_run_of_drafts() -> None:
    """The account has 18 seconds, of which a run may lose 10.8. The time for skipped tokens is lost however many drafts are accepted."""
    costs = costs_of({0: 4.0, 3: 7.6})
    for catch_up, choice, left in ((0.0, Drafting(3), 18.0), (7.0, Drafting(3), 11.0), (7.5, PLAIN, 18.0)):
        policy = DraftPolicy([PLAIN, Drafting(3)])
        assert policy.choose([(policy.row(), 3)], costs, catch_up=catch_up) == choice
        assert policy.account(False, costs) == pytest.approx(left)


@needs_c
@pytest.mark.parametrize(("drafter", "look_up", "graphs"), [("fair", 2, 4 + 2 + 4), ("ngram", 0, 3 * 2)])
def test_graphs_of_all_lengths_take_less_than_twice_those_of_one(
    monkeypatch: pytest.MonkeyPatch, drafter: str, look_up: int, graphs: int
) -> None:
    """Graphs for device grammars, host grammars and none. Host grammars have two lengths beside device grammars; so has a proposer."""
    setup, sizes, replays = Setup(k=7, drafter=drafter, max_rows=1, buckets=(1,), look_up=look_up), list[list[float]](), []
    monkeypatch.setattr(Tape, "replay", lambda *_, replay=Tape.replay, **options: replays.append(1) or replay(*_, **options))  # type: ignore[func-returns-value]
    for length in (7, "auto"):
        with make_engine(setup, draft_length=length, all_graphs=True) as engine:
            reports = [recorded.report for recorded in engine._graphs._recorded.values()]
            sizes.append([sum(sum(each.nodes.values()) for each in reports), sum(each.nbytes for each in reports)])
            assert len(reports) == (graphs if length == "auto" else 3)
            lengths = len(engine._parts.draft_lengths.choices) if engine._parts.draft_lengths else 0
    assert all(every < 2 * one for one, every in zip(*sizes, strict=True)), sizes
    assert len(replays) == (lengths + (drafter == "fair")) * REPLAYS_PER_MEASUREMENT, "one before each measurement of skipped tokens"


def test_plain_cost_that_was_measured_too_high_is_corrected() -> None:
    """As on a busy machine. The drafter is never right."""
    both = PLAIN, Drafting(3)
    key, costs, lengths = GraphKey(1, False), RoundCosts(both), DraftPolicy(both)
    for length, seconds in ((0, 50.0), (3, 5.0)):
        costs.calibrate(replace(key, draft_length=length), seconds)
    row, chosen = lengths.row(), [0]
    for _ in range(200):
        drafting = lengths.choose([(row, 3)], costs.of(key))
        chosen.append(drafting.length)
        costs.add(key, drafting, 5.0 if drafting.length else 2.0)
        lengths.add(drafting, [of_model(row, min(chosen[-2:]), 0)], costs.of(key))
    assert chosen[-80:].count(0) >= 80 - DRAFT_RUN and costs.of(key)[PLAIN] < 2.1


@pytest.mark.parametrize("known", [True, False])
def test_cost_that_was_measured_on_a_busy_machine_is_measured_again(known: bool) -> None:
    """Three drafts took as long as seven, then 10% less. One draft is accepted. known: also measured by rounds, not only by calibration."""
    choices = PLAIN, Drafting(3), Drafting(7)
    key, costs, lengths = GraphKey(1, False), RoundCosts(choices), DraftPolicy(choices)
    for drafting, seconds in zip(choices, (2.0, 2.7, 2.7), strict=True):
        costs.calibrate(replace(key, draft_length=drafting.length), seconds)
        for _ in range(40 * known):
            costs.add(key, drafting, seconds)
    row, chosen, spent = lengths.row(), [PLAIN], 0.0
    for _ in range(600):
        drafting = lengths.choose([(row, 7)], costs.of(key))
        chosen.append(drafting)
        seconds = {0: 2.0, 3: 2.43, 7: 2.7}[drafting.length]
        spent += seconds if len(chosen) > 300 else 0
        costs.add(key, drafting, seconds)
        offered = min(chosen[-2].length, drafting.length)
        lengths.add(drafting, [of_model(row, offered, min(offered, 1))], costs.of(key))
    assert spent <= 1.01 * 301 * 2.43, collections.Counter(chosen[300:])
    assert costs.of(key)[PLAIN] == pytest.approx(2.0, rel=0.1)


def test_length_that_was_measured_at_twice_its_time_is_tried_again() -> None:
    """Of seven drafts, four are right, so that this length is the best one."""
    choices = PLAIN, Drafting(3), Drafting(7)
    key, costs, lengths = GraphKey(1, False), RoundCosts(choices), DraftPolicy(choices)
    for drafting, seconds in zip(choices, (2.0, 2.4, 5.4), strict=True):
        costs.calibrate(replace(key, draft_length=drafting.length), seconds)
    row, chosen = lengths.row(), [PLAIN]
    for _ in range(1200):
        drafting = lengths.choose([(row, 7)], costs.of(key))
        chosen.append(drafting)
        costs.add(key, drafting, {0: 2.0, 3: 2.4, 7: 2.7}[drafting.length])
        offered = min(chosen[-2].length, drafting.length)
        lengths.add(drafting, [of_model(row, offered, min(offered, 4))], costs.of(key))
    assert chosen[-100:].count(Drafting(7)) >= 98, collections.Counter(chosen)


@needs_c
def test_rounds_with_host_grammars_beside_device_grammars_have_two_lengths() -> None:
    """A mixed batch, also where another length is requested. The tokens are those of plain decoding."""
    engine = make_engine(Setup(k=7, max_rows=2, buckets=(2,)), draft_length="auto", all_graphs=True)
    chooser, grammar = engine._parts.draft_lengths, Constraint.regex("[a-z]{40}")
    assert chooser is not None
    engine.compile(on_host := replace(grammar, backend="xgrammar"))
    for chooser.fixed_drafting in (None, Drafting(3)):
        before = {graph.key: graph.rounds for graph in engine.stats().graphs}
        jobs = [engine.submit([5, 6], constraint=each, max_new_tokens=30) for each in (grammar, on_host)]
        finish(engine)
        used = [graph.key for graph in engine.stats().graphs if graph.rounds > before.get(graph.key, 0) and graph.key.on_host]
        assert jobs[0].tokens == jobs[1].tokens == plain([5, 6], 30, grammar).tokens
        assert used and {key.draft_length for key in used} <= ({7} if chooser.fixed_drafting else {0, 7})
    engine.close()


def test_rounds_after_prompts_and_skipped_tokens_measure_no_cost() -> None:
    """Their time includes that of other work; after skipped tokens it measures the time of these."""
    engine, measured = make_engine(Setup(k=3, max_rows=1, buckets=(1,)), draft_length="auto", all_graphs=True), list[tuple[bool, bool]]()
    chooser = engine._parts.draft_lengths
    assert chooser is not None
    draftings = PLAIN, PLAIN, Drafting(3), Drafting(3), PLAIN, Drafting(3)
    jobs = [engine.submit([5, 6, 7], max_new_tokens=30, sampling=IGNORE_EOS) for _ in range(2)]
    for index, chooser.fixed_drafting in enumerate(draftings):
        if index == 5:  # the next request has no skipped tokens
            engine.cancel(jobs[0])
        engine.step()
        launched = engine._in_flight.pending[-1]
        measured.append((math.isfinite(launched.launched_at), launched.caught_up))
    assert measured == [(False, False), (True, False), (True, True), (True, False), (True, False), (False, False)]
    engine.close()


def test_slower_rounds_raise_the_costs_of_all_lengths() -> None:
    """Every round takes 50% longer. Afterwards, only rounds with drafts take longer than was measured at first."""
    both = PLAIN, Drafting(3)
    key, costs = GraphKey(1, False), RoundCosts(both)
    for drafting, seconds in zip(both, (2.0, 2.5), strict=True):
        costs.calibrate(replace(key, draft_length=drafting.length), seconds)
    for _ in range(60):
        costs.add(key, Drafting(3), 3.75)
    assert 2.4 < costs.of(key)[PLAIN] < 2.5
    for _ in range(60):
        costs.add(key, PLAIN, 2.0)
        costs.add(key, Drafting(3), 3.0)
    assert list(costs.of(key).values()) == pytest.approx([2.0, 3.0], rel=0.03)


def test_costs_are_those_of_contexts_of_about_the_same_length() -> None:
    """Requests with short and long contexts by turns: with a long one, seven drafts take twice as long, and three are the best length."""
    choices = PLAIN, Drafting(3), Drafting(7)
    key, costs, lengths = GraphKey(1, False), RoundCosts(choices), DraftPolicy(choices)
    times = {100: (2.0, 2.4, 2.5), 900: (2.2, 2.9, 5.0)}
    for drafting, seconds in zip(choices, times[100], strict=True):
        costs.calibrate(replace(key, draft_length=drafting.length), seconds)
    chosen = dict[int, list[Drafting]]({100: [], 900: []})
    for context in (100, 900) * 12:
        row, before = lengths.row(), 0
        for context_now in range(context, context + 60):
            drafting = lengths.choose([(row, 7)], costs.of(key, context_now))
            costs.add(key, drafting, times[context][choices.index(drafting)], context_now)
            offered, before = min(before, drafting.length), drafting.length
            lengths.add(drafting, [of_model(row, offered, min(offered, 4))], costs.of(key, context_now))
            chosen[context].append(drafting)
    for context, best in ((100, Drafting(7)), (900, Drafting(3))):
        later = chosen[context][180:]
        assert later.count(best) > 0.9 * len(later), (context, collections.Counter(later))


def test_costs_that_fall_do_not_stop_drafting() -> None:
    """Each round in flight is at risk for the time that it was launched with. All drafts are right."""
    lengths = DraftPolicy([PLAIN, Drafting(3)])
    row, chosen = lengths.row(), list[Drafting]()
    for _ in range(200):
        chosen.append(lengths.choose([(row, 3)], costs_of({0: 4.0, 3: 6.0})))
        lengths.add(chosen[-1], [of_model(row, 3, 3)], costs_of({0: 4.0, 3: 5.0}))
    assert chosen[-100:] == [Drafting(3)] * 100


def test_results_of_a_row_count_for_all_rows_of_its_kind() -> None:
    """The kinds are with and without a grammar. Results also count for rows that started before, and not for the other kind."""
    lengths = DraftPolicy([PLAIN, Drafting(3)])
    first, second, other = lengths.row(constrained=True), lengths.row(constrained=True), lengths.row()
    expected = second[True].expected[3]
    assert expected == other[True].expected[3]
    for _ in range(10):
        drafting = lengths.choose([(first, 3), (second, 3)], GPU_COSTS)
        lengths.add(drafting, [of_model(first, 3, 0), of_model(second, 0, 0)], GPU_COSTS)
    assert second[True].expected[3] < expected - 0.5
    assert lengths.row()[True].expected[3] == expected


def test_slow_first_replays_do_not_stop_drafting() -> None:
    """The first replay of a graph takes longer. All drafts are right."""
    both = PLAIN, Drafting(3)
    costs, lengths = RoundCosts(both), DraftPolicy(both)
    for length, seconds in ((0, 2.0), (3, 2.5)):
        costs.calibrate(GraphKey(1, False, draft_length=length), seconds)
    key, row, chosen = GraphKey(1, True), lengths.row(), list[Drafting]()
    for _ in range(40):
        drafting = lengths.choose([(row, 3)], costs.of(key))
        seconds = 2.5 if drafting.length else 2.0
        costs.add(key, drafting, seconds if drafting in chosen else 8 * seconds)
        lengths.add(drafting, [of_model(row, min(drafting.length, 3), drafting.length)], costs.of(key))
        chosen.append(drafting)
    assert chosen[-20:] == [Drafting(3)] * 20


def test_drafts_without_another_source_count_as_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of different lengths have their results in different columns."""
    engine, lengths = (
        make_engine(Setup(k=7, drafter="perfect", max_rows=1, buckets=(1,)), draft_length="auto", all_graphs=True),
        itertools.cycle((7, 3, 0)),
    )
    chooser = engine._parts.draft_lengths
    assert chooser is not None
    monkeypatch.setattr(chooser, "choose", lambda *_, choose=chooser.choose: choose(*_) and Drafting(next(lengths)))
    job = engine.generate([5, 6], constraint=Constraint.regex("[a-z]{60}"), max_new_tokens=60)
    drafts = engine.stats().drafts
    assert job.num_accepted_drafts > 20 and set(job.origins) == {Origin.DRAFT, Origin.TARGET}
    assert (drafts.forced, drafts.looked_up) == (0, 0)
    engine.close()


def calls_per_round(engine: Engine) -> float:
    """Python calls per round of a stepping thread that need not wait for rounds; waiting takes more calls."""
    engine.submit([5, 6], max_new_tokens=90, sampling=IGNORE_EOS)
    for _ in range(20):
        engine.step()
    rounds, calls = engine.stats().rounds, 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    for _ in range(40):
        engine.step()
        time.sleep(0.003)
    sys.setprofile(None)
    return calls / (engine.stats().rounds - rounds)


def test_choice_takes_few_calls_while_the_drafter_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundCosts, "of", lambda *_: costs_of({0: 1.0, 3: 100.0, 7: 100.0}))
    setup = Setup(k=7, drafter="adversarial", max_rows=1, buckets=(1,))
    with make_engine(replace(setup, k=0), all_graphs=True) as plain, make_engine(setup, draft_length="auto", all_graphs=True) as adaptive:
        assert calls_per_round(adaptive) <= calls_per_round(plain) + 16
        assert {graph.key.draft_length for graph in adaptive.stats().graphs} == {0}


@pytest.mark.parametrize("prompts", [[[1, 2]], [[1, 2], [3]]], ids=["alone", "together"])
def test_requests_without_drafts_replay_graphs_without_draft_stages(prompts: list[list[int]]) -> None:
    engine = make_engine(Setup(k=3, drafter="perfect", max_rows=2, buckets=(1, 2)), draft_length="auto", all_graphs=True)
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=8, num_speculative_tokens=0)
    assert [event for event in engine.stream()]
    (graph,) = engine.stats().graphs
    stages = [run.name for run in engine._graphs[graph.key].report.stages]
    assert (graph.key.rows, graph.key.draft_length) == (len(prompts), 0)
    assert not any(name.startswith(("draft_", "choose_draft")) for name in stages)
    engine.close()


def test_choice_does_not_wait() -> None:
    """Rounds with chosen lengths wait for the device as often as rounds of one length: once for the results of each."""
    waits = list[tuple[int, int]]()
    for length in ("auto", 3):
        with make_engine(Setup(k=3, drafter="half", max_rows=1, buckets=(1,)), draft_length=length, all_graphs=True) as engine:
            before = engine.stats()
            job = engine.generate([5, 6], max_new_tokens=60, sampling=IGNORE_EOS)
            after = engine.stats()
            waits.append((after.event_waits - before.event_waits - job.rounds, after.host_syncs - before.host_syncs))
    assert waits[0] == waits[1] == (0, 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"draft_length": "fast"}, r"EngineConfig\.draft_length: got 'fast', expected 'auto', or an integer >= 0"),
        ({"draft_length": None}, r"EngineConfig\.draft_length: got None, expected 'auto', or an integer >= 0"),
        ({"draft_length": 5}, r"EngineConfig\.draft_length: got 5, expected at most num_speculative_tokens=4, or 'auto'"),
        ({"draft_length": "auto", "num_speculative_tokens": 1, "forced_acceptance": (0.5,)}, "got 'auto' with forced_acceptance"),
    ],
)
def test_unusable_draft_lengths_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**config)


def test_trace_has_length_and_account_of_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundCosts, "of", lambda *_: costs_of({0: 4.0, 3: 4.5, 7: 9.0}))
    engine = make_engine(Setup(k=7, drafter="perfect", max_rows=1, buckets=(1,)), draft_length="auto", all_graphs=True)
    with engine.trace(6) as trace:
        engine.generate([5, 6], max_new_tokens=40, sampling=IGNORE_EOS)
    lengths = trace.timeline.lengths
    assert [each.round for each in lengths] == list(range(6)) == list(trace.timeline.rounds)
    assert {each.drafts for each in lengths} <= {0, 3, 7} and lengths[0].account == 12.0 and lengths[-1].account > 12.0
    trace.timeline.save_perfetto(tmp_path / "rounds.json")
    events = json.loads((tmp_path / "rounds.json").read_text())["traceEvents"]
    assert [event["args"]["drafts"] for event in events if event["name"] == "draft length"] == [each.drafts for each in lengths]
    assert len([event for event in events if event["name"] == "draft account"]) == 6
    engine.close()


def test_rejected_drafts_of_prose_do_not_slow_json_in_the_same_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of four JSON requests, alone and with four prose requests whose drafts are all wrong. Costs are fixed; rounds are counted."""
    monkeypatch.setattr(RoundCosts, "of", lambda *_: costs_of({0: 4.0, 3: 4.9, 7: 6.1}))
    config = EngineConfig(max_rows=8, num_speculative_tokens=7, max_length=128, greedy_only=True, buckets=(4, 8), compile_isolation="none")
    schema = {f"a rather long name {index}": {"type": "boolean"} for index in range(3)}
    record = Constraint.json_schema({"type": "object", "properties": schema, "required": list(schema), "additionalProperties": False})
    rounds = list[int]()
    for prose in (0, 4):
        with Engine(TARGET, "forced", vocabulary=VOCABULARY, config=config) as engine:
            engine.capture()
            engine.compile(record)
            others = [engine.submit([index, 9], max_new_tokens=100, sampling=IGNORE_EOS) for index in range(prose)]
            jobs = [engine.submit([index], constraint=record, max_new_tokens=100) for index in range(4)]
            assert [event for event in engine.stream()]
        assert all(len(job.tokens) > 60 for job in jobs) and all(len(job.tokens) == job.rounds for job in others)
        rounds.append(sum(job.rounds for job in jobs))
        tokens = sum(len(job.tokens) for job in jobs)
    assert rounds[0] < tokens / 3 and rounds[1] <= 1.05 * rounds[0]


def test_rejected_drafts_of_prose_do_not_stop_those_of_json() -> None:
    """Wrong drafts of free text leave less in its account than a run of drafts costs. With grammars all drafts are right."""
    lengths, costs = DraftPolicy([PLAIN, Drafting(3)]), costs_of({0: 4.0, 3: 7.0})
    for constrained, rounds in ((False, 200), (True, 20)):
        row, chosen = lengths.row(constrained), list[Drafting]()
        for _ in range(rounds):
            chosen.append(lengths.choose([(row, 3)], costs, constrained=constrained))
            offered = min(each.length for each in chosen[-2:])
            lengths.add(chosen[-1], [of_model(row, offered, offered * constrained)], costs)
        if not constrained:
            assert lengths.account(False, costs) < 3 * (costs[Drafting(3)] - costs[PLAIN])
    assert chosen[-18:] == [Drafting(3)] * 18


def test_length_is_an_integer_or_chosen() -> None:
    """An integer below num_speculative_tokens lowers both to that value."""
    config = EngineConfig(num_speculative_tokens=5, draft_length=2, max_rows=1, max_length=32, grammar_lane="host")
    engine = Engine(TARGET, DRAFTERS["perfect"](), vocabulary=VOCABULARY, config=config)
    engine.capture()
    assert engine.limits.num_speculative_tokens == 2 and engine._parts.draft_lengths is None and len(engine._graphs._recorded) == 4
    assert engine.generate([1], max_new_tokens=9, sampling=IGNORE_EOS).rounds == 4
    with pytest.raises(ValueError, match="num_speculative_tokens: got 3"):
        engine.submit([1], max_new_tokens=9, num_speculative_tokens=3)
    engine.close()
    assert EngineConfig().draft_length == "auto"
