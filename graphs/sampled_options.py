"""What some requests ask of sampled rounds: the user's logits processors, bad words of several tokens, relaxed acceptance.

Each is part of a round only if the engine has the table of its settings.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stepgraph.graphs.accept_options import LogitsProcessor, ProcessorInput
from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.forced_acceptance import after_accepted
from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.sampling.acceptance import may_accept
from stepgraph.sampling.kernels.processors import Processed, judge
from stepgraph.sampling.sampler import Columns, from_units, portable_exp, units


def apply_processors(
    buffers: StaticBuffers, batch: Batch, logits: Tensor, processors: Sequence[LogitsProcessor], columns: Columns
) -> Tensor:
    """Logits [B, Q, V] after the processors that each row uses; the bits of other rows do not change. Functions get those of all tokens."""
    settings, first = buffers.row_processors[batch.rows], 0  # [B, sum of 1 + num_arguments]: whether it is used, then its arguments
    logits = columns.whole(logits)
    tokens = torch.cat([batch.column(Column.LAST_TOKEN)[:, None], batch.drafts], 1)
    for processor in processors:
        end = first + 1 + processor.num_arguments
        counts = buffers.row_output_counts[batch.rows]
        given = ProcessorInput(settings[:, first + 1 : end], tokens, batch.column(Column.GENERATED), counts)
        logits = torch.where((settings[:, first] != 0)[:, None, None], processor.apply(logits, given), logits)
        first = end
    return columns.part(logits)


def ban_words(buffers: StaticBuffers, batch: Batch, processed: Processed, columns: Columns) -> Processed:
    """Minus infinity for each token that would complete a bad word of its row: output and drafts before a position end with the rest."""
    words, recent = buffers.row_bad_words[batch.rows], buffers.row_recent[batch.rows]  # [B, N, L] -1 before a shorter word, [B, L - 1]
    ends = torch.cat([recent, batch.drafts], 1).unfold(1, recent.shape[1], 1)  # [B, Q, L - 1], the tokens before each position
    rest, last = words[:, None, :, :-1], words[..., -1]
    complete = ((rest == ends[:, :, None]) | (rest < 0)).all(-1) & (last >= 0)[:, None]  # [B, Q, N]
    index, own = columns.local(last.clamp(min=0)[:, None].expand(-1, ends.shape[1], -1))
    banned = processed.logits.scatter_add(2, index, torch.where(complete & own, float("-inf"), 0.0))
    return judge(processed.status, processed.finite, banned, columns)


def remember_output(rows: Tensor, tokens: Tensor, emitted: Tensor, row_recent: Tensor) -> None:
    """Append the emitted tokens of [B, Q] to the last ones of each row: row_recent [R, L - 1]."""
    size = row_recent.shape[1]
    index = emitted[:, None] + torch.arange(size, device=rows.device)
    row_recent.index_copy_(0, rows, torch.cat([row_recent[rows], tokens], 1).gather(1, index))


def relax(
    buffers: StaticBuffers, batch: Batch, processed: Processed, probs: Tensor, tokens: Tensor, accepted: Tensor, columns: Columns
) -> tuple[Tensor, Tensor]:
    """tokens [B, K + 1] and accepted [B] of rows with relaxed acceptance: a draft holds if it is one of the `relaxed_top_n` most probable
    legal tokens and at most `relaxed_delta` less probable than the first. Greedy rows only. Writes which drafts are not the target's."""
    count = batch.drafts.shape[1]
    top_n, delta = buffers.row_relaxed[batch.rows][..., None].unbind(1)  # [B, 1] each, 0: exact acceptance
    logits, best = processed.logits[:, :-1], columns.best(probs)[1][..., 0]
    weights = portable_exp(logits - columns.best(logits)[0])  # 1 for the most probable
    own = columns.pick(weights, batch.drafts.clamp(min=0)[..., None])
    above, total = columns.total(torch.stack([(weights > own).to(torch.int64), units(weights)], -2).sum(-1)).unbind(-1)  # [B, K] each
    near = (above < top_n) & ((1 - own[..., 0]) / from_units(total) <= delta) & (own[..., 0] > 0)
    holds = near & processed.finite[:, :-1] & may_accept(processed.status, batch.column(Column.DRAFT_COUNT))
    relaxed, held = top_n > 0, holds.to(torch.int64).cumprod(1)
    others = (held * (batch.drafts != best[:, :-1]) * relaxed) << torch.arange(count, device=held.device)
    ResultLayout(count).write(buffers.results[: len(batch.rows)], relaxed=others.sum(1))
    number = torch.where(relaxed[:, 0], held.sum(1), accepted)
    chosen = after_accepted(batch, number, best.gather(1, number[:, None]).expand_as(tokens))
    return torch.where(relaxed, chosen, tokens), number
