"""The engine: requests in, events out, one replay per round.

`step()` reads as the design: admit, launch, collect. The launching thread never waits for the round it just launched;
with `rounds_in_flight` rounds on their way it reads the oldest one's results from a pinned ring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepgraph.graphs.capture import Backend
from stepgraph.graphs.graph_set import CaptureReport, GraphSet
from stepgraph.graphs.model import TargetModel
from stepgraph.graphs.round import Round
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.build import (
    attention_for,
    backend_for,
    check_device,
    check_mode,
    check_vocabularies,
    forces_drafts,
    kernel_notes,
    make_buffers,
    make_host_link,
    observer_for,
    sharing_for,
)
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.drafters import Drafter, only_looks_up, take_drafter
from stepgraph.runtime.extras.hidden_states import open_states, states_layout
from stepgraph.runtime.forks import LEFT, leave_in_forks
from stepgraph.runtime.grammar_queue import GrammarQueue, QueuedRequest
from stepgraph.runtime.host_drafts import function_drafts
from stepgraph.runtime.metrics import prometheus_text
from stepgraph.runtime.models.files.loading import load_models
from stepgraph.runtime.profiled import make_in_flight
from stepgraph.runtime.request import EngineClosedError, FinishReason, Job, StepEvent
from stepgraph.runtime.scheduler import Scheduler
from stepgraph.runtime.slots import ActiveRequest
from stepgraph.runtime.stats import EngineStats, take_stats
from stepgraph.runtime.step_lock import StepGate, StepLock
from stepgraph.runtime.trace import Trace, trace_rounds
from stepgraph.runtime.upload import Uploader
from stepgraph.runtime.validate import Submissions
from stepgraph.runtime.wake import WakeSignal
from stepgraph.runtime.watchdog import Watchdog
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
from stepgraph.sampling.grammar.constraints.constraint import Constraint
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams

if TYPE_CHECKING:
    from stepgraph.runtime.extras.record import Recording


class Engine:
    """Decodes requests in rounds, each one replay of a recorded graph.

    submit() and cancel() may be called from any thread at any time; step() by one thread at a time.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: Drafter | str | None = None,
        *,
        vocabulary: Vocabulary | None = None,
        config: EngineConfig | None = None,
        backend: Backend | None = None,
        record: Recording | str | Path | None = None,
    ) -> None:
        models, self.config = take_drafter(target, draft, EngineConfig() if config is None else config)
        self._models = models
        num_tokens = check_vocabularies(models, vocabulary)
        self.limits: Limits = self.config.limits(target.vocab_size, num_tokens, target.feature_size)
        self.backend = backend or backend_for(self.config.backend, models, self.config.nvtx)
        self._watchdog = Watchdog(self.backend, self.config.round_timeout_seconds)
        check_device(models, self.backend)
        check_mode(models)
        saved = states_layout(target) if self.config.save_hidden_states else None
        forced = forces_drafts(self.config, models, vocabulary)
        self.buffers = make_buffers(self.limits, models, self.backend, self.config.greedy_only, saved, forced)
        self._attention = attention_for(self.backend.device, self.config, models)
        self._host = make_host_link(self.config, self.buffers, self.limits, vocabulary)
        compiler, self._bell = self.config.grammar_compiler(vocabulary) if vocabulary is not None else None, WakeSignal()
        self._grammars = GrammarQueue(compiler, self._host, self._bell)
        decode_round = Round(self.limits, models, self._host, self.config.draft_masks, self.config.forced_acceptance, self._attention)
        self._graphs = GraphSet(self.backend, self.buffers, decode_round.step, *self.config.graph_terms)
        stop_ids = vocabulary.stop_token_ids if vocabulary else ()
        self._submissions = Submissions(self.config, self.limits, stop_ids, models, self.backend.device.type == "cuda")
        self._states = open_states(self.config, saved, self._watchdog.backend, self.buffers)
        self._sharing = sharing_for(self.config, models)
        observer = observer_for(record, self.config, models, vocabulary, self.backend)
        ended = self._states.ended if self._states else None
        self._desk = Scheduler(self.limits, self._sharing, ended, only_looks_up(models), observer)
        self._admission = Uploader(self._watchdog.backend, self.buffers, models, self.limits, self._attention, self._states)
        self._flights = make_in_flight(self._watchdog.backend, self.buffers, self._graphs, self._host, self.limits, self._states)
        self._function_drafts = function_drafts(models, self._watchdog.backend, self.buffers, self.limits)
        self._turn = StepLock()
        self.stepping = StepGate(self._bell, self._desk, self._flights, self._graphs, self.config.max_queued)
        self._closed = ""
        leave_in_forks(self._leave)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        draft: Drafter | str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        dtype: torch.dtype | None = None,
        feature_layers: Sequence[int] = (),
        progress: bool = False,
        record: Recording | str | Path | None = None,
    ) -> Engine:
        """An engine around a Llama, Mistral, Qwen2 or Qwen3 in a local Hugging Face folder or .gguf file, which is checked first.

        draft: a model, a proposer or a function, or the folder of an EAGLE-3 head, of MTP modules or of a smaller model; "mtp" for
        the modules in `path`, "ngram" for look-up, "auto" for the first of these that there is, "none" for neither.
        dtype: None takes the model's own. feature_layers: whose inputs a draft model is fed with; a folder says so itself.
        progress: tell how much memory it will take, and show a bar. record: where `stepgraph replay` finds all that happens.
        ValueError names the file, field or tensor that is wrong; nothing is downloaded or run.
        """
        loaded = load_models(path, draft, config, dtype=dtype, feature_layers=feature_layers, progress=progress)
        return cls(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config, record=record)

    def capture(self, *, progress: bool = False) -> CaptureReport:
        """Record one graph per batch size, with and without grammars. Once, before the first step."""
        with self._turn:
            self._require_open("capture")
            if self._graphs.captured:
                raise RuntimeError("Engine.capture(): already captured; make a new engine for other limits")
            notes = self.config.notes(self._host.name) + kernel_notes(self.backend.device, self.config, self._models, self._attention)
            notes += self._grammars.notes + self._sharing.notes + (("forced drafts: on",) if "forced_host" in self.buffers else ())
            with self._flights.capturing():
                return self._graphs.capture(notes, self.config.eager, self.config.greedy_only, progress)

    def submit(
        self,
        prompt_ids: Any,
        *,
        constraint: Constraint | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 128,
        num_speculative_tokens: int | None = None,
        draft_ids: Any = None,
        cache_salt: str = "",
        prompt_embeddings: Any = None,
    ) -> Job:
        """Queue a request. ValueError names what cannot be served; nothing has changed then.

        prompt_ids: list, array or 1-D tensor of ids. sampling: None is greedy. max_new_tokens counts a final stop token.
        num_speculative_tokens: drafts per round for this request, 0 switches speculation off; None takes the engine's.
        draft_ids: what the output will be like, to draft from: an earlier version of a text, say. For engines that look texts up.
        cache_salt: only requests of one salt share cached prefixes, so that a tenant cannot tell from the time what others asked.
        prompt_embeddings: {place in prompt_ids: tensor [n, width]}, in place of the embeddings of the n ids there, say of an image.
        """
        self._require_open("submit")
        job = self._submissions.job(
            prompt_ids, constraint, sampling, max_new_tokens, num_speculative_tokens, draft_ids, cache_salt, prompt_embeddings
        )
        waiting = QueuedRequest(job)
        try:
            self._grammars.claim(waiting)
            self._desk.enqueue(waiting, self.config.max_queued, self._require_open)
            self._bell.ring()
        except BaseException:  # an interrupt, too
            self._desk.give_up(waiting)
            self._bell.ring()
            raise
        return job

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Have the grammar of a constraint ready, and wait for it; ValueError where it cannot be enforced. From any thread."""
        self._require_open("compile")
        return self._grammars.compile(constraint)

    def cancel(self, job: Job | int) -> bool:
        """End a job. True where it was still running; False where it had ended or is not known. Safe at any time."""
        asked = self._desk.ask_cancel(job)
        self._bell.ring()
        return asked

    def step(self) -> list[StepEvent]:
        """Launch one round, and return what became known: at most `rounds_in_flight` - 1 rounds stay on their way."""
        with self._turn:
            self._require_open("step")
            self.stepping.check()
            if not self._graphs.captured:
                raise RuntimeError("Engine.step(): nothing is captured; call capture() first")
            try:
                events = [self._end(job, seat, FinishReason.CANCELLED) for job, seat in self._desk.take_cancelled()]
                events += self._admit()
                seats = tuple(seat for seat in self._desk.rows if seat.joined)
                if self._function_drafts:
                    events += [self._end(seat.job, seat, FinishReason.ERROR, error) for seat, error in self._function_drafts.bring(seats)]
                    seats = tuple(seat for seat in seats if not seat.job.finished)
                if seats:
                    self._flights.launch(seats)
                while len(self._flights) >= (self.limits.rounds_in_flight if seats else 1):
                    events += [self._desk.record(*outcome) for outcome in self._flights.collect()]
                if not events and not self._desk.rows and self._desk.waiting:
                    self._grammars.pause()  # who waits for a grammar is all there is
                return events
            except BaseException as error:
                self._shut(f"{type(error).__name__}: {error}", FinishReason.ERROR)
                raise

    def wait(self, seconds: float | None = None) -> bool:
        """For a thread that does nothing but step: sleep until a step may have something to do, and tell whether it has."""
        self._require_open("wait")
        return self.stepping.wait(seconds)

    @property
    def has_work(self) -> bool:
        """False once every submitted job has ended and its last event was returned."""
        return bool(self._desk.jobs)

    def stream(self) -> Iterator[StepEvent]:
        """Step until nothing is left to do, yielding every event. Who leaves early loses the rest of that step's events."""
        while self.has_work:
            yield from self.step()

    def generate(self, prompt_ids: Any, **options: Any) -> Job:
        """Submit one request and step until it ends; captures first where that was not done. Options as in submit().

        Other jobs go on meanwhile; their tokens are in their jobs, their events are not returned.
        """
        if not self._graphs.captured:
            self.capture()
        job = self.submit(prompt_ids, **options)
        while not job.finished:
            try:
                self.step()
            except RuntimeError:
                if self.cancel(job):  # else: another thread closed the engine, and the job says so
                    raise
        return job

    def stats(self) -> EngineStats:
        """What was done so far, and how it stands. From any thread, at any time, also behind the end."""
        backend, host, grammars, desk = self.backend.stats, self._host.stats, self._grammars.stats, self._desk
        with desk.lock:
            launches, eager = self._flights.launches, self._graphs.eager
            return take_stats(backend, host, grammars, desk.counters, launches, desk.rows, desk.waiting, self._states, eager)

    def metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """stats() as text for Prometheus, with these labels on every line."""
        return prometheus_text(self.stats(), labels)

    def trace(self, rounds: int = 20) -> AbstractContextManager[Trace]:
        """Note when all that the next `rounds` rounds do ran, while the block lasts; then `.timeline` tells. For the stepping thread."""
        self._require_open("trace")
        return trace_rounds(self.backend, self._flights.rounds, rounds, self.config.eager or bool(self._graphs.eager))

    def close(self) -> None:
        """Cancel what is running, wait for the device, free threads and graphs. Idempotent."""
        with self._turn:
            if not self._closed:
                self._shut("the engine was closed", FinishReason.CANCELLED)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, job: Job, seat: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        if seat is not None:
            self._admission.retire(seat.row)
        return self._desk.finish(job, seat, reason, error)

    def _admit(self) -> list[StepEvent]:
        """Seat who waits, and take prompts up to one chunk between two rounds."""
        failed = self._desk.seat_waiting()
        budget = self.limits.prefill_chunk
        for seat in self._desk.rows:
            if seat.joined or budget <= 0:
                continue
            if not seat.begun:
                self._desk.begin(seat)
                self._admission.begin(seat)
            taken = self._admission.prefill(seat, budget)
            self._desk.prefilled(seat, taken)
            budget -= taken
        return [self._desk.finish(waiting.job, None, FinishReason.ERROR, waiting.error) for waiting in failed]

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise EngineClosedError(f"Engine.{call}(): {self._closed}")

    def _shut(self, why: str, reason: FinishReason) -> None:
        self._closed = why
        self._desk.finish_all(reason, why)
        self._bell.ring()
        self._watchdog.end(self._flights, self._host)
        self._grammars.close()
        if self._states:
            self._states.close()

    def _leave(self) -> None:
        self._closed, self._turn = LEFT, StepLock()
