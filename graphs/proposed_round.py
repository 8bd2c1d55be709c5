"""The end of a round that runs no draft model: its drafts are the chain of a proposer, or of the look-up beside the model, or none.

The draft model processes the tokens of such rounds later, between rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.graphs import drafting, proposing
from stepgraph.graphs.batch import Batch, read_batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import CaptureContext
from stepgraph.graphs.grammar_lane import GrammarLane
from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.layers.slot_mapping import place_tokens
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel, ModelPair
from stepgraph.graphs.model_call import ModelInput
from stepgraph.graphs.proposer import Proposer
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling.kernels import Emission
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation


@dataclass(frozen=True)
class ProposedRound:
    """After `accept`."""

    buffers: StaticBuffers
    context: CaptureContext
    limits: Limits
    models: ModelPair
    key: GraphKey
    grammar: GrammarLane | None  # if it fills the masks of drafts

    def run(self, batch: Batch, emission: Emission, features: Tensor, after: Batch) -> None:
        """Draft."""
        buffers, count, proposer = self.buffers, self.limits.num_speculative_tokens, self.models.proposer or self.models.look_up
        with self.context.stage("propose"):
            if "row_skipped_tokens" in buffers:
                skip_tokens(buffers, batch, emission, features)
            if self.models.reads_text:
                proposing.append_emission(buffers, batch, emission)
            if not count:
                buffers.row_drafts.index_fill_(0, batch.rows, -1)
            elif proposer is not None:
                drafting.store_chain(buffers, after, self._chain(after, proposer))
                if not self.key.draft_model:
                    proposing.mark_looked_up(buffers, after, self.key.sampled)

    def _chain(self, after: Batch, proposer: Proposer) -> Tensor:
        """[B, K] the proposer's chains, under a grammar their legal part and what it forces.

        Grammars are followed on the main stream: nothing else is left to do before the next round needs the drafts.
        """
        buffers, grammar, count, size = self.buffers, self.grammar, self.limits.num_speculative_tokens, len(after.rows)
        proposed = proposing.propose(buffers, after, proposer, self.limits)
        if grammar is None:
            return proposed
        buffers.batch_drafts[:count, :size].copy_(proposed.T)
        for source in grammar.sources:
            source.rows(0, count - 1)
        with self.context.stage("choose_drafts"):
            mask = grammar.mask(after, 1, count)
            forced = (buffers.batch_forced[:count, :size], buffers.row_forced) if "batch_forced" in buffers else (None, None)
            columns = after.column(Column.FINISH), after.column(Column.DRAFT_LIMIT)
            rules = mask.masks, mask.constrained, mask.status, *forced
            return proposing.choose_chain(proposed, *columns, self.limits.num_tokens, after.rows, *rules)


def skip_tokens(buffers: StaticBuffers, before: Batch, emission: Emission, features: Tensor) -> None:
    """Keep the input of the draft model for the tokens of a round in which it does not run."""
    skipped, stored = before.column(Column.SKIPPED), (buffers.row_skipped_tokens, buffers.row_skipped_features)
    keep_skipped(before.rows, skipped, emission.tokens, emission.emitted, features, *stored, buffers.row_state[:, Column.SKIPPED])


@operation(lambda *_: None, writes=("row_tokens", "row_features", "row_skipped"), triton="stepgraph.graphs.triton.skipped_tokens")
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
