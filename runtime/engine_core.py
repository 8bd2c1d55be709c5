"""The rounds of an engine. `Engine` adds its requests and their results.

`step()` has three parts: admit, launch, collect. The launching thread does not wait for the round it just launched: up to
`rounds_in_flight` rounds run ahead, and results are read from a pinned ring.
"""

from __future__ import annotations

import torch

from stepgraph.runtime.engine_state import EngineState
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.preemption import PreemptingScheduler
from stepgraph.runtime.request import ActiveRequest, Job, StepEvent
from stepgraph.runtime.upload import GrammarCopyError
from stepgraph.sampling.fields import message_of
from stepgraph.sampling.grammar.status import FinishCode


class EngineCore(EngineState):
    """Steps the requests of an engine. step() is for one thread at a time."""

    def step(self) -> list[StepEvent]:
        """Launch one round and return the new results. At most `rounds_in_flight` - 1 rounds stay in flight."""
        if self._closed_reason or not self._graphs.captured:
            self._require_open("step")
            self.ensure_captured()
        with self.step_lock.entered():
            return self._step()

    def _step(self) -> list[StepEvent]:
        if self._closed_reason:
            self._require_open("step")
        self.step_lock.check_owner()
        try:
            events, self._kept_events = self._kept_events + self._admit(), []
            self._prefill(events)
            requests = self._launch(events)
            events += self._collect(self.limits.rounds_in_flight if requests else 1)
            if not events and self.queue.waiting and not self._scheduler.active:
                self.queue.pause()  # every request waits for its grammar
            return events
        except BaseException as error:
            self._fail(error, "a step")
            raise

    def _admit(self) -> list[StepEvent]:
        """End cancelled jobs and those without a grammar, and give rows to queued requests."""
        events: list[StepEvent] = []
        if isinstance(self._scheduler, PreemptingScheduler):
            events = self._scheduler.make_room(self._in_flight, self._uploader, self._collect)
        events += [self._end(job, request, reason) for job, request, reason in self._scheduler.begin_step()]
        return events + self._scheduler.admit()

    def _prefill(self, events: list[StepEvent]) -> None:
        """Launch up to one chunk of prompt tokens. A request ends with an event if its grammar cannot be copied, or on a GPU without
        memory for its settings or its chunk."""
        budget, prefilling = self.limits.prefill_chunk, [request for request in self._scheduler.active if not request.decoding]
        if prefilling:
            self._in_flight.interrupt()
        for request in prefilling:
            try:
                if budget <= 0 or not self._uploader.send_grammar(request):
                    continue
                if not request.prefill_started:
                    self._scheduler.start_prefill(request)
                    self._uploader.begin(request)
                taken = self._uploader.prefill(request, budget)
            except (torch.OutOfMemoryError, GrammarCopyError) as error:  # what was launched concerns this row only
                if self._parts.ranks:  # which would wait for this one
                    raise
                events.append(self._end(request.job, request, FinishReason.ERROR, message_of(error)))
                continue
            self._scheduler.record_prefill(request, taken)
            budget -= taken

    def _launch(self, events: list[StepEvent]) -> tuple[ActiveRequest, ...]:
        """Launch a round of the decoding requests, and return them. Requests whose draft function failed end with an event."""
        requests = tuple([request for request in self._scheduler.active if request.decoding])
        if drafts := self._parts.function_drafts:
            failed = drafts.upload(requests)
            events += [self._end(request.job, request, FinishReason.ERROR, error) for request, error in failed]
            requests = tuple(request for request in requests if not request.job.finished)
        if requests:
            if len(requests) < len(self._scheduler.active):
                self._in_flight.limit_next_launch()  # the next step prefills
            self._in_flight.launch(requests)
        return requests

    def _collect(self, limit: int) -> list[StepEvent]:
        """Read the oldest rounds until fewer than `limit` are in flight."""
        events: list[StepEvent] = []
        for results in self._in_flight.read(limit):
            for request, result in results:
                events.append(event := self._scheduler.record(request, result))
                if event.finish_reason and result.finish == FinishCode.RUNNING:  # a stop string, which the device does not know
                    self._retire(request)
        if not self._scheduler.active:
            self._in_flight.latest_batch = None  # an idle engine keeps no request
        return events

    def _end(self, job: Job, request: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        if request is not None:
            self._retire(request)
        return self._scheduler.finish(job, request, reason, error)

    def _retire(self, request: ActiveRequest) -> None:
        """Make the row of a request that ended on the host inert."""
        self._in_flight.interrupt()
        self._uploader.retire(request.row)
