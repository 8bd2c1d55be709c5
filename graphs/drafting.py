"""The drafting stages of a round: running the draft model, choosing its drafts, storing them for the next round."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.batch import Batch, model_input, model_logits
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.vocabulary_shard import SamplingOps, VocabularyShard
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel
from stepgraph.graphs.model_call import run_model
from stepgraph.graphs.row_layout import Column
from stepgraph.graphs.sampled_stages import draft_sampled
from stepgraph.sampling import bitmask, kernels
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import Emission, GrammarMask
from stepgraph.sampling.kernels.operation import Dense, Flags, Longs, StridedLongs, empty_as, operation


def draft_prefill(
    buffers: StaticBuffers, before: Batch, emission: Emission, features: Tensor, model: DraftModel, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Run the draft model over the emitted tokens. Returns logits [B, num_tokens] and features [B, 1, F] at each row's last token."""
    inputs = model_input(before, limits, emission.tokens, 0, features=features, count=emission.emitted)
    output = run_model("draft", model.forward, inputs, buffers)
    last = (emission.emitted - 1).clamp(min=0)[:, None, None]
    hidden = output.hidden.gather(1, last.expand(-1, 1, output.hidden.shape[2]))
    features = output.next_features.gather(1, last.expand(-1, 1, output.next_features.shape[2]))
    return model_logits("draft", model, hidden[:, 0], limits), features


def draft_decode(
    buffers: StaticBuffers, after: Batch, step: int, tokens: Tensor, features: Tensor, model: DraftModel, limits: Limits
) -> tuple[Tensor, Tensor]:
    """Run the draft model over its draft `step` (from 1). tokens [B], -1 for rows that stopped drafting. Returns as draft_prefill."""
    offset = step - 1 if getattr(model, "advances", True) else -1
    inputs = model_input(after, limits, tokens[:, None], offset, features=features)._replace(step=step + 1)
    output = run_model("draft", model.forward, inputs, buffers)
    return model_logits("draft", model, output.hidden[:, 0], limits), output.next_features


def choose_draft(
    buffers: StaticBuffers,
    after: Batch,
    step: int,
    logits: Tensor,
    alive: Tensor,
    mask: GrammarMask | None,
    sampled: bool = False,
    d2t: Tensor | None = None,
    chain: Tensor | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Draft `step` (from 1) of every row that still drafts, -1 for other rows.

    mask: `grammar_mask_of` this step; it verifies the draft later. None: no mask.
    alive [B] bool: rows that still draft.
    d2t: for a draft model with its own vocabulary, the target id of each of its tokens. Other target tokens are drafted only if
    they are looked up or forced by the grammar.
    chain [B, K]: tokens of the look-up for rows that still follow it, -1 for other rows. A legal one replaces the model's choice; rows that
    draft another token leave their chain.
    shard: the tokens of the logits, where ranks divide them.
    """
    finite, tokens = (draft_sampled if sampled else _draft_greedy)(buffers, after, step, logits, mask, d2t, shard or kernels)
    forces, limit = mask is not None and "batch_forced" in buffers, after.column(Column.DRAFT_LIMIT)
    forced = buffers.batch_forced[step - 1, : len(after.rows)] if forces else None
    rule = {} if mask is None else {"masks": mask.masks[:, 0], "constrained": mask.constrained, "status": mask.status[:, 0]}
    used = {"row_looked_up": chain is not None, "row_forced": forces, "row_certain": sampled}
    flags = {name: buffers[name] for name in used if used[name]}
    return select_draft(tokens, finite, alive, limit, step, after.rows, buffers.batch_drafts, chain, forced, **rule, **flags)


def grammar_mask_of(buffers: StaticBuffers, after: Batch, step: int, on_device: bool = False, count: int = 1) -> GrammarMask:
    """The masks that guide drafts from `step` on, filled in this round. on_device: `advance_fill` filled all of them."""
    if not on_device:
        return check_masks(buffers, after.rows, step - 1, count)
    assert after.constrained is not None
    index = slice(step - 1, step - 1 + count)
    return GrammarMask(buffers.row_masks[:, index], after.rows, after.constrained, buffers.batch_status[index, : len(after.rows)].T)


def check_masks(buffers: StaticBuffers, rows: Tensor, first: int, count: int) -> GrammarMask:
    """`checked_masks`, after their statuses are written."""
    masks, columns = checked_masks(buffers, rows, first, count), (Column.OWNER, Column.GENERATED, Column.CONSTRAINED)
    inputs = buffers.row_tags[:, first : first + count], *(buffers.row_state[:, column] for column in columns)
    kernels.mask_status.run(*inputs, first, rows, masks.status, masks.constrained)
    return masks


def checked_masks(buffers: StaticBuffers, rows: Tensor, first: int, count: int) -> GrammarMask:
    """The masks from `first` on, with the statuses that the latest `check_masks` found."""
    size, masks = len(rows), buffers.row_masks[:, first : first + count]
    return GrammarMask(masks, rows, buffers.batch_constrained[:size], buffers.checked_status[: size * count].view(size, count))


def _draft_greedy(
    buffers: StaticBuffers, after: Batch, step: int, logits: Tensor, mask: GrammarMask | None, d2t: Tensor | None, ops: SamplingOps
) -> tuple[Tensor, Tensor]:
    """[B] bool whether the largest legal logit is finite, and [B] the target id of its token."""
    finite, choice = (each.squeeze(1) for each in ops.most_probable(logits[:, None], mask, d2t))
    return finite, choice if d2t is None else d2t[choice]


def store_chain(buffers: StaticBuffers, after: Batch, chain: Tensor) -> None:
    """Store the drafts in their rows for the next target_verify. chain [B, <= K], -1 after the last draft."""
    unused = buffers.row_drafts.shape[1] - chain.shape[1]
    chain = functional.pad(chain, (0, unused), value=-1) if unused else chain
    store_drafts(after.rows, chain, buffers.row_drafts, buffers.row_state[:, Column.DRAFT_COUNT])


@operation(lambda *_: None, writes=("row_drafts", "row_counts"), triton=True, c=True)
def store_drafts(rows: Longs, chain: StridedLongs, row_drafts: Longs, row_counts: StridedLongs) -> None:
    """Write chains [B, K] into row_drafts [R, K] and their numbers of drafts into row_counts [R]. rows [B]."""
    row_drafts.index_copy_(0, rows, chain)
    row_counts.index_copy_(0, rows, (chain >= 0).sum(1))


@operation(empty_as, writes=("drafts", "chain", "row_looked_up", "row_forced", "row_certain"), triton=True, c=True)
def select_draft(
    tokens: Longs,
    finite: Flags,
    alive: Flags,
    limit: StridedLongs,
    step: int,
    rows: Longs,
    drafts: StridedLongs,
    chain: Longs | None = None,
    forced: Longs | None = None,
    masks: Dense | None = None,
    constrained: Flags | None = None,
    status: Longs | None = None,
    row_looked_up: Tensor | None = None,
    row_forced: Tensor | None = None,
    row_certain: Tensor | None = None,
) -> Tensor:
    """[B] int64 the draft of every row: the forced token, else the looked-up one if it is legal, else the model's; -1 where a row stops.

    tokens [B] int64, finite [B] bool: the model's choice, and whether its logit is finite; alive [B] bool; limit [B]: maximum drafts.
    chain [B, K]: looked-up tokens, -1 where there is none; forced [B]: the token that the grammar forces, -1 where it leaves a choice. In
    a constrained row both need a valid mask, and a looked-up token has to be legal under it; a row that is not constrained is never forced.
    masks [R, words], constrained, status [B]: all three, or none without a grammar.
    Written at `step` (from 1): drafts [K, >= B]; row_looked_up, row_forced, row_certain [R, K] bool: whether the draft of each of `rows`
    [B] is looked up, forced, or either. The chain of a row that drafts another token becomes -1.
    """
    mask_of_rows = None if masks is None or constrained is None or status is None else (masks, constrained, status, rows)
    lookup, takes_lookup, takes_forced = (None if chain is None else chain[:, step - 1]), torch.zeros_like(alive), torch.zeros_like(alive)
    if lookup is not None:
        takes_lookup = lookup >= 0 if mask_of_rows is None else (lookup >= 0) & bitmask.allowed(lookup, *mask_of_rows)
        tokens = torch.where(takes_lookup, lookup, tokens)
    if forced is not None:
        assert mask_of_rows is not None, "a token is forced only by a grammar"
        takes_forced = (forced >= 0) & mask_of_rows[1] & (mask_of_rows[2] == MaskStatus.OK)
        tokens = torch.where(takes_forced, forced, tokens)
    chosen = torch.where(alive & (finite | takes_lookup | takes_forced) & (limit >= step), tokens, -1)
    drafts[step - 1, : len(rows)].copy_(chosen)
    for flags, taken in ((row_looked_up, takes_lookup), (row_forced, takes_forced), (row_certain, takes_lookup | takes_forced)):
        if flags is not None:
            flags[:, step - 1].index_copy_(0, rows, taken)
    if chain is not None and lookup is not None:
        chain.copy_(torch.where((chosen == lookup)[:, None], chain, -1))
    return chosen
