"""Requests between submit() and their row: the queue, the grammars they wait for, and cancellation. Any thread may call it."""

from __future__ import annotations

import bisect
import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepgraph.runtime.device_grammars import DeviceGrammars
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.record import Recorder, request_fields
from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.sampling.fields import Check, check_value, instance_of, is_int
from stepgraph.sampling.grammar.compile.compiler import Claim, GrammarCompiler
from stepgraph.sampling.grammar.link.protocol import MatcherRow
from stepgraph.sampling.lifetimes import FORKED_ERROR, call_after_fork

PAUSE_SECONDS = 0.001
_JOB_ID = Check(is_int, "a Job, or the id of one")
_REASON = instance_of(FinishReason, "a FinishReason")


class QueueFullError(RuntimeError):
    """EngineConfig.max_queued requests are waiting for a row."""


@dataclass(eq=False)
class QueuedRequest:
    """An unfinished job. With a constraint it is not ready for a row until the compile of its grammar has succeeded or failed."""

    job: Job
    claim: Claim | None = None
    matcher: MatcherRow | None = None  # of a grammar on the host
    error: str = ""  # why its grammar could not be compiled, or refused the output so far
    ready: bool = True
    order: tuple[int, int, int] = (0, 0, 0)  # priority, turn, arrival: the smallest one is first


class RequestQueue:
    """All unfinished requests, and those of them that wait for a row. The scheduler takes them from here under `lock`."""

    def __init__(self, max_queued: int, compiler: GrammarCompiler | None, grammars: DeviceGrammars, recorder: Recorder | None) -> None:
        self._max_queued, self._compiler, self._grammars, self.recorder = max_queued, compiler, grammars, recorder
        self.lock = threading.RLock()  # of this queue and of the scheduler; a dropped text stream cancels wherever it is collected
        self.wake = WakeSignal()
        self.unfinished: dict[int, QueuedRequest] = {}  # by job id
        self.waiting: collections.deque[QueuedRequest] = collections.deque()
        self.active: dict[int, ActiveRequest] = {}  # by job id: requests that hold rows, in order of admission; the scheduler changes it
        self._turns: dict[tuple[int, str], list[int]] = {}  # by priority and tenant: the turns of those in `waiting`, ascending
        self.cancelled: dict[int, tuple[Job, FinishReason]] = {}  # since the last step
        self.submitted = self.most_waiting = 0
        self.holds = set[object]()  # while there is one, no request begins; those that lost their rows continue
        self.next_deadline = math.inf  # no unfinished job has an earlier one
        call_after_fork(self._detach)

    @property
    def full(self) -> bool:
        """Whether submit() would raise QueueFullError."""
        return len(self.waiting) >= self._max_queued

    def _require_room(self) -> None:
        if self.full:
            raise QueueFullError(f"Engine.submit(): {self._max_queued} requests are waiting already (EngineConfig.max_queued)")

    def enqueue(self, queued: QueuedRequest, require_open: Callable[[str], None]) -> None:
        """ValueError if the constraint is refused without a compile; QueueFullError; whatever `require_open` raises for a closed engine.
        After any exception the caller calls `withdraw`."""
        job = queued.job
        self._require_room()  # before a compile, which would be killed with its worker process
        if job.constraint is not None:
            queued.ready = False
            claim = queued.claim = Claim(self.compiler, job.constraint)
            claim.take()
            claim.then(lambda claim: self.prepare(queued, claim))
        if self.recorder:
            self.recorder.write("submit", **request_fields(job))
        with self.lock:
            require_open("submit")
            self._require_room()
            queued.order = job.priority, self._turn_of(job), self.submitted
            index = self._index_of(queued.order)
            most = max(self.most_waiting, len(self.waiting) + 1)
            turns, turn, deadline = self._turns_of(job), [queued.order[1]], min(self.next_deadline, job.deadline)
            # KeyboardInterrupt is raised on return from a call. From here on only the last statement is a call, so all is done or nothing.
            self.unfinished[job.id] = queued
            self.submitted += 1
            self.most_waiting, self.next_deadline = most, deadline
            turns += turn
            self.waiting.insert(index, queued)
        self.wake.notify()

    def enqueue_again(self, queued: QueuedRequest) -> None:
        """Put a request that lost its row in its place in `waiting`. Under the lock."""
        bisect.insort(self._turns_of(queued.job), queued.order[1])
        self.waiting.insert(self._index_of(queued.order), queued)
        self.most_waiting = max(self.most_waiting, len(self.waiting))

    def pop_cancelled(self) -> dict[int, tuple[Job, FinishReason]]:
        """Cancelled jobs by id, which no longer wait, and the reasons that they get."""
        with self.lock:
            cancelled, self.cancelled = self.cancelled, {}
            self.remove([self.unfinished[job.id] for job, _ in cancelled.values() if not (job.finished or job.id in self.active)])
        return cancelled

    def remove(self, taken: Iterable[QueuedRequest]) -> None:
        """Take requests out of `waiting`. Under the lock."""
        for queued in taken:
            del self.waiting[self._index_of(queued.order)]
            turns = self._turns_of(queued.job)
            turns.remove(queued.order[1])
            if not turns:
                del self._turns[queued.job.priority, queued.job.tenant]

    def _index_of(self, order: tuple[int, ...]) -> int:
        """The index in `waiting` of a request with this order, or with an order that begins with it. A submit must not visit all requests:
        steps wait for the lock that it holds."""
        return bisect.bisect_left(self.waiting, order, key=lambda queued: queued.order)

    def _turns_of(self, job: Job) -> list[int]:
        return self._turns.setdefault((job.priority, job.tenant), [])

    def _turn_of(self, job: Job) -> int:
        """At equal priority each tenant has one request per turn, so that a long queue of one tenant does not delay others. A new request
        has the first turn, from the present one on, in which no earlier request of its tenant waits."""
        index = self._index_of((job.priority,))
        waits = index < len(self.waiting) and self.waiting[index].job.priority == job.priority
        earliest = self.waiting[index].order[1] if waits else 0
        running = (self.unfinished[request.job.id].order for request in self.active.values() if request.job.priority == job.priority)
        turns = self._turns_of(job)
        # Running requests keep their turn if they are preempted.
        return max([earliest, turns[-1] + 1 if turns else 0, *(order[1] for order in running)])

    def withdraw(self, queued: QueuedRequest) -> None:
        """Undo an interrupted submit, whether or not the request entered the queue."""
        if queued.job.id in self.unfinished:
            self.cancel(queued.job)
            return
        if self.recorder:
            self.recorder.write("refused", job=queued.job.id)
        if queued.claim is not None:
            queued.claim.release()

    def cancel(self, requested: Job | int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a job at the next step with this reason. False if it has finished or is unknown."""
        job_id = requested.id if isinstance(requested, Job) else requested
        check_value("job", job_id, _JOB_ID)
        check_value("reason", reason, _REASON)
        with self.lock:
            queued = self.unfinished.get(job_id)
            # A job of another engine may have the id of one of this engine.
            if queued is None or queued.job.finished or requested not in (job_id, queued.job):
                return False
            # The next step releases its claim: this may be a finaliser or a signal handler within a submit(), which locks the compiler.
            is_first = self.cancelled.setdefault(job_id, cancelled := (queued.job, reason)) is cancelled
        if self.recorder and is_first:
            self.recorder.write("cancel", job=job_id, reason=str(reason))
        self.wake.notify()
        return True

    @property
    def has_begun(self) -> bool:
        """Whether a request has a row, or lost it and continues later."""
        with self.lock:
            return bool(self.active or any(queued.job.num_preemptions for queued in self.waiting))

    def expire(self) -> None:
        """End the jobs whose deadline has passed at the next step."""
        now = time.perf_counter()
        with self.lock:
            jobs = [queued.job for queued in self.unfinished.values()]
            for job in jobs:
                if job.deadline <= now:
                    self.cancel(job, FinishReason.TIMEOUT)
            # Last, so that after an interrupt the next step does it again.
            self.next_deadline = min((job.deadline for job in jobs if job.deadline > now), default=math.inf)

    def pause(self) -> None:
        """Sleep briefly, for a step that can only wait for a grammar, so that it leaves the CPU to the compile."""
        self.wake.wait(0)  # clear an earlier notification, whose cause this step has handled
        self.wake.wait(PAUSE_SECONDS)

    def prepare(self, queued: QueuedRequest, claim: Claim) -> None:
        """Make a request ready for a row, or for its end with an error, once its grammar is compiled."""
        try:
            queued.matcher = self._grammars.prepare(queued.job, claim.result())
        except Exception as error:  # any exception fails this request only
            queued.error = str(error) or type(error).__name__
        queued.ready = True
        self.wake.notify()

    @property
    def compiler(self) -> GrammarCompiler:
        """ValueError if the engine has none."""
        if self._compiler is None:
            raise ValueError("constraint: the engine has no vocabulary; pass Engine(vocabulary=...) to constrain requests")
        return self._compiler

    def _detach(self) -> None:
        """Called in a fork: all jobs end with an error there."""
        self.lock = threading.RLock()
        self.abandon(FinishReason.ERROR, FORKED_ERROR)

    def abandon(self, reason: FinishReason, error: str) -> None:
        """End all jobs of an engine that can no longer step. Takes no lock, as finalisers call it."""
        for queued in self.unfinished.values():
            queued.job.error, queued.job.finish_reason = error, reason
        self.unfinished = {}


class WakeSignal:
    """Wakes one waiting thread: a lock used as an auto-reset event. Without a waiting thread, one notification is kept.

    `notify` is one C call that never blocks, so a finaliser may call it anywhere. An Event is not used: a finaliser that runs while its
    internal lock is held would deadlock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def notify(self) -> None:
        with contextlib.suppress(RuntimeError):  # already set
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a notification and clear it. False on time-out."""
        return self._lock.acquire(timeout=-1 if seconds is None else seconds)
