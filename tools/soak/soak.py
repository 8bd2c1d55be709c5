"""The soak test: one act after another, each with one engine; after each act, checks and a sample of the process."""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from stepgraph import Engine
from tools.soak.checker import Checker
from tools.soak.engines import KINDS, EngineKind, Models
from tools.soak.load import Act, Answer, loop_act, served_act
from tools.soak.process import Sample, sample
from tools.soak.requests import RequestSource

MAX_SAMPLES = 512  # of each of the two series: all samples of an hour took a megabyte, which appeared as growth
MAX_PROBLEMS = 50  # kept in the report; all are counted
KEPT_ANSWERS = 16  # per kind


@dataclass(frozen=True)
class Plan:
    """Configuration of a run."""

    seconds: float
    seed: int = 0
    kinds: tuple[EngineKind, ...] = KINDS
    act_seconds: tuple[float, float] = (2.0, 6.0)
    sample_seconds: float = 2.0  # between two samples during an act
    served_share: float = 0.5  # share of acts with an AsyncEngine
    renewal_share: float = 0.2  # share of acts after which the engine is closed and created again
    plain_share: float = 0.15  # of greedy texts, compared with plain decoding
    warm_up_share: float = 0.25  # share of the time that is warm-up; it also lasts until every kind had settling_turns acts
    warm_up_acts: int = 2


class Series:
    """Evenly spaced samples, at most MOST_SAMPLES of them: each time it is full, every other one is dropped."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.last: Sample | None = None
        self._added, self._step = 0, 1

    def add(self, sample: Sample) -> None:
        self.last = sample
        if self._added % self._step == 0:
            self.samples.append(sample)
        self._added += 1
        if len(self.samples) == MAX_SAMPLES:
            del self.samples[1::2]
            self._step *= 2


class Soak:
    """Runs for the planned time or until `stop` is set. Problems are recorded and do not end the run."""

    def __init__(self, plan: Plan, stop: threading.Event, device: torch.device, progress: Callable[[Soak], None] = lambda _: None) -> None:
        self.plan, self._stop, self._progress = plan, stop, progress
        self.models = Models(device)
        self._series = {settled: Series() for settled in (True, False)}
        self.problems: list[str] = []
        self.num_problems = 0
        self.counts = collections.Counter[str]()
        self.by_kind = {kind.name: collections.Counter[str]() for kind in plan.kinds}
        self.warm_at: float | None = None  # seconds
        self._engines: dict[EngineKind, Engine] = {}
        self._answers = {kind: collections.deque[Answer](maxlen=KEPT_ANSWERS) for kind in plan.kinds}
        self._rng, self._numbers, self._sources = random.Random(f"soak {plan.seed}"), itertools.count(1000), itertools.count()
        self._started = time.monotonic()
        self._lock = threading.Lock()  # guards _engines against the sampling thread

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def _settled_bytes(self) -> dict[str, int]:
        """Memory after the last act; zero where the system does not report it."""
        last = self.last_sample(settled=True)
        return {name: getattr(last, name, None) or 0 for name in ("resident_bytes", "heap_bytes")}

    def samples(self, settled: bool) -> list[Sample]:
        """Samples taken between acts, or during acts."""
        return self._series[settled].samples

    def last_sample(self, settled: bool) -> Sample | None:
        return self._series[settled].last

    @property
    def over(self) -> bool:
        return self._stop.is_set() or self.seconds >= self.plan.seconds

    def run(self) -> None:
        checker = Checker(self.models, random.Random(f"checks {self.plan.seed}"), self.plan.plain_share)
        gc.collect()
        gc.freeze()  # skip existing objects: they are not leaks, and traversing torch takes longer than an act
        ended = threading.Event()
        sampler = threading.Thread(target=self._sample_periodically, args=(ended,), name="soak-samples", daemon=True)
        sampler.start()
        try:
            for kind in self._kinds_in_random_order():
                self._act(kind, checker)
                if self.over:
                    break
        finally:
            ended.set()
            sampler.join()
            with self._lock:
                for engine in self._engines.values():
                    engine.close()
            checker.close()
            self.counts += checker.counts
            gc.unfreeze()

    def _kinds_in_random_order(self) -> Iterator[EngineKind]:
        """Every kind, repeatedly, in a new random order each time."""
        while True:
            yield from self._rng.sample(self.plan.kinds, len(self.plan.kinds))

    def _act(self, kind: EngineKind, checker: Checker) -> None:
        """Put one engine under load until it is idle or closed; then check the outputs and sample the process."""
        rng = self._rng
        served, renews = rng.random() < self.plan.served_share, rng.random() < self.plan.renewal_share
        close_under_load = renews and not served and rng.random() < 0.5
        try:
            problems = self._perform(kind, checker, served, close_under_load)
        except Exception:  # for example, an engine that failed
            problems, renews = [traceback.format_exc(limit=-8)], True
        if renews:
            self.counts["engines closed"] += 1
            self.counts["engines closed under load"] += close_under_load
            try:
                self._renew(kind)
            except Exception:
                problems.append(traceback.format_exc(limit=-8))
        self.counts["acts"] += 1
        self.counts["acts with an AsyncEngine"] += served
        for problem in problems:
            self.num_problems += 1
            if len(self.problems) < MAX_PROBLEMS:
                self.problems.append(f"{kind.name}, at {self.seconds:.0f} s: {problem}")
        counts = self.by_kind[kind.name]
        counts["acts"] += 1
        counts["problems"] += len(problems)
        warm, before = self.warm_at is not None, self._settled_bytes
        self._sample_settled(checker)
        for name, value in self._settled_bytes.items():
            counts[f"{name} after warm-up"] += (value - before[name]) * warm

    def _perform(self, kind: EngineKind, checker: Checker, served: bool, close_under_load: bool) -> list[str]:
        act_seconds = min(self._rng.uniform(*self.plan.act_seconds), max(0.2, self.plan.seconds - self.seconds))
        abort, engine = self._rng.random() < 0.3, self._engine(kind)
        act = Act(engine, self._answers[kind], act_seconds, self._stop)
        if served:
            served_act(act, lambda: self._make_source(kind), abort)
        else:
            loop_act(act, lambda: self._make_source(kind), close_under_load)
        problems = checker.check(kind, act)
        if not act.closed:
            problems += check_released(engine)
        self.counts += act.counts
        counts = self.by_kind[kind.name]
        counts["jobs"] += len(act.records)
        counts["tokens"] += sum(len(record.job.tokens) for record in act.records)
        return problems

    def _renew(self, kind: EngineKind) -> None:
        with self._lock:
            if engine := self._engines.pop(kind, None):
                engine.close()
                del engine  # free its memory before the next engine allocates
        self._engine(kind)

    def _sample_settled(self, checker: Checker) -> None:
        """Sample between two acts, when nothing runs."""
        with self._lock:
            self._series[True].add(sample(self.seconds, (*self._engines.values(), *checker.engines), settled=True))
        all_seen = self.counts["acts"] >= self.plan.warm_up_acts * len(self.plan.kinds)
        if self.warm_at is None and all_seen and self.seconds >= self.plan.warm_up_share * self.plan.seconds:
            self.warm_at = self.seconds
        self._progress(self)

    def _engine(self, kind: EngineKind) -> Engine:
        if kind not in self._engines:
            engine = kind.make(self.models)
            self.counts["engines made"] += 1
            self.counts["engines that record"] += not kind.eager
            with self._lock:
                self._engines[kind] = engine
        return self._engines[kind]

    def _make_source(self, kind: EngineKind) -> RequestSource:
        return RequestSource(kind, f"{self.plan.seed} {next(self._sources)}", self._numbers)

    def _sample_periodically(self, ended: threading.Event) -> None:
        while not ended.wait(self.plan.sample_seconds):
            with self._lock:
                self._series[False].add(sample(self.seconds, tuple(self._engines.values()), settled=False))
            self._progress(self)


def check_released(engine: Engine) -> list[str]:
    """Resources that an idle engine has not released, one line per problem."""
    stats = engine.stats()
    expected = {
        "running": (stats.running, 0),
        "waiting": (stats.waiting, 0),
        "free pages": (stats.free_pages, stats.pages),
        "submitted": (stats.submitted, sum(count for _, count in stats.finished)),
        "waits for the whole device": (stats.host_syncs, 0),
        "rounds": (stats.rounds, stats.replays + stats.eager_rounds),
        "grammar bytes above the cache limit": (max(0, stats.grammars.nbytes - engine.config.grammar_cache_bytes), 0),
    }
    return [f"an idle engine: {name}: got {got}, expected {want}" for name, (got, want) in expected.items() if got != want]


def columns(samples: Sequence[Sample]) -> dict[str, list[object]]:
    """One list per figure."""
    names = [field.name for field in dataclasses.fields(Sample) if field.name not in ("types", "settled")]
    return {name: [getattr(each, name) for each in samples] for name in names}
