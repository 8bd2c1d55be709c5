"""DraftStats: each loss compared with an independent matcher, and figures of known runs."""

from __future__ import annotations

from typing import Any

import pytest

from stepgraph import Constraint, Engine, SamplingParams
from stepgraph.graphs.row_layout import REFUSED, Column, ResultRecord
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.scheduler import LossCause, loss_cause
from stepgraph.sampling.grammar.status import MaskStatus
from tests.helpers.stat_checks import check_invariants, run
from tests.helpers.toy_engines import CONSTRAINTS, STOP, Setup, compiled, make_engine, shared_engine

OK, ILLEGAL, NONE = int(MaskStatus.OK), int(MaskStatus.ILLEGAL), int(MaskStatus.NONE)
PERFECT = Setup(4, drafter="perfect", eager=True)
TERMINATED, COMPLETE = int(MaskStatus.TERMINATED), int(MaskStatus.COMPLETE)


@pytest.mark.parametrize(
    ("arguments", "loss"),
    [
        ((3, 4, 3, 3, [OK] * 4, [5, 6, 7]), None),
        ((2, 3, 2, 3, [OK] * 4, [5, 6, 7]), None),  # the request allows two drafts, and both were accepted
        ((3, 3, 3, 3, [OK, OK, OK, TERMINATED], [5, 6, STOP]), None),  # the last draft ended the text
        ((3, 1, 1, 3, [OK] * 4, [5, 6, 7]), LossCause.ENDED),  # a limit between two accepted drafts
        ((3, 1, 1, 1, [OK, COMPLETE, NONE, NONE], [5, -1, -1]), LossCause.ENDED),
        ((3, 0, 0, 0, [NONE] * 4, [-1, -1, -1]), LossCause.ENDED),  # a failed mask ended the text
        ((3, 2, 1, 3, [OK] * 4, [5, 6, 7]), LossCause.IMPROBABLE),
        ((3, 2, 1, 3, [OK, OK, TERMINATED, NONE], [5, STOP, 7]), LossCause.IMPROBABLE),  # a stop token was drafted, and not chosen
        ((3, 2, 1, 3, [OK, OK, ILLEGAL, NONE], [5, 6, 7]), LossCause.ILLEGAL),
        ((3, 1, 0, 3, [OK, NONE, NONE, NONE], [5, 6, 7]), LossCause.ILLEGAL),  # the draft was not checked
        ((3, 2, 1, 1, [OK] * 4, [5, REFUSED, -1]), LossCause.ILLEGAL),
        ((3, 2, 1, 1, [OK] * 4, [5, -1, -1]), LossCause.UNDRAFTED),
        ((3, 1, 0, 0, [OK] * 4, [-1, -1, -1]), LossCause.UNDRAFTED),
    ],
)
def test_loss_of_each_kind_of_round(arguments: Any, loss: LossCause | None) -> None:
    requested, emitted, accepted, draft_count, statuses, drafts = arguments
    result = ResultRecord(emitted, 0, accepted, draft_count, [], statuses, drafts, forced=0, looked_up=0, relaxed=0, logprobs=[])
    assert loss_cause(requested, result) == loss


class LossOracle:
    """Reads the drafts before each round, and determines the loss with its own matcher."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen, self.expected_causes = engine, dict[int, tuple[int, list[int]]](), list[LossCause | None]()
        self.real_launch, self.real_record = engine._in_flight.launch, engine._scheduler.record
        vars(engine._in_flight)["launch"], vars(engine._scheduler)["record"] = self.launch, self.record

    def launch(self, requests: tuple[ActiveRequest, ...]) -> None:
        buffers = self.engine.buffers
        for request in requests:
            self.seen[request.job.id] = int(buffers.row_state[request.row, Column.DRAFT_COUNT]), buffers.row_drafts[request.row].tolist()
        self.real_launch(requests)

    def record(self, request: ActiveRequest, result: ResultRecord) -> Any:
        job, tokens, accepted = request.job, result.tokens[: result.emitted], result.accepted
        offered, drafts = self.seen[job.id]
        history, first = [*job.tokens, *tokens[:accepted]], not job.rounds
        event = self.real_record(request, result)
        if (first and not offered) or not job.num_speculative_tokens:
            return event
        expected: LossCause | None = None
        if accepted < job.num_speculative_tokens:
            if job.finished and len(tokens) == accepted:
                expected = LossCause.ENDED
            elif accepted < offered:
                legal = self.legal(job.constraint, history, drafts[accepted])
                expected = LossCause.IMPROBABLE if legal else LossCause.ILLEGAL
                assert drafts[accepted] != tokens[accepted], "a draft equal to the token of the target is accepted"
            else:
                expected = self.undrafted(job.constraint, offered)
        assert loss_cause(job.num_speculative_tokens, result) == expected, f"{offered} of {drafts}, {accepted} held, then {tokens}"
        self.expected_causes.append(expected)
        return event

    def undrafted(self, constraint: Constraint | None, offered: int) -> LossCause:
        """With forced drafts, the test has one drafter: it always proposes the control token, which every grammar refuses."""
        refused = "batch_forced" in self.engine.buffers and constraint is not None and not offered
        return LossCause.ILLEGAL if refused else LossCause.UNDRAFTED

    @staticmethod
    def legal(constraint: Constraint | None, history: list[int], draft: int) -> bool:
        if constraint is None:
            return True
        grammar = compiled(constraint)
        assert grammar is not None
        matcher = grammar.matcher()
        assert all(matcher.accept_token(token) for token in history)
        return matcher.accept_token(draft)


@pytest.mark.parametrize(
    ("drafter", "draft_masks", "forced", "causes"),
    [
        ("fair", True, False, {LossCause.IMPROBABLE, LossCause.ENDED, None}),
        ("illegal", False, False, {LossCause.ILLEGAL, LossCause.IMPROBABLE, LossCause.ENDED}),
        ("half", True, False, {LossCause.IMPROBABLE, LossCause.UNDRAFTED, LossCause.ENDED}),
        ("control", True, False, {LossCause.ILLEGAL, LossCause.IMPROBABLE, LossCause.ENDED}),
        ("control", True, True, set(LossCause) | {None}),
        ("ngram", True, False, {LossCause.ILLEGAL, LossCause.IMPROBABLE, LossCause.UNDRAFTED, LossCause.ENDED}),
    ],
)
def test_losses_agree_with_an_independent_matcher(drafter: str, draft_masks: bool, forced: bool, causes: set[LossCause | None]) -> None:
    setup = Setup(3, draft_masks, drafter, rounds_in_flight=1, asynchronous=False, forced_drafts=forced, eager=True)
    with make_engine(setup) as engine:
        oracle = LossOracle(engine)
        tokens = run(engine)
        drafting = engine.stats().drafting
        counted = {loss: getattr(drafting, loss.value) for loss in LossCause}
        assert (drafting.full, drafting.rounds) == (oracle.expected_causes.count(None), len(oracle.expected_causes))
        assert counted == {loss: oracle.expected_causes.count(loss) for loss in LossCause}
        assert set(oracle.expected_causes) == causes, "every cause occurs"
        assert engine.stats().tokens == tokens
        check_invariants(engine.stats())


def test_drafting_stats_of_a_perfect_draft() -> None:
    """Four drafts, all accepted: rounds of one token, of five, and of the rest up to the limit."""
    engine = shared_engine(PERFECT)
    before = engine.stats()
    assert run(engine, [None], tokens=9, sampling=SamplingParams(temperature=0, ignore_eos=True)) == 9
    after = engine.stats()
    drafting = after.drafting
    change = [now - then for now, then in zip(drafting.accepted, before.drafting.accepted, strict=True)]
    assert change == [2, 2, 2, 1] and after.drafting.rounds - before.drafting.rounds == 2
    assert (drafting.full - before.drafting.full, drafting.ended - before.drafting.ended) == (1, 1)
    assert drafting.tokens - before.drafting.tokens == 8, "the first token was not drafted"
    assert drafting.accepted_length == drafting.tokens / drafting.rounds
    check_invariants(after)


def test_drafting_stats_use_the_draft_limit_of_each_request() -> None:
    engine = shared_engine(PERFECT)
    before = engine.stats().drafting
    run(engine, [None, CONSTRAINTS[1]], tokens=12, num_speculative_tokens=0)
    assert engine.stats().drafting == before
    run(engine, [None], tokens=7, num_speculative_tokens=2, sampling=SamplingParams(temperature=0, ignore_eos=True))
    after = engine.stats().drafting
    assert (after.rounds - before.rounds, after.full - before.full) == (2, 2), "twice two drafts and a token of the target"
    assert after.offered[2:] == before.offered[2:]
