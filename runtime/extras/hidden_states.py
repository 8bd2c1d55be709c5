"""Saves the target's hidden states of live traffic to a folder, through pinned rings.

A round writes its states to a static buffer, which is copied to a ring slot like the results. Only the states of emitted tokens are
kept; those of rejected drafts are never read.
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
    """States of a prompt chunk that are being copied to the host."""

    event: Event
    job_id: int
    start: int  # line of the ring
    end: int


class HiddenStates:
    """Collects the states of each job and passes complete texts to the writer. Used by the stepping thread only.

    If the writer fails, saving stops with one warning and `writer.error` holds the reason. Requests are not affected.
    """

    def __init__(self, backend: Backend, buffers: StaticBuffers, layout: StatesLayout, writer: StatesWriter) -> None:
        self._backend, self._buffers, self._layout, self.writer = backend, buffers, layout, writer
        self._lines = buffers.prompt_states_ring_host
        self._next = 0
        self._sent: collections.deque[PromptLines] = collections.deque()
        self._states: dict[int, list[Tensor]] = {}  # by job id, in order: [n, layout.width]
        self._warned = False
        weakref.finalize(self, writer.finish).atexit = False  # for an engine that is not closed

    def prompt_launched(self, job: Job, count: int) -> None:
        """Copy the states of the chunk just launched to the host. Waits only if the whole ring is being copied."""
        self._states.setdefault(job.id, [])
        if self._next + count > len(self._lines):
            self._next = 0
        while any(lines.start < self._next + count and self._next < lines.end for lines in self._sent):
            self._take_oldest()
        if count:
            lines, buffers = self._lines[self._next : self._next + count], self._buffers
            self._backend.run(lambda: lines.copy_(buffers.prompt_states[:count], non_blocking=True))
            self._sent.append(PromptLines(self._backend.event(), job.id, self._next, self._next + count))
            self._next += count

    def launched(self, slot: int, size: int) -> None:
        """Copy the states of the round just launched to the host. Call before its event is recorded."""
        buffers = self._buffers
        self._backend.run(lambda: buffers.states_ring_host[slot, :size].copy_(buffers.results_states[:size], non_blocking=True))

    def emitted(self, job: Job, slot: int, batch_index: int, count: int) -> None:
        """Keep the states of the `count` tokens that a finished round emitted for one row."""
        while self._sent and self._sent[0].event.query():  # prompts of this job were sent before the round was
            self._take_oldest()
        if job.id in self._states and count:
            self._states[job.id].append(self._buffers.states_ring_host[slot, batch_index, :count].clone())

    def ended(self, job: Job) -> None:
        """Save the text of a job if all its states are known.

        Not saved: failed jobs, whose states may not be finite; jobs cancelled within the prompt; prompts with embeddings, which have no
        token ids.
        """
        states = self._states.pop(job.id, [])
        token_ids = torch.tensor([*job.given_ids, *job.tokens])
        valid, count = job.finish_reason != FinishReason.ERROR and not job.embeddings, len(token_ids) - 1
        if valid and states and sum(map(len, states)) >= count:  # a stop string may end before the last tokens of its round
            parts = torch.cat(states)[:count].split([size for _, size in self._layout.parts], 1)
            self.writer.put(SavedText(token_ids, len(job.prompt_ids), features=parts[0], hidden=parts[-1]))
        if self.writer.error and not self._warned:
            self._warned = True
            message = f"EngineConfig.save_hidden_states: {self.writer.error}; nothing more is saved, requests continue"
            with suppress(Warning):  # raised if warnings are errors
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        self.writer.close()

    def _take_oldest(self) -> None:
        lines = self._sent.popleft()
        if not lines.event.query():
            lines.event.wait()
        if lines.job_id in self._states:
            self._states[lines.job_id].append(self._lines[lines.start : lines.end].clone())


def open_states(config: EngineConfig, layout: StatesLayout | None, backend: Backend, buffers: StaticBuffers) -> HiddenStates | None:
    """The collector of an engine; None without a layout. ValueError if the folder cannot be used."""
    if layout is None or config.save_hidden_states is None:
        return None
    try:
        writer = StatesWriter(config.save_hidden_states, layout, config.states_shard_bytes)
    except ValueError as error:
        raise ValueError(f"EngineConfig.save_hidden_states: {error}") from None
    return HiddenStates(backend, buffers, layout, writer)


def states_layout(target: TargetModel) -> StatesLayout:
    """The layout of a target's states. ValueError if it has no hidden_size."""
    hidden_size = getattr(target, "hidden_size", None)
    if not isinstance(hidden_size, int):
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
