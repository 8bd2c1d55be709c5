"""Tokens that the draft model has not processed, because rounds without it emitted them."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.slot_mapping import place_tokens
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel
from stepgraph.graphs.model_call import ModelInput
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.kernels import Emission


def skip_tokens(buffers: StaticBuffers, before: Batch, emission: Emission, features: Tensor) -> None:
    """Keep the input of the draft model for the tokens of a round in which it does not run."""
    skipped, count = before.column(Column.SKIPPED), emission.tokens.shape[1]
    columns = skipped[:, None] + torch.arange(count, device=skipped.device)  # those after the emitted tokens are written again later
    index = before.rows[:, None], columns.clamp(max=buffers.row_skipped_tokens.shape[1] - 1)  # inert rows may have no room
    buffers.row_skipped_tokens.index_put_(index, emission.tokens)
    buffers.row_skipped_features.index_put_(index, features)
    buffers.row_state[:, Column.SKIPPED].index_copy_(0, before.rows, skipped + emission.emitted)


def process_skipped(buffers: StaticBuffers, size: int, model: DraftModel, limits: Limits) -> None:
    """Run the draft model over the skipped tokens of a batch. Between rounds, like a prompt."""
    batch, tokens = read_batch(buffers, size), buffers.row_skipped_tokens
    skipped = batch.column(Column.SKIPPED)
    start, end, tables = batch.column(Column.LENGTH) - skipped, batch.column(Column.MAX_LENGTH), batch.block_tables
    placed = place_tokens(tokens[batch.rows], start, end, tables, 0, limits.page_size, limits.max_length, batch.live, skipped)
    model.forward(ModelInput(*placed, tables, limits.page_size, buffers.row_skipped_features[batch.rows]), buffers)
    buffers.row_state[:, Column.SKIPPED].index_fill_(0, batch.rows, 0)
