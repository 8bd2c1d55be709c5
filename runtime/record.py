"""Records the requests and results of an engine in a file that `stepgraph replay` can run again: docs/serve.md.

After the first line, each line is one event with the number of steps begun before it.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stepgraph.graphs.capture import Backend
from stepgraph.graphs.model import Models
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.printing import warn
from stepgraph.runtime.request import Job
from stepgraph.sampling.fields import Check, check_value, clip_repr, is_int, whole
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.lifetimes import call_after_fork

FORMAT = 1
PACKAGES = ("stepgraph", "torch", "xgrammar", "llguidance", "triton")
# Options of submit() that a line contains unchanged.
SUBMIT_FIELDS = ("max_new_tokens", "num_speculative_tokens", "draft_ids", "cache_salt", "resume_from", "priority", "tenant")
FULL_LINE = b'{"kind":"full"}\n'
FIRST_VALUES = 16  # of each tensor: enough to distinguish models of the same shape


@dataclass(frozen=True)
class Recording:
    """A recording to write: a file that does not exist yet, and its maximum size."""

    path: str | Path
    max_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        check_value("Recording.path", self.path, Check(lambda path: isinstance(path, (str, Path)) and path != "", "the path of a file"))
        check_value("Recording.max_bytes", self.max_bytes, whole(1))


class Recorder:
    """Writes a recording: the events of all requests, in order, on the thread that causes them. Thread-safe.

    Each line is written at once and whole, so that a crash keeps the lines before it. A failure to write ends the recording with one
    warning; it neither delays nor fails a request.
    """

    def __init__(self, recording: Recording, header: dict[str, Any]) -> None:
        """ValueError if the file cannot be created."""
        self._path, self._bytes_left, self._lock = Path(recording.path), recording.max_bytes - len(FULL_LINE), threading.RLock()
        self.steps = 0  # begun so far
        try:
            # Unbuffered, readable by its owner only, and never over an existing file.
            self._file: io.FileIO | None = io.FileIO(str(self._path), "xb", opener=lambda path, flags: os.open(path, flags, 0o600))
        except (OSError, ValueError) as error:
            why, expected = getattr(error, "strerror", error), "expected the path of a new file in a writable folder"
            raise ValueError(f"Engine.record: got {clip_repr(str(self._path))} ({why}), {expected}") from None
        call_after_fork(self._detach)
        self.write("engine", **header)

    def write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            line = json.dumps({"kind": kind, "step": self.steps, **fields}, separators=(",", ":")).encode() + b"\n"
            with self._lock:
                if self._file is None:
                    return
                self._bytes_left -= len(line)
                if self._bytes_left >= 0:
                    if self._file.write(line) != len(line):
                        raise OSError("only a part of a line could be written")
                    return
                self._file.write(FULL_LINE)
            self._fail("its size reached Recording.max_bytes")
        except Exception as error:
            self._fail(str(error) or type(error).__name__)

    def close(self) -> bool:
        """Return whether the file was open."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
        return file is not None

    def _detach(self) -> None:
        self._lock = threading.RLock()
        self.close()

    def _fail(self, why: str) -> None:
        if self.close():
            warn(f"the recording {self._path} ends here: {why}")


def open_recorder(
    record: Recording | str | Path, config: EngineConfig, models: Models, vocabulary: Vocabulary | None, backend: Backend, tables: bool
) -> Recorder:
    """The recorder of an engine. ValueError if the file cannot be created. tables: whether grammars can be on the device."""
    unsupported = {
        "max_loras": "a recording has no adapters",
        "forced_acceptance": "which drafts are accepted depends on job ids, which a replay numbers anew",
        "logits_processors": "a recording has no functions",
        "rounds_per_launch": "a recording lists what arrived between two rounds",
        **dict.fromkeys(("preemption", "page_allocation"), "the rounds of a recorded request are one series"),
    }
    for name, why in unsupported.items():
        if getattr(config, name) != getattr(EngineConfig, name):
            raise ValueError(f"Engine.record: got {clip_repr(record)}, expected None with {name}: {why}")
    lane = config.grammar_lane if tables else "host"  # a replay with grammars on the device would have other draft lengths
    header = {
        "format": FORMAT,
        "versions": versions(),
        "backend": backend.name,
        "config": asdict(config) | {"save_hidden_states": None, "grammar_lane": lane},  # the folder belongs to the recorded engine
        "vocabulary": vocabulary_fingerprint(vocabulary),
        "models": model_fingerprints(models),
    }
    return Recorder(record if isinstance(record, Recording) else Recording(record), header)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def vocabulary_fingerprint(vocabulary: Vocabulary | None) -> str:
    if vocabulary is None:
        return "none"
    digest = hashlib.sha256()
    ids = [vocabulary.logits_width, vocabulary.stop_token_ids, vocabulary.control_token_ids]
    for piece in (repr(ids).encode(), *vocabulary.tokens):
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()[:16]


def model_fingerprints(models: Models) -> dict[str, dict[str, Any]]:
    """By role: class, number of tensors, and a hash of the sizes and of each tensor's name, shape, dtype and first values."""
    by_role = {"target": models.target, "draft": models.drafter, "look_up": models.look_up}
    return {role: _model_fingerprint(model) for role, model in by_role.items() if model is not None}


def request_fields(job: Job) -> dict[str, Any]:
    """The arguments of submit(); of prompt embeddings only position, length and hash."""
    return {name: getattr(job, name) for name in ("prompt_ids", *SUBMIT_FIELDS)} | {
        "job": job.id,
        "constraint": asdict(job.constraint) if job.constraint else None,
        "sampling": asdict(job.sampling) | {"seed": job.seed, "logit_bias": list(job.sampling.logit_bias.items())},
        "embeddings": [[position, len(values), _values_fingerprint(values)] for position, values in job.embeddings],
    }


def _model_fingerprint(model: object) -> dict[str, Any]:
    digest = hashlib.sha256()
    sizes = {name: value for name, value in sorted(getattr(model, "__dict__", {}).items()) if is_int(value) or isinstance(value, float)}
    digest.update(repr((type(model).__name__, sizes)).encode())
    tensors = dict([*model.named_parameters(), *model.named_buffers()]) if isinstance(model, nn.Module) else {}
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        if tensor.numel():
            digest.update(_bytes(tensor.detach()[(0,) * (tensor.dim() - 1)].reshape(-1)[:FIRST_VALUES]))
    return {"class": type(model).__name__, "tensors": len(tensors), "fingerprint": digest.hexdigest()[:16]}


def _values_fingerprint(values: Tensor) -> str:
    return hashlib.sha256(repr(tuple(values.shape)).encode() + _bytes(values.reshape(-1))).hexdigest()[:16]


def _bytes(values: Tensor) -> bytes:  # values: [n]
    return values.contiguous().cpu().view(torch.uint8).numpy().tobytes()
