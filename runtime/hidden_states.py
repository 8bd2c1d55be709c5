"""Saves the target's hidden states of live traffic to a folder, through pinned rings and a background thread.

A round writes its states to a static buffer, which is copied to a ring slot like the results. Only the states of emitted tokens are
kept; those of rejected drafts are never read.

A folder has safetensors files (shards), each with the layout in its metadata. A shard holds complete texts; the tensors of its fourth text
are `3.token_ids`, `3.prompt_length`, `3.features` and `3.hidden`. The last token of a text was never fed to the model, so a text of n
tokens has n - 1 states. Every file appears complete or not at all.
"""

from __future__ import annotations

import collections
import json
import os
import queue
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Event
from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.printing import warn
from stepgraph.runtime.request import Job
from stepgraph.sampling.fields import clip_error, is_int
from stepgraph.sampling.lifetimes import call_after_fork, close_at_exit

FORMAT = "stepgraph hidden states 2"  # the name of the layout in the metadata
SHARDS = "states-*.safetensors"


@dataclass(frozen=True)
class StatesLayout:
    """Model and sizes of the states in a folder, the same for all shards."""

    model: str
    vocab_size: int
    feature_layers: tuple[int, ...]  # of the target; the features are the concatenated inputs of these layers
    feature_size: int  # 0: the features are the hidden states, which are saved once
    hidden_size: int  # of the states that the logits are computed from
    dtype: str

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Name and width of each tensor that is saved per token."""
        hidden = ("hidden", self.hidden_size)
        return (("features", self.feature_size), hidden) if self.feature_size else (hidden,)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.feature_size + self.hidden_size


class SavedText(NamedTuple):
    token_ids: Tensor  # [n] int64
    prompt_length: int
    features: Tensor  # [n - 1, feature_size]
    hidden: Tensor  # [n - 1, hidden_size]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in {self.token_ids, self.features, self.hidden})  # the last two may be one tensor


class StatesWriter:
    """Writes texts in a background thread, one shard at a time. `put` never blocks; it refuses texts if the disk is too slow.

    Holds at most about twice `shard_bytes` in memory, which a crash loses. ValueError if the folder cannot be used.
    """

    def __init__(self, folder: str | Path, layout: StatesLayout, shard_bytes: int) -> None:
        self._folder, self._layout, self._shard_bytes = Path(folder), layout, shard_bytes
        self._lock = threading.RLock()  # reentrant, as a finaliser may call `finish` while its thread holds it
        self._texts: queue.SimpleQueue[SavedText | None] = queue.SimpleQueue()
        self._buffered_bytes = 0
        self._closed = False
        self.saved = self.unsaved = 0
        self.error = ""
        self._prepare()
        self._thread = threading.Thread(target=self._run, name="stepgraph-states", daemon=True)
        self._thread.start()
        close_at_exit(self)
        call_after_fork(self._detach)

    def put(self, text: SavedText) -> bool:
        with self._lock:
            full = self._buffered_bytes and self._buffered_bytes + text.nbytes > 2 * self._shard_bytes
            if self.error or self._closed or full:
                self.unsaved += 1
                return False
            self._buffered_bytes += text.nbytes
            self._texts.put(text)
            return True

    def finish(self) -> None:
        """Let the thread write the texts in memory and end, without waiting for it. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._texts.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Write the texts in memory, and wait at most `seconds`. Idempotent."""
        self.finish()
        self._thread.join(seconds)

    def _prepare(self) -> None:
        """Create the folder, or check that its states have the same layout."""
        folder = self._folder
        try:
            folder.mkdir(exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"{folder}: {why}, expected a writable folder") from None
        for shard in list(folder.glob(SHARDS))[:1]:
            if (layout := open_shard(shard)[1]) != self._layout:
                raise ValueError(f"{folder}: got states of {layout}, expected an empty folder or states of {self._layout}")

    def _run(self) -> None:
        waiting: list[SavedText] = []
        size = 0
        for text in iter(self._texts.get, None):
            waiting.append(text)
            size += text.nbytes
            if size >= self._shard_bytes:
                self._flush(waiting, size)
                waiting, size = [], 0
        if waiting:
            self._flush(waiting, size)

    def _detach(self) -> None:
        self._lock, self._closed = threading.RLock(), True

    def _flush(self, texts: Sequence[SavedText], size: int) -> None:
        try:
            if not self.error:
                self._write_shard(texts)
        except Exception as error:  # any exception ends the saving and nothing else
            self.error = f"{self._folder}: {error}"
        with self._lock:
            self._buffered_bytes -= size
            self.saved, self.unsaved = (self.saved, self.unsaved + len(texts)) if self.error else (self.saved + len(texts), self.unsaved)

    def _write_shard(self, texts: Sequence[SavedText]) -> None:
        tensors: dict[str, Tensor] = {}
        for index, text in enumerate(texts):
            tensors |= {f"{index}.token_ids": text.token_ids, f"{index}.prompt_length": torch.tensor(text.prompt_length)}
            tensors |= {f"{index}.{part}": getattr(text, part).contiguous() for part, _ in self._layout.parts}
        # Ordered by time, and unique: several engines may write to one folder.
        path = self._folder / f"states-{time.time_ns():019}-{secrets.token_hex(4)}.safetensors"
        part = path.with_suffix(".part")
        try:
            save_file(tensors, part, {FORMAT: json.dumps(asdict(self._layout))})
            with part.open("rb") as written:
                os.fsync(written.fileno())
            os.replace(part, path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def open_shard(path: Path) -> tuple[Any, StatesLayout]:
    """The opened file, and the layout in its metadata. ValueError if it is not a shard of states."""
    try:
        file: Any = safe_open(path, framework="pt")
        if (layout := (file.metadata() or {}).get(FORMAT)) is None:
            raise ValueError(f"got no metadata named {FORMAT!r}")
        fields = json.loads(layout)
        return file, StatesLayout(**fields | {"feature_layers": tuple(fields["feature_layers"])})
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: {clip_error(error)}, expected a file written by EngineConfig.save_hidden_states") from None


class PromptCopy(NamedTuple):
    """States of a prompt chunk that are being copied to the host."""

    event: Event
    job_id: int
    start: int  # line of the ring
    end: int


class HiddenStates:
    """Collects the states of each job and passes complete texts to the writer. Used by the stepping thread only.

    If the writer fails, saving stops with one warning and `writer.error` holds the reason. Requests are not affected.
    """

    def __init__(self, backend: Backend, buffers: StaticBuffers, layout: StatesLayout, folder: str | Path, shard_bytes: int) -> None:
        """ValueError if the folder cannot be used."""
        self._backend, self._buffers, self._layout = backend, buffers, layout
        try:
            self.writer = StatesWriter(folder, layout, shard_bytes)
        except ValueError as error:
            raise ValueError(f"EngineConfig.save_hidden_states: {error}") from None
        self._prompt_ring = buffers.prompt_states_ring_host
        self._next = 0
        self._pending_copies: collections.deque[PromptCopy] = collections.deque()
        self._states: dict[int, list[Tensor]] = {}  # by job id, in order: [n, layout.width]
        self._warned = False
        weakref.finalize(self, self.writer.finish).atexit = False  # for an engine that is dropped without close()

    def prompt_launched(self, job: Job, count: int) -> None:
        """Copy the states of the chunk just launched to the host. Waits only if the whole ring is being copied."""
        self._states.setdefault(job.id, [])
        if self._next + count > len(self._prompt_ring):
            self._next = 0
        while any(lines.start < self._next + count and self._next < lines.end for lines in self._pending_copies):
            self._take_oldest()
        if count:
            lines, buffers = self._prompt_ring[self._next : self._next + count], self._buffers
            self._backend.run(lambda: lines.copy_(buffers.prompt_states[:count], non_blocking=True))
            self._pending_copies.append(PromptCopy(self._backend.event(), job.id, self._next, self._next + count))
            self._next += count

    def round_launched(self, slot: int, size: int) -> None:
        """Copy the states of the round just launched to the host. Call before its event is recorded."""
        buffers = self._buffers
        self._backend.run(lambda: buffers.states_ring_host[slot, :size].copy_(buffers.results_states[:size], non_blocking=True))

    def tokens_emitted(self, job: Job, slot: int, batch_index: int, count: int) -> None:
        """Keep the states of the `count` tokens that a finished round emitted for one row."""
        while self._pending_copies and self._pending_copies[0].event.query():  # the prompt of this job was copied before the round
            self._take_oldest()
        if job.id in self._states and count:
            self._states[job.id].append(self._buffers.states_ring_host[slot, batch_index, :count].clone())

    def save(self, job: Job) -> None:
        """Save the text of a job if all its states are known.

        Not saved: failed jobs, whose states may not be finite; jobs cancelled within the prompt, or ended by closing the engine; prompts
        with embeddings, which have no token ids.
        """
        states = self._states.pop(job.id, [])
        token_ids = torch.tensor([*job.context_ids, *job.tokens])
        valid, count = not job.error and not job.embeddings, len(token_ids) - 1
        if valid and states and sum(map(len, states)) >= count:  # a stop string may end before the last tokens of its round
            parts = torch.cat(states)[:count].split([size for _, size in self._layout.parts], 1)
            self.writer.put(SavedText(token_ids, len(job.prompt_ids), features=parts[0], hidden=parts[-1]))
        self._warn()

    def close(self) -> None:
        """Write the texts in memory, and wait. Idempotent."""
        self.writer.close()
        self._warn()

    def _warn(self) -> None:
        if self.writer.error and not self._warned:
            self._warned = True
            warn(f"EngineConfig.save_hidden_states: {self.writer.error}; nothing more is saved, requests continue")

    def _take_oldest(self) -> None:
        copy = self._pending_copies.popleft()
        if not copy.event.query():
            copy.event.wait()
        if copy.job_id in self._states:
            self._states[copy.job_id].append(self._prompt_ring[copy.start : copy.end].clone())


def states_layout(target: TargetModel) -> StatesLayout:
    """The layout of a target's states. ValueError if it has no hidden_size."""
    hidden_size = getattr(target, "hidden_size", None)
    if not is_int(hidden_size) or hidden_size < 1:
        expected = "the width of the hidden states that its logits are computed from"
        raise ValueError(f"EngineConfig.save_hidden_states: got a target with hidden_size {hidden_size!r}, expected {expected}")
    layers = getattr(target, "feature_layers", None)
    return StatesLayout(
        model=getattr(target, "origin", "") or type(target).__name__,
        vocab_size=target.vocab_size,
        feature_layers=layers or (),
        feature_size=0 if layers == () else target.feature_size,
        hidden_size=hidden_size,
        dtype=str(target.feature_dtype).removeprefix("torch."),
    )
