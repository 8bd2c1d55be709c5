"""The rows of one round, as its stages read them, and the inputs that they pass to a model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stepgraph.graphs.attention.paged import DEFAULT_ATTENTION, AttentionChoice
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.slot_mapping import place_tokens
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel, TargetModel
from stepgraph.graphs.model_call import ModelInput, check_shape
from stepgraph.graphs.publishing import receive_batch
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.grammar.status import FinishCode


class Batch(NamedTuple):
    """The rows of a round at its start. B rows; those that pad the batch are the dummy row, which is inert."""

    rows: Tensor  # [B] int64
    state: Tensor  # [B, columns] int64
    drafts: Tensor  # [B, K] int64, -1 after the last draft
    block_tables: Tensor  # [B, pages_per_row] int64
    attention: AttentionChoice = DEFAULT_ATTENTION
    constrained: Tensor | None = None  # [B] bool: rows with a constraint; set by `accept` in a constrained round
    params: Tensor | None = None  # [B, Param] float32, set by `accept` in a sampled round

    def column(self, column: Column) -> Tensor:
        return self.state[:, column]

    @property
    def live(self) -> Tensor:
        return self.state[:, Column.FINISH] == FinishCode.RUNNING


def read_batch(buffers: StaticBuffers, size: int, attention: AttentionChoice = DEFAULT_ATTENTION, max_drafts: int | None = None) -> Batch:
    """The first `size` rows of the batch, with at most `max_drafts` drafts of each row; None: all drafts."""
    receive_batch(buffers, size)
    rows, drafts = buffers.batch_rows[:size], buffers.row_drafts
    state = buffers.row_state[rows]
    if max_drafts is not None and max_drafts < drafts.shape[1]:
        state[:, Column.DRAFT_COUNT].clamp_(max=max_drafts)
        drafts = drafts[:, :max_drafts]
    return Batch(rows, state, drafts[rows], buffers.row_block_tables[rows], attention)


def model_input(
    batch: Batch,
    limits: Limits,
    tokens: Tensor,
    offset: int,
    *,
    features: Tensor | None = None,
    live: Tensor | None = None,
    count: Tensor | None = None,
) -> ModelInput:
    """Consecutive positions from each row's length plus `offset` on. Tokens that are inert or past its end use the scratch page.

    tokens [B, Q]: inert where negative, in rows that are not `live` [B], and from `count` [B] on.
    """
    length, end, tables = batch.column(Column.LENGTH), batch.column(Column.MAX_LENGTH), batch.block_tables
    placed = place_tokens(tokens, length, end, tables, offset, limits.page_size, limits.max_length, live, count)
    return ModelInput(*placed, tables, limits.page_size, features, attend=batch.attention.round_attend())


def model_logits(name: str, model: TargetModel | DraftModel, hidden: Tensor, limits: Limits) -> Tensor:
    """The model's logits without the padding of its vocabulary."""
    logits = model.logits(hidden)
    check_shape(f"{name} logits", logits, *hidden.shape[:-1], getattr(model, "shard", model).vocab_size)
    if not logits.is_floating_point():
        raise ValueError(f"{name} logits: got {logits.dtype}, expected a floating-point dtype")
    return logits[..., : limits.num_tokens]
