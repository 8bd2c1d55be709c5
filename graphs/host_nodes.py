"""Grammars that are followed by matchers on the host: what a round copies to host nodes, and reads from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.grammar_lane import VERIFY_MASKS, MaskedRound, stage_of_masks
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, END_ROUND, HostLink, HostStep, advance, fill_next, follow
from stepgraph.sampling.grammar.status import HostColumn
from stepgraph.sampling.kernels.operation import Ints, Longs, operation


@dataclass(frozen=True)
class HostNodes:
    round: MaskedRound
    link: HostLink

    def fill_verify_masks(self) -> None:
        shape, buffers, max_drafts = self.round, self.round.buffers, self.round.max_drafts
        # With masked drafts one mask is filled per row, in the last stage: its index depends on the row's number of drafts.
        stages_filled = range(max_drafts, max_drafts + 1) if shape.masks_drafts else range(shape.num_drafts + 1)
        steps = [fill_next(stage=max_drafts)] if shape.masks_drafts else [COMMIT, *(advance(index) for index in stages_filled[1:])]
        ends = not (shape.masks_drafts and shape.num_drafts)
        with self.round.context.stage(f"show {VERIFY_MASKS}"):
            rows = buffers.batch_rows[: shape.size]
            if "batch_host_rows" in buffers:
                images = buffers.row_state[rows, Column.IMAGE]
                buffers.batch_host_rows[: shape.size].copy_(torch.where(images == 0, rows, len(buffers.row_state) - 1))
            self._copy_state()
            if not shape.masks_drafts:
                for draft in range(shape.num_drafts):
                    self._copy_draft(draft, buffers.row_drafts[rows, draft])
            elif shape.fixed_draft_count:
                self._copy_draft(max_drafts - 1, buffers.row_drafts[rows, max_drafts - 1])
            else:
                last = (buffers.row_state[rows, Column.DRAFT_COUNT] - 1).clamp(min=0)
                self._copy_draft(max_drafts - 1, buffers.row_drafts[rows, last])
        self._node(VERIFY_MASKS, [BEGIN_ROUND, *steps, *([END_ROUND] if ends else [])], stages_filled)

    def fill_draft_masks(self, first: int, last: int) -> None:
        name, drafts = stage_of_masks(first, last), range(max(1, first), last + 1)
        ends_round = last == self.round.num_drafts - 1
        with self.round.context.stage(f"show {name}"):
            if first == 0:
                self._copy_state()
            for index in drafts:
                self._copy_draft(index - 1, self.round.buffers.batch_drafts[index - 1, : self.round.size])
        accept = follow if self.round.proposes_chain else advance
        steps = [COMMIT] * (first == 0) + [accept(index) for index in drafts]
        self._node(name, [*steps, END_ROUND] if ends_round else steps, range(first, last + 1))

    def _copy_state(self) -> None:
        buffers, size = self.round.buffers, self.round.size
        buffers.state_host[:size].copy_(buffers.row_state[buffers.batch_rows[:size], : len(HostColumn)], non_blocking=True)

    def _copy_draft(self, index: int, tokens: Tensor) -> None:
        self.round.buffers.drafts_host[index, : self.round.size].copy_(tokens, non_blocking=True)

    def _node(self, name: str, steps: Sequence[HostStep], stages_filled: range) -> None:
        """A host node, then the upload of the masks and tags that it filled."""
        buffers, size, context = self.round.buffers, self.round.size, self.round.context
        forced = [buffers.forced_host] if "forced_host" in buffers else []
        filled = buffers.masks_host, buffers.contents_host
        context.host_node(
            name,
            self.link.node(steps),
            reads=[buffers.state_host, buffers.drafts_host],
            writes=[*(masks[stages_filled.start : stages_filled.stop] for masks in filled), buffers.tags_host, *forced],
        )
        # Masks and tags of rows whose grammars are on the device are not written: the dummy row takes their place.
        rows = (buffers.batch_host_rows if "batch_host_rows" in buffers else buffers.batch_rows)[:size]
        with context.stage(f"place {name}"):
            for stage in stages_filled:
                place_masks(buffers, rows, stage)


@operation(lambda *_: None, writes=("row_tags", "row_masks", "batch_forced"), triton=True, c=True, mapped=True)
def scatter_masks(
    rows: Longs,
    tags: Longs,
    masks: Ints,
    row_tags: Longs,
    row_masks: Ints,
    forced: Longs | None = None,
    batch_forced: Longs | None = None,
) -> None:
    """Write masks and tags of host nodes into their rows, and forced tokens into the batch: one launch, and no copy before it.

    rows [B]. In pinned memory: tags [B, TAG_FIELDS], tags[:, 2] is the position in the row; masks [B, words]; forced [B]. row_tags,
    row_masks [R, positions, ...]; batch_forced: as forced.
    """
    tags, masks = (each.to(rows.device, non_blocking=True) for each in (tags, masks))
    row_masks.index_put_((rows, tags[:, 2]), masks)
    row_tags.index_put_((rows, tags[:, 2]), tags)
    if forced is not None and batch_forced is not None:
        batch_forced.copy_(forced, non_blocking=True)


def place_masks(buffers: StaticBuffers, rows: Tensor, stage: int) -> None:
    """Upload one stage of masks of `rows`; each tag holds the index among the row's K + 1 masks."""
    b, size = buffers, len(rows)
    forces = "forced_host" in buffers and stage < len(buffers.forced_host)
    forced = (b.forced_host[stage, :size], b.batch_forced[stage, :size]) if forces else (None, None)
    scatter_masks(rows, b.tags_host[stage, :size], b.masks_host[stage, :size], b.row_tags, b.row_masks, *forced)
