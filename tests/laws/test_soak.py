"""The soak test for some seconds: it passes, reports its measurements, and finds planted leaks and wrong answers."""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from stepgraph import Constraint, Engine, StepEvent
from stepgraph.graphs.row_layout import ResultRecord
from stepgraph.runtime.page_cache import PageCache
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.scheduler import Scheduler
from stepgraph.sampling.grammar import Claim
from tests.helpers.toy_engines import COMPILER, Setup, make_engine
from tools.soak import __main__ as soak
from tools.soak import checker, load
from tools.soak import report as soak_report
from tools.soak.engines import KINDS, EngineKind
from tools.soak.process import PROCESS, Sample, TypeCounts, heap_bytes, resident_bytes, sample
from tools.soak.report import ALLOWED, MIB, Trend, fit, fit_trends, growing_trends, report
from tools.soak.requests import RequestSource
from tools.soak.soak import MAX_SAMPLES, Plan, Series, Soak

has_process_figures = pytest.mark.skipif(resident_bytes() is None or not (PROCESS / "fd").exists(), reason="the system has no /proc")
ROOT = Path(__file__).resolve().parents[2]
SOME = ("n-gram", "function", "no drafter")


def small(name: str) -> EngineKind:
    """A kind that starts fast and caches no unused grammar, so that growth over some seconds is a leak."""
    (kind,) = [kind for kind in KINDS if kind.name == name]
    return replace(kind, eager=True, changes={**kind.changes, "grammar_cache_bytes": 1, "compile_isolation": "none", "prefix_reuse": False})


def plan(*names: str, **changes: Any) -> Plan:
    """A plan of short acts, which `run` ends."""
    kinds = tuple(small(name) for name in names)
    return Plan(600, kinds=kinds, act_seconds=(0.05, 0.15), sample_seconds=0.2, warm_up_share=0.0, warm_up_acts=1, **changes)


def run(plan: Plan, acts: int, problems: int = 0) -> dict[str, Any]:
    """Run until there are enough acts and problems: on a busy machine, an act may cancel all its requests before their first event."""
    stop = threading.Event()

    def progress(soaking: Soak) -> None:
        if soaking.counts["acts"] >= acts and soaking.num_problems >= problems:
            stop.set()

    soaking = Soak(plan, stop, torch.device("cpu"), progress)
    soaking.run()
    return report(soaking)


@pytest.fixture(autouse=True)
def small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "CACHE_BYTES", 1)


def test_short_run_passes() -> None:
    found = run(plan(*SOME, plain_share=0.3, renewal_share=0.5), acts=7)
    assert found["passed"] and found["flat"], (found["reason"], found["problems"])
    assert set(found["kinds"]) == set(SOME) and found["did"]["acts"] == 7 and found["did"]["engines closed"] > 0
    for did in ("compared with plain decoding", "re-accepted by a fresh matcher", "read by other means", "ended: cancelled", "ended: stop"):
        assert found["did"][did] > 0, did
    assert sum(figures["acts"] for figures in found["kinds"].values()) == 7
    points = len(found["settled"]["seconds"])
    assert points == 7 and all(len(values) == points for values in found["settled"].values())
    assert set(found["settled"]["rows"]) == set(found["settled"]["pages"]) == {0}
    assert json.loads(json.dumps(found)) == found


def keep_matchers(patch: pytest.MonkeyPatch) -> None:
    compiled = COMPILER.compile(Constraint.regex("a+"))
    at_each_start(patch, lambda: [compiled.matcher() for _ in range(50)])


def keep_memory(patch: pytest.MonkeyPatch) -> None:
    at_each_start(patch, touched_pages)


def keep_allocations(patch: pytest.MonkeyPatch) -> None:
    at_each_start(patch, lambda: bytearray(2 * MIB))


def touched_pages() -> mmap.mmap:
    """Resident memory in a mapping of its own: an allocation could be served from a heap that earlier tests left behind."""
    pages = mmap.mmap(-1, 4 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.write(b"x" * len(pages))
    return pages


def keep_files(patch: pytest.MonkeyPatch) -> None:
    at_each_start(patch, lambda: os.open(os.devnull, os.O_RDONLY))


def at_each_start(patch: pytest.MonkeyPatch, make: Callable[[], object]) -> None:
    """Every submitting thread leaks one object."""
    kept, real = list[object](), Soak._make_source

    def make_source(soaking: Soak, kind: EngineKind) -> RequestSource:
        kept.append(make())
        return real(soaking, kind)

    patch.setattr(Soak, "_make_source", make_source)


def keep_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claim, "release", lambda claim: None)


def keep_a_page(patch: pytest.MonkeyPatch) -> None:
    taken, real = list[int](), PageCache.free

    def free(prefixes: PageCache, pages: list[int]) -> None:
        taken.extend(pages[:1] if not taken else [])
        real(prefixes, [page for page in pages if page not in taken])

    patch.setattr(PageCache, "free", free)


def repeat_events(patch: pytest.MonkeyPatch) -> None:
    after_each_step(patch, lambda events: [*events, *events[:1]])


def delay_events(patch: pytest.MonkeyPatch) -> None:
    late = list[StepEvent]()

    def hold_back(events: list[StepEvent]) -> list[StepEvent]:
        late.extend(events[:1])
        return [*events[1:], *([late.pop(0)] if len(late) > 3 else [])]

    after_each_step(patch, hold_back)


def drop_last_events(patch: pytest.MonkeyPatch) -> None:
    after_each_step(patch, lambda events: [event for event in events if event.finish_reason is None])


def another_token(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.record

    def record(scheduler: Scheduler, request: ActiveRequest, result: ResultRecord) -> StepEvent:
        return real(scheduler, request, result._replace(tokens=[(token + 1) % 95 for token in result.tokens]))

    patch.setattr(Scheduler, "record", record)


def after_each_step(patch: pytest.MonkeyPatch, change: Callable[[list[StepEvent]], list[StepEvent]]) -> None:
    real = Engine.step
    patch.setattr(Engine, "step", lambda engine: change(real(engine)))


PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "matchers are kept": (keep_matchers, "growing: .*matchers"),
    "memory is kept": (keep_memory, "growing: .*resident_bytes"),
    "allocations are kept": (keep_allocations, "growing: .*heap_bytes"),
    "files stay open": (keep_files, "growing: .*files"),
    "claims are kept": (keep_claims, "grammar bytes above the cache limit"),
    "a page is not freed": (keep_a_page, "free pages: got 33, expected 34"),
    "an event is repeated": (repeat_events, "the events have|after the end"),
    "an event is late": (delay_events, "the events have|after the end"),
    "other tokens": (another_token, "a fresh matcher|plain decoding gives"),
}


@pytest.mark.slow
@has_process_figures
def test_four_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for planted in ("matchers are kept", "memory is kept", "allocations are kept", "an event is late"):
        PLANTED[planted][0](monkeypatch)
    found = run(plan("no drafter", plain_share=1.0, renewal_share=0.0, served_share=0.0), acts=5, problems=1)
    assert not found["passed"] and found["flat"] is False
    assert not any(found["trends"][name]["flat"] for name in ("matchers", "resident_bytes", "heap_bytes"))
    assert re.search(PLANTED["an event is late"][1], str(found["problems"]))


@pytest.mark.soak
@has_process_figures
@pytest.mark.parametrize("planted", PLANTED)
def test_planted_fault_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message = PLANTED[planted]
    plant(monkeypatch)
    found = run(plan("no drafter", plain_share=1.0, renewal_share=0.0, served_share=0.0), acts=6)
    assert not found["passed"] and re.search(message, found["reason"]), found["reason"]


@pytest.mark.soak
def test_stream_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "DRAIN_SECONDS", 2.0)
    drop_last_events(monkeypatch)
    found = run(plan("no drafter", served_share=1.0), acts=2)
    assert not found["passed"] and any("a task still waits for its stream" in problem for problem in found["problems"])


@pytest.mark.slow
def test_ctrl_c_prints_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, handler = Soak._sample_settled, signal.getsignal(signal.SIGINT)

    def settled(soaking: Soak, checker: checker.Checker) -> None:
        real(soaking, checker)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Soak, "_sample_settled", settled)
    monkeypatch.setattr(soak, "Plan", lambda seconds, seed: replace(plan("no drafter"), seconds=seconds, seed=seed))
    assert soak.main(["--minutes", "5", "--out", str(tmp_path / "report.json")]) == soak.INTERRUPTED
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] and found["passed"] and found["flat"] is None and found["did"]["acts"] == 1
    assert json.loads((tmp_path / "report.json").read_text()) == found
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--minutes", "0"], "--minutes: got 0, expected a number above 0"),
        (["--minutes", "nan"], "--minutes: got nan"),
        (["--minutes", "1", "--out", "/nowhere/at/all"], "--out: got /nowhere/at/all, expected a file in an existing folder"),
    ],
)
def test_bad_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(flags) == 2
    assert message in capsys.readouterr().err


def waves(rise: float) -> Iterator[float]:
    yield from (100 + rise * index + (index * 7 % 5) for index in range(40))


@pytest.mark.parametrize(("rise", "flat"), [(0.0, True), (0.2, True), (0.3, False), (-5.0, True), (3.0, False)])
def test_trend_ignores_waves(rise: float, flat: bool) -> None:
    trend = fit([10.0 * index for index in range(40)], [*waves(rise)], slack=10.0, share=0.0, step=0.0)
    assert trend is not None and trend.flat == flat
    assert trend.per_hour == pytest.approx(360 * rise, abs=4 * trend.error_per_hour) and trend.growth == pytest.approx(39 * rise, abs=1.5)


def resident(per_hour: float, noise: float, minutes: float = 15, start: float = 0, likeness: float = 0, seed: int = 0) -> Trend:
    """The trend of resident bytes that rise by `per_hour` with normal noise, sampled every 6 seconds from minute `start` on. likeness: the
    correlation of the noise of consecutive samples."""
    random, seconds = Random(seed), [60 * start + 6.0 * index for index in range(round(10 * minutes) + 1)]
    rest, values = 0.0, list[float]()
    for second in seconds:
        rest = likeness * rest + (1 - likeness**2) ** 0.5 * random.gauss(0, noise)
        values.append(340e6 + per_hour * second / 3600 + rest)
    trend = fit(seconds, values, *ALLOWED["resident_bytes"])
    assert trend is not None
    return trend


def test_growth_is_judged_by_its_standard_error() -> None:
    """In the first quarter of an hour, 4 MiB may be a cache that fills once. Later, 2 MB per hour are growth if the error is small."""
    growing = resident(26e6, noise=0.65e6)
    assert growing.error_per_hour == pytest.approx(0.74e6, rel=0.3) and growing.growth < 8e6 and not growing.flat
    filling = resident(10e6, noise=0.1e6)
    assert filling.per_hour > 10 * filling.error_per_hour and filling.growth < filling.allowed == 4 * MIB and filling.flat
    for per_hour, noise, flat in ((2e6, 0.1e6, False), (2e6, 0.5e6, False), (2e6, 5e6, True), (-26e6, 0.1e6, True), (0.0, 0.1e6, True)):
        late = resident(per_hour, noise, minutes=22.5, start=37.5)
        assert (late.flat, late.allowed) == (flat, MIB / 2), late.why
        assert late.growth < 4 * MIB or late.flat  # an allowance of 4 MiB would hide all of these


def test_noise_is_not_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if consecutive samples are correlated; the error for independent points would report growth."""

    def growing(likeness: float, noise: float = 3e6) -> int:
        return sum(not resident(0.0, noise, 22.5, 37.5, likeness, seed).flat for seed in range(200))

    assert growing(0.0) <= 3 and growing(0.8) <= 8, "of 200"
    found = [resident(26e6, 3e6, 22.5, 37.5, 0.8, seed).flat for seed in range(100)]
    assert found.count(True) <= 5, "growth within noise is not found"
    monkeypatch.setattr(soak_report, "MAX_LAG", 0)  # independent points
    assert growing(0.8) >= 30


@pytest.mark.slow
def test_memory_of_idle_engines_is_not_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of twelve engines keeps a random amount of memory until its next act, one turn of all engines later."""

    def growing(leak: float = 0.0) -> int:
        found = 0
        for seed in range(60):
            random, held, turn, totals = Random(seed), [0.0] * 12, list[int](), list[float]()
            for act in range(12 + 330):
                turn = turn or random.sample(range(12), 12)
                held[turn.pop()] = random.gauss(0, 0.3e6)
                totals.append(300e6 + sum(held) + leak * act / 440)
            found += "resident_bytes" in growing_trends(fit_trends(series(totals[12:], 15), 900.0))
        return found

    assert growing() <= 2 and growing(26e6) >= 54, "of 60"
    monkeypatch.setattr(soak_report, "MAX_LAG", 0)
    assert growing() >= 6


@functools.cache
def settled_sample() -> Sample:
    """Counts all objects of the process, which takes seconds after many tests."""
    return sample(0.0, (), settled=True)


def series(values: list[float], minutes: float) -> list[Sample]:
    """Settled samples of an hour with these resident bytes, after warm-up from `minutes` on."""
    base, warm = replace(settled_sample(), types=TypeCounts({})), 60 * minutes
    return [
        replace(base, seconds=warm + (3600 - warm) * index / len(values), resident_bytes=int(value)) for index, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("leak", "filled", "grows"),
    [(0, 0, False), (0, 3e6, False), (5e6, 0, True), (5e6, 3e6, True), (0.5e6, 0, False)],
    ids=["noise", "fills once", "leaks", "fills and leaks", "too little to measure"],
)
def test_the_last_half_of_an_hour_decides(leak: float, filled: float, grows: bool) -> None:
    """leak: bytes per hour; filled: bytes, most of them within ten minutes after warm-up."""
    random, hours = Random(7), [0.75 * index / 400 for index in range(400)]
    values = [280e6 + leak * hour + filled * (1 - 2.718 ** (-hour * 20)) + random.gauss(0, 0.4e6) for hour in hours]
    trends = fit_trends(series(values, 15), 900.0)
    assert trends["resident_bytes, last half"].flat is not grows, trends["resident_bytes, last half"].why
    assert trends["resident_bytes"].per_hour > (1e6 if grows or filled else -0.3e6)
    assert [*growing_trends(trends)] == ["resident_bytes"] * grows


@pytest.mark.parametrize(
    ("counts", "flat"), [([9 * index for index in range(40)], False), ([min(9 * index, 180) for index in range(40)], True)]
)
def test_a_cache_that_fills_once_is_flat(counts: list[int], flat: bool) -> None:
    base = settled_sample()
    samples = [replace(base, seconds=10.0 * index, types={"stepgraph.Kept": count}) for index, count in enumerate(counts)]
    assert ("objects: stepgraph.Kept" not in growing_trends(fit_trends(samples, 0.0))) == flat
    trends = fit_trends([replace(each, resident_bytes=MIB * each.types["stepgraph.Kept"]) for each in samples], 0.0)
    assert not trends["resident_bytes"].flat and trends["resident_bytes, last half"].flat == flat


def test_kept_samples_are_bounded_and_evenly_spaced() -> None:
    found, base = Series(), sample(0.0, (), settled=False)
    for index in range(5000):
        found.add(replace(base, seconds=float(index)))
        assert found.last is not None and found.last.seconds == index and len(found.samples) < MAX_SAMPLES
    spaces = {later.seconds - earlier.seconds for earlier, later in itertools.pairwise(found.samples)}
    assert len(spaces) == 1 and len(found.samples) >= MAX_SAMPLES / 2 and found.samples[0].seconds == 0


def test_too_few_points_give_no_trend() -> None:
    assert fit([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], 0.0, 0.0, 0.0) is None
    assert fit([1.0] * 5, [1.0] * 5, 0.0, 0.0, 0.0) is None


def test_type_counts_are_small_mappings() -> None:
    first, second = {f"stepgraph.Kept{index}": 1000 + index for index in range(100)}, {"stepgraph.New": 3, "stepgraph.Kept7": 2}
    for counts in (first, second, {}):
        found = TypeCounts(counts)
        assert dict(found) == counts and len(found) == len(counts) and found.get("stepgraph.Other", 0) == 0
    earlier = TypeCounts(first)
    TypeCounts({"stepgraph.Later": 1})
    assert earlier == first and "stepgraph.Later" not in earlier


HEAPS = """
import ctypes, sys, threading
from tools.soak.process import share_one_heap
if sys.argv[1:]:
    share_one_heap()
together = threading.Barrier(5)
threads = [threading.Thread(target=lambda: (bytearray(5000), together.wait())) for _ in range(5)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.soak
@pytest.mark.skipif(heap_bytes() is None, reason="not glibc")
def test_threads_share_one_heap() -> None:
    def heaps(*arguments: str) -> int:
        command = [sys.executable, "-c", HEAPS, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.count("<heap nr=")

    assert heaps() > 1 and heaps("share") == 1


@has_process_figures
def test_compile_workers_are_counted_as_children_or_strays() -> None:
    def process_counts(*engines: Engine) -> list[int]:
        found = sample(0.0, engines, settled=False)
        return [found.files or 0, found.children or 0, found.strays or 0]

    before = process_counts()
    with make_engine(Setup(k=0, eager=True, compile_isolation="process")) as engine:
        files, children, strays = before
        assert process_counts(engine) == [files, children + 1, strays]
        assert process_counts() == [files, children + 1, strays + 1]
    assert process_counts() == before
