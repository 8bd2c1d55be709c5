"""The engine: requests in, events out, one replay per round.

`step()` reads as the design: admit, launch, collect. The launching thread never waits for the round it just launched;
with `rounds_in_flight` rounds on their way it reads the oldest one's results from a pinned ring.
"""

from __future__ import annotations

import collections
import contextlib
import secrets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgraph.graphs.buffers import RESULT_FIELDS
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.graph_set import CaptureReport, GraphSet
from stepgraph.graphs.model import DraftModel, ModelPair, TargetModel
from stepgraph.graphs.round import Round
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.admission import Admission
from stepgraph.runtime.checks import checked_count, checked_ids, checked_prompt, checked_sampling
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.desk import Desk
from stepgraph.runtime.models.pretrained import load_target
from stepgraph.runtime.placement import (
    backend_for,
    check_device,
    check_draft,
    check_mode,
    check_vocabularies,
    kernel_notes,
    make_buffers,
    make_host_link,
)
from stepgraph.runtime.request import FinishReason, Job, StepEvent, TokenLogprob
from stepgraph.runtime.rows import Flight
from stepgraph.runtime.stats import EngineStats
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.constraint import Constraint
from stepgraph.sampling.grammar.host_link import MatcherRow
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.params import SamplingParams


class Engine:
    """Decodes requests in rounds, each one replay of a recorded graph.

    submit() and cancel() may be called from any thread at any time; step() by one thread at a time.
    """

    def __init__(
        self,
        target: TargetModel,
        draft: DraftModel | None = None,
        *,
        vocabulary: Vocabulary | None = None,
        config: EngineConfig | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        drafts = check_draft(self.config, draft)
        self._models = models = ModelPair(target, draft if drafts else None)
        num_tokens = check_vocabularies(models, vocabulary)
        self.limits: Limits = self.config.limits(target.vocab_size, num_tokens, target.feature_size)
        self.backend = backend or backend_for(self.config.backend, models)
        check_device(models, self.backend)
        check_mode(models)
        self.buffers = make_buffers(self.limits, models, self.backend, self.config.greedy_only)
        self._compiler = self.config.grammar_compiler(vocabulary) if vocabulary is not None else None
        self._host = make_host_link(self.config.host_link, self.buffers, self.limits)
        decode_round = Round(self.limits, models, self._host, self.config.draft_masks, self.config.forced_acceptance)
        self._graphs = GraphSet(self.backend, self.buffers, decode_round.step, self.config.bucket_sizes)
        self._admission = Admission(self.backend, self.buffers, models, self.limits)
        self._desk = Desk(self.limits, vocabulary.stop_token_ids if vocabulary else ())
        self._flights: collections.deque[Flight] = collections.deque()
        self._round = 0
        self._step_lock = threading.Lock()
        self._closed = ""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        draft: DraftModel | None = None,
        *,
        config: EngineConfig | None = None,
        dtype: torch.dtype | None = None,
        feature_layers: Sequence[int] = (),
        progress: bool = False,
    ) -> Engine:
        """An engine around a Llama, Mistral, Qwen2 or Qwen3 in a local Hugging Face folder or .gguf file, which is checked first.

        dtype: None takes the model's own. feature_layers: whose inputs the draft is fed with. progress: tell how much memory
        it will take, and show a bar. ValueError names the file, field or tensor that is wrong; nothing is downloaded or run.
        """
        config = config or EngineConfig(num_speculative_tokens=EngineConfig.num_speculative_tokens if draft is not None else 0)
        check_draft(config, draft)
        target, vocabulary = load_target(path, config, dtype=dtype, feature_layers=feature_layers, progress=progress)
        return cls(target, draft, vocabulary=vocabulary, config=config)

    def capture(self, *, progress: bool = False) -> CaptureReport:
        """Record one graph per batch size, with and without grammars. Once, before the first step."""
        with self._step_lock:
            self._require_open("capture")
            if self._graphs.captured:
                raise RuntimeError("Engine.capture(): already captured; make a new engine for other limits")
            notes = self.config.notes(self._host.name) + kernel_notes(self.backend.device, self.config, self._models)
            return self._graphs.capture(notes, self.config.eager, self.config.greedy_only, progress)

    def submit(
        self,
        prompt_ids: Any,
        *,
        constraint: Constraint | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 128,
        num_speculative_tokens: int | None = None,
    ) -> Job:
        """Queue a request. ValueError names what cannot be served; nothing has changed then.

        prompt_ids: list, array or 1-D tensor of ids. sampling: None is greedy. max_new_tokens counts a final stop token.
        num_speculative_tokens: drafts per round for this request, 0 switches speculation off; None takes the engine's.
        """
        self._require_open("submit")
        limits, most = self.limits, self.limits.num_speculative_tokens
        prompt = checked_prompt(prompt_ids, limits)
        why = f"max_length={limits.max_length} less {len(prompt)} of prompt"
        new_tokens = checked_count("max_new_tokens", max_new_tokens, 1, limits.max_length - len(prompt), why)
        drafts = most if num_speculative_tokens is None else num_speculative_tokens
        drafts = checked_count("num_speculative_tokens", drafts, 0, most, "what the engine was captured for")
        sampling = checked_sampling(
            sampling, limits, greedy_only=self.config.greedy_only, constrained=constraint is not None, max_new_tokens=new_tokens
        )
        extra_stops = checked_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.num_tokens)
        stops = self._desk.stop_ids(extra_stops, sampling.ignore_eos)
        seed = sampling.seed if sampling.seed is not None else 0 if sampling.greedy else secrets.randbits(63)
        job = Job(self._desk.next_id(), prompt, constraint, sampling, new_tokens, drafts, stops, seed)
        matcher = self._matcher(job)
        self._desk.enqueue(job, matcher, self.config.max_queued, self._require_open)
        return job

    def cancel(self, job: Job | int) -> bool:
        """End a job. True where it was still running; False where it had ended or is not known. Safe at any time."""
        return self._desk.ask_cancel(job.id if isinstance(job, Job) else job)

    def step(self) -> list[StepEvent]:
        """Launch one round, and return what became known: at most `rounds_in_flight` - 1 rounds stay on their way."""
        with self._step_lock:
            self._require_open("step")
            if not self._graphs.captured:
                raise RuntimeError("Engine.step(): nothing is captured; call capture() first")
            try:
                events = self._cancel()
                self._admit()
                launched = self._launch()
                while len(self._flights) >= (self.limits.rounds_in_flight if launched else 1):
                    events += self._collect()
                return events
            except BaseException as error:
                self._shut(f"{type(error).__name__}: {error}", FinishReason.ERROR)
                raise

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
                if not job.finished:  # else: another thread closed the engine, and the job says so
                    raise
        return job

    def stats(self) -> EngineStats:
        counts, host, desk = self.backend.stats, self._host.stats, self._desk
        return EngineStats(
            rounds=self._round,
            replays=counts.replays,
            host_syncs=counts.syncs,
            event_waits=counts.event_waits,
            tokens=desk.tokens,
            accepted_drafts=desk.accepted_drafts,
            mask_fills=host.fills,
            matcher_accepts=host.accepts,
            matcher_rollbacks=host.rollbacks,
            running=len(desk.rows),
            waiting=desk.waiting,
            free_pages=desk.rows.free_pages,
        )

    def close(self) -> None:
        """Cancel what is running, wait for the device, free threads and graphs. Idempotent."""
        with self._step_lock:
            if not self._closed:
                self._shut("the engine was closed", FinishReason.CANCELLED)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _cancel(self) -> list[StepEvent]:
        events = []
        for job, seat in self._desk.take_cancelled():
            if seat is not None:
                self._admission.retire(seat.row)
            events.append(self._desk.finish(job, seat, FinishReason.CANCELLED))
        return events

    def _admit(self) -> None:
        """Seat who waits, and take prompts up to one chunk between two rounds."""
        self._desk.seat_waiting()
        budget = self.limits.prefill_chunk
        for seat in self._desk.rows:
            if not seat.joined and budget > 0:
                budget -= self._admission.prefill(seat, budget)

    def _launch(self) -> bool:
        """One round of every seat that has joined: batch in, replay, results out. Nothing here waits."""
        seats = tuple(seat for seat in self._desk.rows if seat.joined)
        if not seats:
            return False
        slot = self._round % self.limits.ring_depth
        self._round += 1
        constrained, sampled = any(seat.matcher for seat in seats), any(not seat.job.sampling.plain for seat in seats)
        key = self._graphs.key_for(len(seats), constrained, sampled)
        batch_host, results_host = self.buffers.batch_rows_ring_host[slot], self.buffers.results_ring_host[slot]
        batch_np = batch_host.numpy()
        batch_np[:] = self.limits.dummy_row
        batch_np[: len(seats)] = [seat.row for seat in seats]
        if key.constrained:
            self._host.announce([seat.matcher for seat in seats])
        self.backend.run(lambda: self.buffers.batch_rows.copy_(batch_host, non_blocking=True))
        self._graphs[key].replay()
        self.backend.run(lambda: results_host.copy_(self.buffers.results, non_blocking=True))
        logprobs = any(seat.job.sampling.logprobs for seat in seats)
        if logprobs:
            logprobs_host = self.buffers.logprobs_ring_host[slot]
            self.backend.run(lambda: logprobs_host.copy_(self.buffers.results_logprobs, non_blocking=True))
        self._flights.append(Flight(self.backend.event(), slot, seats, logprobs))
        return True

    def _collect(self) -> list[StepEvent]:
        """Read the oldest round on its way."""
        flight = self._flights.popleft()
        flight.event.wait()
        self._host.let_go()
        results = self.buffers.results_ring_host[flight.slot].tolist()
        logprobs = self.buffers.logprobs_ring_host[flight.slot].tolist() if flight.logprobs else [[]] * len(results)
        events = []
        for seat, (count, finish, accepted, *tokens), told in zip(flight.seats, results, logprobs, strict=False):
            assert len(tokens) + RESULT_FIELDS == len(results[0])
            if not seat.job.finished:  # else: launched before its end was known, and inert
                wanted = [TokenLogprob(*pair) for pair in told[:count]] if seat.job.sampling.logprobs else []
                events.append(self._desk.record(seat, tokens[:count], accepted, FinishCode(finish), wanted))
        return events

    def _matcher(self, job: Job) -> MatcherRow | None:
        if job.constraint is None:
            return None
        if not isinstance(job.constraint, Constraint):
            raise ValueError(f"constraint: got {type(job.constraint).__name__}, want a Constraint")
        if self._compiler is None:
            raise ValueError("constraint: the engine has no vocabulary; pass Engine(vocabulary=...) to constrain requests")
        return self._host.row(job.id, self._compiler.compile(job.constraint).matcher())

    def _require_open(self, call: str) -> None:
        if self._closed:
            raise RuntimeError(f"Engine.{call}(): {self._closed}")

    def _shut(self, why: str, reason: FinishReason) -> None:
        self._closed = why
        self._flights.clear()
        self._desk.finish_all(reason, why)
        with contextlib.suppress(Exception):  # whatever was still on its way fails for the reason that is being told
            self.backend.synchronize()
        self.backend.close()
        self._host.close()
