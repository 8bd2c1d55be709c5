"""Deterministic simulation on the tape backend: a seed fixes the engine, requests, arrival and cancel times, stream delays and faults.

    python -m tests.helpers.simulation --seed 17            # one schedule, on a fresh engine
    python -m tests.helpers.simulation --first 0 --count 500

In every schedule, a job without a cancel or a fault emits the same tokens as when it runs alone: in a plain engine if it is greedy, in
an engine like the simulated one if it is sampled. Every job ends with one reason, and all rows, pages and grammars are released.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from stepgraph import FinishReason, Job, QueueFullError, StepEvent
from stepgraph.sampling.grammar.link.native import NativeRow
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher
from tests.helpers.planted import break_fill, exhaust_fuel
from tests.helpers.simulated_worlds import MAX_LENGTH, MAX_QUEUED, NUM_ASKS, NUM_PAGES, WORLDS, Ask, Delays, World, alone, ask, make_engine

MAX_STEPS = 2000  # per schedule; more count as a hang
FAULTS = ("fill", "fuel", "tags")


class Action(NamedTuple):
    """One action of a schedule."""

    kind: Literal["submit", "refused", "cancel", "fault", "steps"]
    value: int  # request number (submit), submission index (cancel), choice of a request with a grammar (fault), or number of steps
    fault: str = ""


def make_schedule(seed: int) -> list[Action]:
    """All actions of a schedule, fixed in advance."""
    rng, actions, submitted = random.Random(f"schedule {seed}"), list[Action](), 0
    for _ in range(rng.randint(2, 12)):
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            actions.append(Action("refused" if rng.random() < 0.05 else "submit", rng.randrange(NUM_ASKS)))
            submitted += actions[-1].kind == "submit"
        if submitted and rng.random() < 0.25:
            actions.append(Action("cancel", rng.randrange(submitted)))
        if submitted and rng.random() < 0.3:
            actions.append(Action("fault", rng.randrange(12), rng.choice(FAULTS)))
        actions.append(Action("steps", rng.choice((1, 1, 2, 5))))
    return actions


@dataclass
class Submission:
    """A submitted request, its planted fault and its events."""

    request: Ask
    job: Job
    fault: str = ""
    events: list[StepEvent] = field(default_factory=list)


class Simulation:
    """Runs one schedule at a time in one engine, which is reused because recording takes longer than a schedule."""

    def __init__(self, world: World) -> None:
        self.world, self.delays = world, Delays()
        self.engine = make_engine(world, self.delays)

    def run(self, seed: int) -> list[Submission]:
        self.delays.start(seed)
        prefixes = self.engine._scheduler.rows.page_cache
        prefixes._evict(len(prefixes._idle))  # cached pages of earlier schedules
        submissions: list[Submission | None] = []
        before = self.engine.stats()
        for action in make_schedule(seed):
            if action.kind == "submit":
                submissions.append(self._submit(ask(action.value)))
            elif action.kind == "refused":
                self._submit_refused(ask(action.value))
            elif action.kind == "steps":
                for _ in range(action.value):
                    self._step(submissions)
            elif action.kind == "fault":
                self._plant(submissions, action.value, action.fault)
            elif entry := submissions[action.value]:
                self.engine.cancel(entry.job)
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self._step(submissions)
        entries = [entry for entry in submissions if entry]
        left = [entry.job for entry in entries if not entry.job.finished]
        assert not left and not self.engine.has_work, f"jobs left after {MAX_STEPS} steps: {left}"
        self.engine.step()  # a step of an idle engine changes nothing
        after = self.engine.stats()
        assert after.submitted - before.submitted == len(entries)
        assert after.tokens - before.tokens == sum(len(entry.job.tokens) for entry in entries)
        return entries

    def _submit(self, request: Ask) -> Submission | None:
        full = self.engine.stats().waiting >= MAX_QUEUED
        try:
            entry = Submission(request, request.submit(self.engine))
        except QueueFullError:
            assert full, "a queue with room refused a request"
            return None
        while not all(waiting.ready for waiting in tuple(self.engine.queue.waiting)):
            time.sleep(1e-4)  # compile times are not deterministic, so wait here
        return entry

    def _submit_refused(self, request: Ask) -> None:
        before = self.engine.stats().submitted
        try:
            replace(request, max_new_tokens=MAX_LENGTH).submit(self.engine)
        except ValueError:
            assert self.engine.stats().submitted == before
        else:
            raise AssertionError("a request beyond max_length was accepted")

    def _step(self, submissions: list[Submission | None]) -> None:
        by_job = {entry.job.id: entry for entry in submissions if entry}
        for event in self.engine.step():
            by_job[event.job_id].events.append(event)

    def _plant(self, submissions: list[Submission | None], which: int, fault: str) -> None:
        """Plant a fault in one running request with a grammar, if there is one. On the device only its tags can be wrong."""
        by_job = {entry.job.id: entry for entry in submissions if entry}
        self.engine.backend.event().wait()  # otherwise thread timing decides which host nodes see the fault
        working = [
            request
            for request in self.engine._scheduler.active
            if request.decoding and request.constrained and not by_job[request.job.id].fault
        ]
        if not working:
            return
        request = working[which % len(working)]
        entry = by_job[request.job.id]
        entry.fault, matcher = fault, request.matcher
        if matcher and fault == "fuel" and (isinstance(matcher, NativeRow) or isinstance(matcher.matcher, XGrammarMatcher)):
            exhaust_fuel(matcher)
        elif matcher and fault != "tags":
            break_fill(matcher, "planted", which)
        else:
            tags, row = self.engine.buffers.row_tags, request.row
            self.engine.backend.run(lambda: tags[row].add_(77))

    def check(self, entries: list[Submission]) -> None:
        """Compare each job with its result alone, and check that all resources are free."""
        for entry in entries:
            check_job(entry, *alone(entry.request, self.world))
        self.check_released()

    def check_released(self) -> None:
        engine, stats = self.engine, self.engine.stats()
        rows, prefixes = engine._scheduler.rows, engine._scheduler.rows.page_cache
        assert (stats.running, stats.waiting, len(engine._scheduler._active)) == (0, 0, 0)
        assert sorted(rows._free_rows) == list(range(self.world.max_rows)), f"rows {rows._free_rows} are free"
        known = list(prefixes._published.values())
        held = sorted([*prefixes._free, *(page.page for page in known)])
        assert held == list(range(1, NUM_PAGES + 1)), f"pages {held} are free or published"
        assert all(page.ref_count == 0 for page in known), "a page is held after all jobs ended"
        compiler = engine._parts.compiler
        assert compiler is not None and not engine.queue.unfinished
        assert not any(entry.claims for entry in compiler._cache._entries.values()), "a grammar is claimed after all jobs ended"
        assert stats.submitted == sum(count for _, count in stats.finished)
        assert stats.rounds == sum(graph.rounds for graph in stats.graphs) and stats.host_syncs == 0
        assert stats.rounds == (stats.replays if not self.world.eager else stats.eager_rounds)


def check_job(entry: Submission, tokens: tuple[int, ...], reason: str) -> None:
    job, events = entry.job, entry.events
    assert job.finish_reason is not None
    assert [token for event in events for token in event.tokens] == job.tokens, "the events differ from the tokens of the job"
    assert [event.finish_reason for event in events if event.finish_reason] == [job.finish_reason], "expected exactly one finish event"
    assert events[-1].finish_reason is not None, "an event after the finish event"
    assert len(job.origins) == len(job.tokens) and len(job.logprobs) == (len(job.tokens) if entry.request.sampling.logprobs else 0)
    message = (
        f"got {job.tokens} {job.finish_reason} {job.error!r}, expected {list(tokens)} {reason}, for {entry.request}, fault {entry.fault!r}"
    )
    if job.finish_reason == FinishReason.CANCELLED or (entry.fault and job.finish_reason == FinishReason.ERROR):
        assert job.tokens == list(tokens[: len(job.tokens)]), message
    else:
        assert (tuple(job.tokens), str(job.finish_reason)) == (tokens, reason), message
    if job.finish_reason == FinishReason.ERROR:
        assert job.error and (entry.fault or reason == FinishReason.ERROR), message


def world_of(seed: int) -> World:
    return WORLDS[seed % len(WORLDS)]


class Failure(AssertionError):
    """A failed schedule. The message ends with the command that repeats it."""


@functools.cache
def shared_simulation(world: World) -> Simulation:
    return Simulation(world)


def run_seed(seed: int, simulation: Simulation | None = None) -> list[Submission]:
    """Run and check one schedule; raises Failure if a check fails."""
    simulation = simulation or shared_simulation(world_of(seed))
    try:
        entries = simulation.run(seed)
        simulation.check(entries)
        return entries
    except Exception as error:
        shared_simulation.cache_clear()  # the engine may be in an invalid state
        raise Failure(f"{simulation.world}: {type(error).__name__}: {error}\npython -m tests.helpers.simulation --seed {seed}") from error


def run_many(seeds: Iterable[int]) -> dict[str, int]:
    """Run the schedules of `seeds`; counts of schedules, jobs, tokens, faults and finish reasons."""
    counts = dict.fromkeys(("schedules", "jobs", "tokens", "faults", *(str(reason) for reason in FinishReason)), 0)
    for seed in seeds:
        entries = run_seed(seed)
        counts["schedules"] += 1
        counts["jobs"] += len(entries)
        for entry in entries:
            counts["tokens"] += len(entry.job.tokens)
            counts["faults"] += bool(entry.fault)
            counts[str(entry.job.finish_reason)] += 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run one schedule")
    parser.add_argument("--first", type=int, default=0, help="first seed of several schedules")
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.count) if options.seed is None else range(options.seed, options.seed + 1)
    started = time.perf_counter()
    try:
        counts = run_many(tqdm(seeds, disable=not sys.stderr.isatty()))
    except Failure as failure:
        print(failure, file=sys.stderr)
        return 1
    print(*(f"{name}: {count}" for name, count in counts.items()), f"seconds: {time.perf_counter() - started:.1f}", sep=", ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
