"""The rows of one round, as its stages read them, and the inputs that they pass to a model."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from stepgraph.graphs.attention.paged import OPERATION, AttentionChoice
from stepgraph.graphs.buffers import Column, StaticBuffers
from stepgraph.graphs.layers.slot_mapping import place_tokens
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel, ModelInput, TargetModel, check_shape
from stepgraph.sampling import processors
from stepgraph.sampling.grammar.status import FinishCode


class Batch(NamedTuple):
    """The rows of a round at its start. B slots; padding slots hold the dummy row, which is inert."""

    rows: Tensor  # [B] int64
    state: Tensor  # [B, columns] int64
    drafts: Tensor  # [B, K] int64, -1 after the last draft
    block_tables: Tensor  # [B, pages_per_row] int64
    attention: AttentionChoice = OPERATION

    def column(self, column: Column) -> Tensor:
        return self.state[:, column]

    @property
    def live(self) -> Tensor:
        return self.state[:, Column.FINISH] == FinishCode.RUNNING


def read_batch(buffers: StaticBuffers, size: int, attention: AttentionChoice = OPERATION) -> Batch:
    rows = buffers.batch_rows[:size]
    return Batch(rows, buffers.row_state[rows], buffers.row_drafts[rows], buffers.row_block_tables[rows], attention)


def model_input(batch: Batch, limits: Limits, tokens: Tensor, offset: int, valid: Tensor, features: Tensor | None = None) -> ModelInput:
    """Consecutive positions from each row's length plus `offset` on. Tokens that are invalid or past its end use the scratch page."""
    length, end, tables = batch.column(Column.LENGTH), batch.column(Column.MAX_LENGTH), batch.block_tables
    placed = place_tokens(tokens, valid, length, end, tables, offset, limits.page_size, limits.max_length)
    return ModelInput(*placed, tables, limits.page_size, features, attend=batch.attention.round_call())


def model_logits(name: str, model: TargetModel | DraftModel, hidden: Tensor, limits: Limits) -> Tensor:
    """The model's logits without the padding of its vocabulary."""
    logits = model.logits(hidden)
    check_shape(f"{name} logits", logits, *hidden.shape[:-1], model.vocab_size)
    return logits[..., : limits.num_tokens]


def row_settings(buffers: StaticBuffers, batch: Batch) -> processors.RowSettings:
    """The sampling settings of all rows; indexed with batch.rows."""
    return processors.RowSettings(
        params=buffers.row_params,
        bias_ids=buffers.row_bias_ids,
        biases=buffers.row_biases,
        stop_ids=buffers.row_stop_ids,
        prompt_seen=buffers.row_prompt_seen,
        output_counts=buffers.row_output_counts,
        generated=batch.column(Column.GENERATED),
    )
