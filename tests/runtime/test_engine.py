"""Engine: counters, rows, pages, cancellation, and independence of requests."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from stepgraph import Constraint, Engine, EngineClosedError, EngineConfig, FinishReason, Job, SamplingParams
from stepgraph.graphs import StaticBuffers, TapeBackend
from stepgraph.graphs.errors import StepError
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.page_cache import PageCache
from stepgraph.sampling.grammar.compile.compiler import GrammarCompiler
from tests.helpers.toy_engines import (
    CONSTRAINTS,
    STOP,
    TARGET,
    VOCABULARY,
    Setup,
    finish,
    make_engine,
    needs_native,
    plain,
    shared_engine,
)

SETUP = Setup(k=3)


class NoSyncs(TorchFunctionMode):
    """Fails if the launching thread reads the values of a device buffer, which would wait for the device."""

    def __init__(self, buffers: StaticBuffers) -> None:
        super().__init__()
        self.buffers, self.pinned_reads = buffers, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("item", "cpu", "tolist", "numpy", "__bool__", "__int__", "__index__", "nonzero", "equal"):
            owner = self.buffers.owner_of(args[0])
            assert owner is not None and owner[1] == "pinned", f"host sync on the launching thread: {func} of {owner}"
            self.pinned_reads += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("on_demand", [False, True])
def test_one_replay_per_round_and_no_sync_on_the_launching_thread(on_demand: bool) -> None:
    """on_demand: graphs are recorded at their first use, which waits for the device; rounds of recorded graphs do not."""
    engine = make_engine(SETUP, all_graphs=not on_demand)
    guard = NoSyncs(engine.buffers)
    with guard, pytest.raises(AssertionError, match="host sync on the launching thread"):
        engine.buffers.row_state.tolist()
    for is_guarded in (False, True) if on_demand else (True,):
        begun = engine.stats()
        for constraint in CONSTRAINTS:
            engine.submit([3, 1, 4, 1, 5], constraint=constraint, max_new_tokens=30)
        while engine.has_work:
            before = engine.stats()
            with guard if is_guarded else nullcontext():
                engine.step()
            after = engine.stats()
            assert after.replays - before.replays == after.rounds - before.rounds <= 1
    stats = engine.stats()
    assert stats.rounds - begun.rounds == stats.replays - begun.replays > 10
    assert stats.host_syncs == begun.host_syncs == 0 and guard.pinned_reads > 10
    engine.close()


def test_prompts_keep_no_tensor_and_move_no_buffer() -> None:
    """Prompt chunks, unlike rounds, allocate: their inputs and activations live until their call returns."""

    def tensors() -> int:
        engine.backend.synchronize()  # the newest round may still run and hold tensors
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    engine = shared_engine(SETUP)
    counts, pointers = list[int](), engine.buffers.fingerprint()
    for first in (0, 30):
        for length in (2, 9, 23):
            engine.generate([*range(first, first + length)], max_new_tokens=2)
        counts.append(tensors())
    assert counts[0] == counts[1] and engine.buffers.fingerprint() == pointers


def test_next_round_is_launched_before_the_previous_is_read() -> None:
    """With a slow device, a step returns while the newest rounds are in flight."""
    hold = threading.Event()
    backend = TapeBackend(asynchronous=True, delay=lambda name: hold.wait(10))
    engine = make_engine(Setup(k=2, rounds_in_flight=3), backend, all_graphs=True)
    job = engine.submit([1, 2], max_new_tokens=20)
    assert engine.step() == [] and engine.step() == [], "two rounds are launched without waiting for either"
    assert engine.stats().rounds == 2
    hold.set()
    while not job.finished:
        engine.step()
    assert job.tokens == plain([1, 2], 20).tokens
    engine.close()


def test_jobs_of_an_engine_that_is_dropped_without_close_end() -> None:
    engine = make_engine(Setup(k=1, max_rows=1))
    jobs = [engine.submit([1], constraint=CONSTRAINTS[1], max_new_tokens=20) for _ in range(2)]
    engine.step()
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
    assert [(job.finish_reason, job.error) for job in jobs] == [(FinishReason.CANCELLED, "the engine was dropped without close()")] * 2


@pytest.mark.parametrize(("stop", "limit"), [((), 8), (("zq~zq", "END"), 24)], ids=["", "stop strings"])
def test_each_further_row_adds_few_python_calls_to_a_step(stop: tuple[str, ...], limit: int) -> None:
    """They delay the launch of the next round."""
    calls = []
    with make_engine(Setup(k=3, max_rows=32, num_pages=32 * 12, buckets=(32,), prefill_chunk=512)) as engine:
        for size in (1, 32):
            sampling = SamplingParams(ignore_eos=True, stop=stop)
            jobs = [engine.submit([5, index], max_new_tokens=80, sampling=sampling) for index in range(size)]
            while not all(job.tokens for job in jobs):
                engine.step()
            frames = list[FrameType]()
            sys.setprofile(lambda frame, event, _, frames=frames: frames.append(frame) if event == "call" else None)  # type: ignore[misc]
            for _ in range(4):
                engine.step()
            sys.setprofile(None)
            calls.append(sum("/tape/" not in frame.f_code.co_filename for frame in frames))
            assert not any(job.finished for job in jobs)
            finish(engine)
    assert (calls[1] - calls[0]) / (4 * 31) < limit, calls


def test_a_burst_of_arrivals_does_not_wait_for_the_device() -> None:
    hold = threading.Event()
    engine = make_engine(
        Setup(k=2, max_rows=8, rounds_in_flight=4), TapeBackend(asynchronous=True, delay=lambda name: hold.wait(10)), all_graphs=True
    )
    waits = engine.stats().event_waits  # of the capture
    engine.submit([1], max_new_tokens=20)
    assert engine.step() == []
    jobs = [engine.submit([1, index], max_new_tokens=4) for index in range(7)]
    assert engine.step() == [] and engine.stats().running == 8
    assert engine.stats().event_waits == waits
    hold.set()
    list(engine.stream())
    assert [job.tokens for job in jobs] == [plain([1, index], 4).tokens for index in range(7)]
    engine.close()


def test_matchers_are_freed_when_their_requests_end() -> None:
    engine = shared_engine(replace(SETUP, grammar_lane="host"))
    jobs = [engine.submit([index], constraint=CONSTRAINTS[1 + index % 3], max_new_tokens=20) for index in range(8)]
    engine.step()
    matchers = [weakref.ref(request.matcher.matcher) for request in engine._scheduler.active if request.matcher]
    assert len(matchers) == 4
    finish(engine)
    engine.backend.synchronize()
    assert all(job.finished for job in jobs)
    assert [matcher() for matcher in matchers] == [None] * 4


def test_submit_during_close_raises_or_is_cancelled() -> None:
    engine = make_engine(SETUP, all_graphs=True)
    entered, closing = threading.Event(), threading.Event()
    real = engine._require_open

    def slowly(call: str) -> None:
        real(call)
        if threading.current_thread() is client and call == "submit":
            entered.set()
            closing.wait(0.2)  # the second check is made under the lock, which close() waits for

    outcome: list[object] = []

    def submit() -> None:
        try:
            outcome.append(engine.submit([1], max_new_tokens=3))
        except RuntimeError as error:
            outcome.append(error)

    client = threading.Thread(target=submit)
    engine._require_open = slowly  # type: ignore[method-assign]
    client.start()
    assert entered.wait(10)
    engine.close()
    client.join()
    (result,) = outcome
    assert isinstance(result, RuntimeError) or (isinstance(result, Job) and result.finish_reason == FinishReason.CANCELLED)
    assert not engine.has_work


def test_pinned_rings_with_random_device_delays() -> None:
    """Host memory is never overwritten before its copy has finished."""
    pauses = iter([0.0, 0.002, 0.0, 0.004, 0.001] * 100_000)
    engine = make_engine(
        Setup(k=3, rounds_in_flight=4), TapeBackend(asynchronous=True, delay=lambda name: time.sleep(next(pauses))), all_graphs=True
    )
    asks = [([7, index], CONSTRAINTS[index % len(CONSTRAINTS)], 12) for index in range(14)]
    jobs = [engine.submit(prompt, constraint=constraint, max_new_tokens=count) for prompt, constraint, count in asks]
    finish(engine)
    for (prompt, constraint, count), job in zip(asks, jobs, strict=True):
        assert job.tokens == plain(prompt, count, constraint).tokens
    engine.close()


@pytest.mark.parametrize(("k", "draft_masks"), [(0, True), (1, True), (4, True), (8, True), (1, False), (4, False)])
def test_k_plus_one_fills_per_constrained_row_and_round(k: int, draft_masks: bool) -> None:
    """A perfect drafter and an endless grammar: every round accepts all drafts, and fills each mask row once."""
    target = ToyTarget(
        VOCABULARY.logits_width, seed=5, biases={STOP: -100.0, **dict.fromkeys(range(STOP + 1, VOCABULARY.logits_width), -100.0)}
    )
    sizes: dict[str, Any] = {"max_rows": 4, "buckets": (4,), "num_speculative_tokens": k, "draft_length": k, "max_length": 96}
    sizes |= {"compile_isolation": "none", "backend": "tape", "grammar_lane": "host"}
    config = EngineConfig(**sizes, draft_masks=draft_masks, greedy_only=True)
    with Engine(target, ToyDraft(target), vocabulary=VOCABULARY, config=config) as engine:
        engine.capture()
        endless = Constraint.regex(r"[ -~\n\t]*")
        jobs = [engine.submit([5, index], constraint=endless, max_new_tokens=41) for index in range(3)]
        engine.submit([9], max_new_tokens=40)  # an unconstrained request costs no fills
        finish(engine)
        rounds = 1 + -(-40 // (k + 1))  # the first round has no drafts, every other accepts all
        assert [job.rounds for job in jobs] == [rounds] * 3
        # Row 0 of the first round, and K + 1 rows of every chain: rows 0..K-1 in the round that begins it, row K in the next.
        assert engine.stats().mask_fills == 3 * (1 + (rounds - 1) * (k + 1))


@pytest.mark.parametrize("k", [0, 3, 8])
def test_request_may_reach_max_length(k: int) -> None:
    """Drafts beyond max_length are inert: they write to the scratch page."""
    engine = make_engine(Setup(k=k, drafter="perfect", max_rows=2, buckets=(2,)))
    for length in range(engine.limits.max_length - 10, engine.limits.max_length):
        prompt = [(index * 7 + length) % 90 for index in range(length)]
        room = engine.limits.max_length - length
        job = engine.submit(prompt, max_new_tokens=room)
        short = engine.submit([length % 90], max_new_tokens=room)
        finish(engine)
        assert job.tokens == plain(prompt, room).tokens
        assert short.tokens == plain([length % 90], room).tokens
    engine.close()


def test_graphs_are_recorded_while_other_rounds_are_in_flight() -> None:
    """Without capture(): rows arrive one by one, so each round may need a graph of another kind than those in flight."""
    config = EngineConfig(max_rows=4, num_speculative_tokens=2, max_length=48, rounds_in_flight=3, compile_isolation="none")
    with Engine(TARGET, ToyDraft(TARGET, 0.7), vocabulary=VOCABULARY, config=config) as engine:
        free = SamplingParams(ignore_eos=True, temperature=0)
        jobs = [engine.submit([1], max_new_tokens=40, sampling=free)]
        for _ in range(3):
            engine.step()
        recorded = {(key.rows, key.constrained, key.sampled) for key in engine._graphs._recorded if isinstance(key, GraphKey)}
        assert recorded == {(1, False, False)}
        for constraint in (None, Constraint.regex("[a-c]{9}"), Constraint.regex("[x-z]{9}")):
            if constraint:
                engine.compile(constraint)
            sampling = free if constraint is None else SamplingParams()
            jobs.append(engine.submit([len(jobs) + 1], constraint=constraint, max_new_tokens=20, sampling=sampling))
            engine.step()
        finish(engine)
        for number, job in enumerate(jobs):
            expected = plain([number + 1], job.max_new_tokens, job.constraint, sampling=job.sampling)
            assert job.tokens == expected.tokens, job


def test_capture_after_the_first_request_records_the_graphs_that_are_missing() -> None:
    config = EngineConfig(max_rows=2, num_speculative_tokens=2, max_length=48, compile_isolation="none")
    with Engine(TARGET, ToyDraft(TARGET, 0.7), vocabulary=VOCABULARY, config=config) as engine:
        free = SamplingParams(ignore_eos=True, temperature=0)
        job = engine.submit([1], max_new_tokens=30, sampling=free)
        for _ in range(3):
            engine.step()
        before = dict(engine._graphs._recorded)
        assert before and not job.finished
        report = engine.capture()
        assert len(before) < len(report.keys) and {key.rows for key, _ in report.keys} == {1, 2}
        assert all(engine._graphs[key] is recorded for key, recorded in before.items())
        finish(engine)
        assert job.tokens == plain([1], 30, sampling=free).tokens
        with pytest.raises(RuntimeError, match="already captured, by a call or by a step"):
            engine.capture()


@pytest.mark.parametrize("device", [False, pytest.param(True, marks=needs_native)])
def test_captured_and_eager_engines_have_equal_buffers_after_every_step(device: bool) -> None:
    setup = Setup(k=3, asynchronous=False, grammar_lane="device" if device else "host")
    engines = [make_engine(replace(setup, eager=eager)) for eager in (False, True)]
    constraints = [*CONSTRAINTS[:6], replace(CONSTRAINTS[6], backend="xgrammar")] if device else CONSTRAINTS[:6]
    jobs: list[list[Job]] = [[], []]
    for index, constraint in enumerate(constraints):
        for engine, submitted in zip(engines, jobs, strict=True):
            if constraint:
                engine.compile(constraint)
            submitted.append(engine.submit([index, 4], constraint=constraint, max_new_tokens=25))
    while any(engine.has_work for engine in engines):
        captured, eager = (engine.step() for engine in engines)
        assert captured == eager
        for name in engines[0].buffers:
            left, right = (engine.buffers[name] for engine in engines)
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name
    assert [job.tokens for job in jobs[0]] == [job.tokens for job in jobs[1]]
    for engine in engines:
        engine.close()


def test_cancel_is_idempotent_and_frees_the_row() -> None:
    engine = shared_engine(SETUP)
    jobs = [engine.submit([index], max_new_tokens=60, constraint=CONSTRAINTS[index % 3]) for index in range(6)]
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
    late = engine.submit([1, 1], max_new_tokens=30)  # gets the row while older rounds are in flight
    for event in engine.stream():
        assert event.job_id != running.id, "no event after the last one"
    assert len(running.tokens) == length
    assert engine.cancel(running) is False and engine.cancel(10_000) is False
    assert late.tokens == plain([1, 1], 30).tokens


def test_a_request_that_waits_for_pages_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up takes time in proportion to the prompt."""
    with make_engine(Setup(k=0, num_pages=12, max_rows=3, buckets=(3,))) as engine:  # pages of eight tokens
        sampling = SamplingParams(ignore_eos=True)
        first = engine.submit([7] * 30, max_new_tokens=58, sampling=sampling)  # eleven pages
        while not first.tokens:
            engine.step()
        looked_up, find = list[int](), PageCache.find
        monkeypatch.setattr(PageCache, "find", lambda self, salt, ids, limit: looked_up.append(limit) or find(self, salt, ids, limit))  # type: ignore[func-returns-value]
        later = engine.submit([7] * 30, max_new_tokens=58, sampling=sampling)
        while not later.tokens:
            engine.step()
        assert first.finished and later.num_cached_tokens == 24 and len(looked_up) <= 4
        finish(engine)
        assert later.tokens == first.tokens


def test_submit_and_cancel_from_many_threads() -> None:
    engine = shared_engine(SETUP)
    jobs: list[Any] = []
    lock, go = threading.Lock(), threading.Event()

    def client(number: int) -> None:
        go.wait(10)
        for index in range(6):
            job = engine.submit([number, index], constraint=CONSTRAINTS[index % 4], max_new_tokens=12)
            with lock:
                jobs.append(job)
            if index % 3 == 2:
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
        expected = plain(job.prompt_ids, 12, job.constraint).tokens
        assert events.get(job.id, []) == job.tokens == expected[: len(job.tokens)]
        assert job.finish_reason == FinishReason.CANCELLED or job.tokens == expected


@pytest.mark.parametrize("eager", [False, True])
def test_an_engine_made_in_inference_mode_works_within_and_outside_of_it(eager: bool) -> None:
    with torch.inference_mode():
        engine = make_engine(Setup(k=2, max_rows=1, buckets=(1,), eager=eager))
        within = engine.generate([1, 2, 3], max_new_tokens=12)
    with engine:
        assert engine.generate([1, 2, 3], max_new_tokens=12).tokens == within.tokens == plain([1, 2, 3], 12).tokens


def test_several_rounds_that_fail_are_one_error_and_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    class Failing(ToyTarget):
        def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
            raise RuntimeError("of the model")

    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, eager=True, rounds_in_flight=4, backend="tape")
    with Engine(Failing(9), config=config) as engine:
        job, launched = engine.submit([1]), threading.Event()
        engine.backend.run(lambda: launched.wait(10))
        for _ in range(3):
            assert engine.step() == []
        launched.set()
        with pytest.raises(StepError, match="the step raised RuntimeError: of the model"):
            engine.step()
    assert job.finish_reason == FinishReason.ERROR and "of the model" in job.error
    assert [str(each.message) for each in recwarn if each.category is RuntimeWarning] == []


@pytest.mark.parametrize(("call", "during"), [("submit", "check"), ("compile", "check"), ("compile", "_compile_entry")])
def test_engine_that_another_thread_closes_during_a_call_raises_engine_closed_error(
    call: str, during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=64)
    engine, real = Engine(TARGET, vocabulary=VOCABULARY, config=config), getattr(GrammarCompiler, during)

    def close_before(*arguments: Any) -> Any:
        engine.close()
        return real(*arguments)

    monkeypatch.setattr(GrammarCompiler, during, close_before)
    with pytest.raises(EngineClosedError, match=rf"Engine.{call}\(\): the engine was closed"):
        engine.submit([5], constraint=Constraint.regex("a+")) if call == "submit" else engine.compile(Constraint.regex("a+"))


def test_first_steps_of_two_threads_capture_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(max_rows=2, max_length=48, eager=True, greedy_only=True)
    with Engine(TARGET, ToyDraft(TARGET), vocabulary=VOCABULARY, config=config) as engine, ThreadPoolExecutor(2) as pool:
        both, ensure_captured = threading.Barrier(2), engine.ensure_captured
        monkeypatch.setattr(engine, "ensure_captured", lambda: (both.wait(30), ensure_captured()))
        jobs = [pool.submit(engine.generate, [1, index], max_new_tokens=4) for index in range(2)]
        assert [job.result().tokens for job in jobs] == [plain([1, index], 4).tokens for index in range(2)]
