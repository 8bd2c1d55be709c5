"""The engine: its front door, its counts, its rows and pages, and what one request may not do to another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stepgraph.graphs import HostNodeError, StaticBuffers, TapeBackend
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.graphs.shapes import bucket_sizes
from stepgraph.runtime import Constraint, Engine, EngineConfig, FinishReason, SamplingParams, Vocabulary
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.oracles import greedy
from tests.toy_engines import COMPILER, CONSTRAINTS, SCHEMA, STOP, TARGET, VOCABULARY, Setup, compiled, make_engine, shared_engine

SETUP = Setup(k=3)
BAD_SUBMITS: list[tuple[dict[str, Any], str]] = [
    ({"prompt_ids": []}, r"prompt_ids: got an empty prompt"),
    ({"prompt_ids": "hello"}, r"prompt_ids: got str, want a sequence of token ids"),
    ({"prompt_ids": 5}, r"prompt_ids: got int"),
    ({"prompt_ids": [1, 2, -1]}, r"prompt_ids\[2\]: got -1, want a token id from 0 to 131"),
    ({"prompt_ids": [1, 132]}, r"prompt_ids\[1\]: got 132"),
    ({"prompt_ids": [1.0]}, r"prompt_ids\[0\]: got 1.0"),
    ({"prompt_ids": [True]}, r"prompt_ids\[0\]: got True"),
    ({"prompt_ids": torch.zeros(2, 2, dtype=torch.int64)}, r"prompt_ids\[0\]: got \[0, 0\]"),
    ({"prompt_ids": [1] * 96}, r"prompt_ids: got 96 tokens, want fewer than max_length=96"),
    ({"max_new_tokens": 0}, r"max_new_tokens: got 0, want a whole number from 1 to 93"),
    ({"max_new_tokens": 94}, r"max_new_tokens: got 94"),
    ({"max_new_tokens": "many"}, r"max_new_tokens: got 'many'"),
    ({"num_speculative_tokens": 4}, r"num_speculative_tokens: got 4, want a whole number from 0 to 3 \(what the engine was captured for\)"),
    ({"num_speculative_tokens": -1}, r"num_speculative_tokens: got -1"),
    ({"sampling": {"temperature": 1}}, r"sampling: got dict, want SamplingParams"),
    ({"sampling": SamplingParams(stop_token_ids=(500,))}, r"sampling.stop_token_ids\[0\]: got 500"),
    (
        {"sampling": SamplingParams(stop_token_ids=tuple(range(8)))},
        r"sampling.stop_token_ids: got 9 with the vocabulary's own, want at most",
    ),
    ({"constraint": "[a-z]+"}, r"constraint: got str, want a Constraint"),
    ({"constraint": Constraint.regex("(a")}, r"constraint regex"),
    ({"constraint": Constraint.json_schema({"type": "strung"})}, r"constraint json_schema"),
    ({"constraint": Constraint.ebnf("root ::= missing")}, r"constraint ebnf"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SUBMITS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_bad_submit_is_refused_by_name_and_changes_nothing(bad: dict[str, Any], message: str) -> None:
    engine = shared_engine(SETUP)
    before = engine.stats()
    with pytest.raises(ValueError, match=message):
        engine.submit(**{"prompt_ids": [1, 2, 3], "max_new_tokens": 4, **bad})
    assert engine.stats() == before
    assert not engine.has_work


def test_unknown_fields_are_refused_by_name() -> None:
    engine = shared_engine(SETUP)
    with pytest.raises(TypeError, match="top_q"):
        engine.submit([1], top_q=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="max_rowz"):
        EngineConfig(max_rowz=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"SamplingParams.temperature: got 0.7, want 0.0"):
        SamplingParams(temperature=0.7)
    assert not engine.has_work


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_rows": 0}, r"EngineConfig.max_rows: got 0, want a whole number >= 1"),
        ({"num_speculative_tokens": 9}, r"EngineConfig.num_speculative_tokens: got 9, want 0 to 8"),
        ({"page_size": 0}, r"EngineConfig.page_size: got 0"),
        ({"max_length": "long"}, r"EngineConfig.max_length: got 'long'"),
        ({"num_pages": 2}, r"EngineConfig.num_pages: got 2, want >= 64"),
        ({"rounds_in_flight": 0}, r"EngineConfig.rounds_in_flight: got 0"),
        ({"buckets": (1, 2)}, r"buckets: got \(1, 2\), want sizes from 1 to 8"),
        ({"buckets": (0, 8)}, r"buckets: got \(0, 8\)"),
        ({"backend": "vulkan"}, r"EngineConfig.backend: got 'vulkan'"),
        ({"max_queued": 0}, r"EngineConfig.max_queued: got 0"),
    ],
)
def test_a_bad_config_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_a_bad_engine_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"Engine.draft: got None with num_speculative_tokens=4"):
        Engine(TARGET)
    with pytest.raises(ValueError, match=r"Engine.vocabulary: its logits_width is 112, want the target's vocab_size 132"):
        Engine(TARGET, ToyDraft(TARGET), vocabulary=Vocabulary.printable())
    with Engine(TARGET, config=EngineConfig(num_speculative_tokens=0, backend="tape")) as engine:
        engine.capture()
        with pytest.raises(ValueError, match=r"constraint: the engine has no vocabulary"):
            engine.submit([1], constraint=CONSTRAINTS[1])
        assert engine.generate([1], max_new_tokens=3).tokens == greedy(TARGET, [1], 3, ()).tokens


def test_capture_once_before_the_first_step_and_nothing_after_close() -> None:
    engine = Engine(TARGET, ToyDraft(TARGET), config=EngineConfig(max_rows=1, num_speculative_tokens=1, backend="tape"))
    waiting = engine.submit([1, 2], max_new_tokens=2)
    with pytest.raises(RuntimeError, match=r"Engine.step\(\): nothing is captured; call capture\(\) first"):
        engine.step()
    engine.capture()
    with pytest.raises(RuntimeError, match=r"Engine.capture\(\): already captured"):
        engine.capture()
    assert not waiting.finished, "a refused call ends nobody's request"
    engine.close()
    engine.close()
    assert (waiting.finish_reason, waiting.error) == (FinishReason.CANCELLED, "the engine was closed")
    for call in (lambda: engine.submit([1]), engine.step, engine.capture):
        with pytest.raises(RuntimeError, match="the engine was closed"):
            call()
    assert engine.cancel(waiting) is False


class NoSyncs(TorchFunctionMode):
    """Fails on what would make the launching thread wait for a device: any read of a device tensor's values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", "")
        if name in ("item", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal"):
            raise AssertionError(f"host sync on the launching thread: {name}")
        return func(*args, **(kwargs or {}))


def test_one_replay_per_round_and_no_sync_on_the_launching_thread() -> None:
    engine = make_engine(SETUP)
    for constraint in CONSTRAINTS:
        engine.submit([3, 1, 4, 1, 5], constraint=constraint, max_new_tokens=30)
    while engine.has_work:
        before = engine.stats()
        with NoSyncs():
            engine.step()
        after = engine.stats()
        assert after.replays - before.replays == after.rounds - before.rounds <= 1
    stats = engine.stats()
    assert stats.rounds == stats.replays > 10
    assert stats.host_syncs == 0
    engine.close()


def test_the_next_round_is_launched_before_the_last_one_is_read() -> None:
    """With a device that lags behind, a step returns while the newest rounds are still on their way."""
    hold = threading.Event()
    backend = TapeBackend(asynchronous=True, delay=lambda name: (hold.wait(), None)[1])
    engine = make_engine(Setup(k=2, rounds_in_flight=3), backend)
    job = engine.submit([1, 2], max_new_tokens=20)
    assert engine.step() == [] and engine.step() == [], "two rounds are launched without waiting for either"
    assert engine.stats().rounds == 2
    hold.set()
    while not job.finished:
        engine.step()
    assert job.tokens == greedy(TARGET, [1, 2], 20, (STOP,)).tokens
    engine.close()


def test_rings_survive_a_device_that_lags_in_every_way() -> None:
    """Delays at random places of the device: host memory that is still to be copied is never written."""
    pauses = iter([0.0, 0.002, 0.0, 0.004, 0.001] * 100_000)
    engine = make_engine(Setup(k=3, rounds_in_flight=4), TapeBackend(asynchronous=True, delay=lambda name: time.sleep(next(pauses))))
    asks = [([7, place], CONSTRAINTS[place % len(CONSTRAINTS)], 12) for place in range(14)]
    jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=count) for prompt, constraint, count in asks]
    for _ in engine.stream():
        pass
    for (prompt, constraint, count), job in zip(asks, jobs, strict=True):
        assert job.tokens == greedy(TARGET, prompt, count, (STOP,), compiled(constraint)).tokens
    engine.close()


@pytest.mark.parametrize(("k", "draft_masks"), [(0, True), (1, True), (4, True), (8, True), (1, False), (4, False)])
def test_k_plus_one_fills_per_constrained_row_and_round(k: int, draft_masks: bool) -> None:
    """A perfect drafter and an endless grammar: every round walks the whole chain, and fills each of its rows once."""
    target = ToyTarget(
        VOCABULARY.logits_width, seed=5, biases={STOP: -100.0, **dict.fromkeys(range(STOP + 1, VOCABULARY.logits_width), -100.0)}
    )
    config = EngineConfig(max_rows=4, num_speculative_tokens=k, max_length=96, draft_masks=draft_masks, backend="tape")
    with Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        endless = Constraint.regex(r"[ -~\n\t]*")
        jobs = [engine.submit([5, place], constraint=endless, max_new_tokens=41) for place in range(3)]
        engine.submit([9], max_new_tokens=40)  # an unconstrained neighbour costs no fills
        for _ in engine.stream():
            pass
        rounds = 1 + -(-40 // (k + 1))  # the first round has no drafts yet, every other one takes them all
        assert [job.rounds for job in jobs] == [rounds] * 3
        # Row 0 of the first round, and K + 1 rows of every chain: rows 0..K-1 in the round that begins it, row K in the next.
        assert engine.stats().mask_fills == 3 * (1 + (rounds - 1) * (k + 1))


def test_outputs_do_not_depend_on_neighbours_rows_or_buckets() -> None:
    engine = make_engine(Setup(k=3, drafter="fair"))
    prompt, constraint = [11, 12, 13], CONSTRAINTS[1]
    alone = engine.generate(prompt, constraint=constraint, max_new_tokens=60).tokens
    seen = set()
    for neighbours in range(4):
        before = [engine.submit([place, 1], max_new_tokens=50, constraint=CONSTRAINTS[place + 2]) for place in range(neighbours)]
        engine.step()
        job = engine.submit(prompt, constraint=constraint, max_new_tokens=60)
        after = [engine.submit([place, 2], max_new_tokens=9) for place in range(3 - neighbours)]
        engine.step()
        seen.add(next(seat.row for seat in engine._desk.rows if seat.job is job))
        for _ in engine.stream():
            pass
        assert job.tokens == alone
        assert all(other.finished for other in before + after)
    assert len(seen) > 1, "the job sat in different rows"
    engine.close()


def test_outputs_are_bit_identical_captured_and_eager_along_a_whole_schedule() -> None:
    engines = [make_engine(Setup(k=3, eager=eager, asynchronous=False)) for eager in (False, True)]
    jobs = [[engine.submit([place, 4], constraint=CONSTRAINTS[place], max_new_tokens=25) for place in range(6)] for engine in engines]
    while any(engine.has_work for engine in engines):
        captured, eager = (engine.step() for engine in engines)
        assert captured == eager
        for name in engines[0].buffers:
            left, right = (engine.buffers[name] for engine in engines)
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name
    assert [job.tokens for job in jobs[0]] == [job.tokens for job in jobs[1]]
    for engine in engines:
        engine.close()


def test_cancel_at_any_time_is_idempotent_and_frees_the_seat() -> None:
    engine = make_engine(SETUP)
    jobs = [engine.submit([place], max_new_tokens=60, constraint=CONSTRAINTS[place % 3]) for place in range(6)]
    queued = jobs[5]
    assert engine.cancel(queued) and engine.cancel(queued.id)
    engine.step()
    assert queued.finish_reason == FinishReason.CANCELLED and queued.tokens == []
    running = jobs[1]
    engine.step()
    assert engine.cancel(running) and engine.cancel(running)
    events = engine.step()
    assert [event.finish_reason for event in events if event.job_id == running.id] == [FinishReason.CANCELLED]
    length = len(running.tokens)
    late = engine.submit([1, 1], max_new_tokens=30)  # takes the seat while older rounds are on their way
    for event in engine.stream():
        assert event.job_id != running.id, "no event after the last one"
    assert len(running.tokens) == length
    assert engine.cancel(running) is False and engine.cancel(10_000) is False
    assert late.tokens == greedy(TARGET, [1, 1], 30, (STOP,)).tokens
    engine.close()


def test_requests_wait_for_pages_and_nobody_fails() -> None:
    engine = make_engine(SETUP)  # 36 pages of 8 tokens
    jobs = [engine.submit([place] * 10, max_new_tokens=80) for place in range(5)]  # 12 pages each
    engine.step()
    assert (engine.stats().running, engine.stats().waiting, engine.stats().free_pages) == (3, 2, 0)
    for _ in engine.stream():
        pass
    for place, job in enumerate(jobs):
        assert job.tokens == greedy(TARGET, [place] * 10, 80, (STOP,)).tokens
    assert engine.stats().free_pages == 36
    engine.close()


def test_too_many_waiting_requests_are_refused() -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_queued=2, backend="tape")
    with Engine(TARGET, config=config) as engine:
        jobs = [engine.submit([1]) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"2 requests are waiting already \(EngineConfig.max_queued\)"):
            engine.submit([1])
        assert not any(job.finished for job in jobs)


def test_submit_and_cancel_from_many_threads() -> None:
    engine = make_engine(SETUP)
    jobs: list[Any] = []
    lock, go = threading.Lock(), threading.Event()

    def client(number: int) -> None:
        go.wait()
        for place in range(6):
            job = engine.submit([number, place], constraint=CONSTRAINTS[place % 4], max_new_tokens=12)
            with lock:
                jobs.append(job)
            if place % 3 == 2:
                engine.cancel(job)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    go.set()
    events: dict[int, list[int]] = {}
    while any(thread.is_alive() for thread in threads) or engine.has_work:
        for event in engine.step():
            events.setdefault(event.job_id, []).extend(event.tokens)
    assert len(jobs) == 30 and all(job.finished for job in jobs)
    for job in jobs:
        expected = greedy(TARGET, job.prompt_ids, 12, (STOP,), compiled(job.constraint)).tokens
        assert events.get(job.id, []) == job.tokens == expected[: len(job.tokens)]
        assert job.finish_reason == FinishReason.CANCELLED or job.tokens == expected
    engine.close()


def test_a_matcher_that_fails_is_one_requests_error() -> None:
    engine = make_engine(Setup(k=3, drafter="perfect"))
    asks = [([place], CONSTRAINTS[1]) for place in range(3)]
    jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=50) for prompt, constraint in asks]
    engine.step()
    victim = next(seat for seat in engine._desk.rows if seat.job is jobs[1])
    assert victim.matcher is not None

    def explode(masks: Tensor, index: int) -> Any:
        raise RuntimeError("out of fuel")

    victim.matcher.matcher.fill_next_token_bitmask = explode  # type: ignore[method-assign]
    for _ in engine.stream():
        pass
    assert jobs[1].finish_reason == FinishReason.ERROR
    assert "out of fuel" in jobs[1].error
    for place in (0, 2):
        assert jobs[place].tokens == greedy(TARGET, [place], 50, (STOP,), compiled(CONSTRAINTS[1])).tokens
    engine.close()


class PoisonedTarget(ToyTarget):
    """Not-a-number after a prefix that ends in the token 13."""

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        output = super().forward(inputs, buffers)
        return output._replace(hidden=torch.where((inputs.tokens == 13)[..., None], torch.full_like(output.hidden, -1.0), output.hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where((hidden[..., :1] < 0), float("nan"), super().logits(hidden.clamp(min=0)))


def test_non_finite_logits_are_one_requests_error() -> None:
    target = PoisonedTarget(VOCABULARY.logits_width, seed=3)
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=64, backend="tape")
    with Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        bad, good = engine.submit([1, 13], max_new_tokens=8), engine.submit([1, 2], max_new_tokens=8)
        for _ in engine.stream():
            pass
        assert (bad.finish_reason, bad.tokens) == (FinishReason.ERROR, [])
        assert "not finite" in bad.error
        assert good.finish_reason != FinishReason.ERROR and len(good.tokens) == 8


def test_a_dead_end_is_one_requests_finish_reason() -> None:
    """A grammar whose only way on needs bytes that no token has."""
    tokens = [b"a", b"b", b"<eos>"]
    vocabulary = Vocabulary(tokens, [2], logits_width=4)
    target = ToyTarget(4, seed=1)
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=64, backend="tape")
    with Engine(target, ToyDraft(target), vocabulary=vocabulary, config=config) as engine:
        engine.capture()
        stuck = engine.submit([0], constraint=Constraint.regex("ab?z"), max_new_tokens=8)
        free = engine.submit([0], max_new_tokens=8)
        for _ in engine.stream():
            pass
        assert stuck.finish_reason == FinishReason.DEAD_END
        assert free.tokens == greedy(target, [0], 8, (2,)).tokens


def test_a_broken_device_ends_every_job_with_a_reason_and_closes_the_engine() -> None:
    def explode(name: str) -> None:
        if armed.is_set() and name == "commit":
            raise OSError("the host is on fire")

    armed = threading.Event()
    engine = make_engine(SETUP, TapeBackend(asynchronous=True, delay=explode))
    jobs = [engine.submit([place], constraint=CONSTRAINTS[1], max_new_tokens=30) for place in range(6)]
    engine.step()
    armed.set()
    with pytest.raises((HostNodeError, OSError), match="the host is on fire"):  # noqa: PT012
        while True:
            engine.step()
    assert {job.finish_reason for job in jobs} == {FinishReason.ERROR}
    assert all("the host is on fire" in job.error for job in jobs)
    with pytest.raises(RuntimeError, match="the host is on fire"):
        engine.submit([1])


@given(max_rows=st.integers(1, 40), extra=st.lists(st.integers(1, 40), max_size=4))
@settings(max_examples=60)
def test_dispatch_is_total(max_rows: int, extra: list[int]) -> None:
    from stepgraph.graphs.shapes import checked_buckets, dispatch

    for sizes in (bucket_sizes(max_rows), checked_buckets([*[size for size in extra if size <= max_rows], max_rows], max_rows)):
        for batch in range(1, max_rows + 1):
            for constrained in (False, True):
                key = dispatch(sizes, batch, constrained)
                assert key.rows in sizes and key.rows >= batch and key.constrained == constrained
                assert not any(batch <= size < key.rows for size in sizes), "the smallest that fits"


def planted(find: Callable[[], None]) -> bool:
    try:
        find()
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("bug", ["rollback one short", "mask one row off", "page freed twice"])
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls: the oracles must fail on each of these."""
    from stepgraph.runtime.pages import PagePool
    from stepgraph.sampling.grammar.matcher import XGrammarMatcher

    if bug == "rollback one short":
        real_rollback = XGrammarMatcher.rollback
        monkeypatch.setattr(XGrammarMatcher, "rollback", lambda self, count: real_rollback(self, count - 1))
    elif bug == "mask one row off":
        real_fill = XGrammarMatcher.fill_next_token_bitmask
        monkeypatch.setattr(
            XGrammarMatcher, "fill_next_token_bitmask", lambda self, masks, index: real_fill(self, masks, (index + 1) % len(masks))
        )
    else:
        real_give = PagePool.give_back
        monkeypatch.setattr(PagePool, "give_back", lambda self, pages: (real_give(self, pages), self._free.extend(pages))[0])

    def hunt() -> None:
        engine = make_engine(Setup(k=3, drafter="fair"))
        jobs = [engine.submit([place, 3], constraint=CONSTRAINTS[1 + place % 4], max_new_tokens=40) for place in range(12)]
        for _ in engine.stream():
            pass
        monkeypatch.undo()
        for place, job in enumerate(jobs):
            answer = greedy(TARGET, [place, 3], 40, (STOP,), compiled(CONSTRAINTS[1 + place % 4]))
            assert (job.tokens, job.finish_reason) == (answer.tokens, answer.reason)

    assert planted(hunt)


def test_schema_outputs_are_json_of_that_schema() -> None:
    import json

    engine = shared_engine(SETUP)
    for seed in range(20):
        job = engine.generate([seed, 5], constraint=Constraint.json_schema(SCHEMA), max_new_tokens=80)
        if job.finish_reason == FinishReason.CONSTRAINT_COMPLETE:
            document = json.loads(VOCABULARY.decode(job.tokens))
            assert document["name"] in ("ada", "bob") and isinstance(document["age"], int) and len(document["tags"]) <= 3
    assert COMPILER.compile(Constraint.json_schema(SCHEMA)).nbytes > 0
