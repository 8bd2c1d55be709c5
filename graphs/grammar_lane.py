"""The masks of a round on the side stream: when each is filled, and the two places where grammars are followed.

`HostNodes` drives matchers on the host: state and drafts to pinned memory, a host node, masks and tags back to the device.
`DeviceTables` follows grammars in device memory: one kernel, no host node and no copy. A row uses one of them from admission to its
end; a round whose batch has rows of both runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stepgraph.graphs import drafting, stages
from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffers import Column, StaticBuffers
from stepgraph.graphs.capture import CaptureContext, StreamEvent
from stepgraph.sampling.grammar.automaton.device_tables import SplitTensors, TokenTensors
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, HostStep, advance, fill_next, follow
from stepgraph.sampling.grammar.status import HostColumn
from stepgraph.sampling.kernels import GrammarMask, advance_fill

SIDE, HEAD = "side", "head"


class MaskSource(Protocol):
    """Fills masks and tags of the rows whose grammars it follows."""

    def head(self) -> None:
        """Complete the masks of the previous round's drafts, all if they were chosen without; fill mask 0 of new rows."""

    def rows(self, first: int, last: int) -> None:
        """Fill these masks of this round's drafts. Index 0: commit the emitted tokens first; others: accept the draft before the mask.

        In a proposed chain a forced token replaces the proposed one.
        """


@dataclass(frozen=True)
class GrammarLane:
    """Fills the masks of one round while the models compute on the main stream."""

    sources: Sequence[MaskSource]
    buffers: StaticBuffers
    context: CaptureContext
    on_device: bool  # all grammars of the batch

    def head(self) -> StreamEvent:
        """During target_verify."""
        return self._fill(lambda source: source.head())

    def rows(self, first: int, last: int) -> StreamEvent:
        """While the draft model computes."""
        return self._fill(lambda source: source.rows(first, last))

    def mask(self, after: Batch, step: int) -> GrammarMask:
        """The mask that guides draft `step`, on the main stream after it waited for it."""
        return drafting.grammar_mask_of(self.buffers, after, step, self.on_device)

    def _fill(self, fill: Callable[[MaskSource], None]) -> StreamEvent:
        reached = self.context.record()
        with self.context.stream(SIDE):
            self.context.wait(reached)
            for source in self.sources:
                fill(source)
            return self.context.record()


@dataclass(frozen=True)
class RoundShape:
    """What the sources of a round have in common."""

    size: int  # rows of the batch
    drafts: int  # of this round
    masked: bool  # each draft is chosen under its mask
    fixed: bool  # the previous round had as many drafts
    proposed: bool  # the drafts are a proposed chain: they are known before their masks


@dataclass(frozen=True)
class DeviceTables:
    """Grammars in device memory."""

    buffers: StaticBuffers
    context: CaptureContext
    tokens: TokenTensors
    split: SplitTensors | None  # with forced tokens
    shape: RoundShape

    def head(self) -> None:
        drafts, masked = self.shape.drafts, self.shape.masked
        first = drafts if masked and self.shape.fixed else min(1, drafts) if masked else 0
        self._fill(HEAD, first, drafts, of_last_round=True, fill_new=first > 0)

    def rows(self, first: int, last: int) -> None:
        self._fill(_name(first, last), first, last)

    def _fill(self, name: str, first: int, last: int, of_last_round: bool = False, fill_new: bool = False) -> None:
        b, size = self.buffers, self.shape.size
        drafts = b.row_drafts if of_last_round else b.batch_drafts[:, :size].T
        rows, images = b.batch_rows[:size], b.row_state[:, Column.IMAGE]
        forced: tuple[Tensor | None, Tensor | None, Tensor | None, int, int] = None, None, None, 0, 0
        if self.split is not None:  # no draft of this round is chosen by the masks of the last one
            takes_forced = self.shape.proposed and first > 0 and not of_last_round
            searched = None if of_last_round else b.batch_forced
            forced = b.row_forced_text, self.split.token_slots, searched, int(self.split.merges), int(takes_forced)
        with self.context.stage(f"fill {name}"):
            advance_fill(
                b.row_state,
                images,
                rows,
                drafts,
                b.grammar_arena,
                *self.tokens,
                b.row_places,
                b.row_stacks,
                b.row_masks,
                b.row_tags,
                b.batch_status,
                first,
                last,
                int(fill_new),
                int(of_last_round),
                *forced,
            )


@dataclass(frozen=True)
class HostNodes:
    """Matchers on the host."""

    buffers: StaticBuffers
    context: CaptureContext
    link: HostLink
    shape: RoundShape
    dummy_row: int
    beside_device: bool  # rows of the batch may have their grammars on the device: their masks and tags are not touched

    def head(self) -> None:
        buffers, shape = self.buffers, self.shape
        longest = buffers.row_drafts.shape[1]
        # With masked drafts one mask is filled per row, in the last stage: its index differs if the number of drafts does.
        stages_filled = range(longest, longest + 1) if shape.masked else range(shape.drafts + 1)
        steps = [fill_next(stage=longest)] if shape.masked else [COMMIT, *(advance(index) for index in stages_filled[1:])]
        ends = not (shape.masked and shape.drafts)
        with self.context.stage(f"show {HEAD}"):
            rows = buffers.batch_rows[: shape.size]
            if self.beside_device:
                images = buffers.row_state[rows, Column.IMAGE]
                buffers.batch_host_rows[: shape.size].copy_(torch.where(images == 0, rows, self.dummy_row))
            self._copy_state()
            if not shape.masked:
                for draft in range(shape.drafts):
                    self._copy_draft(draft, buffers.row_drafts[rows, draft])
            elif shape.fixed:
                self._copy_draft(longest - 1, buffers.row_drafts[rows, longest - 1])
            else:
                last = (buffers.row_state[rows, Column.DRAFT_COUNT] - 1).clamp(min=0)
                self._copy_draft(longest - 1, buffers.row_drafts[rows, last])
        self._node(HEAD, [BEGIN_ROUND, *steps, *([END_ROUND] if ends else [])], stages_filled)

    def rows(self, first: int, last: int) -> None:
        name, ends, drafts = _name(first, last), last == self.shape.drafts - 1, range(max(1, first), last + 1)
        with self.context.stage(f"show {name}"):
            if first == 0:
                self._copy_state()
            for index in drafts:
                self._copy_draft(index - 1, self.buffers.batch_drafts[index - 1, : self.shape.size])
        accept = follow if self.shape.proposed else advance
        steps = [COMMIT] * (first == 0) + [accept(index) for index in drafts]
        self._node(name, [*steps, END_ROUND] if ends else steps, range(first, last + 1))

    def _copy_state(self) -> None:
        size = self.shape.size
        state = self.buffers.row_state[self.buffers.batch_rows[:size], : len(HostColumn)]
        self.buffers.state_host[:size].copy_(state, non_blocking=True)

    def _copy_draft(self, index: int, tokens: Tensor) -> None:
        self.buffers.drafts_host[index, : self.shape.size].copy_(tokens, non_blocking=True)

    def _node(self, name: str, steps: Sequence[HostStep], stages_filled: range) -> None:
        """A host node, then the copies of the masks and tags that it filled."""
        buffers, size = self.buffers, self.shape.size
        forced = [buffers.forced_host] if "forced_host" in buffers else []
        filled = buffers.masks_host, buffers.contents_host
        self.context.host_node(
            name,
            self.link.node(steps),
            reads=[buffers.state_host, buffers.drafts_host],
            writes=[*(masks[stages_filled.start : stages_filled.stop] for masks in filled), buffers.tags_host, *forced],
        )
        rows = (buffers.batch_host_rows if self.beside_device else buffers.batch_rows)[:size]
        with self.context.stage(f"place {name}"):
            for stage in stages_filled:
                buffers.batch_masks[stage, :size].copy_(buffers.masks_host[stage, :size], non_blocking=True)
                buffers.batch_tags[stage, :size].copy_(buffers.tags_host[stage, :size], non_blocking=True)
                stages.place_masks(buffers, rows, stage)
                if forced and stage < len(buffers.forced_host):
                    buffers.batch_forced[stage, :size].copy_(buffers.forced_host[stage, :size], non_blocking=True)


def _name(first: int, last: int) -> str:
    return "commit" if last == 0 else f"advance {last}" if first == last else f"follow {first} to {last}"
