"""Deterministic simulation on the tape backend: a seed fixes the engine, requests, arrival and cancel times, stream delays and faults.

    python -m tests.helpers.simulation --seed 17            # one schedule, on a fresh engine
    python -m tests.helpers.simulation --first 0 --count 500

Settings of the engine and options of the requests are drawn. In every schedule, a job without a cancel or a fault has the tokens,
log-probabilities, text and finish reason that it has alone: in an engine without drafts; if its draws depend on the drafts, in an engine
with the same drafts. A job that continues another one has the rest. Every job ends with one reason, and all rows, pages and grammars are
released. Statistics and pages are checked after every step.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from stepgraph import Engine, FinishReason, Job, QueueFullError, StepEvent
from stepgraph.graphs.row_layout import ResultRecord
from stepgraph.runtime.hidden_states import SavedText
from stepgraph.runtime.models.toy import _MASK, hash_pair
from stepgraph.runtime.replay import read_recording, replay
from stepgraph.runtime.request import ActiveRequest
from stepgraph.runtime.scheduler import LossCause, loss_cause
from stepgraph.sampling.grammar.link.native import NativeRow
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.grammar.xgrammar_lib.grammar import XGrammarMatcher
from tests.helpers.planted import break_fill, exhaust_fuel
from tests.helpers.simulated_worlds import (
    EXACT_DRAFTS,
    LORAS,
    MAX_LENGTH,
    MAX_QUEUED,
    NUM_ASKS,
    POISON,
    Ask,
    Delays,
    Expected,
    World,
    add_adapter,
    alone,
    alone_with_drafts,
    ask,
    draw_world,
    make_engine,
    models_of,
)
from tests.helpers.stat_checks import check_invariants
from tests.helpers.toy_engines import switch_draft_lengths

MAX_STEPS = 2000  # per schedule; more count as a hang
FAULTS = ("fill", "fuel", "tags")
SCHEDULES_PER_WORLD = 10  # a capture takes longer than a schedule
COUNTS = (  # statistics that never decrease
    *("rounds", "replays", "tokens", "prompt_tokens", "eager_rounds", "submitted", "forced_looks", "mask_fills", "matcher_accepts"),
    *(
        "matcher_rollbacks",
        "most_waiting",
        "most_used_pages",
        "evicted_pages",
        "added_pages",
        "preemptions",
        "reused_tokens",
        "saved_texts",
        "unsaved_texts",
    ),
)


class Action(NamedTuple):
    """One action of a schedule."""

    kind: Literal["submit", "refused", "cancel", "continue", "adapter", "fault", "reset", "steps"]
    value: int  # request number (submit), submission index (cancel), choice (continue, adapter, fault), or number of steps
    fault: str = ""
    cut: int = 0  # of the output of the job that is continued


def make_schedule(seed: int) -> list[Action]:
    """All actions of a schedule, fixed in advance."""
    rng, actions, submitted = random.Random(f"schedule {seed}"), list[Action](), 0
    resets = random.Random(f"resets {seed}")
    for _ in range(rng.randint(4, 14)):
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            actions.append(Action("refused" if rng.random() < 0.05 else "submit", rng.randrange(NUM_ASKS)))
            submitted += actions[-1].kind == "submit"
        if submitted and rng.random() < 0.25:
            actions.append(Action("cancel", rng.randrange(submitted)))
        for _ in range(rng.choice((0, 0, 1, 2)) if submitted else 0):
            actions.append(Action("continue", rng.randrange(12), cut=rng.randrange(100)))
            submitted += 1
        if rng.random() < 0.1:
            actions.append(Action("adapter", rng.randrange(len(LORAS))))
        if submitted and rng.random() < 0.25:
            actions.append(Action("fault", rng.randrange(12), rng.choice(FAULTS)))
        if resets.random() < 0.1:
            actions.append(Action("reset", 0))
        actions.append(Action("steps", rng.choice((1, 2, 4, 8, 16))))
    return actions


@dataclass
class Submission:
    """A submitted request, the output that it continues, its planted fault and its events."""

    request: Ask
    job: Job
    given: tuple[int, ...] = ()
    fault: str = ""
    events: list[StepEvent] = field(default_factory=list)


class Simulation:
    """Runs one schedule at a time in one engine, which is reused because recording takes longer than a schedule."""

    def __init__(self, world: World) -> None:
        self.world, self.delays = world, Delays()
        self.engine = make_engine(world, self.delays)
        self.draft_lengths = switch_draft_lengths(self.engine, share=world.switches) if world.switches else None
        self.stats = self.engine.stats()
        self.host_syncs = self.stats.host_syncs  # of the capture
        self.events = collections.defaultdict[int, list[StepEvent]](list)  # by job id
        self.saved = list[SavedText]()
        if (states := self.engine._parts.hidden_states) is not None:
            put = states.writer.put
            states.writer.put = lambda text: self.saved.append(text) or put(text)  # type: ignore[method-assign, func-returns-value]

        if world.drafter in EXACT_DRAFTS and not world.config.look_up:
            self._record, self.engine._scheduler.record = self.engine._scheduler.record, self._record_checked  # type: ignore[method-assign]

    def _record_checked(self, request: ActiveRequest, result: ResultRecord) -> StepEvent:
        """The model's drafts are the target's choices, so that a greedy request accepts all of them, or its grammar or its end prevents it.
        The target may spell a forced text in other tokens than the forced ones."""
        choice = request.job.sampling.plain and result.finish <= FinishCode.DEAD_END
        forced = request.constrained and result.forced >> result.accepted & 1  # no round without grammars writes `forced`
        lost = choice and not forced and loss_cause(result.draft_count, result) == LossCause.IMPROBABLE
        assert not lost, f"the draft model did not propose the target's choice: {result}, {request.job}"
        return self._record(request, result)

    def run(self, seed: int) -> list[Submission]:
        self.delays.start(seed)
        if self.draft_lengths and (chooser := self.engine._parts.draft_lengths):
            self.draft_lengths.seed(seed)
            chooser.fixed_drafting = None
        prefixes = self.engine._scheduler.rows.page_cache
        prefixes._evict(len(prefixes._idle))  # cached pages of earlier schedules
        submissions: list[Submission | None] = []
        before = self.engine.stats()
        with self._stepping() if self.world.threaded else contextlib.nullcontext():
            for action in make_schedule(seed):
                self._act(action, submissions)
            for _ in range(MAX_STEPS * (50 if self.world.threaded else 1)):
                if not self.engine.has_work:
                    break
                self._step()
        entries = [entry for entry in submissions if entry]
        for entry in entries:
            entry.events = self.events.pop(entry.job.id)
        left = [entry.job for entry in entries if not entry.job.finished]
        assert not left and not self.engine.has_work, f"jobs left after {MAX_STEPS} steps: {left}"
        self.engine.step()  # a step of an idle engine changes nothing
        after = self.engine.stats()
        assert after.submitted - before.submitted == len(entries)
        assert after.tokens - before.tokens == sum(len(entry.job.tokens) for entry in entries)
        return entries

    def _act(self, action: Action, submissions: list[Submission | None]) -> None:
        if action.kind == "submit":
            submissions.append(self._submit(ask(action.value).fitted(self.world)))
        elif action.kind == "refused":
            self._submit_refused(ask(action.value).fitted(self.world))
        elif action.kind == "steps":
            for _ in range(action.value):
                self._step()
        elif action.kind == "reset" and not self.world.records:
            self.engine.reset_prefix_cache()
        elif action.kind == "adapter":
            self._change_adapter(LORAS[action.value])
        elif action.kind == "fault" and not (self.world.records or self.world.threaded):  # a replay would not have it
            self._plant(submissions, action.value, action.fault)
        elif action.kind == "continue":
            submissions.append(self._continue(submissions, action.value, action.cut))
        elif action.kind == "cancel" and (entry := submissions[action.value]):
            self.engine.cancel(entry.job)

    def _submit(self, request: Ask, given: tuple[int, ...] = ()) -> Submission | None:
        full = self.engine.stats().waiting >= MAX_QUEUED
        try:
            entry = Submission(request, request.submit(self.engine, given), given)
        except QueueFullError:
            assert full, "a queue with room refused a request"
            return None
        except ValueError:
            if request.lora in ("", *self.engine.list_loras()):
                raise
            return None
        while not all(waiting.ready for waiting in tuple(self.engine.queue.waiting)):
            time.sleep(1e-4)  # compile times are not deterministic, so wait here
        return entry

    def _continue(self, submissions: list[Submission | None], which: int, cut: int) -> Submission | None:
        """Continue one of the jobs that have ended, from a part of its output unless it was cancelled."""
        ended = [each for each in submissions if each and each.job.finished and not each.fault and not each.request.depends_on_drafts]
        if not ended:
            return None
        entry = ended[which % len(ended)]
        given, reason = (*entry.given, *entry.job.tokens), entry.job.finish_reason
        if given and reason != FinishReason.CANCELLED:
            given = given[: cut % (len(given) + (reason not in (FinishReason.STOP, FinishReason.LENGTH)))]
        return self._submit(entry.request, given)

    def _submit_refused(self, request: Ask) -> None:
        before = self.engine.stats().submitted
        try:
            replace(request, max_new_tokens=MAX_LENGTH).submit(self.engine)
        except ValueError:
            assert self.engine.stats().submitted == before
        else:
            raise AssertionError("a request beyond max_length was accepted")

    def _change_adapter(self, name: str) -> None:
        """Remove an adapter, or add it if it was removed and a slot is free."""
        if self.world.config.max_loras and not self.engine.remove_lora(name):
            with contextlib.suppress(ValueError):
                add_adapter(self.engine, self.world, name)

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        """Step the engine in another thread."""
        ended, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                while not ended.is_set():
                    if self.engine.wait(0.01):
                        self._step_once()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        if errors:
            raise errors[0]

    def _step(self) -> None:
        if self.world.threaded:
            time.sleep(0.001)
        else:
            self._step_once()

    def _step_once(self) -> None:
        for event in self.engine.step():
            self.events[event.job_id].append(event)
        earlier, self.stats = self.stats, self.engine.stats()
        check_invariants(self.stats)
        decreased = [name for name in COUNTS if getattr(self.stats, name) < getattr(earlier, name)]
        assert not decreased, f"{decreased} decreased"
        check_pages(self.engine)

    def _plant(self, submissions: list[Submission | None], which: int, fault: str) -> None:
        """Plant a fault in one running request with a grammar, if there is one. On the device only its tags can be wrong."""
        by_job = {entry.job.id: entry for entry in submissions if entry}
        self.engine._in_flight.interrupt()
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
            check_job(entry, alone(entry.request, self.world))
            self._check_drafts(entry)
        self.check_released()
        if self.world.saves:
            self.check_saved(entries)

    def _check_drafts(self, entry: Submission) -> None:
        """Drafts do not depend on other requests, shared pages, and chunks of the prompt."""
        config, job = self.world.config, entry.job
        whole = job.finish_reason != FinishReason.CANCELLED and not (entry.given or entry.fault or job.num_preemptions)
        if whole and entry.request.drafts and config.draft_length == config.num_speculative_tokens:
            expected = alone_with_drafts(entry.request, self.world).drafts
            found = job.rounds, job.num_accepted_drafts
            assert found == expected, f"got {found} rounds and accepted drafts, expected {expected}, for {entry.request}"

    def check_released(self) -> None:
        engine, stats = self.engine, self.engine.stats()
        rows, known = engine._scheduler.rows, engine._scheduler.rows.page_cache._published.values()
        assert (stats.running, stats.waiting, len(engine._scheduler._active), len(rows)) == (0, 0, 0, 0)
        check_pages(engine)
        assert all(page.ref_count == 0 for page in known), "a page is held after all jobs ended"
        compiler = engine._parts.compiler
        assert compiler is not None and not engine.queue.unfinished
        assert not any(entry.claims for entry in compiler._cache._entries.values()), "a grammar is claimed after all jobs ended"
        assert stats.submitted == sum(count for _, count in stats.finished)
        assert stats.rounds == sum(graph.rounds for graph in stats.graphs) and stats.host_syncs == self.host_syncs
        if not engine.limits.loops:
            assert stats.rounds == (stats.replays if not self.world.config.eager else stats.eager_rounds)

    def close(self) -> None:
        """End the engine. A replay of what it recorded has the same tokens."""
        self.engine.close()
        if recorder := self.engine._parts.scheduler._recorder:
            report = replay(read_recording(recorder._path), *models_of(self.world))
            assert report.equal, report

    def check_saved(self, entries: list[Submission]) -> None:
        """The states of the toy are a hash of the text up to each token."""
        found, self.saved[:] = [*self.saved], []
        for saved in found:
            ids = saved.token_ids[:-1]
            expected = (hash_pair(ids, torch.arange(len(ids))).cumsum(0) & _MASK)[:, None].to(torch.float64)
            expected[ids == POISON] = -1.0
            assert torch.equal(saved.hidden, expected), f"the states of {saved.token_ids.tolist()} are wrong"
        counts = collections.Counter(tuple(saved.token_ids.tolist()) for saved in found)
        for entry in entries:
            text, reason = (*entry.request.prompt, *entry.given, *entry.job.tokens), entry.job.finish_reason
            if reason not in (FinishReason.CANCELLED, FinishReason.ERROR):
                counts[text] -= 1
                assert counts[text] >= 0, f"{text} was not saved: {entry.job}"


def check_pages(engine: Engine) -> None:
    """Every row and page is free or has one owner, and a published page is held by as many requests as it counts."""
    rows, active = engine._scheduler.rows, engine._scheduler.active
    assert sorted([*rows._free_rows, *(request.row for request in active)]) == list(range(engine.limits.max_rows))
    held = collections.Counter(page for request in active for page in request.cached_pages)
    own = list[int]()
    for request in active:
        cached = [page.page for page in request.cached_pages]
        own += [page for index, page in enumerate(request.pages) if cached[index : index + 1] != [page]]
    known = {*rows.page_cache._published.values(), *held}
    pages = sorted([*rows.page_cache._free, *own, *(page.page for page in known)])
    assert pages == list(range(1, engine.limits.num_pages + 1)), f"pages {pages} are free, published or owned"
    assert all(page.ref_count == held[page] for page in known), "a page counts other holders than it has"


def check_job(entry: Submission, expected: Expected) -> None:
    job, events, given = entry.job, entry.events, len(entry.given)
    assert job.finish_reason is not None
    assert [token for event in events for token in event.tokens] == job.tokens, "the events differ from the tokens of the job"
    assert [event.finish_reason for event in events if event.finish_reason] == [job.finish_reason], "expected exactly one finish event"
    assert events[-1].finish_reason is not None, "an event after the finish event"
    assert len(job.origins) == len(job.tokens) and len(job.logprobs) == (len(job.tokens) if entry.request.sampling.logprobs else 0)
    assert sum(event.num_accepted_drafts for event in events) == job.num_accepted_drafts <= len(job.tokens)
    tokens = expected.tokens[given:]
    message = f"got {job.tokens} {job.finish_reason} {job.error!r}, expected {list(tokens)} {expected.reason} {expected.error!r}"
    message += f", after {list(entry.given)}, preempted {job.num_preemptions} times, for {entry.request}, fault {entry.fault!r}"
    assert entry.given == expected.tokens[:given], message
    if job.finish_reason == FinishReason.CANCELLED or (entry.fault and job.finish_reason == FinishReason.ERROR):
        assert job.tokens == list(tokens[: len(job.tokens)]), message
    else:
        assert (tuple(job.tokens), str(job.finish_reason), job.text) == (tokens, expected.reason, expected.text), message
        assert job.error == expected.error or entry.fault, message
    logprobs = expected.logprobs[given : given + len(job.tokens)]
    assert tuple(job.logprobs) == logprobs, f"got {job.logprobs}, expected {logprobs}, {message}"
    assert repr(job.prompt_logprobs) == (expected.prompt_logprobs if job.rounds else "[]"), message
    if job.finish_reason == FinishReason.ERROR:
        assert job.error and (entry.fault or expected.reason == FinishReason.ERROR), message


@functools.cache
def world_of(seed: int) -> World:
    return draw_world(seed // SCHEDULES_PER_WORLD)


class Failure(AssertionError):
    """A failed schedule. The message ends with the command that repeats it."""


_latest: list[Simulation] = []


def simulation_of(world: World) -> Simulation:
    """The simulation of the latest schedule, if it has this world, or a new one."""
    if not _latest or _latest[0].world != world:
        while _latest:
            _latest.pop().close()
        _latest.append(Simulation(world))
    return _latest[0]


def run_seed(seed: int, simulation: Simulation | None = None) -> list[Submission]:
    """Run and check one schedule; raises Failure if a check fails."""
    simulation = simulation or simulation_of(world_of(seed))
    try:
        entries = simulation.run(seed)
        simulation.check(entries)
        return entries
    except Exception as error:
        _latest.clear()  # the engine may be in an invalid state
        raise Failure(f"{simulation.world}: {type(error).__name__}: {error}\npython -m tests.helpers.simulation --seed {seed}") from error


def run_many(seeds: Iterable[int]) -> dict[str, int]:
    """Run the schedules of `seeds`; counts of schedules, jobs, tokens, faults and finish reasons."""
    counts = dict.fromkeys(
        (
            "schedules",
            "jobs",
            "tokens",
            "faults",
            "continued",
            "preempted",
            "cached",
            "accepted",
            *(str(reason) for reason in FinishReason),
        ),
        0,
    )
    for seed in seeds:
        entries = run_seed(seed)
        counts["schedules"] += 1
        counts["jobs"] += len(entries)
        for entry in entries:
            counts["tokens"] += len(entry.job.tokens)
            counts["faults"] += bool(entry.fault)
            counts["continued"] += bool(entry.given)
            counts["preempted"] += entry.job.num_preemptions
            counts["cached"] += entry.job.num_cached_tokens
            counts["accepted"] += entry.job.num_accepted_drafts
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
