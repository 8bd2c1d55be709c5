"""The masks of a round on the side stream: when each is filled, and the two ways to follow grammars.

`host_nodes.HostNodes` drives matchers on the host: state and drafts to pinned memory, a host node, masks and tags back to the device.
`DeviceTables` follows grammars in device memory: one kernel, no host node and no copy. A row uses one of them from admission to its
end; a round whose batch has rows of both runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepgraph.graphs import drafting
from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import CaptureContext, StreamEvent
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.grammar.automaton.grammar import SplitTensors, TokenTensors
from stepgraph.sampling.kernels import GrammarMask, advance_fill

SIDE_STREAM, VERIFY_MASKS = "side", "verify"


class MaskSource(Protocol):
    """Fills masks and tags of the rows whose grammars it follows."""

    def fill_verify_masks(self) -> None:
        """Complete the masks of the previous round's drafts, all of them if drafts are unmasked; fill mask 0 of new rows."""

    def fill_draft_masks(self, first: int, last: int) -> None:
        """Fill these masks of this round's drafts. Index 0: commit the emitted tokens first; others: accept the draft before the mask.

        In a proposed chain a forced token replaces the proposed one.
        """


@dataclass(frozen=True)
class MaskedRound:
    """What the sources of a round have in common."""

    buffers: StaticBuffers
    context: CaptureContext
    size: int  # rows of the batch
    num_drafts: int  # drafts of this round
    max_drafts: int  # of any round
    masks_drafts: bool  # each draft is chosen under its mask
    fixed_draft_count: bool  # the previous round had `max_drafts` as well
    proposes_chain: bool  # the drafts are a proposed chain: they are known before their masks


@dataclass(frozen=True)
class GrammarLane:
    """Fills the masks of one round while the models compute on the main stream."""

    round: MaskedRound
    sources: Sequence[MaskSource]
    on_device: bool  # all grammars of the batch are on the device

    def fill_verify_masks(self, batch: Batch) -> StreamEvent:
        """During target_verify. Also checks the masks that verify drafts: the main stream runs nothing more than without grammars."""
        return self._fill(lambda source: source.fill_verify_masks(), batch)

    def fill_draft_masks(self, first: int, last: int) -> StreamEvent:
        """Fill masks of this round's drafts while the draft model computes."""
        return self._fill(lambda source: source.fill_draft_masks(first, last))

    def mask(self, after: Batch, step: int, count: int = 1) -> GrammarMask:
        """The masks that guide drafts from `step` on, on the main stream after it waited for them."""
        return drafting.grammar_mask_of(self.round.buffers, after, step, self.on_device, count)

    def _fill(self, fill: Callable[[MaskSource], None], checked: Batch | None = None) -> StreamEvent:
        context = self.round.context
        reached = context.record()
        with context.stream(SIDE_STREAM):
            context.wait(reached)
            for source in self.sources:
                fill(source)
            if checked is not None:
                with context.stage(f"check {VERIFY_MASKS}"):
                    drafting.check_masks(self.round.buffers, checked.rows, 0, checked.drafts.shape[1] + 1)
            return context.record()


@dataclass(frozen=True)
class DeviceTables:
    round: MaskedRound
    tokens: TokenTensors
    split: SplitTensors | None  # None: no forced tokens

    def fill_verify_masks(self) -> None:
        drafts, masked = self.round.num_drafts, self.round.masks_drafts
        first = drafts if masked and self.round.fixed_draft_count else min(1, drafts) if masked else 0
        self._fill(VERIFY_MASKS, first, drafts, of_previous_round=True, fill_new=first > 0)

    def fill_draft_masks(self, first: int, last: int) -> None:
        self._fill(stage_of_masks(first, last), first, last)

    def _fill(self, stage: str, first: int, last: int, of_previous_round: bool = False, fill_new: bool = False) -> None:
        b, size, split = self.round.buffers, self.round.size, self.split
        drafts = b.row_drafts if of_previous_round else b.batch_drafts[:, :size].T
        rows, images = b.batch_rows[:size], b.row_state[:, Column.IMAGE]
        named: dict[str, Any] = {name: b[name] for name in ("row_places", "row_stacks", "row_masks", "row_tags", "batch_status")}
        named |= {"first": first, "last": last, "fill_new": int(fill_new), "by_row": int(of_previous_round)}
        if split:
            named |= {"row_forced_text": b.row_forced_text, "token_slots": split.token_slots, "merges": int(split.merges)}
        if split and not of_previous_round:  # the last round's masks guide no draft of this round
            named |= {"batch_forced": b.batch_forced, "takes_forced": int(self.round.proposes_chain and last > 0)}
        with self.round.context.stage(f"fill {stage}"):
            advance_fill(b.row_state, images, rows, drafts, b.grammar_arena, *self.tokens, **named)


def stage_of_masks(first: int, last: int) -> str:
    return "commit" if last == 0 else f"advance {last}" if first == last else "follow"
