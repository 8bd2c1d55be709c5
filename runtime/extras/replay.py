"""Reads a recording, asks another engine the same at the same steps, and compares what it says, token for token.

Grammars are ready before the request that needs them, where the recorded engine may have waited for one: a request may then sit down
sooner, in another row, in other company, and be cancelled further on in its text. That changes how many rounds there are, never a token.
"""

from __future__ import annotations

import collections
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.drafters import Drafter, take_drafter
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.extras.record import FORMAT, model_prints, versions, vocabulary_print
from stepgraph.runtime.request import FinishReason, Job
from stepgraph.sampling.fields import clip_error, clip_name, clip_repr
from stepgraph.sampling.grammar.compile.limits import GrammarLimits
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams


@dataclass
class Told:
    """A recorded request and what came of it."""

    job_id: int
    step: int  # steps begun before it came
    options: dict[str, Any]  # of Engine.submit; empty for one that cannot be asked again
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None  # None: it had not ended when the recording did
    error: str = ""
    end_step: int = 0

    @property
    def open(self) -> bool:
        """Whether something outside ended it, here or there: its text is compared as far as both go."""
        return self.reason in (None, FinishReason.CANCELLED)


@dataclass(frozen=True)
class Run:
    """A recording."""

    path: Path
    header: dict[str, Any]
    requests: tuple[Told, ...]  # in the order in which they came
    steps: int
    ending: str  # why there is no more of it

    @property
    def config(self) -> EngineConfig:
        """The recorded one, for wherever the models are now."""
        fields = dict(self.header["config"])
        try:
            limits = GrammarLimits(**fields.pop("grammar_limits"))
            tuples = {name: None if fields[name] is None else tuple(fields[name]) for name in ("forced_acceptance", "buckets")}
            config = EngineConfig(**fields | tuples | {"grammar_limits": limits, "backend": "auto", "nvtx": False})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{self.path}:1: config: {error}") from None
        return replace(config, max_queued=max(config.max_queued, len(self.requests)))


class Difference(NamedTuple):
    """Where a text is another one: a token or, at its end, a finish reason."""

    job_id: int
    place: int
    got: int | str
    wanted: int | str
    error: str  # that came with a reason

    def __str__(self) -> str:
        told = f" ({self.error})" if self.error else ""
        return f"job {self.job_id}, place {self.place}: got {self.got}, want {self.wanted}{told}"


@dataclass(frozen=True)
class Replayed:
    """What a replay found."""

    requests: int
    left_out: int  # with embeddings, of which a recording has none
    tokens: int  # compared
    recorded_tokens: int
    rounds: int
    differences: tuple[Difference, ...]  # the first of each request

    @property
    def equal(self) -> bool:
        return not self.differences


def read_recording(path: str | Path) -> Run:
    """ValueError names the file, and the line that is wrong. Half a line at the end is where a process ended."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            header = _header(path, file.readline())
            return _Reader(path).read(header, file)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}, want a file that Engine(record=...) wrote") from None


def replay(
    run: Run, target: TargetModel, draft: Drafter | str | None, vocabulary: Vocabulary | None, *, progress: bool = False
) -> Replayed:
    """Ask an engine around these models what was asked then. ValueError where they are not those that were recorded."""
    models, config = take_drafter(target, draft, run.config)
    _check_prints(run, model_prints(models), vocabulary_print(vocabulary))
    with Engine(target, draft, vocabulary=vocabulary, config=config) as engine:
        engine.capture(progress=progress)
        return ask_again(run, engine)


def ask_again(run: Run, engine: Engine) -> Replayed:
    """Ask an engine that is idle and captured, whatever it is made of."""
    before = engine.stats().rounds
    jobs = _Schedule(run).carried_out(engine)
    return _compared(run, jobs, engine.stats().rounds - before)


def other_versions(run: Run) -> tuple[str, ...]:
    """What may explain a difference."""
    there, here = run.header["versions"], versions()
    return tuple(
        f"{name}: {here.get(name, 'none')}, recorded with {there.get(name, 'none')}"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    )


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests: dict[int, Told] = {}
        self._steps, self._ending, self._closed = 0, "the process ended", False

    def read(self, header: dict[str, Any], lines: Iterator[bytes]) -> Run:
        for number, line in enumerate(lines, 2):
            if not line.endswith(b"\n"):
                break
            try:
                happened = json.loads(line)
                self._take(happened)
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise ValueError(
                    f"{self._path}:{number}: {type(error).__name__}: {clip_error(error)}, want a line that a recorder wrote"
                ) from None
        return Run(self._path, header, tuple(self._requests.values()), self._steps, self._ending)

    def _take(self, happened: Mapping[str, Any]) -> None:
        kind = happened["kind"]
        self._steps = max(self._steps, int(happened.get("step", 0)))
        if kind == "submit":
            job_id = int(happened["job"])
            self._requests[job_id] = Told(job_id, int(happened["step"]), _options(happened))
        elif kind == "refused":
            self._requests.pop(happened["job"], None)
        elif kind == "tokens":
            self._requests[happened["job"]].tokens += map(int, happened["tokens"])
        elif kind == "end" and not self._closed:
            told = self._requests[happened["job"]]
            told.reason, told.error, told.end_step = FinishReason(happened["reason"]), str(happened["error"]), int(happened["step"])
        elif kind == "closed":  # the ends behind it are nobody's own
            self._closed, self._ending = True, str(happened["why"])
        elif kind == "full":
            self._ending = "it was as long as Recording.max_bytes allows"
        elif kind not in ("end", "cancel"):
            raise ValueError(f"kind: got {clip_repr(kind)}")


class _Schedule:
    """What happens between two steps, by the number of steps before."""

    def __init__(self, run: Run) -> None:
        self._steps = run.steps
        self._told = {told.job_id: told for told in run.requests if told.options}
        self._submits, self._cancels = collections.defaultdict[int, list[Told]](list), collections.defaultdict[int, list[Told]](list)
        for told in self._told.values():
            self._submits[told.step].append(told)
            if told.reason == FinishReason.CANCELLED:
                self._cancels[max(told.end_step - 1, told.step)].append(told)
        self._jobs: dict[int, Job] = {}

    def carried_out(self, engine: Engine) -> dict[int, Job]:
        moments = sorted({*self._submits, *self._cancels}, reverse=True)
        step = 0
        while moments or engine.has_work:
            if moments and (moments[-1] <= step or not engine.has_work):  # steps of an idle engine change nothing
                step = max(step, moments[-1])
                self._happen(moments.pop(), engine)
                continue
            engine.step()
            step += 1
            if step >= self._steps:
                self._cancel_unknown(engine)
        return self._jobs

    def _happen(self, moment: int, engine: Engine) -> None:
        for told in self._submits[moment]:
            if constraint := told.options["constraint"]:
                with contextlib.suppress(ValueError):  # then that is what the request ends with
                    engine.compile(constraint)
            options = dict(told.options)
            self._jobs[told.job_id] = engine.submit(options.pop("prompt_ids"), **options)
        for told in self._cancels[moment]:
            engine.cancel(self._jobs[told.job_id])

    def _cancel_unknown(self, engine: Engine) -> None:
        """Nothing is known of how these went on."""
        for job_id, job in self._jobs.items():
            told = self._told[job_id]
            if told.reason is None and not job.finished and len(job.tokens) >= len(told.tokens):
                engine.cancel(job)


def _compared(run: Run, jobs: Mapping[int, Job], rounds: int) -> Replayed:
    pairs = [(told, jobs[told.job_id]) for told in run.requests if told.job_id in jobs]
    found = [difference for told, job in pairs if (difference := _difference(told, job))]
    return Replayed(
        requests=len(run.requests),
        left_out=len(run.requests) - len(pairs),
        tokens=sum(min(len(told.tokens), len(job.tokens)) for told, job in pairs),
        recorded_tokens=sum(len(told.tokens) for told in run.requests),
        rounds=rounds,
        differences=tuple(found),
    )


def _difference(told: Told, job: Job) -> Difference | None:
    said: tuple[int | str, ...] = (*job.tokens, str(job.finish_reason))
    recorded: tuple[int | str, ...] = (*told.tokens, str(told.reason or "no end"))
    last = min(len(said), len(recorded)) - 1
    place = next((place for place in range(last) if said[place] != recorded[place]), last)
    # An end from outside is no word against what the other one goes on with.
    silent = (told.open and place == len(told.tokens)) or (job.finish_reason == FinishReason.CANCELLED and place == len(job.tokens))
    if silent or said[place] == recorded[place]:
        return None
    error = (told.error if place == len(told.tokens) else "") or (job.error if place == len(job.tokens) else "")
    return Difference(told.job_id, place, said[place], recorded[place], error)


def _header(path: Path, line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
        if header["kind"] != "engine":
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path}:1: got {line[:40]!r}, want the first line of a file that Engine(record=...) wrote") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}:1: got format {header.get('format')!r}, want {FORMAT}")
    for name in ("versions", "config", "models"):
        if not isinstance(header.get(name), dict):
            raise ValueError(f"{path}:1: {name}: got {type(header.get(name)).__name__}, want an object")
    return dict(header)


def _options(happened: Mapping[str, Any]) -> dict[str, Any]:
    if happened["embeddings"]:
        return {}
    sampling, given = dict(happened["sampling"]), happened["constraint"]
    sampling["logit_bias"] = dict(sampling["logit_bias"])
    if given is not None:
        given = {**given, "marker": tuple(given["marker"]) if isinstance(given["marker"], list) else given["marker"]}
    names = ("prompt_ids", "max_new_tokens", "num_speculative_tokens", "cache_salt")
    return {name: happened[name] for name in names} | {
        "draft_ids": happened["draft_ids"] or None,
        "sampling": SamplingParams(**sampling),
        "constraint": None if given is None else Constraint(**given),
    }


def _check_prints(run: Run, models: Mapping[str, Mapping[str, Any]], vocabulary: str) -> None:
    wanted = run.header["models"]
    for name in sorted({*wanted, *models}):
        there, here = wanted.get(name), models.get(name)
        if there != here:
            raise ValueError(f"{run.path}: {name}: got {_named(here)}, want {_named(there)}, with which it was recorded")
    if run.header.get("vocabulary") != vocabulary:
        there = clip_repr(run.header.get("vocabulary"))
        raise ValueError(f"{run.path}: vocabulary: got {vocabulary}, want {there}, with which it was recorded")


def _named(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none"
    return f"{clip_name(found['class'])} of {clip_name(found['tensors'])} tensors, fingerprint {clip_name(found['fingerprint'])}"
