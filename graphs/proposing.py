"""Drafts that follow from the text alone: what the device keeps of it, and how a proposer is asked inside a round."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffers import REFUSED, BufferSpec, Column, StaticBuffers
from stepgraph.graphs.drafting import going_on, grammar_mask_of, legal, select_draft
from stepgraph.graphs.model import History, Proposer, check_shape
from stepgraph.graphs.shapes import Limits
from stepgraph.sampling.acceptance import Emission

ANCHOR = 8  # tokens of the prompt in front of a given text: what an output begins with follows them there as it does here


def given_from(limits: Limits) -> int:
    return limits.max_length + 1 + ANCHOR


def text_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """On top of `round_specs`, for who proposes from it: every row's history, a column that stays -1, the given text, and one more -1."""
    width = given_from(limits) + limits.max_length + 1
    return (
        BufferSpec("row_text", (limits.rows, width), torch.int32, fill=-1),
        BufferSpec("text_ring_host", (limits.admission_ring_depth, width), torch.int32, "pinned"),
    )


def note_emission(buffers: StaticBuffers, batch: Batch, emission: Emission, limits: Limits) -> None:
    """Append what a round emitted to its rows' histories. `batch`: as the round began."""
    index = torch.arange(limits.positions, device=batch.rows.device)
    wanted = index < emission.emitted[:, None]
    # Inert places collide in the column between the texts, and write there what it holds.
    places = torch.where(wanted, batch.column(Column.LENGTH)[:, None] + index, limits.max_length)
    tokens = torch.where(wanted, emission.tokens, -1).to(torch.int32)
    buffers.row_text.index_put_((batch.rows[:, None], places), tokens)


def propose(buffers: StaticBuffers, after: Batch, proposer: Proposer, limits: Limits) -> Tensor:
    """[B, K] a chain of drafts for every row that goes on, -1 behind its last. No mask has guided them."""
    count, generated = limits.num_speculative_tokens, after.column(Column.GENERATED)
    length = after.column(Column.LENGTH).clamp(min=1)  # of padding it is 0, and a last token would be looked for outside the text
    drafts = proposer.propose(History(buffers.row_text[after.rows], length, generated, given_from(limits), count), buffers)
    check_drafts(drafts, len(after.rows), count)
    wanted = torch.arange(count, device=drafts.device) < after.column(Column.DRAFT_LIMIT)[:, None]
    wanted = wanted & going_on(after)[:, None] & (drafts >= 0) & (drafts < limits.num_tokens)
    return torch.where(wanted.to(torch.int64).cumprod(1) != 0, drafts, -1)


def choose_proposed(buffers: StaticBuffers, after: Batch, step: int, proposed: Tensor, alive: Tensor) -> Tensor:
    """Draft `step` (from 1) of every row that still drafts, -1 elsewhere: what its grammar forces, or else what is proposed and legal.

    REFUSED where what is proposed is not: the chain ends there as well, and statistics tell the two apart.
    """
    ruling, size = grammar_mask_of(buffers, after, step), len(after.rows)
    rule, wanted = (ruling.masks[:, 0], ruling.constrained, ruling.status[:, 0]), buffers.batch_forced[step - 1, :size]
    unforced = torch.where(legal(proposed, *rule), proposed, torch.where(proposed < 0, -1, REFUSED))
    settled = select_draft(unforced, torch.ones_like(alive), alive, after.column(Column.DRAFT_LIMIT), step, None, wanted, ruling)
    assert settled.forced is not None
    buffers.row_forced[:, step - 1].index_copy_(0, after.rows, settled.forced)
    return settled.tokens


def check_drafts(drafts: Tensor, rows: int, count: int) -> None:
    """ValueError where a proposer returned something else than it promised; free in a replay, which runs no Python."""
    check_shape("drafts of the proposer", drafts, rows, count)
    if drafts.dtype != torch.int64:
        raise ValueError(f"drafts of the proposer: got {drafts.dtype}, want torch.int64")
