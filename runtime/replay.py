"""Reads a recording, submits its requests to another engine at the same steps, and compares tokens and finish reasons.

A request is submitted at the step at which it got a row: its grammar is already compiled, while the recorded engine may have waited for
the compile. So rounds have the same requests, and with the recorded draft lengths sampled tokens are the same as well.
"""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.graphs.graph_key import FULL_LENGTH, Drafting
from stepgraph.graphs.limits import MAX_DRAFTS
from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.check_models import Drafter, resolve_drafter
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.record import FORMAT, SUBMIT_FIELDS, model_fingerprints, versions, vocabulary_fingerprint
from stepgraph.runtime.request import Job
from stepgraph.sampling.fields import clip_error, clip_repr, is_int
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams


@dataclass
class RecordedRequest:
    job_id: int
    step: int  # steps begun before it was submitted
    options: dict[str, Any]  # arguments of Engine.submit; empty if it cannot be replayed
    tokens: list[int] = field(default_factory=list)
    requested_reason: str = FinishReason.CANCELLED  # by the latest cancel()
    reason: FinishReason | None = None  # None: it had not ended at the end of the recording
    error: str = ""
    end_step: int = 0
    admission: tuple[int, int] | None = None  # the step in which it got a row, and its number among the requests that got one


@dataclass
class RecordedRun:
    path: Path
    header: dict[str, Any]
    by_id: dict[int, RecordedRequest] = field(default_factory=dict)  # in the order of submission
    draftings: dict[int, Drafting] = field(default_factory=dict)  # by step: how its round drafted, if that was chosen for each round
    num_admits: int = 0
    steps: int = 0
    ending: str = "the process ended"  # why the recording ends
    closed: bool = False  # jobs that end later were cut off

    @property
    def requests(self) -> tuple[RecordedRequest, ...]:
        return tuple(self.by_id.values())

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the event of one line. ValueError, KeyError, TypeError or OverflowError if it is malformed."""
        kind = event["kind"]
        self.steps = max(self.steps, int(event.get("step", 0)))
        if kind == "submit":
            job_id = int(event["job"])
            self.by_id[job_id] = RecordedRequest(job_id, int(event["step"]), _options(event))
        elif kind == "admit":
            self.by_id[event["job"]].admission = int(event["step"]), self.num_admits
            self.num_admits += 1
        elif kind == "round":
            if not FULL_LENGTH <= int(event["drafts"]) <= MAX_DRAFTS:
                raise ValueError(f"drafts: got {event['drafts']!r:.40}, expected {FULL_LENGTH} to {MAX_DRAFTS}")
            self.draftings[int(event["step"])] = Drafting(int(event["drafts"]), bool(event.get("model", True)))
        elif kind == "refused":
            self.by_id.pop(event["job"], None)
        elif kind == "tokens":
            self.by_id[event["job"]].tokens += map(int, event["tokens"])
        elif kind == "end" and not self.closed:
            request = self.by_id[event["job"]]
            request.reason, request.error, request.end_step = FinishReason(event["reason"]), str(event["error"]), int(event["step"])
        elif kind == "closed":
            self.closed, self.ending = True, str(event["why"])
        elif kind == "full":
            self.ending = "its size reached Recording.max_bytes"
        elif kind == "cancel":
            self.by_id[event["job"]].requested_reason = str(event.get("reason", FinishReason.CANCELLED))
        elif kind != "end":
            raise ValueError(f"kind: got {clip_repr(kind)}")

    @property
    def config(self) -> EngineConfig:
        """The recorded configuration, on the device of the replaying models."""
        fields = dict(self.header["config"])
        fields.pop("logits_processors", None)  # empty: functions are not recorded
        try:
            limits = GrammarLimits(**fields.pop("grammar_limits"))
            tuples = {name: None if fields[name] is None else tuple(fields[name]) for name in ("forced_acceptance", "buckets")}
            config = EngineConfig(**fields | tuples | {"grammar_limits": limits, "backend": "auto", "nvtx": False})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.path}:1: config: {error}") from None
        return replace(config, max_queued=max(config.max_queued, len(self.requests)))


class Difference(NamedTuple):
    """The first position at which two texts differ, by a token or by the finish reason after the last token."""

    job_id: int
    position: int
    got: int | str
    expected: int | str
    error: str  # the error that belongs to the finish reason

    def __str__(self) -> str:
        error = f" ({self.error})" if self.error else ""
        return f"job {self.job_id}, position {self.position}: got {self.got}, expected {self.expected}{error}"


@dataclass(frozen=True)
class ReplayReport:
    requests: int
    skipped: int  # requests with prompt embeddings, whose values are not recorded
    tokens: int  # compared
    recorded_tokens: int
    rounds: int
    differences: tuple[Difference, ...]  # the first of each request

    @property
    def equal(self) -> bool:
        return not self.differences


def read_recording(path: str | Path) -> RecordedRun:
    """ValueError names the file and the line. An incomplete last line is ignored: the process ended while writing it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            run = RecordedRun(path, _header(path, file.readline()))
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    break
                try:
                    run.add(json.loads(line))
                except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                    got = f"{type(error).__name__}: {clip_error(error)}"
                    raise ValueError(f"{path}:{number}: {got}, expected a line written by Engine(record=...)") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, expected a file written by Engine(record=...)") from None
    return run


def replay(
    run: RecordedRun, target: TargetModel, draft: Drafter | str | None, vocabulary: Vocabulary | None, *, progress: bool = False
) -> ReplayReport:
    """Replay a run on a new engine for these models. ValueError if they are not the recorded ones."""
    models, config = resolve_drafter(target, draft, run.config)
    _check_fingerprints(run, model_fingerprints(models), vocabulary_fingerprint(vocabulary))
    with Engine(target, draft, vocabulary=vocabulary, config=config) as engine:
        engine.capture(progress=progress)
        return replay_on(engine, run)


def replay_on(engine: Engine, run: RecordedRun) -> ReplayReport:
    """Replay a run on an engine that is captured and has no jobs."""
    before = engine.stats().rounds
    jobs = _execute(run, engine)
    pairs = [(request, jobs[request.job_id]) for request in run.requests if request.job_id in jobs]
    return ReplayReport(
        requests=len(run.requests),
        skipped=len(run.requests) - len(pairs),
        tokens=sum(min(len(request.tokens), len(job.tokens)) for request, job in pairs),
        recorded_tokens=sum(len(request.tokens) for request in run.requests),
        rounds=engine.stats().rounds - before,
        differences=tuple(difference for request, job in pairs if (difference := _difference(request, job))),
    )


def version_differences(run: RecordedRun) -> tuple[str, ...]:
    """Packages whose version is not the recorded one."""
    recorded, installed = run.header["versions"], versions()
    return tuple(
        f"{name}: {installed.get(name, 'none')}, recorded with {recorded.get(name, 'none')}"
        for name in sorted({*recorded, *installed})
        if recorded.get(name) != installed.get(name)
    )


def _execute(run: RecordedRun, engine: Engine) -> dict[int, Job]:
    """Submit and cancel the requests after as many steps as in the recording. Returns the jobs by recorded job id."""
    requests, chooser = [request for request in run.requests if request.options], engine._parts.draft_lengths
    # Within a step, submissions come before cancellations, and requests that got a row come first, in the order of their admission.
    submits = [(*(request.admission or (max(request.step + 1, request.end_step), run.num_admits)), request, False) for request in requests]
    cancelled = [request for request in requests if request.reason == request.requested_reason]
    cancels = [(max(request.end_step, request.step + 1), run.num_admits + 1, request, True) for request in cancelled]
    actions = collections.deque(sorted([*submits, *cancels], key=lambda action: action[:2]))
    jobs, step = dict[int, Job](), 0
    engine._parts.uploader.waits_for_grammars = True  # like the recorded engine
    while actions or engine.has_work:
        if actions and (actions[0][0] <= step + 1 or not engine.has_work):  # steps of an idle engine are skipped
            action_step, _, request, cancels_it = actions.popleft()
            step = max(step, action_step - 1)
            if cancels_it:
                engine.cancel(jobs[request.job_id])
            else:
                jobs[request.job_id] = _submit(request, engine)
            continue
        step += 1
        if chooser:
            chooser.fixed_drafting = run.draftings.get(step)
        engine.step()
        if step >= run.steps:
            # Cancel the jobs that have no recorded end, once they have as many tokens as were recorded.
            for request in requests:
                job = jobs.get(request.job_id)
                if job and request.reason is None and len(job.tokens) >= len(request.tokens):
                    engine.cancel(job)
    if chooser:
        chooser.fixed_drafting = None
    return jobs


def _submit(request: RecordedRequest, engine: Engine) -> Job:
    options = dict(request.options)
    if options["constraint"]:
        with contextlib.suppress(ValueError):  # the request will end with this error
            engine.compile(options["constraint"])
    return engine.submit(options.pop("prompt_ids"), **options)


def _difference(request: RecordedRequest, job: Job) -> Difference | None:
    got: tuple[int | str, ...] = (*job.tokens, str(job.finish_reason))
    recorded: tuple[int | str, ...] = (*request.tokens, str(request.reason or "no end"))
    last = min(len(got), len(recorded)) - 1
    position = next((position for position in range(last) if got[position] != recorded[position]), last)
    recorded_ends, job_ends = position == len(request.tokens), position == len(job.tokens)
    # Of a text that was cut off, only the tokens that both have are compared.
    recorded_open = request.reason in (None, FinishReason.CANCELLED, FinishReason.TIMEOUT)
    cut_off = (recorded_open and recorded_ends) or (job.finish_reason == FinishReason.CANCELLED and job_ends)
    if cut_off or got[position] == recorded[position]:
        return None
    error = (request.error if recorded_ends else "") or (job.error if job_ends else "")
    return Difference(request.job_id, position, got[position], recorded[position], error)


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if header["kind"] != "engine":
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path}:1: got {line[:40]!r}, expected the first line of a file written by Engine(record=...)") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}:1: format: got {clip_repr(header.get('format'))}, expected {FORMAT}")
    for name in ("versions", "config", "models"):
        if not isinstance(header.get(name), dict):
            raise ValueError(f"{path}:1: {name}: got {type(header.get(name)).__name__}, expected an object")
    return dict(header)


def _options(event: Mapping[str, Any]) -> dict[str, Any]:
    if event["embeddings"]:
        return {}
    sampling, constraint = dict(event["sampling"]), event["constraint"]
    sampling["logit_bias"] = dict(sampling["logit_bias"])
    if constraint is not None:
        marker = constraint["marker"]
        constraint = Constraint(**{**constraint, "marker": tuple(marker) if isinstance(marker, list) else marker})
    prompt = event["prompt_ids"]
    if not isinstance(prompt, list) or not all(map(is_int, prompt)):  # submit() also takes texts and messages
        raise ValueError(f"prompt_ids: got {clip_repr(prompt)}, expected a list of token ids")
    copied = {name: event[name] for name in ("prompt_ids", *SUBMIT_FIELDS)}
    return copied | {"draft_ids": event["draft_ids"] or None, "sampling": SamplingParams(**sampling), "constraint": constraint}


def _check_fingerprints(run: RecordedRun, models: Mapping[str, Mapping[str, Any]], vocabulary: str) -> None:
    recorded = run.header["models"]
    for role in sorted({*recorded, *models}):
        if recorded.get(role) != models.get(role):
            got, expected = clip_repr(models.get(role)), clip_repr(recorded.get(role))
            raise ValueError(f"{run.path}: {role}: got {got}, expected the recorded {expected}")
    if run.header.get("vocabulary") != vocabulary:
        raise ValueError(f"{run.path}: vocabulary: got {vocabulary}, expected the recorded {clip_repr(run.header.get('vocabulary'))}")
