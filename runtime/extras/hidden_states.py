"""The hidden states of live traffic: from the rounds and the prompts, over pinned rings, to a folder.

A round leaves its states in a static buffer, and a copy to a ring follows it as its results do. A state is kept where its token
was emitted; what belongs to rejected drafts is never read.
"""

from __future__ import annotations

import collections
import warnings
import weakref
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend, Event
from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.extras.states_folder import SavedText, StatesLayout, StatesWriter
from stepgraph.runtime.request import FinishReason, Job


class PromptLines(NamedTuple):
    """A chunk of a prompt on its way to the host."""

    event: Event
    job_id: int
    start: int  # in the ring
    end: int


class HiddenStates:
    """Collects what the rounds say of each job, and hands whole texts to the writer. For the stepping thread alone.

    When the writer fails, requests go on: one warning tells why, and so does `error`.
    """

    def __init__(self, backend: Backend, buffers: StaticBuffers, layout: StatesLayout, writer: StatesWriter) -> None:
        self._backend, self._buffers, self._layout, self._writer = backend, buffers, layout, writer
        self._lines = buffers.prompt_states_ring_host
        self._next = 0
        self._sent: collections.deque[PromptLines] = collections.deque()
        self._kept: dict[int, list[Tensor]] = {}  # per job: its states in order
        self._warned = False
        weakref.finalize(self, writer.finish).atexit = False  # of an engine that nobody closed

    @property
    def saved(self) -> int:
        return self._writer.saved

    @property
    def unsaved(self) -> int:
        return self._writer.unsaved

    @property
    def error(self) -> str:
        return self._writer.error

    def prompt_lines(self, job: Job, count: int) -> Tensor:
        """Pinned lines for the states of a job's next `count` prompt tokens; waits only if the device is a whole ring behind."""
        self._kept.setdefault(job.id, [])
        if self._next + count > len(self._lines):
            self._next = 0
        while any(lines.start < self._next + count and self._next < lines.end for lines in self._sent):
            self._take_oldest()
        return self._lines[self._next : self._next + count]

    def prompt_sent(self, job: Job, count: int) -> None:
        """The copy into the lines given last was issued."""
        if count:
            self._sent.append(PromptLines(self._backend.event(), job.id, self._next, self._next + count))
            self._next += count

    def launched(self, slot: int, size: int) -> None:
        """Bring the states of the round just launched to the host, before its event."""
        buffers = self._buffers
        self._backend.run(lambda: buffers.states_ring_host[slot, :size].copy_(buffers.results_states[:size], non_blocking=True))

    def emitted(self, job: Job, slot: int, place: int, count: int) -> None:
        """Keep what a finished round left at one place of its batch: a state for every token that it emitted."""
        while self._sent and self._sent[0].event.query():  # prompts of this job were sent before the round was
            self._take_oldest()
        if job.id in self._kept and count:
            self._kept[job.id].append(self._buffers.states_ring_host[slot, place, :count].clone())

    def ended(self, job: Job) -> None:
        """Save a text whose states are all known and belong to its tokens.

        An error's may not be finite, a cancelled prompt's are not whole, and embeddings in a prompt stand for no tokens.
        """
        kept = self._kept.pop(job.id, [])
        token_ids = torch.tensor([*job.prompt_ids, *job.tokens])
        sound = job.finish_reason != FinishReason.ERROR and not job.embeddings
        if sound and kept and sum(map(len, kept)) == len(token_ids) - 1:
            parts = torch.cat(kept).split([size for _, size in self._layout.parts], 1)
            self._writer.put(SavedText(token_ids, len(job.prompt_ids), features=parts[0], hidden=parts[-1]))
        if self.error and not self._warned:
            self._warned = True
            told = f"EngineConfig.save_hidden_states: {self.error}; nothing more is saved, requests go on"
            with suppress(Warning):  # where warnings are errors
                warnings.warn(told, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        self._writer.close()

    def _take_oldest(self) -> None:
        lines = self._sent.popleft()
        if not lines.event.query():
            lines.event.wait()
        if lines.job_id in self._kept:
            self._kept[lines.job_id].append(self._lines[lines.start : lines.end].clone())


def open_states(config: EngineConfig, layout: StatesLayout | None, backend: Backend, buffers: StaticBuffers) -> HiddenStates | None:
    """The collector of an engine whose buffers have room for these states; None where nothing is saved."""
    if layout is None:
        return None
    assert config.save_hidden_states is not None
    try:
        writer = StatesWriter(config.save_hidden_states, layout, config.states_shard_bytes)
    except ValueError as error:
        raise ValueError(f"EngineConfig.save_hidden_states: {error}") from None
    return HiddenStates(backend, buffers, layout, writer)


def states_layout(target: TargetModel) -> StatesLayout:
    """What would be saved of a target; ValueError where it does not tell its sizes."""
    hidden_size = getattr(target, "hidden_size", None)
    if not isinstance(hidden_size, int):
        wanted = "the width of what its logits are taken from"
        raise ValueError(f"EngineConfig.save_hidden_states: the target's hidden_size is {hidden_size!r}, want {wanted}")
    layers = getattr(target, "feature_layers", None)
    return StatesLayout(
        model=getattr(target, "origin", "") or type(target).__name__,
        vocab_size=target.vocab_size,
        feature_layers=layers or (),
        feature_size=0 if layers == () else target.feature_size,
        hidden_size=hidden_size,
        dtype=str(target.feature_dtype).removeprefix("torch."),
    )
