"""A user's function on the host as a drafter: asked between two rounds, when all that was said is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stepgraph.graphs.buffers import BufferSpec, Column, StaticBuffers
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.model import History, ModelPair
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.request import Job
from stepgraph.runtime.slots import ActiveRequest
from stepgraph.runtime.upload import PinnedRing
from stepgraph.runtime.validate import checked_count

DraftFunction = Callable[[Job], Sequence[int]]


class FunctionProposer:
    """What a round sees of it: nobody drafts on the device, and a chain is brought before the round that verifies it."""

    notes = ("draft: a function, asked on the host between rounds",)

    def __init__(self, function: DraftFunction) -> None:
        self.function = function

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        size = limits.max_rows * (2 + limits.num_speculative_tokens)  # of each row: its number, how many drafts, the drafts
        return (
            BufferSpec("function_drafts", (size,), torch.int64),
            BufferSpec("function_drafts_ring_host", (limits.ring_depth, size), torch.int64, "pinned"),
        )

    def propose(self, history: History, buffers: StaticBuffers) -> Tensor:
        return torch.full((len(history.length), history.num_drafts), -1, dtype=torch.int64, device=history.length.device)


class FunctionDrafts:
    """Asks the function for every request that wants drafts, and brings what it says."""

    def __init__(self, function: DraftFunction, backend: Backend, buffers: StaticBuffers, limits: Limits) -> None:
        self._function, self._backend, self._buffers, self._limits = function, backend, buffers, limits
        self._ring = PinnedRing(backend, buffers.function_drafts_ring_host)

    def upload(self, requests: Sequence[ActiveRequest]) -> list[tuple[ActiveRequest, str]]:
        """No round may be on its way: it would say more than the function was shown. Returns those for whom it failed, and why."""
        lines, failed = list[list[int]](), list[tuple[ActiveRequest, str]]()
        for request in requests:
            if request.job.num_speculative_tokens:
                try:
                    lines.append(self._line(request))
                except Exception as error:  # whatever a user's function raises is the fault of the request it was asked for
                    failed.append((request, f"the draft function failed: {type(error).__name__}: {error}"))
        if lines:
            self._place(lines)
        return failed

    def _place(self, lines: Sequence[Sequence[int]]) -> None:
        slot, buffers, width = self._ring.write([number for line in lines for number in line]), self._buffers, len(lines[0])

        def place() -> None:
            brought = buffers.function_drafts[: len(lines) * width]
            brought.copy_(slot[: len(lines) * width], non_blocking=True)
            rows, counts, drafts = brought.view(-1, width).split([1, 1, width - 2], 1)
            buffers.row_drafts.index_copy_(0, rows[:, 0], drafts)
            buffers.row_state[:, Column.DRAFT_COUNT].index_copy_(0, rows[:, 0], counts[:, 0])

        self._backend.run(place)
        self._ring.sent()

    def _line(self, request: ActiveRequest) -> list[int]:
        most, vocabulary = request.job.num_speculative_tokens, self._limits.num_tokens
        said: Any = self._function(request.job)
        said = said.tolist() if hasattr(said, "tolist") else said
        if not isinstance(said, Sequence):
            raise ValueError(f"drafts of the function: got {type(said).__name__}, expected a sequence of token ids")
        drafts: list[int] = []
        for token in said[:most]:
            if not 0 <= checked_count("drafts of the function", token, -(2**63), 2**63 - 1, "a token id") < vocabulary:
                break
            drafts.append(int(token))
        return [request.row, len(drafts), *drafts, *[-1] * (self._limits.num_speculative_tokens - len(drafts))]


def function_drafts(models: ModelPair, backend: Backend, buffers: StaticBuffers, limits: Limits) -> FunctionDrafts | None:
    proposer = models.proposer
    return FunctionDrafts(proposer.function, backend, buffers, limits) if isinstance(proposer, FunctionProposer) else None
