"""The parts of an engine, and what happens before its first round and after its last one: the capture of its graphs, and its end."""

from __future__ import annotations

from stepgraph.graphs.recording import CaptureReport
from stepgraph.runtime.build import EngineParts, capture_notes, records_on_demand
from stepgraph.runtime.parallel.ranks import CAPTURE
from stepgraph.runtime.request import EngineClosedError, FinishReason
from stepgraph.runtime.step_lock import StepLock
from stepgraph.sampling.lifetimes import FORKED, call_after_fork


class EngineState:
    """Holds the parts. A closed engine refuses every call that changes it."""

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

    @property
    def captured(self) -> bool:
        return self._graphs.captured

    @property
    def notes(self) -> tuple[str, ...]:
        """The implementations that were chosen, as in the capture report."""
        return capture_notes(self._parts)

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
            self._parts.hidden_states.writer.close()
        if self._parts.ranks:
            self._parts.ranks.close()

    def _detach(self) -> None:
        """In a fork: every call raises EngineClosedError."""
        self._closed, self.step_lock = FORKED, StepLock()
