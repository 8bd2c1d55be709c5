"""Drafters without a model or a search: tokens that grammars force, and a user's host function.

The function is called between two rounds, with all earlier tokens known.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import History, NoCache
from stepgraph.graphs.row_layout import Column
from stepgraph.runtime.request import ActiveRequest, Job
from stepgraph.runtime.upload import PinnedRing
from stepgraph.sampling.fields import clip_repr, message_of

DraftFunction = Callable[[Job], Sequence[int]]


class _EmptyChains(NoCache):
    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return torch.full((len(history.length), history.num_drafts), -1, dtype=torch.int64, device=history.length.device)


class ForcedDrafts(_EmptyChains):
    """Proposes nothing, so that a chain ends where the grammar forces no token."""

    batch_invariant = True
    takes_draft_ids = False
    notes = ("draft: tokens forced by grammars",)


class FunctionProposer(_EmptyChains):
    """The device part of a draft function: proposes nothing, since drafts are uploaded before the round that verifies them."""

    notes = ("draft: a function, called on the host between rounds",)

    def __init__(self, function: DraftFunction) -> None:
        self.function = function

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        size = limits.max_rows * (2 + limits.num_speculative_tokens)  # for each row: row, number of drafts, drafts
        return (
            BufferSpec("function_drafts", (size,), torch.int64),
            BufferSpec("function_drafts_ring_host", (limits.ring_depth, size), torch.int64, "pinned"),
        )


class FunctionDrafts:
    """Calls the function for every request with speculation, and uploads its drafts."""

    def __init__(self, function: DraftFunction, backend: Backend, buffers: StaticBuffers, limits: Limits) -> None:
        self._function, self._buffers, self._limits = function, buffers, limits
        self._ring = PinnedRing(backend, buffers.function_drafts_ring_host)
        self.num_drafts = collections.Counter[ActiveRequest]()  # the number of drafts of a request for the next round

    def upload(self, requests: Sequence[ActiveRequest]) -> list[tuple[ActiveRequest, str]]:
        """Requires that no round is in flight, since the function needs all tokens. Returns the requests whose call failed, and why."""
        lines, failed = list[list[int]](), list[tuple[ActiveRequest, str]]()
        self.num_drafts.clear()
        for request in requests:
            if request.job.num_speculative_tokens:
                try:
                    lines.append(self._line(request))
                    self.num_drafts[request] = lines[-1][1]
                except Exception as error:  # any exception fails this request only
                    failed.append((request, f"the draft function failed: {type(error).__name__}: {message_of(error)}"))
        if not lines:
            return failed
        buffers, width = self._buffers, len(lines[0])

        def copy(slot: Tensor) -> None:
            uploaded = buffers.function_drafts[: len(lines) * width]
            uploaded.copy_(slot[: len(lines) * width], non_blocking=True)
            rows, counts, drafts = uploaded.view(-1, width).split([1, 1, width - 2], 1)
            buffers.row_drafts.index_copy_(0, rows[:, 0], drafts)
            buffers.row_state[:, Column.DRAFT_COUNT].index_copy_(0, rows[:, 0], counts[:, 0])

        self._ring.send([number for line in lines for number in line], copy)
        return failed

    def _line(self, request: ActiveRequest) -> list[int]:
        limit, vocabulary = request.job.num_speculative_tokens, self._limits.num_tokens
        result: Any = self._function(request.job)
        result = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(result, Sequence):
            raise ValueError(f"drafts of the function: got {type(result).__name__}, expected a sequence of token ids")
        drafts: list[int] = []
        for token in result[:limit]:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)):
                accepted = f"expected token ids from 0 to {vocabulary - 1}; another number ends the drafts"
                raise ValueError(f"drafts of the function: got {clip_repr(token)}, {accepted}")
            if not 0 <= token < vocabulary:
                break
            drafts.append(int(token))
        return [request.row, len(drafts), *drafts, *[-1] * (self._limits.num_speculative_tokens - len(drafts))]
