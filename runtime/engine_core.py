"""The rounds of an engine: `step()`, and what begins and ends them. `Engine` adds its requests and their results.

`step()` has three parts: admit, launch, collect. The launching thread does not wait for the round it just launched: up to
`rounds_in_flight` rounds run ahead, and results are read from a pinned ring.
"""

from __future__ import annotations

from stepgraph.graphs.recording import CaptureReport
from stepgraph.runtime.build import EngineParts, capture_notes, records_on_demand
from stepgraph.runtime.parallel.ranks import CAPTURE
from stepgraph.runtime.request import ActiveRequest, EngineClosedError, FinishReason, Job, StepEvent
from stepgraph.runtime.step_lock import StepLock
from stepgraph.sampling.grammar.status import FinishCode
from stepgraph.sampling.lifetimes import FORKED, call_after_fork


class EngineCore:
    """Steps the requests of an engine. step() is for one thread at a time."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.config, self.limits, self.backend, self.buffers = parts.config, parts.limits, parts.backend, parts.buffers
        self.queue, self.step_lock, self._closed = parts.queue, StepLock(), ""
        self._graphs, self._scheduler, self._uploader, self._in_flight = parts.graphs, parts.scheduler, parts.uploader, parts.in_flight
        call_after_fork(self._detach)

    def capture(self, *, progress: bool = False) -> CaptureReport:
        """Record the graphs: one per batch size, with and without grammars. For an engine in service, before its first request.

        If it was not called, the first step does it on CUDA; on the CPU each graph is recorded when a batch first needs it.
        """
        with self.step_lock:
            self._require_open("capture")
            if self.captured:
                raise RuntimeError("Engine.capture(): already captured; make a new engine for other limits")
            if self._parts.ranks:
                self._parts.ranks.publish(CAPTURE)
            with self._in_flight.capturing():
                report = self._graphs.capture(self.notes, self.config.eager, self.config.greedy_only, progress)
            self._in_flight.calibrate()
            return report

    def ensure_captured(self, progress: bool = False) -> None:
        """What the first step does if capture() was not called. On the CPU it takes seconds, and an answer needs few of the graphs."""
        if self.captured:
            return
        if records_on_demand(self._parts):
            _ = self.notes  # chooses the implementation of the filters
            self._graphs.on_demand = True
        else:
            self.capture(progress=progress)

    def step(self) -> list[StepEvent]:
        """Launch one round and return the new results. At most `rounds_in_flight` - 1 rounds stay in flight."""
        self._require_open("step")
        self.ensure_captured()
        with self.step_lock:
            self._require_open("step")
            self.step_lock.check_owner()
            try:
                events = self._admit()
                requests = self._launch(events)
                events += self._collect(self.limits.rounds_in_flight if requests else 1)
                if not events and self.queue.waiting and not self._scheduler.active:
                    self.queue.pause()  # every request waits for its grammar
                return events
            except BaseException as error:
                self._shut(f"{type(error).__name__}: {str(error) or 'in a step, which closed the engine'}", FinishReason.ERROR)
                raise

    @property
    def captured(self) -> bool:
        return self._graphs.captured

    @property
    def notes(self) -> tuple[str, ...]:
        """The implementations that were chosen, as in the capture report."""
        return capture_notes(self._parts)

    def _admit(self) -> list[StepEvent]:
        """End cancelled jobs, give rows to queued requests, and launch up to one chunk of prompt tokens."""
        events = [self._end(job, request, FinishReason.CANCELLED) for job, request in self._scheduler.pop_cancelled()]
        failed, budget = self._scheduler.admit(), self.limits.prefill_chunk
        if not all(request.decoding for request in self._scheduler.active):
            self._in_flight.interrupt()
        for request in self._scheduler.active:
            if request.decoding or budget <= 0 or not self._uploader.send_image(request):
                continue
            if not request.prefill_started:
                self._scheduler.start_prefill(request)
                self._uploader.begin(request)
            taken = self._uploader.prefill(request, budget)
            self._scheduler.prefilled(request, taken)
            budget -= taken
        return events + [self._scheduler.finish(queued.job, None, FinishReason.ERROR, queued.error) for queued in failed]

    def _launch(self, events: list[StepEvent]) -> tuple[ActiveRequest, ...]:
        """Launch a round of the decoding requests, and return them. Requests whose draft function failed end with an event."""
        requests = tuple(request for request in self._scheduler.active if request.decoding)
        if drafts := self._parts.function_drafts:
            failed = drafts.upload(requests)
            events += [self._end(request.job, request, FinishReason.ERROR, error) for request, error in failed]
            requests = tuple(request for request in requests if not request.job.finished)
        if requests:
            if len(requests) < len(self._scheduler.active):
                self._in_flight.interrupt(next_too=True)  # the next step prefills
            self._in_flight.launch(requests)
        return requests

    def _collect(self, most: int) -> list[StepEvent]:
        """Read the oldest rounds until fewer than `most` are in flight."""
        events = list[StepEvent]()
        for request, result in self._in_flight.read(most):
            events.append(self._scheduler.record(request, result))
            if request.job.finished and result.finish == FinishCode.RUNNING:  # a stop string, which the device does not know
                self._retire(request)
        return events

    def _end(self, job: Job, request: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        if request is not None:
            self._retire(request)
        return self._scheduler.finish(job, request, reason, error)

    def _retire(self, request: ActiveRequest) -> None:
        """Make the row of a request inert that ended on the host."""
        self._in_flight.interrupt()
        self._uploader.retire(request.row)

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise EngineClosedError(f"Engine.{call}(): {self._closed}")

    def _shut(self, why: str, reason: FinishReason) -> None:
        self._closed = why
        self._scheduler.finish_all(reason, why)
        self.queue.wake.notify()
        self._in_flight.interrupt()
        self._parts.watchdog.end(self._in_flight, self._parts.host_link)
        if self._parts.compiler:
            self._parts.compiler.close()
        if self._parts.hidden_states:
            self._parts.hidden_states.close()
        if self._parts.ranks:
            self._parts.ranks.close()

    def _detach(self) -> None:
        """In a fork: every call raises EngineClosedError."""
        self._closed, self.step_lock = FORKED, StepLock()
