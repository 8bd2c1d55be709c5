"""The parts of an engine, the capture of its graphs, and its end."""

from __future__ import annotations

import weakref

from stepgraph.graphs.attention.float8 import FLOAT8
from stepgraph.graphs.graph_set import CaptureReport
from stepgraph.runtime.build import EngineParts
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.parallel.ranks import CAPTURE
from stepgraph.runtime.request import EngineClosedError, StepEvent
from stepgraph.runtime.step_lock import StepLock
from stepgraph.sampling import kernels
from stepgraph.sampling.fields import message_of
from stepgraph.sampling.lifetimes import FORKED_ERROR, call_after_fork


class EngineState:
    """Holds the parts. A closed engine refuses every call that changes it."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.config, self.limits, self.backend, self.buffers = parts.config, parts.limits, parts.backend, parts.buffers
        self.queue, self.step_lock, self._closed_reason = parts.queue, StepLock(), ""
        self._ended = False  # once `_shut_down` has returned
        self._failure: BaseException | None = None  # the error that closed the engine
        self._kept_events: list[StepEvent] = []  # of steps of update_weights(), which the next step returns
        self._filters = ""  # the implementation, once it is chosen
        self._graphs, self._scheduler, self._uploader, self._in_flight = parts.graphs, parts.scheduler, parts.uploader, parts.in_flight
        call_after_fork(self._detach)
        weakref.finalize(self, self.queue.abandon, FinishReason.CANCELLED, "the engine was dropped without close()").atexit = False

    def __repr__(self) -> str:
        models, queue, rows = self._parts.models, self.queue, self.config.max_rows
        drafts = f"{type(models.drafter).__name__} with {self.config.num_speculative_tokens} drafts" if models.drafter else "no drafts"
        state = self._closed_reason or f"{len(queue.active)} of {rows} rows in use, {len(queue.waiting)} requests waiting"
        return f"<Engine: {type(models.target).__name__}, {drafts}, {self.backend.device}; {state}>"

    def capture(self, *, progress: bool = False) -> CaptureReport:
        """Record the graphs: one per batch size, with and without grammars. For an engine in service, before its first request.

        If it was not called, the first step does it on CUDA; on the CPU each graph is recorded when a batch first needs it, and a
        later call records those that are missing.
        """
        with self.step_lock.entered():
            self._require_open("capture")
            if self._graphs.complete:
                raise RuntimeError("Engine.capture(): already captured, by a call or by a step; call it before the first request")
            return self._capture(progress)

    def _capture(self, progress: bool) -> CaptureReport:
        try:
            if self._parts.ranks:
                self._parts.ranks.publish(CAPTURE)
            with self._in_flight.capturing():
                self._choose_filters()
                report = self._graphs.capture(self.notes, self.config.eager, self.config.greedy_only, progress)
            self._in_flight.calibrate()
        except BaseException as error:
            if self._graphs.complete or self._parts.ranks:  # not calibrated, or in other states than the other ranks
                self._fail(error, "capture()")
            raise
        return report

    def ensure_captured(self, progress: bool = False) -> None:
        """Capture, if capture() was not called. On the CPU each graph at its first use: all take seconds, and an answer needs few."""
        with self.step_lock.entered():
            if self.captured:  # also by another thread meanwhile
                return
            self._require_open("capture")
            # Limits of failures and memory, profiles and loops require all graphs before the first round.
            config, profiled = self.config, self._parts.profile_range is not None
            needs_memory = config.capture_bytes is not None or config.on_capture_failure != "raise"
            if self.backend.name == "tape" and not (config.eager or needs_memory or self.limits.loops or profiled):
                self._choose_filters()
                self._graphs.records_on_demand = True
            else:
                self._capture(progress)

    def _choose_filters(self) -> None:
        """For the graphs that are recorded from now on."""
        if not self.config.greedy_only:
            try:
                self._filters = str(kernels.choose_filters(self.backend.device, self.config.filters))
            except ValueError as error:
                raise ValueError(f"EngineConfig.{error}") from None

    @property
    def captured(self) -> bool:
        return self._graphs.captured

    @property
    def notes(self) -> tuple[str, ...]:
        """The chosen implementations, as in the capture report; that of the filters is chosen by the capture."""
        parts, config, device = self._parts, self.config, self.backend.device
        masked = "each is kept while its mask allows it" if "batch_forced" in self.buffers else "without masks"
        notes: dict[str, object] = {  # each note, and whether it applies
            f"host link: {parts.host_link.name}": True,
            f"grammar lane: {parts.grammars.note}": True,
            "rounds per launch: until an event; one in graphs with host nodes": self.limits.loops,
            "acceptance is forced: the texts are not the models'": config.forced_acceptance,
            "relaxed acceptance: requests may accept drafts that are not the target's choice": config.relaxed_acceptance,
            f"logits processors: {', '.join(each.name for each in config.logits_processors)}": config.logits_processors,
            f"kernels: {kernels.describe(device)}": True,
            **dict.fromkeys((note for model in parts.models for note in getattr(model, "notes", ())), True),
            f"drafts are proposed whole, {masked}": parts.models.proposer is not None,
            "cache: float8_e4m3fn": config.kv_cache_dtype == FLOAT8,
            f"attention: {parts.attention}": parts.attention.rounds,
            parts.products_note: parts.products_note,
            f"filters: {self._filters}": self._filters,
            f"grammars: {parts.compiler and parts.compiler.note}": parts.compiler,
            f"prefixes: not shared, {parts.sharing.why_off}": parts.sharing.why_off,
            "pages: added while requests decode": self.limits.grows,
            "forced drafts: on": "forced_host" in self.buffers,
            f"adapters: up to {config.max_loras} of rank {config.max_lora_rank}": config.max_loras,
        }
        return tuple(note for note, applies in notes.items() if applies)

    def _require_open(self, call: str) -> None:
        if self._closed_reason:
            raise EngineClosedError(f"Engine.{call}(): {self._closed_reason}")

    def _fail(self, error: BaseException, where: str) -> None:
        """End every job with this error, and close the engine."""
        self._failure = self._failure if self._closed_reason else error
        why = message_of(error) or f"in {where}, which closed the engine"
        self._shut_down(f"{type(error).__name__}: {why}", FinishReason.ERROR)

    def _shut_down(self, why: str, reason: FinishReason) -> None:
        """After an interrupt, another call does what is left."""
        self._closed_reason = why = self._closed_reason or why
        self._kept_events = []
        self._scheduler.finish_all(reason, why)
        self.queue.wake.notify()
        self._in_flight.interrupt()
        self._parts.watchdog.close(self._in_flight, self._parts.host_link)
        if self._parts.compiler:
            self._parts.compiler.close()
        if self._parts.hidden_states:
            self._parts.hidden_states.close()
        if self._parts.ranks:
            self._parts.ranks.close()
        self._ended = True

    def _detach(self) -> None:
        """Called in a fork, in which every call raises EngineClosedError."""
        self._closed_reason, self._ended, self.step_lock = FORKED_ERROR, True, StepLock()
