"""Streams that lose their replica, over real engines in this process: the tokens, ends and log-probabilities are those of one engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from stepgraph import AsyncEngine, Constraint, Engine, FinishReason, Job, SamplingParams, StepEvent
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.replicas import streams
from stepgraph.runtime.replicas.replica import AnswerPart, Refusal, ReplicaRequest, Tokens, answer, info_of
from stepgraph.runtime.replicas.router import PrefixRouter
from stepgraph.runtime.replicas.streams import ATTEMPTS, MAX_OTHERS, Counts, ReplicaLost, ResumedStream
from stepgraph.runtime.request_queue import QueueFullError
from stepgraph.runtime.serve.serving import AnswerError
from tests.helpers.toy_engines import CONSTRAINTS, STOP, Setup, make_engine, shared_engine

PROMPT, TOKENS = [49, 65, 16, 66, 71, 26, 54, 7, 61, 46, 72], 24
PLAIN, DRAFTED = (Setup(k=k, greedy_only=False, buckets=(4,), look_up=k) for k in (0, 3))
SAMPLED = SamplingParams(temperature=1.3, top_p=0.95, seed=11, min_new_tokens=9, repetition_penalty=1.3, logprobs=True, prompt_logprobs=0)
SAMPLINGS = {"greedy": SamplingParams(min_new_tokens=9, logit_bias={STOP: 2.0}, logprobs=True, temperature=0), "sampled": SAMPLED}


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BACKOFF_SECONDS", 0)


@dataclass
class Replicas:
    """Two engines with equal settings. The engine of each call is lost after the number of parts in `cuts`."""

    serving: list[AsyncEngine]
    cuts: list[int]
    identities: list[str] = field(default_factory=lambda: ["x", "x"])
    change: Callable[[AnswerPart], AnswerPart] = field(default=lambda part: part)
    asks: list[ReplicaRequest] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=lambda: {"a": 0, "b": 1})
    returns: bool = True  # whether a lost replica becomes available again
    absent: range = range(0)  # the calls for which Ray does not list a

    async def call(self, ask: ReplicaRequest) -> AsyncGenerator[AnswerPart, None]:
        names, loads = ["a", "b"], {name: load for name, load in self.loads.items() if name != "a" or len(self.asks) not in self.absent}
        number = names.index(PrefixRouter().rank((), loads, ask.avoid)[0])
        cut, self.asks = (self.cuts[len(self.asks)] if len(self.asks) < len(self.cuts) else 10**9), [*self.asks, ask]
        async with contextlib.aclosing(answer(self.serving[number], ask, names[number], self.identities[number])) as parts:
            for count in itertools.count():
                if count == cut:
                    if not self.returns:
                        del self.loads[names[number]]
                    raise ReplicaLost("ActorDiedError: killed", names[number])
                try:
                    part = await parts.__anext__()
                except StopAsyncIteration:
                    return
                yield part if len(self.asks) == 1 else self.change(part)


@dataclass
class Run:
    stream: ResumedStream
    counts: Counts
    replicas: Replicas
    tokens: list[int]


def run(engine: Engine, cuts: list[int], how: str = "exact", info: Any = None, other: Any = None, **options: Any) -> Run:
    async def main() -> Run:
        async with AsyncEngine(engine) as serving:
            replicas, counts, ended = Replicas([serving, serving], cuts, **(other or {})), Counts(), list[int]()
            known = replace(info_of(engine, "a"), **(info or {}))
            stream = ResumedStream(replicas.call, known, how, counts, lambda: ended.append(1), tuple(PROMPT), options)
            tokens: list[int] = []
            try:
                await stream.open()
                async for event in stream:
                    tokens += event.tokens
            except AnswerError as error:
                raise AnswerError(*error.args, tokens, counts, stream.job) from error
            finally:
                assert ended == [1]
            return Run(stream, counts, replicas, tokens)

    return asyncio.run(main())


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("setup", [pytest.param(PLAIN, id="plain", marks=pytest.mark.slow), pytest.param(DRAFTED, id="drafted")])
def test_a_stream_that_is_cut_anywhere_has_the_tokens_of_one_engine(setup: Setup, sampling: SamplingParams) -> None:
    engine, continued = shared_engine(setup), 0
    for constraint in (None, *CONSTRAINTS[1::3]):
        options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": TOKENS, "constraint": constraint}
        whole = engine.generate(PROMPT, **options)
        for cuts in ([], [0], [1, 1], [2], [3, 2, 3], [5], [2, 1, 1, 3], [7], [4, 4, 4]):
            found = run(engine, cuts, **options)
            job = found.stream.job
            assert (job.tokens, job.finish_reason, job.error) == (whole.tokens, whole.finish_reason, "")
            assert found.tokens == whole.tokens and [each.raw for each in job.logprobs] == [each.raw for each in whole.logprobs]
            assert job.prompt_logprobs == whole.prompt_logprobs and bool(job.prompt_logprobs) == (sampling is SAMPLED)
            continued += found.counts.continued
            resumed = [ask for ask in found.replicas.asks if "resume_from" in ask.options]
            assert len(resumed) == found.counts.continued
            assert all(ask.options["sampling"].prompt_logprobs is None for ask in resumed), "those that are known are not computed again"
    assert continued > 20


@pytest.mark.parametrize(
    "options",
    [
        {"constraint": Literal["yes", "not at all"], "cache_salt": "a", "priority": 3},
        {"constraint": CONSTRAINTS[1], "cache_salt": "b", "tenant": "t", "max_new_tokens": None},
        {"resume_from": torch.tensor([81, 88]), "sampling": SamplingParams(stop_token_ids=(3,), logprobs=True), "cache_salt": "c"},
        {"draft_ids": [4, 5, 6], "lora_name": "", "cache_salt": "d", "num_speculative_tokens": 2},
    ],
    ids=["literal", "json", "resumed", "drafts given"],
)
@pytest.mark.parametrize(("setup", "cuts"), [(DRAFTED, []), (PLAIN, [2, 1])], ids=["drafted", "continued"])
def test_the_job_of_a_stream_has_the_fields_of_a_job_of_an_engine(setup: Setup, cuts: list[int], options: dict[str, Any]) -> None:
    engine, without_drafts = shared_engine(setup), {"draft_ids": None, "num_speculative_tokens": 0}
    options = {"max_new_tokens": 60} | options | without_drafts if setup is PLAIN else {"max_new_tokens": 60} | options
    _, wanted = (engine.generate(PROMPT, **options) for _ in range(2))  # the second one finds the prompt in the cache
    job = run(engine, cuts, **options).stream.job
    others = {"id", "submitted_at", "queue_seconds", "first_token_seconds", "seconds", "parse"}
    others |= {"rounds", "grammar_lane"} if cuts else set()  # of a resumed request
    for name in ["text", *(each.name for each in fields(Job) if each.name not in others)]:
        assert getattr(job, name) == getattr(wanted, name), name
    assert job.queue_seconds is not None and job.first_token_seconds is not None and job.seconds is not None
    assert 0 < job.queue_seconds < job.first_token_seconds <= job.seconds
    assert job.rounds + job.num_accepted_drafts >= len(job.tokens)
    if wanted.finish_reason != FinishReason.LENGTH:
        assert job.parsed == wanted.parsed


def test_draws_without_a_seed_are_fixed_before_the_first_replica() -> None:
    engine = shared_engine(PLAIN)
    options: dict[str, Any] = {"sampling": SamplingParams(temperature=1.5, ignore_eos=True), "max_new_tokens": TOKENS}
    found = run(engine, [3, 4], **options)
    job = found.stream.job
    assert len(job.replicas) == 3 and {ask.options["sampling"].seed for ask in found.replicas.asks} == {job.seed}
    seeded = replace(options["sampling"], seed=job.seed)
    assert engine.generate(PROMPT, sampling=seeded, max_new_tokens=TOKENS).tokens == job.tokens
    assert run(engine, [], **options).stream.job.seed != job.seed


def test_requests_whose_tokens_depend_on_drafts_have_none() -> None:
    engine = shared_engine(DRAFTED)
    options: dict[str, Any] = {"sampling": replace(SAMPLED, seed=-7), "max_new_tokens": TOKENS}
    found = run(engine, [4], **options)
    assert [ask.options["num_speculative_tokens"] for ask in found.replicas.asks] == [0, 0]
    assert found.tokens == engine.generate(PROMPT, num_speculative_tokens=0, **options).tokens
    for how, exact in (("never", True), ("exact", False)):  # neither policy continues streams
        kept = run(engine, [], how, info={"exact": exact}, **options)
        assert "num_speculative_tokens" not in kept.replicas.asks[0].options
    relaxed = SamplingParams(temperature=0, relaxed_top_n=8, relaxed_delta=0.5, ignore_eos=True)
    with make_engine(DRAFTED, relaxed_acceptance=True) as engine:
        found = run(engine, [4], sampling=relaxed, max_new_tokens=TOKENS)
        assert found.tokens == engine.generate(PROMPT, sampling=relaxed, max_new_tokens=TOKENS, num_speculative_tokens=0).tokens
    assert found.stream.job.replicas == ["a", "b"] and found.counts.continued == 1


def test_equal_tokens_are_promised_only_of_models_that_declare_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared_engine(DRAFTED)
    monkeypatch.delattr(ToyDraft, "batch_invariant")
    assert info_of(engine, "a").exact
    monkeypatch.delattr(ToyTarget, "batch_invariant")
    with pytest.raises(AnswerError, match=r"with this model on .* a near tie may end differently"):
        run(engine, [1], sampling=SamplingParams(ignore_eos=True), max_new_tokens=TOKENS)


def test_streams_continue_on_equal_hardware_only() -> None:
    engine = shared_engine(PLAIN)
    options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": TOKENS}
    with pytest.raises(
        AnswerError, match=r"after \d+ tokens: 4 replicas in a row gave no new token \(replica . has other hardware, packages,"
    ):
        run(engine, [1], other={"identities": ["x", "y"], "returns": False}, **options)
    assert run(engine, [1], other={"identities": ["x", "y"]}, **options).stream.job.replicas == ["a", "a"]
    found = run(engine, [0], other={"identities": ["x", "y"]}, **options)  # lost before the first token: any hardware can begin
    assert found.stream.job.replicas == ["b"] and found.counts.retried == 1


@pytest.mark.parametrize("other", [{"loads": {"a": 1, "b": 0}}, {"absent": range(1, 4)}], ids=["more requests", "not listed"])
@pytest.mark.parametrize("cuts", [[4], [0, 4]], ids=str)
def test_a_replica_that_returns_continues_its_stream_beside_one_of_another_identity(other: dict[str, Any], cuts: list[int]) -> None:
    engine = shared_engine(PLAIN)
    options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": TOKENS}
    found = run(engine, cuts, other={"identities": ["x", "y"], **other}, **options)
    assert found.tokens == engine.generate(PROMPT, **options).tokens


def test_a_stream_ends_if_every_replica_restarts_with_another_identity() -> None:
    names = [f"c{index}" for index in range(2 * MAX_OTHERS)]  # a stream that does not end needs more

    def restarted(part: AnswerPart) -> Refusal:
        return Refusal(names.pop(), "identity", "other weights")

    options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": TOKENS}
    with pytest.raises(AnswerError, match=r"4 replicas in a row gave no new token \(other weights\)"):
        run(shared_engine(PLAIN), [2], other={"change": restarted}, **options)
    assert len(names) == MAX_OTHERS - ATTEMPTS


@pytest.mark.parametrize(
    ("policy", "exact", "message"),
    [
        ("never", True, "resume is 'never'"),
        ("exact", False, "on .* a near tie may end differently; resume='same-hardware' accepts that"),
    ],
)
def test_streams_are_not_continued_where_equal_tokens_are_not_promised(policy: str, exact: bool, message: str) -> None:
    engine = shared_engine(PLAIN)
    options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": TOKENS}
    whole = engine.generate(PROMPT, **options).tokens
    with pytest.raises(AnswerError, match=message) as caught:
        run(engine, [5], policy, info={"exact": exact}, **options)
    tokens, counts, job = caught.value.args[1:]
    assert job.finish_reason == FinishReason.ERROR and job.error and caught.value.args[0].endswith(job.error)
    assert 0 < len(tokens) < TOKENS and tokens == whole[: len(tokens)] and counts.refused == 1
    assert run(engine, [5], "same-hardware", info={"exact": False}, **options).tokens == whole
    assert run(engine, [0], policy, info={"exact": exact}, **options).tokens == whole  # nothing was delivered


def test_a_request_that_crashes_every_replica_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = shared_engine(PLAIN)
    with pytest.raises(AnswerError, match=r"after 0 tokens: 4 replicas in a row gave no new token \(ActorDiedError: killed\)"):
        run(engine, [0] * 9, max_new_tokens=TOKENS)
    options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": 70, "resume_from": None}
    monkeypatch.setattr(streams, "ATTEMPTS", 2)
    found = run(engine, [3, 3, 0, 3, 0, 3], **options)
    assert found.counts.continued == 6  # a replica without a new token follows one that had given some


def test_an_engine_that_fails_or_shuts_down_is_replaced() -> None:
    """The last part of its answer is an error, or a cancellation that no client caused."""
    engine = shared_engine(PLAIN)
    options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": TOKENS}
    whole = engine.generate(PROMPT, **options).tokens
    for ending in (Refusal("a", "failed", "the engine failed"), Tokens(StepEvent(0, finish_reason=FinishReason.CANCELLED))):

        class Ends(Replicas):
            last = ending

            async def call(self, ask: ReplicaRequest) -> AsyncGenerator[AnswerPart, None]:
                try:
                    async for part in super().call(ask):
                        yield part
                except ReplicaLost:
                    yield self.last

        async def main(kind: type[Replicas] = Ends) -> list[int]:
            async with AsyncEngine(engine) as serving:
                replicas = kind([serving, serving], [4])
                stream = ResumedStream(replicas.call, info_of(engine, "a"), "exact", Counts(), lambda: None, tuple(PROMPT), options)
                await stream.open()
                tokens = [token async for event in stream for token in event.tokens]
                assert stream.job.replicas == ["a", "b"] and replicas.asks[1].avoid == {"a"}
                return tokens

        assert asyncio.run(main()) == whole


def test_a_continued_stream_has_what_is_left_of_its_time() -> None:
    found = run(shared_engine(PLAIN), [2, 1], timeout_seconds=1000.0, max_new_tokens=TOKENS, sampling=SamplingParams(ignore_eos=True))
    times = [ask.options["timeout_seconds"] for ask in found.replicas.asks]
    assert times[0] == 1000 > times[1] > times[2] > 0 and len(found.tokens) == TOKENS


def test_wrong_requests_are_refused_by_the_replica() -> None:
    engine = shared_engine(PLAIN)
    with pytest.raises(ValueError, match=r"timeout_seconds: got 'x', expected a number"):
        run(engine, [], timeout_seconds="x")
    with pytest.raises(ValueError, match=r"max_new_tokens: got 0, expected"):
        run(engine, [], max_new_tokens=0)
    with pytest.raises(ValueError, match=r"sampling: got 5, expected SamplingParams"):
        run(engine, [], sampling=5)
    with pytest.raises(ValueError, match=r"num_speculative_tokens: got 9, expected"):  # although draws with drafts have none here
        run(shared_engine(DRAFTED), [], sampling=SAMPLED, max_new_tokens=9, num_speculative_tokens=9)
    found = run(engine, [], constraint=Constraint.regex("[a-c]{3}"), max_new_tokens=TOKENS)
    assert len(found.tokens) >= 1 and found.stream.job.finish_reason in ("stop", "constraint_complete")

    class Full(Replicas):
        async def call(self, ask: ReplicaRequest) -> AsyncGenerator[AnswerPart, None]:
            yield Refusal("a", "full", "too many wait")

    async def main() -> None:
        stream = ResumedStream(Full([], []).call, info_of(engine, "a"), "exact", Counts(), lambda: None, tuple(PROMPT), {})
        with pytest.raises(QueueFullError, match="too many wait"):
            await stream.open()

    asyncio.run(main())


@pytest.mark.parametrize("waits", [False, True])
def test_leaving_a_stream_cancels_its_job_and_its_reader_gets_the_end(waits: bool) -> None:
    engine = shared_engine(PLAIN)

    async def read(stream: ResumedStream) -> list[FinishReason | None]:
        return [event.finish_reason async for event in stream]

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            ended, before = list[int](), dict(engine.stats().finished).get(FinishReason.CANCELLED, 0)
            options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": 90}
            replicas, counts = Replicas([serving], []), Counts()
            stream = ResumedStream(replicas.call, info_of(engine, "a"), "exact", counts, lambda: ended.append(1), (5,), options)
            await stream.open()
            reader = asyncio.ensure_future(read(stream))
            for _ in range(3 * waits):
                await asyncio.sleep(0)
            stream.cancel(FinishReason.STOP)
            await stream.aclose()
            assert (await reader)[-1] == stream.job.finish_reason == FinishReason.STOP
            assert counts.ended == {FinishReason.STOP: 1}, "for the replica it is cancelled"
            assert ended == [1] and dict(engine.stats().finished)[FinishReason.CANCELLED] == before + 1

    asyncio.run(main())


def test_a_reader_is_cancelled_although_its_stream_was_cancelled_before() -> None:
    engine = shared_engine(PLAIN)

    async def main() -> None:
        async with AsyncEngine(engine) as serving:
            options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": 90}
            call = Replicas([serving], []).call
            stream = ResumedStream(call, info_of(engine, "a"), "exact", Counts(), lambda: None, (5,), options)
            await stream.open()
            first = await stream.__anext__()
            reader = asyncio.ensure_future(stream.__anext__())
            await asyncio.sleep(0)  # it waits for the next event
            stream.cancel()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            last = await stream.__anext__()
            assert last.finish_reason == FinishReason.CANCELLED and first.finish_reason is None
            assert [*first.tokens, *last.tokens] == stream.job.tokens

    asyncio.run(main())


def test_a_stream_that_is_dropped_cancels_its_job_and_logs_nothing() -> None:
    engine = shared_engine(PLAIN)
    cancelled = dict(engine.stats().finished)[FinishReason.CANCELLED]
    ended, logged = list[int](), list[Any]()

    async def main() -> ResumedStream:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
        async with AsyncEngine(engine) as serving:
            options: dict[str, Any] = {"sampling": SamplingParams(ignore_eos=True), "max_new_tokens": 90}
            make = functools.partial(ResumedStream, Replicas([serving], []).call, info_of(engine, "a"), "exact", Counts())
            for count in range(1, 3):
                stream = make(lambda: ended.append(1), (5,), options)
                await stream.open()
                job = stream.job
                del stream
                gc.collect()
                for _ in range(2000):
                    await asyncio.sleep(0.001)
                    if dict(engine.stats().finished)[FinishReason.CANCELLED] == cancelled + count and job.finished:
                        break
                assert len(ended) == count and job.finish_reason == FinishReason.CANCELLED
            await (last := make(lambda: ended.append(1), (5,), options)).open()
            return last  # is dropped after the end of the loop

    asyncio.run(main())
    gc.collect()
    assert not logged


def test_a_pool_of_engines_without_vocabulary_replaces_a_replica_whose_error_has_no_message() -> None:
    ray_serve = pytest.importorskip("stepgraph.runtime.replicas.ray_serve", exc_type=ImportError)
    calls = itertools.count()

    class Response:
        async def __aiter__(self) -> AsyncGenerator[Tokens, None]:
            if not next(calls):
                raise ray_serve.TaskCancelledError
            yield Tokens(StepEvent(0, (7,), finish_reason=FinishReason.LENGTH), replica="b")

        def cancel(self) -> None: ...

    async def main() -> None:
        async def describe() -> Any:
            return replace(info_of(shared_engine(PLAIN), "a"), vocabulary=None)

        handle: Any = SimpleNamespace(remote=lambda ask: Response(), describe=SimpleNamespace(remote=describe))
        handle.options = lambda **options: handle
        for name, value in (("replicas", 0), ("max_open", 0), ("max_open", 1.5)):
            with pytest.raises(ValueError, match=f"ReplicaPool.{name}: got {value}, expected a whole number >= 1"):
                await ray_serve.ReplicaPool.open(handle, **{name: value})
        pool = await ray_serve.ReplicaPool.open(handle)
        with pytest.raises(TypeError, match=r"generate\(\): got the keyword 'max_tokens', expected max_new_tokens"):
            await pool.generate([5], max_tokens=3)
        assert [event.tokens async for event in await pool.generate(torch.tensor([5]))] == [(7,)] and not pool._num_open

    asyncio.run(main())
