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
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation


def skip_tokens(buffers: StaticBuffers, before: Batch, emission: Emission, features: Tensor) -> None:
    """Keep the input of the draft model for the tokens of a round in which it does not run."""
    skipped, stored = before.column(Column.SKIPPED), (buffers.row_skipped_tokens, buffers.row_skipped_features)
    keep_skipped(before.rows, skipped, emission.tokens, emission.emitted, features, *stored, buffers.row_state[:, Column.SKIPPED])


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

    row_tokens [R, N], row_features [R, N, F]; row_skipped [R] becomes skipped + emitted [B]: the others are written again later. Inert
    rows may have no room. rows [B]; all but features int64.
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
