"""The engine: requests in, events out, one replay per round. `engine_core` has the rounds."""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import torch

from stepgraph.graphs.capture import Backend
from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.build import EngineParts
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.engine_core import EngineCore
from stepgraph.runtime.job import FinishReason, T
from stepgraph.runtime.loras import LoraTable
from stepgraph.runtime.models.files.checkpoint import WeightsMode
from stepgraph.runtime.models.files.new_weights import checked_update
from stepgraph.runtime.models.files.transformers_folder import Implementation
from stepgraph.runtime.parallel.loading import load_part
from stepgraph.runtime.parallel.ranks import ranks_of
from stepgraph.runtime.record import Recording
from stepgraph.runtime.request import EngineClosedError, Job, StepEvent
from stepgraph.runtime.request_queue import PAUSE_SECONDS, QueuedRequest
from stepgraph.runtime.stats import EngineStats, take_stats
from stepgraph.runtime.text import Message, TextCodec
from stepgraph.runtime.trace import Trace
from stepgraph.runtime.validate import ENGINE_NAMES, REQUEST_NAMES, BatchOptions, Prompt, Prompts, RequestOptions, split_batch
from stepgraph.sampling.fields import Check, check_value, checked_keywords, clip_repr, number, optional, whole
from stepgraph.sampling.grammar.compile.compiler import CompiledConstraint
from stepgraph.sampling.grammar.constraints.python_types import typed_constraint
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.lifetimes import BoundToProcess
from stepgraph.sampling.params import SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepgraph.runtime.validate import UntypedBatchOptions, UntypedOptions

_TOKENIZER = optional(Check(lambda value: isinstance(value, TextCodec) or callable(value), "a TextCodec, or a function that returns one"))
_SECONDS = optional(number(0, threading.TIMEOUT_MAX))
_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()  # by id
_TOKENIZER_RESULT = Check(lambda codec: isinstance(codec, TextCodec), "a TextCodec from the function")


class Engine(EngineCore, BoundToProcess):
    """Decodes requests in rounds, each one replay of a recorded graph.

    Any thread may call submit() and cancel() at any time; step() is for one thread at a time.
    """

    @checked_keywords(ENGINE_NAMES)
    def __init__(
        self,
        target: TargetModel,
        draft: Drafter | str | None = None,
        *,
        vocabulary: Vocabulary | None = None,
        tokenizer: TextCodec | Callable[[], TextCodec] | None = None,
        config: EngineConfig | None = None,
        backend: Backend | None = None,
        record: Recording | str | Path | None = None,
    ) -> None:
        """tokenizer: encodes prompts that are text; a function is called at the first such prompt."""
        if isinstance(target, (str, Path)):
            raise ValueError(f"Engine.target: got {clip_repr(target)}, expected a model; Engine.from_pretrained loads one from files")
        if type(target).__module__.partition(".")[0] == "transformers":
            expected = "expected Engine.from_pretrained(folder) after model.save_pretrained(folder) and tokenizer.save_pretrained(folder)"
            raise ValueError(f"Engine.target: got a {type(target).__name__} of transformers, {expected}")
        check_value("Engine.tokenizer", tokenizer, _TOKENIZER)
        with ExitStack() as taken:  # what a refused engine has to close, as its error may keep all parts alive
            if ranks := ranks_of(target):
                taken.callback(ranks.close)
            parts = EngineParts(taken, target, draft, vocabulary, EngineConfig() if config is None else config, backend, record)
            taken.pop_all()
        super().__init__(parts)
        self._loras = LoraTable(target, self.limits, self.buffers, parts.watchdog.backend, self.queue)
        self._make_tokenizer = (lambda: tokenizer) if isinstance(tokenizer, TextCodec) else tokenizer
        _engines[id(self)] = self

    @classmethod
    @checked_keywords(ENGINE_NAMES)
    def from_pretrained(
        cls,
        path: str | Path,
        draft: Drafter | str | Path | None = "auto",
        *,
        config: EngineConfig | None = None,
        dtype: torch.dtype | None = None,
        weights: WeightsMode = "dequantised",
        implementation: Implementation = "auto",
        feature_layers: Sequence[int] = (),
        progress: bool = False,
        record: Recording | str | Path | None = None,
        tensor_parallel: int = 1,
    ) -> Engine:
        """An engine for a model in a local Hugging Face folder or .gguf file, which is checked first.

        path: "demo" is the pair of the demonstration, with its head as the drafter and in bfloat16.
        draft: a model, a proposer or a function; the folder of an EAGLE-3 head, of MTP modules or of a smaller model; "mtp" for the
        modules in `path`, "ngram" for look-up, "auto" for the first of these that is available; None or "none" for no drafts.
        dtype: None is the model's own. feature_layers: target layers whose inputs a draft model reads; a draft folder sets its own.
        weights: quantised ones are "dequantised" to `dtype`, or stay "quantised" in memory.
        implementation: "native" for the families of docs/models.md; "transformers" for a folder of any causal language model of that
        package (`pip install 'stepgraph[transformers]'`); "auto" is "native" where it implements the model's config.
        progress: print the memory required, and show a progress bar. record: the file that `stepgraph replay` reads.
        tensor_parallel: the number of processes, each with a part of every layer; this call starts them, unless torchrun did.
        ValueError for a wrong file, field or tensor. Downloads nothing and runs no code of the folder.
        """
        check_value("tensor_parallel", tensor_parallel, whole(1))
        options = {"dtype": dtype, "weights": weights, "feature_layers": feature_layers, "implementation": implementation}
        loaded = load_part(path, draft, config, tensor_parallel, record, progress=progress, **options)
        tokenizer = functools.partial(TextCodec.open, path, loaded.vocabulary)
        return cls(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, tokenizer=tokenizer, config=loaded.config, record=record)

    @functools.cached_property
    def tokenizer(self) -> TextCodec:
        """Text to token ids and back. ValueError if the engine has none."""
        if self._make_tokenizer is None:
            raise ValueError("Engine.tokenizer: got None, expected a TextCodec for prompts that are text: Engine(..., tokenizer=...)")
        codec = self._make_tokenizer()
        check_value("Engine.tokenizer()", codec, _TOKENIZER_RESULT)
        return codec

    @property
    def vocabulary(self) -> Vocabulary:
        """The token table of text and grammars. ValueError if the engine has none."""
        if self._parts.vocabulary is None:
            raise ValueError("Engine.vocabulary: got None, expected a Vocabulary for text and constraints: Engine(..., vocabulary=...)")
        return self._parts.vocabulary

    @overload
    def submit(self, prompt: Prompt, *, constraint: type[T], **options: Unpack[UntypedOptions]) -> Job[T]: ...
    @overload
    def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Job: ...
    @checked_keywords(REQUEST_NAMES, RequestOptions.__annotations__)
    def submit(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Job:
        """Queue a request. ValueError for an argument that cannot be served, before anything changes.

        prompt: a text; chat messages, objects with a role and a content; or a list, array or 1-D tensor of token ids.
        constraint: a Constraint, or what compile() returned; or a Python type, whose value is then `Job.parsed`: a pydantic model, a
        dataclass, a TypedDict, an enum, a Literal type, a compiled pattern, or a function, whose name and arguments are generated.
        sampling: None is SamplingParams(), which is greedy.
        max_new_tokens: includes a final stop token; None: as many as EngineConfig.max_length allows.
        num_speculative_tokens: drafts per round of this request; 0: none; None: the engine's.
        draft_ids: the expected output, e.g. an earlier version of a text, to draft from. Requires an engine with look-up.
        cache_salt: only requests with equal salts share cached prefixes, so that timing reveals nothing about other tenants' prompts.
        lora_name: of an adapter of add_lora(); "" for none.
        prompt_embeddings: {position in the prompt: tensor [n, width]} replaces the embeddings of n ids, e.g. by those of an image.
        resume_from: the tokens of an earlier job with the same arguments, of this engine or another, e.g. one that was cancelled. The new
        job has the tokens that would have followed. max_new_tokens and min_new_tokens count them. Not for a sampled request with drafts.
        priority: lower numbers get rows first; by default 0. With EngineConfig.preemption they also take the rows of higher numbers.
        tenant: at equal priority, tenants get rows in turn, for one request each.
        timeout_seconds: from this call, after which the next step ends the request with the reason `timeout`, also while it waits.
        """
        self._require_open("submit")
        prompt_ids, options["sampling"] = self._prompt_ids(prompt), self._with_word_ids(options.get("sampling"))
        job = self._parts.validator.make_job(prompt_ids, self._loras.find(options.get("lora_name", "")), options)
        queued = QueuedRequest(job)
        try:
            self.queue.enqueue(queued, functools.partial(self._require_accepted, job))
        except BaseException as error:  # including KeyboardInterrupt
            self.queue.withdraw(queued)
            if isinstance(error, RuntimeError):  # of the compiler, for example, which another thread has closed with the engine
                self._require_open("submit")
            raise
        return job

    def compile(self, constraint: object) -> CompiledConstraint:
        """Compile the grammar of a constraint, as for submit(), into the cache, and wait for it. From any thread.

        ValueError if it cannot be enforced.
        """
        self._require_open("compile")
        try:
            return self.queue.compiler.compile(typed_constraint(constraint).constraint)
        except (RuntimeError, ValueError):  # of the compiler, for example, which another thread has closed with the engine
            self._require_open("compile")
            raise

    def cancel(self, job: Job | int) -> bool:
        """End a job at the next step. False if it has finished or is unknown. Idempotent, and safe at any time."""
        return self.queue.cancel(job)

    def update_weights(self, weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | str | Path) -> None:
        """Copy new weights into the target, and forget all cached prefixes. From any thread; no graph is recorded again.

        weights: tensors by their names in a folder of the model (of the parameters, for a model of your own), all or some of them; or a
        folder or .gguf file with the same config. ValueError for one that does not fit, before any weight changes; a copy that fails
        closes the engines of this target.
        Requests that have a row end first, as this call steps the engine or waits for the thread that does; the next step() returns their
        events. Others wait and get the new weights. The weights of a draft model, which change no text, and adapters stay as they are.
        """
        self._require_open("update_weights")
        self._require_without("update_weights", self._parts.hidden_states)
        copy = checked_update(self._parts.models.target, weights, self.buffers)
        hold, sharing = object(), list[Engine]()
        try:  # a context manager in Python would keep the hold after an interrupt at its begin
            self.queue.holds.add(hold)
            while self.queue.has_begun:
                try:
                    self.step_lock.check_owner()
                except RuntimeError:  # the thread of an AsyncEngine steps
                    time.sleep(PAUSE_SECONDS)
                else:
                    with self.step_lock.entered():
                        self._kept_events = self._step()
            with self.step_lock.entered():
                self._require_open("update_weights")
                self._in_flight.interrupt()
                self.reset_prefix_cache()
                self._settle("update_weights()")  # a copy from the caller's memory waits in the driver, without a limit
                watchdog = self._parts.watchdog
                try:
                    watchdog.backend.run(copy)
                    watchdog.note_copy("new weights", copied := watchdog.backend.event())
                    copied.wait()  # the caller may change or free the tensors
                except BaseException as error:  # some weights are new
                    self._fail(error, "update_weights()")
                    engines = (ref() for ref in _engines.valuerefs())
                    sharing += [each for each in engines if each and each._parts.models.target is self._parts.models.target]
                    raise
        except BaseException as error:
            for other in sharing:  # not within the lock of this engine
                with other.step_lock.entered():
                    if not other._closed_reason:
                        other._fail(error, "update_weights()")
            raise
        finally:
            self.queue.holds.discard(hold)
            self.queue.wake.notify()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes, e.g. after parameters were changed in place. From any thread.

        Requests that have a row keep their pages, and share none from here on.
        """
        self._require_open("reset_prefix_cache")
        self._require_without("reset_prefix_cache")
        with self.queue.lock:
            self._scheduler.rows.reset_prefix_cache(self._scheduler.active)

    def add_lora(self, lora_name: str, lora_path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter into a free slot, between two rounds: submit(lora_name=...) then selects it. From any thread.

        lora_path: a folder in the layout of PEFT: adapter_config.json and adapter_model.safetensors. ValueError for an adapter that
        does not fit the target, and if EngineConfig.max_loras are in use. No graph is recorded again. replace: also if the name is loaded:
        requests that were submitted before keep the earlier adapter, and its slot until they have ended.
        """
        self._require_open("add_lora")
        contents = self._loras.read(lora_name, lora_path, replace)
        with self.step_lock.entered():
            self._require_open("add_lora")
            self._in_flight.interrupt()
            self._settle("add_lora()")  # an error of the copy then concerns the adapter only
            self._loras.add(lora_name, contents, replace)
            self._parts.watchdog.note_copy(f"the adapter {lora_name!r}", self.backend.event())

    def remove_lora(self, lora_name: str) -> bool:
        """Refuse further requests for an adapter; its slot is free once its requests have ended. False if unknown. From any thread."""
        return self._loras.remove(lora_name)

    def list_loras(self) -> list[str]:
        """The names of the loaded adapters."""
        return list(self._loras.by_name)

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep until a step may have something to do; True if it has. For a thread that only steps."""
        self._require_open("wait")
        check_value("Engine.wait.seconds", seconds, _SECONDS)
        if not self._ready:
            if (deadline := self.queue.next_deadline) < math.inf:
                left = max(0.0, deadline - time.perf_counter())
                seconds = min(left, threading.TIMEOUT_MAX if seconds is None else seconds)
            if not self.queue.wake.wait(seconds):
                self.queue.expire()
        return self._ready

    @property
    def has_work(self) -> bool:
        """False once every submitted job has finished and its last event was returned."""
        return bool(self.queue.unfinished or self.queue.holds or self._kept_events)

    def stream(self) -> Iterator[StepEvent]:
        """Step until all jobs have finished, yielding every event. Breaking out discards the remaining events of that step."""
        while self.has_work:
            yield from self.step()

    @overload
    def generate(self, prompt: Prompt, *, constraint: type[T], **options: Unpack[UntypedOptions]) -> Job[T]: ...
    @overload
    def generate(self, prompt: Prompts, *, constraint: type[T], **options: Unpack[UntypedBatchOptions]) -> list[Job[T]]: ...
    @overload
    def generate(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Job: ...
    @overload
    def generate(self, prompt: Prompts, **options: Unpack[BatchOptions]) -> list[Job]: ...
    @checked_keywords(REQUEST_NAMES, RequestOptions.__annotations__)
    def generate(self, prompt: Any, **options: Unpack[BatchOptions]) -> Job | list[Job]:
        """Submit a request, or one for each prompt of a list, and step until all have finished. Options as for submit().

        Other jobs proceed meanwhile; their tokens are in their jobs, their events are not returned. For a list of prompts `sampling`,
        `constraint` and `max_new_tokens` may be lists of the same length. RuntimeError if the request of a single prompt fails; of a list
        of prompts all jobs are returned, and a failed one has an `error`.
        """
        batch, jobs = split_batch(prompt, options), list[Job]()
        requests: list[tuple[Any, Any]] = [(prompt, options)] if batch is None else batch
        try:
            for one, own in requests:
                while jobs and self.queue.full:
                    self.step()
                try:
                    jobs.append(self.submit(one, **own))
                except ValueError as error:
                    if batch is None:
                        raise
                    raise ValueError(f"prompts[{len(jobs)}]: {error}") from None
            for job in jobs:
                while not job.finished:
                    self.step()
        except BaseException as error:  # including KeyboardInterrupt
            running = [self.cancel(job) for job in jobs]
            closed = isinstance(error, EngineClosedError)  # by another thread, which finished the jobs
            if any(running) or len(jobs) < len(requests) or not closed:
                raise
        if batch is None and jobs[0].finish_reason == FinishReason.ERROR:
            raise RuntimeError(f"Engine.generate(): {jobs[0].error}")
        return jobs[0] if batch is None else jobs

    @checked_keywords(REQUEST_NAMES, RequestOptions.__annotations__)
    def stream_text(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Iterator[str]:
        """Submit a request, and step and yield its text piece by piece. RuntimeError if it fails. Leaving early cancels it."""
        _ = self.vocabulary  # ValueError before the request is queued
        pieces = self._text_pieces(self.submit(prompt, **options))
        next(pieces)  # a generator that has not started would not cancel the request when it is dropped
        return pieces

    def stats(self) -> EngineStats:
        """Counters and gauges at one moment. From any thread, at any time, also after close()."""
        return take_stats(self._parts)

    def metrics(self, labels: Mapping[str, str] | None = None) -> str:
        """stats() in the Prometheus text format, with these labels on every sample."""
        try:
            from stepgraph.runtime.metrics import engine_metrics, prometheus_text
        except ModuleNotFoundError as error:
            raise ValueError(f"metrics: {error.name} is not installed: pip install 'stepgraph[serve]'") from None
        return prometheus_text(engine_metrics([({} if labels is None else labels, self.stats())]))

    def trace(self, rounds: int = 20) -> Trace:
        """Within the block, record the timeline of the next `rounds` rounds; then read `.timeline`. For the stepping thread."""
        self._require_open("trace")
        if self.limits.loops:
            raise RuntimeError("Engine.trace(): a launch of this engine runs many rounds; use EngineConfig.rounds_per_launch=1 for a trace")
        eager, chooser = self.config.eager or bool(self._graphs.eager), self._parts.draft_lengths

        def wait() -> None:
            with self.step_lock.entered():
                if not self._closed_reason:
                    self._settle("trace()")

        return Trace(self.backend, self._in_flight.rounds, rounds, eager, wait, chooser)

    def close(self) -> None:
        """Cancel all jobs, wait for the device, release threads and graphs. Idempotent."""
        with self.step_lock.entered():
            if not self._ended:
                self._shut_down("the engine was closed", FinishReason.CANCELLED)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, where: str) -> None:
        """Wait for everything launched. An error of a round, whose results are then missing, closes the engine. Under the step lock."""
        try:
            self._parts.watchdog.backend.synchronize()
        except Exception as error:
            self._fail(error, where)
            raise

    @property
    def _ready(self) -> bool:
        """Whether a step has something to do. False while every job waits for its grammar."""
        return self._scheduler.runnable or len(self._in_flight.pending) > 0 or bool(self._kept_events)

    def _text_pieces(self, job: Job) -> Iterator[str]:
        stream, known = job.text_stream(), 0
        try:
            yield ""
            while not job.finished:
                self.step()
                new = job.tokens[known:]  # read once: another thread may step the engine too
                known += len(new)
                if piece := stream.push(new):
                    yield piece
            if job.error:
                raise RuntimeError(f"Engine.stream_text(): {job.error}")
            if rest := stream.push(job.tokens[known:]) + stream.finish():
                yield rest
        finally:
            self.cancel(job)

    def _prompt_ids(self, prompt: Prompt) -> Any:
        if isinstance(prompt, str) or (isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping)):
            return self.tokenizer.prompt_ids(cast("str | Sequence[Message]", prompt))
        return prompt

    def _with_word_ids(self, sampling: SamplingParams | None) -> SamplingParams | None:
        """Replace bad words that are texts by token ids, once without and once with a blank before the word."""
        texts = isinstance(sampling, SamplingParams) and any(isinstance(word, str) for word in sampling.bad_words)
        if sampling is None or not texts or self._make_tokenizer is None:
            return sampling
        words = dict[tuple[int, ...], None]()
        for word in sampling.bad_words:
            spelled = [self.tokenizer.encode(each, False) for each in (word, f" {word.lstrip()}")] if isinstance(word, str) else [word]
            words |= dict.fromkeys(tuple(ids) for ids in spelled)
        return replace(sampling, bad_words=tuple(words))

    def _require_without(self, call: str, hidden_states: object = None) -> None:
        """ValueError with ranks or a recording, as other ranks or a replay would keep other prefixes, or with these hidden states."""
        parts = {"save_hidden_states": hidden_states, "tensor_parallel": self._parts.ranks, "record": self.queue.recorder}
        if present := [name for name, part in parts.items() if part is not None]:
            raise ValueError(f"Engine.{call}: got an engine with {present[0]}, expected one without it")

    def _require_accepted(self, job: Job, call: str) -> None:
        self._require_open(call)
        job.lora = self._loras.find(job.lora.name)  # under the queue's lock: after it was found before, it may be removed or replaced
