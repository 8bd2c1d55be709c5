"""The soak itself: one act after another, each with one of the engines, and between two of them everything looked at."""

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
from tools.soak.acts import loop_act, served_act
from tools.soak.asking import Asks
from tools.soak.checking import Checker
from tools.soak.figures import Sample, sample
from tools.soak.kinds import KINDS, Kind, Models
from tools.soak.telling import Act, Answer

MOST_PROBLEMS = 50  # kept; the others are counted
KEPT_ANSWERS = 16  # per kind


@dataclass(frozen=True)
class Plan:
    """What a soak is to do."""

    seconds: float
    seed: int = 0
    kinds: tuple[Kind, ...] = KINDS
    act_seconds: tuple[float, float] = (2.0, 6.0)
    sample_seconds: float = 2.0  # between two looks at the process while acts run
    served: float = 0.5  # share of acts with an AsyncEngine
    renewals: float = 0.2  # share of acts behind which the engine is closed, and another is made
    plain_share: float = 0.15  # of greedy texts: held against plain decoding
    settling: float = 0.25  # share of the time that is warm-up, and at least until every kind had so many acts:
    settling_turns: int = 2


class Soak:
    """Runs until its time is over, or `stop` is set; whatever goes wrong is noted, and it goes on."""

    def __init__(self, plan: Plan, stop: threading.Event, device: torch.device, progress: Callable[[Soak], None] = lambda _: None) -> None:
        self.plan, self._stop, self._progress = plan, stop, progress
        self.models = Models(device)
        self.samples: list[Sample] = []
        self.problems: list[str] = []
        self.num_problems = 0
        self.counts, self.by_kind = collections.Counter[str](), collections.Counter[str]()
        self.warm_at: float | None = None  # seconds
        self._engines: dict[Kind, Engine] = {}
        self._kept = {kind: collections.deque[Answer](maxlen=KEPT_ANSWERS) for kind in plan.kinds}
        self._drawn, self._numbers, self._asks = random.Random(f"soak {plan.seed}"), itertools.count(1000), itertools.count()
        self._started = time.monotonic()
        self._lock = threading.Lock()  # between the sampling thread and whoever changes the engines

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def over(self) -> bool:
        return self._stop.is_set() or self.seconds >= self.plan.seconds

    def run(self) -> None:
        checker = Checker(self.models, random.Random(f"checks {self.plan.seed}"), self.plan.plain_share)
        gc.collect()
        gc.freeze()  # what was there before is nobody's leak, and looking through all of torch takes longer than an act
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(ended,), name="soak-samples", daemon=True)
        watching.start()
        try:
            for kind in self._turns():
                self._act(kind, checker)
                if self.over:
                    break
        finally:
            ended.set()
            watching.join()
            with self._lock:
                for engine in self._engines.values():
                    engine.close()
            checker.close()
            self.counts += checker.counts
            gc.unfreeze()

    def _turns(self) -> Iterator[Kind]:
        """Every kind, again and again, in an order of its own each time."""
        while True:
            yield from self._drawn.sample(self.plan.kinds, len(self.plan.kinds))

    def _act(self, kind: Kind, checker: Checker) -> None:
        """One engine under load, until it is idle or closed; then the checks, and a look at the process."""
        drawn = self._drawn
        served, leaves = drawn.random() < self.plan.served, drawn.random() < self.plan.renewals
        abruptly = leaves and not served and drawn.random() < 0.5
        try:
            problems = self._perform(kind, checker, served, abruptly)
        except Exception:  # an engine that failed, say
            problems, leaves = [traceback.format_exc(limit=-8)], True
        if leaves:
            self.counts["engines closed"] += 1
            self.counts["engines closed under load"] += abruptly
            try:
                self._renew(kind)
            except Exception:
                problems.append(traceback.format_exc(limit=-8))
        self.counts["acts"] += 1
        self.counts["acts with an AsyncEngine"] += served
        for problem in problems:
            self.num_problems += 1
            if len(self.problems) < MOST_PROBLEMS:
                self.problems.append(f"{kind.name}, at {self.seconds:.0f} s: {problem}")
        self._settled(checker)

    def _perform(self, kind: Kind, checker: Checker, served: bool, abruptly: bool) -> list[str]:
        lasting = min(self._drawn.uniform(*self.plan.act_seconds), max(0.2, self.plan.seconds - self.seconds))
        hurry, engine = self._drawn.random() < 0.3, self._engine(kind)
        act = Act(engine, self._kept[kind], lasting, self._stop)
        if served:
            served_act(act, lambda: self._make_asks(kind), hurry)
        else:
            loop_act(act, lambda: self._make_asks(kind), abruptly)
        problems = checker.check(kind, act)
        if not act.closed:
            problems += check_books(engine)
        self.counts += act.counts
        self.by_kind[kind.name] += len(act.told)
        return problems

    def _renew(self, kind: Kind) -> None:
        with self._lock:
            if made := self._engines.pop(kind, None):
                made.close()
                del made  # its memory is free before the next one takes some
        self._engine(kind)

    def _settled(self, checker: Checker) -> None:
        """Between two acts, with nothing under way."""
        with self._lock:
            self.samples.append(sample(self.seconds, (*self._engines.values(), *checker.engines), settled=True))
        all_seen = self.counts["acts"] >= self.plan.settling_turns * len(self.plan.kinds)
        if self.warm_at is None and all_seen and self.seconds >= self.plan.settling * self.plan.seconds:
            self.warm_at = self.seconds
        self._progress(self)

    def _engine(self, kind: Kind) -> Engine:
        if kind not in self._engines:
            engine = kind.make(self.models)
            self.counts["engines made"] += 1
            self.counts["engines that record"] += not kind.eager
            with self._lock:
                self._engines[kind] = engine
        return self._engines[kind]

    def _make_asks(self, kind: Kind) -> Asks:
        return Asks(kind, f"{self.plan.seed} {next(self._asks)}", self._numbers)

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(self.plan.sample_seconds):
            with self._lock:
                self.samples.append(sample(self.seconds, tuple(self._engines.values()), settled=False))
            self._progress(self)


def check_books(engine: Engine) -> list[str]:
    """What an idle engine still holds, one line each."""
    stats = engine.stats()
    wanted = {
        "running": (stats.running, 0),
        "waiting": (stats.waiting, 0),
        "free pages": (stats.free_pages, stats.pages),
        "submitted": (stats.submitted, sum(count for _, count in stats.finished)),
        "waits for the whole device": (stats.host_syncs, 0),
        "rounds": (stats.rounds, stats.replays + stats.eager_rounds),
        "grammars over the cache's bytes": (max(0, stats.grammars.nbytes - engine.config.grammar_cache_bytes), 0),
    }
    return [f"an idle engine: {name}: got {got}, want {want}" for name, (got, want) in wanted.items() if got != want]


def columns(samples: Sequence[Sample]) -> dict[str, list[object]]:
    """Figures over time, one list each."""
    names = [field.name for field in dataclasses.fields(Sample) if field.name not in ("types", "settled")]
    return {name: [getattr(each, name) for each in samples] for name in names}
