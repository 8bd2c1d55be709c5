"""A fault of one request ends only that request with an error; the oracles detect planted bugs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, Job, Vocabulary
from stepgraph.graphs import HostNodeError, StaticBuffers, TapeBackend
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.request import ActiveRequest
from stepgraph.sampling.grammar.link.native import NativeRow
from stepgraph.sampling.grammar.status import MaskStatus
from tests.helpers.oracles import greedy
from tests.helpers.planted import USUAL_MATCHER, break_fill, exhaust_fuel, plant
from tests.helpers.toy_engines import CONSTRAINTS, VOCABULARY, Setup, finish, make_engine, needs_native, plain

SETUP = Setup(k=3)
HOST_LINKS = ["python", pytest.param("native", marks=needs_native)]


def active_request(engine: Engine, job: Job) -> ActiveRequest:
    engine._scheduler.admit()
    return next(request for request in engine._scheduler.active if request.job is job)


@pytest.mark.parametrize("host_link", HOST_LINKS)
def test_matcher_fault_is_one_requests_error(host_link: str) -> None:
    engine = make_engine(Setup(k=3, drafter="perfect", grammar_lane="host", host_link=host_link))
    requests = [([token], CONSTRAINTS[1]) for token in range(3)]
    jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=50) for prompt, constraint in requests]
    engine.step()
    faulty = active_request(engine, jobs[1])
    assert faulty.matcher is not None
    break_fill(faulty.matcher, "out of fuel")
    finish(engine)
    assert jobs[1].finish_reason == FinishReason.ERROR
    assert "out of fuel" in jobs[1].error
    for index in (0, 2):
        assert jobs[index].tokens == plain([index], 50, CONSTRAINTS[1]).tokens
    engine.close()


@pytest.mark.parametrize("field", [0, 1, 2, 3])
def test_wrong_mask_tag_ends_only_that_request(field: int) -> None:
    """Change one field of a row's mask tag on the device between two rounds: no token is sampled under that mask."""
    engine = make_engine(Setup(k=2, drafter="perfect", rounds_in_flight=1))
    jobs = [engine.submit([token], constraint=CONSTRAINTS[1], max_new_tokens=50) for token in range(2)]
    engine.step()
    engine.step()
    row = active_request(engine, jobs[0]).row
    engine.backend.run(lambda: engine.buffers.row_tags[row, :, field].add_(77))
    length = len(jobs[0].tokens)
    finish(engine)
    assert (jobs[0].finish_reason, len(jobs[0].tokens)) == (FinishReason.ERROR, length)
    assert "no valid grammar mask" in jobs[0].error
    assert jobs[1].tokens == plain([1], 50, CONSTRAINTS[1]).tokens
    engine.close()


LIMITED = replace(CONSTRAINTS[1], backend="xgrammar") if CONSTRAINTS[1] else None  # a library whose steps have a time limit


@pytest.mark.parametrize("host_link", HOST_LINKS)
@pytest.mark.parametrize("k", [0, 2])
def test_exhausted_grammar_fuel_is_reported(k: int, host_link: str) -> None:
    engine = make_engine(Setup(k=k, grammar_lane="host", host_link=host_link))
    assert LIMITED and engine.compile(LIMITED)
    job, other = engine.submit([1], constraint=LIMITED, max_new_tokens=50), engine.submit([2], max_new_tokens=20)
    row = active_request(engine, job).matcher
    assert row is not None
    exhaust_fuel(row)
    finish(engine)
    assert job.finish_reason == FinishReason.ERROR
    assert "one step of the grammar took" in job.error
    assert other.tokens == plain([2], 20).tokens
    engine.close()


class PoisonedTarget(ToyTarget):
    """Logits are NaN after token 13."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        output = super().forward(inputs, buffers)
        return output._replace(hidden=torch.where((inputs.tokens == 13)[..., None], torch.full_like(output.hidden, -1.0), output.hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where((hidden[..., :1] < 0), float("nan"), super().logits(hidden.clamp(min=0)))


def test_non_finite_logits_are_one_requests_error() -> None:
    target = PoisonedTarget(VOCABULARY.logits_width, seed=3)
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, draft_length=2, max_length=64, backend="tape")
    with Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        bad, good = engine.submit([1, 13], max_new_tokens=8), engine.submit([1, 2], max_new_tokens=8)
        finish(engine)
        assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, [])
        assert "not finite" in bad.error
        assert good.finish_reason != FinishReason.ERROR and len(good.tokens) == 8


def test_a_dead_end_is_one_requests_finish_reason() -> None:
    """A grammar whose only continuation needs a byte that occurs in no token."""
    tokens = [b"a", b"b", b"<eos>"]
    vocabulary = Vocabulary(tokens, [2], logits_width=4)
    target = ToyTarget(4, seed=1)
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, draft_length=2, max_length=64, backend="tape")
    with Engine(target, ToyDraft(target), vocabulary=vocabulary, config=config) as engine:
        engine.capture()
        stuck = engine.submit([0], constraint=Constraint.regex("ab?z"), max_new_tokens=8)
        free = engine.submit([0], max_new_tokens=8)
        finish(engine)
        assert stuck.finish_reason == FinishReason.DEAD_END
        assert free.tokens == greedy(target, [0], 8, (2,), num_tokens=3).tokens


def test_device_fault_ends_every_job_and_closes_the_engine() -> None:
    def fail_at_commit(name: str) -> None:
        if armed.is_set() and name == "commit":
            raise OSError("injected host failure")

    armed = threading.Event()
    engine = make_engine(replace(SETUP, grammar_lane="host"), TapeBackend(asynchronous=True, delay=fail_at_commit))
    jobs = [engine.submit([token], constraint=CONSTRAINTS[1], max_new_tokens=30) for token in range(6)]
    engine.step()
    armed.set()
    with pytest.raises((HostNodeError, OSError), match="injected host failure"):  # noqa: PT012
        while True:
            engine.step()
    assert {job.finish_reason for job in jobs} == {FinishReason.ERROR}
    assert all("injected host failure" in job.error for job in jobs)
    with pytest.raises(RuntimeError, match="injected host failure"):
        engine.submit([1])


def raises_assertion(check: Callable[[], None]) -> bool:
    try:
        check()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "bug",
    [
        "rollback one short",
        "mask one row off",
        "page freed twice",
        pytest.param("native: rollback one short", marks=needs_native),
        pytest.param("native: mask not filled", marks=needs_native),
    ],
)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the oracle must detect each of these bugs."""
    from stepgraph.runtime.page_cache import PageCache

    if bug.startswith("native"):
        real_init = NativeRow.__init__

        def planted_init(row: NativeRow, *arguments: Any) -> None:
            real_init(row, *arguments)
            if bug == "native: rollback one short":
                plant(row, "rollback", lambda real, library, matcher, count, why: real(library, matcher, count - 1, why))
            else:
                plant(row, "fill", lambda *_: int(MaskStatus.OK))

        monkeypatch.setattr(NativeRow, "__init__", planted_init)
    elif bug == "rollback one short":
        real_rollback = USUAL_MATCHER.rollback
        monkeypatch.setattr(USUAL_MATCHER, "rollback", lambda self, count: real_rollback(self, count - 1))
    elif bug == "mask one row off":
        real_fill = USUAL_MATCHER.fill_next_token_bitmask
        monkeypatch.setattr(
            USUAL_MATCHER, "fill_next_token_bitmask", lambda self, masks, index: real_fill(self, masks, (index + 1) % len(masks))
        )
    else:
        real_free = PageCache.free
        monkeypatch.setattr(PageCache, "free", lambda self, pages: (real_free(self, pages), self._free.extend(pages))[0])

    def compare_with_oracle() -> None:
        host_link = "native" if bug.startswith("native") else "python"
        engine = make_engine(Setup(k=3, drafter="fair", grammar_lane="host", host_link=host_link))
        jobs = [engine.submit([token, 3], constraint=CONSTRAINTS[1 + token % 4], max_new_tokens=40) for token in range(12)]
        finish(engine)
        monkeypatch.undo()
        for token, job in enumerate(jobs):
            answer = plain([token, 3], 40, CONSTRAINTS[1 + token % 4])
            assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)

    assert raises_assertion(compare_with_oracle)
