"""Drafts without a model: the text that the device keeps for them, the call of a proposer inside a round, n-gram look-up, and the end of
a round that runs no draft model. The draft model processes the tokens of such rounds later, between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import pad

from stepgraph.graphs import drafting
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import CaptureContext
from stepgraph.graphs.grammar_lane import GrammarLane
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.layers.slot_mapping import place_tokens
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel, History, Models, Proposer
from stepgraph.graphs.model_call import ModelInput, check_shape
from stepgraph.graphs.row_layout import REFUSED, Column
from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels import Emission
from stepgraph.sampling.kernels.operation import Contiguous, Dense, Flags, Ints, Longs, StridedLongs, dense, empty_as, empty_of, operation

ANCHOR_TOKENS = 8  # prompt tokens copied before a given text, so that the start of the output is found after the end of the prompt


def given_from(limits: Limits) -> int:
    return limits.max_length + 1 + ANCHOR_TOKENS


def text_specs(limits: Limits) -> tuple[BufferSpec, ...]:
    """In addition to `round_specs`, for proposers: per row its history, a column of -1, the given text, and a column of -1."""
    width = given_from(limits) + limits.max_length + 1
    return (
        BufferSpec("row_text", (limits.rows, width), torch.int32, fill=-1),
        BufferSpec("text_ring_host", (limits.admission_ring_depth, width), torch.int32, "pinned"),
    )


def append_emission(buffers: StaticBuffers, batch: Batch, emission: Emission) -> None:
    """Append the emitted tokens to their rows' histories. `batch`: at the start of the round."""
    append_tokens(batch.rows, emission.tokens, emission.emitted, batch.column(Column.LENGTH), buffers.row_text)


@operation(lambda *_: None, writes=("row_text",), triton=True, c=True)
def append_tokens(rows: Longs, tokens: Longs, emitted: Longs, length: StridedLongs, row_text: Ints) -> None:
    """Write the first `emitted` [B] of the tokens [B, Q] into row_text [R, width], from column length [B] on."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    inside, columns = index < emitted[:, None], (length[:, None] + index).clamp(max=row_text.shape[1] - 1)
    kept = row_text[rows[:, None], columns]
    row_text.index_put_((rows[:, None], columns), torch.where(inside, tokens.to(torch.int32), kept))


def propose(buffers: StaticBuffers, after: Batch, proposer: Proposer, limits: Limits, num_drafts: int) -> Tensor:
    """[B, num_drafts] a chain of unmasked drafts for every row that continues, -1 after its last draft."""
    generated = after.column(Column.GENERATED)
    length = after.column(Column.LENGTH).clamp(min=1)  # 0 for padding rows, whose last token would be outside the text
    drafts = proposer.propose(History(buffers.row_text[after.rows], length, generated, given_from(limits), num_drafts), buffers)
    check_drafts(drafts, len(after.rows), num_drafts)
    return choose_chain(drafts, after.column(Column.FINISH), after.column(Column.DRAFT_LIMIT), limits.num_tokens, after.rows)


def mark_looked_up(buffers: StaticBuffers, after: Batch, sampled: bool) -> None:
    """Mark all drafts of a round in which the draft model does not run: looked up, unless a grammar forces them, and certain."""
    buffers.row_looked_up.index_fill_(0, after.rows, True)
    if sampled:
        buffers.row_certain.index_fill_(0, after.rows, True)


def _c_supports(forced: Tensor | None, row_forced: Tensor | None) -> bool:
    return (forced is None) is (row_forced is None)


@operation(empty_as, writes=("row_forced",), triton=True, c=True, supports=_c_supports)
def choose_chain(
    proposed: Longs,
    finish: StridedLongs,
    limit: StridedLongs,
    num_tokens: int,
    rows: Longs,
    masks: Annotated[Tensor, dense, (torch.int32,)] | None = None,
    constrained: Flags | None = None,
    status: StridedLongs | None = None,
    forced: Annotated[Tensor, dense, (torch.int64,)] | None = None,
    row_forced: Annotated[Tensor, None, (torch.bool,)] | None = None,
) -> Tensor:
    """[B, K] the drafts of proposed chains: each the token that the grammar forces, else the proposed token if it is legal.

    Drafts are -1 in rows that do not run, and from the limit of a row on. After an id that is no token, or a draft other than the proposed
    one, only forced tokens follow. REFUSED instead of -1 ends a chain whose next token is not legal: statistics count the two separately.
    proposed [B, K]; finish, limit [B]; rows [B]. With a grammar: masks [R, >= K, words]; constrained [B]; status [B, K] of these
    masks. With forced tokens: forced [K, B], -1 where the grammar leaves a choice; row_forced [R, >= K]: written, whether
    each draft is forced.
    """
    alive = follows_proposal = finish == FinishCode.RUNNING
    chosen = list[Tensor]()
    for index, candidate in enumerate(proposed.unbind(1)):
        token = torch.where(follows_proposal & (candidate >= 0) & (candidate < num_tokens), candidate, -1)
        if masks is not None and constrained is not None and status is not None:
            legal = bitmask.allowed(token, masks[:, index], constrained, status[:, index], rows)
            token = torch.where(legal | (token < 0), token, REFUSED)
            if forced is not None and row_forced is not None:
                taken = (forced[index] >= 0) & constrained & (status[:, index] == MaskStatus.OK)
                token = torch.where(taken, forced[index], token)
                row_forced[:, index].index_copy_(0, rows, taken)
        token = torch.where(alive & (limit > index), token, -1)
        alive, follows_proposal = token >= 0, follows_proposal & (token == candidate)
        chosen.append(token)
    return torch.stack(chosen, 1)


def check_drafts(drafts: Tensor, rows: int, count: int) -> None:
    """ValueError if a proposer returned another shape or dtype. Costs nothing in a replay, which runs no Python."""
    check_shape("drafts of the proposer", drafts, rows, count)
    if drafts.dtype != torch.int64:
        raise ValueError(f"drafts of the proposer: got {drafts.dtype}, expected torch.int64")


@operation(lambda text, length, _generated, _given_from, count, *_: empty_of((len(text), count), length), triton=True, c=True)
def look_up(text: Ints, length: StridedLongs, generated: StridedLongs, given_from: int, count: int, longest: int, shortest: int) -> Tensor:
    """[B, count] int64: chains of drafts as NgramLookup describes them, -1 without a match. text [B, T], length [B], generated [B] and
    given_from as in History; longest and shortest match."""
    start, width = given_from, text.shape[1]
    length, generated = (column[:, None].to(torch.int32) for column in (length, generated))
    columns = torch.arange(width, dtype=torch.int32, device=text.device)
    # Unique in a row: the column in the history, or a larger number that falls with the distance to the expected column.
    distance = columns - start - generated
    preference = torch.where(columns < start, columns, 3 * width - 2 * distance.abs() - (distance < 0).to(torch.int32))
    matched = _match_lengths(text, length, longest).to(torch.int32)
    usable = (matched >= shortest) & ((columns < length) | ((columns >= start) & (text >= 0)))
    best, column = torch.where(usable, matched * 4 * width + preference, -1).max(1, keepdim=True)
    drafts = torch.arange(count, device=text.device)
    copied = column + torch.where(column < start, drafts % (length - column).clamp(min=1), drafts)
    chain = text.gather(1, copied.clamp(max=width - 1)).to(torch.int64)
    return torch.where(best >= 0, chain, -1)


def _match_lengths(text: Tensor, length: Tensor, count: int) -> Tensor:
    """[B, T] int8: how many tokens before each column equal the last tokens of the history."""
    device = text.device
    last = length - torch.arange(count, 0, -1, device=device)  # [B, count] int64
    suffix = torch.where(last >= 0, text.gather(1, last.clamp(min=0)), -2)  # -2 equals no token and no padding
    windows = pad(text, (count, 0), value=-1).unfold(1, count, 1)[:, : text.shape[1]]  # [B, T, count], the tokens before a column
    after = torch.arange(count - 1, -1, -1, dtype=torch.int8, device=device)  # match length if this is the last unequal token
    return torch.where(windows == suffix[:, None], count, after).amin(2)


@dataclass(frozen=True)
class ProposedRound:
    """The end of a round, after `accept`: its drafts are the chain of a proposer, or of the look-up beside the model, or none."""

    buffers: StaticBuffers
    context: CaptureContext
    limits: Limits
    models: Models
    key: GraphKey
    num_drafts: int  # 0: none
    grammar: GrammarLane | None  # if it fills the masks of drafts

    def run(self, batch: Batch, emission: Emission, features: Tensor, after: Batch) -> None:
        buffers, proposer = self.buffers, self.models.proposer or self.models.look_up
        with self.context.stage("propose"):
            if "row_skipped_tokens" in buffers:
                kept, counts = (buffers.row_skipped_tokens, buffers.row_skipped_features), buffers.row_state[:, Column.SKIPPED]
                keep_skipped(batch.rows, batch.column(Column.SKIPPED), emission.tokens, emission.emitted, features, *kept, counts)
            if self.models.reads_text:
                append_emission(buffers, batch, emission)
            if not self.num_drafts:
                buffers.row_drafts.index_fill_(0, batch.rows, -1)
            elif proposer is not None:
                drafting.store_chain(buffers, after, self._chain(after, proposer))
                if not self.key.draft_model:
                    mark_looked_up(buffers, after, self.key.sampled)

    def _chain(self, after: Batch, proposer: Proposer) -> Tensor:
        """[B, K] the proposer's chains; under a grammar, their legal part and forced tokens.

        Grammars are followed on the main stream: nothing else is left to do before the next round needs the drafts.
        """
        buffers, grammar, count, size = self.buffers, self.grammar, self.num_drafts, len(after.rows)
        proposed = propose(buffers, after, proposer, self.limits, count)
        if grammar is None:
            return proposed
        buffers.batch_drafts[:count, :size].copy_(proposed.T)
        for source in grammar.sources:
            source.fill_draft_masks(0, count - 1)
        with self.context.stage("choose_drafts"):
            mask = grammar.mask(after, 1, count)
            forced = (buffers.batch_forced[:count, :size], buffers.row_forced) if "batch_forced" in buffers else (None, None)
            columns = after.column(Column.FINISH), after.column(Column.DRAFT_LIMIT)
            rules = mask.masks, mask.constrained, mask.status, *forced
            return choose_chain(proposed, *columns, self.limits.num_tokens, after.rows, *rules)


@operation(lambda *_: None, writes=("row_tokens", "row_features", "row_skipped"), triton=True)
def keep_skipped(
    rows: Contiguous,
    skipped: Tensor,
    tokens: Contiguous,
    emitted: Contiguous,
    features: Dense,
    row_tokens: Tensor,
    row_features: Tensor,
    row_skipped: Tensor,
) -> None:
    """Write the tokens [B, Q] of a round and their features [B, Q, F] into their rows, after the `skipped` [B] tokens there.
    A draft model that does not run in this round processes them later.

    row_tokens [R, N], row_features [R, N, F]; row_skipped [R] becomes skipped + emitted [B]: later rounds overwrite the other tokens.
    Inert rows may have no room. rows [B]; all but features int64.
    """
    columns = skipped[:, None] + torch.arange(tokens.shape[1], device=skipped.device)
    index = rows[:, None], columns.clamp(max=row_tokens.shape[1] - 1)
    row_tokens.index_put_(index, tokens)
    row_features.index_put_(index, features)
    row_skipped.index_copy_(0, rows, skipped + emitted)


def process_skipped(buffers: StaticBuffers, size: int, model: DraftModel, limits: Limits) -> None:
    """Run the draft model over the skipped tokens of a batch. Between rounds, like a prompt."""
    batch, tokens = read_batch(buffers, size), buffers.row_skipped_tokens
    skipped = batch.column(Column.SKIPPED)
    start, end, tables = batch.column(Column.LENGTH) - skipped, batch.column(Column.MAX_LENGTH), batch.block_tables
    placed = place_tokens(tokens[batch.rows], start, end, tables, 0, limits.page_size, limits.max_length, batch.live, skipped)
    model.forward(ModelInput(*placed, tables, limits.page_size, buffers.row_skipped_features[batch.rows]), buffers)
    buffers.row_state[:, Column.SKIPPED].index_fill_(0, batch.rows, 0)
