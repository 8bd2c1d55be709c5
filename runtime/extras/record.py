"""A recording: what an engine is asked and what it answers, written as it happens, so that `stepgraph replay` can ask the same again.

Lines of JSON. The first tells the format, the engine's config, package versions, and fingerprints of the vocabulary and the models; no
weights. Then one line for each thing that happens, with the number of steps begun before it. Prompts and texts are in it as they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import os
import platform
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepgraph.graphs.capture import Backend
from stepgraph.graphs.model import ModelPair
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.drafters import only_looks_up
from stepgraph.runtime.extras.hidden_states import HiddenStates
from stepgraph.runtime.forks import leave_in_forks
from stepgraph.runtime.grammar_queue import QueuedRequest
from stepgraph.runtime.request import FinishReason, Job, StepEvent
from stepgraph.runtime.scheduler import Scheduler, id_of
from stepgraph.runtime.slots import ActiveRequest, Sharing
from stepgraph.sampling.fields import clip_repr, is_int
from stepgraph.sampling.grammar.vocabulary import Vocabulary

FORMAT = 1
PACKAGES = ("torch", "xgrammar", "llguidance", "triton")
FULL = b'{"kind":"full"}\n'
FIRST_VALUES = 16  # of each tensor: enough to tell a model from another one of its shape


@dataclass(frozen=True)
class Recording:
    """Where an engine writes what it is asked and what it answers: a file that is not there yet, and how long it may become."""

    path: str | Path
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, Path)) or self.path == "":
            raise ValueError(f"Recording.path: got {clip_repr(self.path)}, want the path of a file")
        if not is_int(self.max_bytes) or self.max_bytes < 1:
            raise ValueError(f"Recording.max_bytes: got {clip_repr(self.max_bytes)}, want a whole number >= 1")


class Recorder:
    """Writes lines, each at once and whole, so that a crash keeps those before it. For any thread.

    What goes wrong here is told once and ends the recording; no request waits or fails for it.
    """

    def __init__(self, recording: Recording, header: dict[str, Any]) -> None:
        self._path, self._left, self._lock = Path(recording.path), recording.max_bytes - len(FULL), threading.Lock()
        try:
            # Unbuffered, and for its owner's eyes: a file of the same name is somebody's last recording.
            self._file: io.FileIO | None = io.FileIO(str(self._path), "xb", opener=lambda path, flags: os.open(path, flags, 0o600))
        except OSError as error:
            wanted = "want the path of a file that is not there yet and can be written"
            raise ValueError(f"Engine.record: got {str(self._path)!r} ({error.strerror}), {wanted}") from None
        leave_in_forks(self._leave)
        self.write("engine", **header)

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
            with self._lock:
                if self._file is None:
                    return
                self._left -= len(line)
                if self._left >= 0:
                    if self._file.write(line) != len(line):
                        raise OSError("only a part of a line could be written")
                    return
                self._file.write(FULL)
            self._end("it is as long as Recording.max_bytes allows")
        except Exception as error:
            self._end(str(error) or type(error).__name__)

    def close(self) -> bool:
        """Whether it was open."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        return file is not None

    def _leave(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _end(self, why: str) -> None:
        if self.close():
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(f"the recording {self._path} ends here: {why}", RuntimeWarning, stacklevel=4)


class RecordedScheduler(Scheduler):
    """A desk that tells a recorder of all that passes over it."""

    def __init__(
        self, recorder: Recorder, limits: Limits, sharing: Sharing, ended: Callable[[Job], None] | None, only_looks_up: bool
    ) -> None:
        super().__init__(limits, sharing, ended, only_looks_up)
        self._recorder, self._steps = recorder, 0

    def enqueue(self, waiting: QueuedRequest, max_queued: int, still_open: Callable[[str], None]) -> None:
        try:
            # In front of the job's way in: a step on another thread may answer it as soon as it is there.
            self._recorder.write("submit", step=self._steps, **request_fields(waiting.job))
            super().enqueue(waiting, max_queued, still_open)
        except BaseException:
            if waiting.job.id not in self.jobs:
                self._recorder.write("refused", job=waiting.job.id)
            raise

    def ask_cancel(self, asked: Job | int) -> bool:
        running = super().ask_cancel(asked)
        self._recorder.write("cancel", step=self._steps, job=id_of(asked), running=running)
        return running

    def take_cancelled(self) -> list[tuple[Job, ActiveRequest | None]]:
        self._steps += 1  # every step begins with this
        return super().take_cancelled()

    def record(self, seat: ActiveRequest, tokens: Sequence[int], *told: Any, **named: Any) -> StepEvent:
        if tokens:  # in front of the job's end, which is told from within
            self._recorder.write("tokens", step=self._steps, job=seat.job.id, tokens=list(tokens))
        return super().record(seat, tokens, *told, **named)

    def finish(self, job: Job, seat: ActiveRequest | None, reason: FinishReason, error: str = "") -> StepEvent:
        event = super().finish(job, seat, reason, error)
        self._recorder.write("end", step=self._steps, job=job.id, reason=reason.value, error=error)
        return event

    def finish_all(self, reason: FinishReason, error: str) -> None:
        self._recorder.write("closed", step=self._steps, why=error)
        super().finish_all(reason, error)
        self._recorder.close()


def make_scheduler(
    record: Recording | str | Path | None,
    config: EngineConfig,
    models: ModelPair,
    vocabulary: Vocabulary | None,
    backend: Backend,
    limits: Limits,
    sharing: Sharing,
    states: HiddenStates | None,
) -> Scheduler:
    """A desk, with a recorder behind it where one is wanted. ValueError where the file cannot be made."""
    ended, looks_up = states.ended if states else None, only_looks_up(models)
    if record is None:
        return Scheduler(limits, sharing, ended, looks_up)
    recording = record if isinstance(record, Recording) else Recording(record)
    return RecordedScheduler(Recorder(recording, header(config, models, vocabulary, backend)), limits, sharing, ended, looks_up)


def header(config: EngineConfig, models: ModelPair, vocabulary: Vocabulary | None, backend: Backend) -> dict[str, Any]:
    """What has to be the same for the same tokens, or may explain others."""
    fields = asdict(config)
    fields["save_hidden_states"] = None  # the folder is the recorded engine's own
    return {
        "format": FORMAT,
        "versions": versions(),
        "backend": backend.name,
        "config": fields,
        "vocabulary": vocabulary_print(vocabulary),
        "models": model_prints(models),
    }


def versions() -> dict[str, str]:
    found = {"stepgraph": _version("stepgraph"), "python": platform.python_version()}
    return found | {name: version for name in PACKAGES if (version := _version(name))}


def vocabulary_print(vocabulary: Vocabulary | None) -> str:
    if vocabulary is None:
        return "none"
    digest = hashlib.sha256()
    told = [vocabulary.logits_width, vocabulary.stop_token_ids, vocabulary.control_token_ids]
    for piece in (repr(told).encode(), *vocabulary.tokens):
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()[:16]


def model_prints(models: ModelPair) -> dict[str, dict[str, Any]]:
    """Of each model: its class, the number of its tensors, and a fingerprint of its sizes, its tensors' names and shapes, and how they
    begin."""
    named = {"target": models.target, "draft": models.drafter, "look_up": models.look_up}
    return {name: _model_print(model) for name, model in named.items() if model is not None}


def request_fields(job: Job) -> dict[str, Any]:
    """All that is needed to ask the same again; of embeddings only what tells them apart."""
    sampling = asdict(job.sampling) | {"seed": job.seed, "logit_bias": list(job.sampling.logit_bias.items())}
    return {
        "job": job.id,
        "prompt_ids": job.prompt_ids,
        "constraint": asdict(job.constraint) if job.constraint else None,
        "sampling": sampling,
        "max_new_tokens": job.max_new_tokens,
        "num_speculative_tokens": job.num_speculative_tokens,
        "draft_ids": job.draft_ids,
        "cache_salt": job.cache_salt,
        "embeddings": [[place, len(values), _values_print(values)] for place, values in job.embeddings],
    }


def _model_print(model: object) -> dict[str, Any]:
    digest = hashlib.sha256()
    sizes = {name: value for name, value in sorted(getattr(model, "__dict__", {}).items()) if is_int(value) or isinstance(value, float)}
    digest.update(repr((type(model).__name__, sizes)).encode())
    tensors = dict(_tensors(model))
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        if tensor.numel():
            digest.update(_bytes(tensor.detach()[(0,) * (tensor.dim() - 1)].reshape(-1)[:FIRST_VALUES]))
    return {"class": type(model).__name__, "tensors": len(tensors), "fingerprint": digest.hexdigest()[:16]}


def _tensors(model: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, nn.Module):
        yield from model.named_parameters()
        yield from model.named_buffers()


def _values_print(values: Tensor) -> str:
    return hashlib.sha256(repr(tuple(values.shape)).encode() + _bytes(values.reshape(-1))).hexdigest()[:16]


def _bytes(values: Tensor) -> bytes:
    """Of a row of values, as they lie in memory."""
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
