"""Recordings, and replays of them."""

from __future__ import annotations

import functools
import io
import json
import re
import tempfile
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stepgraph import Constraint, Engine, EngineConfig, FinishReason, Job, QueueFullError, SamplingParams, Vocabulary
from stepgraph.runtime.demo.variants import toy_pair
from stepgraph.runtime.models.files.loading import load_models
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from stepgraph.runtime.record import Recorder, Recording
from stepgraph.runtime.replay import ReplayReport, read_recording, replay, replay_on
from stepgraph.runtime.upload import PinnedRing
from stepgraph.sampling.grammar.constraints.constraint import BackendChoice
from tests.helpers.c_library import needs_c
from tests.helpers.command_models import model_folder
from tests.helpers.toy_engines import CONSTRAINTS, TARGET, VOCABULARY, finish, switch_draft_lengths

CONFIG = EngineConfig(
    max_rows=2,
    num_speculative_tokens=2,
    max_length=64,
    page_size=8,
    num_pages=12,
    prefill_chunk=5,
    buckets=(2,),
    compile_isolation="none",
    look_up=2,
    eager=True,  # no captures
    draft_length=2,
)
DRAFT = ToyDraft(TARGET, 0.8)


def recorded_engine(path: Path, config: EngineConfig = CONFIG, record: Recording | None = None) -> Engine:
    engine = Engine(TARGET, DRAFT, vocabulary=VOCABULARY, config=config, record=record or path)
    engine.capture()
    return engine


@functools.cache
def other_engine() -> Engine:
    """An engine for the replays of many tests."""
    engine = Engine(TARGET, DRAFT, vocabulary=VOCABULARY, config=CONFIG)
    engine.capture()
    return engine


def busy_run(engine: Engine, ready: bool) -> list[Job]:
    """Requests of all kinds between steps. ready: all grammars are compiled beforehand."""
    for constraint in filter(None, CONSTRAINTS if ready else ()):
        engine.compile(constraint)
    jobs = []
    for index in range(14):
        sampling = SamplingParams(
            temperature=0.9 * (index % 3), top_p=0.9, stop_token_ids=(index,), logit_bias={index + 1: 1.5}, presence_penalty=0.5
        )
        jobs.append(
            engine.submit(
                [index, 3, *range(index)],
                constraint=CONSTRAINTS[index % len(CONSTRAINTS)],
                sampling=sampling if index % 4 else None,
                max_new_tokens=30,
                num_speculative_tokens=index % 3 or None,
                draft_ids=[1, 2, 3] if index % 3 == 1 else None,
                cache_salt="abc"[: index % 2],
            )
        )
        for _ in range(index % 3):
            engine.step()
        if index % 5 == 4:
            engine.cancel(jobs[-2])
    finish(engine)
    return jobs


def again(path: Path) -> ReplayReport:
    return replay_on(other_engine(), read_recording(path))


@pytest.mark.parametrize("ready", [True, False])
def test_replay_has_the_same_tokens(ready: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with recorded_engine(path) as engine:
        jobs = busy_run(engine, ready)
        fixed = sum(len(jobs[index].tokens) for index in (0, 4, 6, 9, 12))  # greedy and not cancelled, so their length is fixed
        rounds = engine.stats().rounds
        assert engine.stats().finished[list(FinishReason).index(FinishReason.CANCELLED)][1] > 0
    found = replay(read_recording(path), TARGET, DRAFT, VOCABULARY)
    assert found.equal and (found.requests, found.skipped) == (14, 0), found.differences
    assert found.tokens > fixed == 50
    assert (found.tokens, found.rounds) == (found.recorded_tokens, rounds)


@pytest.mark.parametrize("ready", [True, False])
def test_replay_repeats_the_draft_lengths_of_sampled_requests(ready: bool, tmp_path: Path) -> None:
    """Sampled tokens without a seed depend on the draft lengths, which depend on time."""
    path, config = tmp_path / "run.jsonl", replace(CONFIG, num_speculative_tokens=3, draft_length="auto", look_up=1)
    with recorded_engine(path, config) as engine:
        switch_draft_lengths(engine)
        busy_run(engine, ready)
        rounds = engine.stats().rounds
        assert len({graph.key.drafting for graph in engine.stats().graphs}) == 4
    run = read_recording(path)
    found = replay(run, TARGET, DRAFT, VOCABULARY)
    assert found.equal and (found.tokens, found.rounds) == (found.recorded_tokens, rounds), found.differences
    run.draftings.clear()
    assert not replay(run, TARGET, DRAFT, VOCABULARY).equal, "the lengths have no effect"


@needs_c
@pytest.mark.parametrize(
    ("replaced", "backend"), [("upload.PinnedRing.ready", "auto"), ("build.why_no_device_grammars", "xgrammar")], ids=["slow copy", "no C"]
)
def test_replay_repeats_the_draft_lengths_of_another_machine(
    monkeypatch: pytest.MonkeyPatch, replaced: str, backend: BackendChoice, tmp_path: Path
) -> None:
    """Recorded where the first copy of a grammar takes longer than a step, or where no grammar can be on the device."""
    path, config = tmp_path / "run.jsonl", replace(CONFIG, num_speculative_tokens=4, draft_length="auto", look_up=0)
    constraint, late, ready = Constraint.regex("[a-f]{40}", backend=backend), iter([False]), vars(PinnedRing)["ready"].fget
    slow = property(lambda ring: next(late, True) and ready(ring))
    with monkeypatch.context() as machine:
        machine.setattr(f"stepgraph.runtime.{replaced}", slow if "ready" in replaced else lambda *_: "no kernel in C")
        with recorded_engine(path, config) as engine:
            switch_draft_lengths(engine)
            engine.compile(constraint)
            engine.generate([1, 3], constraint=constraint, sampling=SamplingParams(temperature=1.0), max_new_tokens=30)
    found = replay(read_recording(path), TARGET, DRAFT, VOCABULARY)
    assert found.equal, found.differences


@functools.cache
def two_texts() -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        with recorded_engine(path) as engine:
            for seed in (4, 5):
                job = engine.generate([1, 2, 3], sampling=SamplingParams(seed=seed, ignore_eos=True), max_new_tokens=12)
        assert job.finish_reason == FinishReason.LENGTH and again(path).equal
        return path.read_text()


def altered(path: Path, kind: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the last line of a kind."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change([line for line in lines if line["kind"] == kind][-1])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        ("tokens", lambda line: line["tokens"].__setitem__(0, 9999), (2, "expected 9999")),
        ("tokens", lambda line: line.update(tokens=line["tokens"] + [5]), (2, "got length, expected 5")),
        ("tokens", lambda line: line.update(tokens=line["tokens"][:-1]), (2, "expected length")),
        ("end", lambda line: line.update(reason="stop"), (2, "got length, expected stop")),
        ("submit", lambda line: line["sampling"].update(seed=6), (2, "")),
        ("submit", lambda line: line["prompt_ids"].__setitem__(0, 50), (2, "")),
    ],
)
def test_first_difference_is_reported(
    kind: str, change: Callable[[dict[str, Any]], object], expected: tuple[int, str], tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(two_texts())
    altered(path, kind, change)
    (difference,) = again(path).differences
    assert difference.job_id == expected[0] and expected[1] in str(difference)


def test_rounds_of_more_drafts_than_the_configuration_has_are_replayed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with recorded_engine(path, replace(CONFIG, draft_length="auto", look_up=0)) as engine:
        engine.generate([1, 2], max_new_tokens=10)
    altered(path, "round", lambda line: line.update(drafts=8))
    assert replay(read_recording(path), TARGET, DRAFT, VOCABULARY).equal


def test_replay_of_faults_and_cancelled_requests(tmp_path: Path) -> None:
    """A grammar that cannot be compiled, a job cancelled in the queue, and jobs ended by close()."""
    path = tmp_path / "run.jsonl"
    with recorded_engine(path, replace(CONFIG, max_queued=5)) as engine:
        bad = engine.submit([1], constraint=Constraint.json_schema({"type": "integer", "minimum": 2, "maximum": 1}), max_new_tokens=8)
        running = [engine.submit([index], sampling=SamplingParams(seed=1, ignore_eos=True), max_new_tokens=40) for index in range(3)]
        waiting = engine.submit([9], max_new_tokens=40)
        with pytest.raises(QueueFullError):
            engine.submit([1], max_new_tokens=8)
        while not bad.finished:
            engine.step()
        engine.cancel(waiting)
        engine.step()
    assert (bad.finish_reason, waiting.finish_reason) == ("error", "cancelled")
    assert {job.finish_reason for job in running} == {"cancelled"} and running[0].tokens
    assert "refused" in path.read_text()
    run = read_recording(path)
    assert run.ending == "the engine was closed" and len(run.requests) == 5
    found = again(path)
    assert found.equal and found.tokens == found.recorded_tokens > 0, found.differences


def test_replay_of_a_request_that_its_reader_ended(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with recorded_engine(path) as engine:
        job = engine.submit([1, 2], sampling=SamplingParams(ignore_eos=True), max_new_tokens=50)
        while len(job.tokens) < 9:
            engine.step()
        engine.queue.cancel(job, FinishReason.STOP)
        assert engine.cancel(job), "its stream is closed before the next step"
        finish(engine)
    assert job.finish_reason == FinishReason.STOP and len(job.tokens) < 50
    found = again(path)
    assert found.equal and found.tokens == found.recorded_tokens >= 9, found.differences


def test_crash_keeps_the_lines_before_it(tmp_path: Path) -> None:
    """Every returned token is in the file already; an incomplete last line is ignored."""
    path, cut = tmp_path / "run.jsonl", tmp_path / "cut.jsonl"
    with recorded_engine(path) as engine:
        job = engine.submit([1, 2, 3], sampling=SamplingParams(seed=1, ignore_eos=True), max_new_tokens=50)
        while len(job.tokens) < 8:
            engine.step()
            assert sum(len(request.tokens) for request in read_recording(path).requests) == len(job.tokens)
        cut.write_bytes(path.read_bytes() + b'{"kind":"tokens","step":99,"jo')
    run = read_recording(cut)
    assert run.ending == "the process ended" and run.requests[0].reason is None
    found = again(cut)
    assert found.equal and 8 <= found.tokens == found.recorded_tokens < 50


def test_recording_ends_at_max_bytes_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with warnings.catch_warnings(record=True) as caught, recorded_engine(path, record=Recording(path, 4000)) as engine:
        warnings.simplefilter("always")
        jobs = [engine.generate([index], sampling=SamplingParams(seed=1, ignore_eos=True), max_new_tokens=50) for index in range(6)]
    assert [str(each.message) for each in caught] == [f"the recording {path} ends here: its size reached Recording.max_bytes"]
    assert all(job.finish_reason == FinishReason.LENGTH for job in jobs)
    assert 3000 < path.stat().st_size <= 4000
    assert read_recording(path).ending.startswith("its size reached") and again(path).equal


@pytest.mark.parametrize("strict", [False, True])
def test_full_disk_affects_no_request(strict: bool, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with warnings.catch_warnings(record=True) as caught, recorded_engine(path) as engine:
        warnings.simplefilter("error" if strict else "always")
        engine.step()
        recorder = engine._scheduler._recorder
        assert isinstance(recorder, Recorder) and recorder._file
        recorder._file.close()
        recorder._file = io.FileIO("/dev/full", "wb")
        jobs = [engine.submit([index], max_new_tokens=20) for index in range(4)]
        finish(engine)
    assert all(job.finish_reason in ("length", "stop") for job in jobs)
    ending = f"the recording {path} ends here: [Errno 28] No space left on device"
    assert [str(each.message) for each in caught] == ([] if strict else [ending])


def test_recording_to_an_invalid_path_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = tmp_path / "there.jsonl"
    there.write_text("another file")
    for path, message in ((there, "File exists"), (tmp_path / "no" / "run.jsonl", "No such file"), (Path("\0"), r"record: got '\\x00'")):
        with pytest.raises(ValueError, match=message):
            recorded_engine(path)
    assert there.read_text() == "another file"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"look_up": 0, "forced_acceptance": (0.5, 0.5)}, r"Engine\.record: got .*, expected None with forced_acceptance"),
        ({"preemption": True}, r"Engine\.record: got .*, expected None with preemption"),
        ({"page_allocation": "grow"}, r"Engine\.record: got .*, expected None with page_allocation"),
        ({"rounds_per_launch": "until_event", "eager": False}, "None with rounds_per_launch: a recording lists what arrived"),
    ]
    for fields, message in refused:
        with pytest.raises(ValueError, match=message):
            recorded_engine(tmp_path / "run.jsonl", replace(CONFIG, **fields))
        assert not (tmp_path / "run.jsonl").exists(), "a refused engine has created its recording"
    with pytest.raises(ValueError, match=r"Recording\.path: got 3"):
        Engine(TARGET, DRAFT, vocabulary=VOCABULARY, config=CONFIG, record=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Recording\.max_bytes: got 0"):
        Recording(there, 0)
    monkeypatch.setenv("STEPGRAPH_PROFILE_ROUNDS", "x")
    with pytest.raises(ValueError, match="STEPGRAPH_PROFILE_ROUNDS: got 'x'"):
        recorded_engine(tmp_path / "run.jsonl")
    assert not (tmp_path / "run.jsonl").exists()


def test_a_signal_handler_may_cancel_and_read_statistics_under_any_lock(tmp_path: Path) -> None:
    engine = recorded_engine(tmp_path / "run.jsonl")
    parts, recorder = engine._parts, engine._scheduler._recorder

    def handle() -> None:
        with parts.compiler._lock, getattr(parts.host_link, "_closing", parts.queue.lock), recorder._lock:  # type: ignore[union-attr]
            engine.cancel(engine.submit([1]))
            engine.stats()

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    engine.close()


def test_engine_without_recording_has_no_observer() -> None:
    with Engine(TARGET, DRAFT, vocabulary=VOCABULARY, config=CONFIG) as engine:
        assert engine._scheduler._recorder is None


def test_recording_is_private_and_has_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded_engine(path).close()
    assert path.stat().st_mode & 0o777 == 0o600 and path.stat().st_size < 4000


def test_lines_from_many_threads_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = Recorder(Recording(path), {})

    def write(thread: int) -> None:
        for index in range(200):
            recorder.write("x", thread=thread, index=index)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert len(lines) == 800
    assert all([line["index"] for line in lines if line["thread"] == number] == list(range(200)) for number in range(4))


def test_replay_with_another_model_raises(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded_engine(path).close()
    run = read_recording(path)
    biased = ToyTarget(VOCABULARY.logits_width, seed=3, biases={1: 2.5})  # same shapes, other values
    wider = Vocabulary(VOCABULARY.tokens, VOCABULARY.stop_token_ids, VOCABULARY.logits_width)  # no control tokens
    for message, target, draft, vocabulary in (
        ("draft: got {'class': 'ToyDraft', ", TARGET, ToyDraft(TARGET, 0.7), VOCABULARY),
        ("target: got {'class': 'ToyTarget', ", biased, DRAFT, VOCABULARY),
        ("vocabulary: got", TARGET, DRAFT, wider),
    ):
        with pytest.raises(ValueError, match=message):
            replay(run, target, draft, vocabulary)
    pair = toy_pair()
    with pytest.raises(
        ValueError, match=r"'fingerprint': '\w{16}'}, expected the recorded {'class': 'ToyDraft', 'tensors': \d, 'fingerprint': '\w{16}'}"
    ):
        replay(run, pair.target, pair.draft, pair.vocabulary)
    for role, text in (("extra", "x"), ("target", 5), ("target", {})):
        header = run.header | {"models": run.header["models"] | {role: text}}
        with pytest.raises(ValueError, match=rf"run\.jsonl: {role}: got .*, expected the recorded "):
            replay(replace(run, header=header), TARGET, DRAFT, VOCABULARY)


def test_invalid_recordings_raise(tmp_path: Path) -> None:
    good = two_texts().splitlines(keepends=True)
    bad = {
        ":1: got b'', expected the first line": "",
        ":1: got b'{}": "{}\n",
        ":1: format: got 2, expected 1": good[0].replace('"format":1', '"format":2'),
        ":1: config: ": good[0].replace('"max_rows":2', '"max_rows":0'),
        ":2: JSONDecodeError": good[0] + "nonsense\n",
        ":2: KeyError: 7": good[0] + '{"kind":"tokens","step":1,"job":7,"tokens":[1]}\n',
        ":2: ValueError: drafts: got 99, expected -1 to 8": good[0] + '{"kind":"round","step":1,"drafts":99}\n',
        ":2: ValueError: drafts: got -3, expected -1 to 8": good[0] + '{"kind":"round","step":1,"drafts":-3}\n',
        ":2: ValueError: SamplingParams.top_p": "".join(good).replace('"top_p":1.0', '"top_p":3.0'),
        ":2: ValueError: prompt_ids: got 'ab', expected a list of token ids": re.sub(r'("prompt_ids":)\[.*?\]', r'\1"ab"', "".join(good)),
        ":3: ValueError: kind: got 'fly'": "".join(good[:2]) + '{"kind":"fly"}\n',
    }
    path = tmp_path / "run.jsonl"
    for message, text in bad.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(f"run.jsonl{message}")):
            read_recording(path).config  # noqa: B018
    with pytest.raises(ValueError, match="Is a directory, expected a file"):
        read_recording(tmp_path)


def test_requests_with_embeddings_are_skipped(tmp_path: Path) -> None:
    """A recording has a hash of embeddings and no values."""
    path, config = tmp_path / "run.jsonl", EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=32, eager=True)
    loaded = load_models(model_folder(), "none", config)
    with Engine(loaded.target, vocabulary=loaded.vocabulary, config=config, record=path) as engine:
        engine.generate([1, 2, 3, 4], prompt_embeddings={1: torch.ones(2, 32)}, max_new_tokens=3)
        engine.generate([1, 2, 3, 4], max_new_tokens=3)
    found = replay(read_recording(path), loaded.target, None, loaded.vocabulary)
    assert found.equal and (found.requests, found.skipped) == (2, 1)
    (first, _) = [line["embeddings"] for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "submit"]
    assert first[0][:2] == [1, 2] and re.fullmatch(r"[0-9a-f]{16}", first[0][2])


def test_a_recording_without_a_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    config = EngineConfig(max_rows=1, num_speculative_tokens=0, max_length=16, greedy_only=True, eager=True)
    with Engine(ToyTarget(40), config=config, record=path) as engine:
        engine.generate([1, 2], max_new_tokens=2)
    assert json.loads(path.read_text(encoding="utf-8").splitlines()[0])["vocabulary"] == "none"
