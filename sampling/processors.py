"""Logit processors: biases, bans and penalties of a request, at every position of a round. Pure tensor functions.

The order is vLLM's: logit_bias and bad tokens, min_new_tokens, then the repetition, frequency and presence penalties. A grammar's
mask may be applied before or after: minus infinity stays minus infinity. A position counts the drafts before it as if they had been
emitted, because its logits are only used if they are accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.sampler import Param


class RowSettings(NamedTuple):
    """Settings and histories of B rows. V is the target's vocabulary."""

    params: Tensor  # [B, len(Param)] float32
    bias_ids: Tensor  # [B, M] int64, distinct; the used ones first, then -1
    biases: Tensor  # [B, M] float32, minus infinity for a bad token, 0 where unused
    stop_ids: Tensor  # [B, S] int64, -1 where unused
    prompt_seen: Tensor  # [B, V] bool
    output_counts: Tensor  # [B, V] int32
    generated: Tensor  # [B] int64, tokens emitted so far


def process(logits: Tensor, rows: RowSettings, before: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Logits [B, Q, V] of the positions first, first + 1, ... as float32, after everything except temperature and filters.

    before [B, N] int64: the drafts at the positions from 0 on, -1 where there is none. ids [V]: the target's token of each logit, for
    a draft with a vocabulary of its own; None: its index.
    """
    positions = torch.arange(first, first + logits.shape[1], device=logits.device)
    counts = _output_counts(rows.output_counts, before, positions)
    bias = _scattered(rows.biases, rows.bias_ids, rows.prompt_seen.shape[1])
    stops = _scattered((rows.stop_ids >= 0).to(torch.float32), rows.stop_ids, rows.prompt_seen.shape[1]) > 0
    prompt_seen = rows.prompt_seen
    if ids is not None:
        counts, bias, stops, prompt_seen = counts[..., ids], bias[:, ids], stops[:, ids], prompt_seen[:, ids]
    repetition, presence, frequency, least = (
        rows.params[:, column, None, None]
        for column in (Param.REPETITION_PENALTY, Param.PRESENCE_PENALTY, Param.FREQUENCY_PENALTY, Param.MIN_NEW_TOKENS)
    )
    result = logits.to(torch.float32) + bias[:, None]
    early = (rows.generated[:, None] + positions)[:, :, None] < least
    result = torch.where(early & stops[:, None], float("-inf"), result)
    emitted = counts > 0
    repeated = torch.where(result > 0, result / repetition, result * repetition)
    result = torch.where(emitted | prompt_seen[:, None], repeated, result)
    return result - frequency * counts - presence * emitted


def mark_dead_ends(status: Tensor, finite: Tensor, processed: Tensor) -> Tensor:
    """Status [B, Q], DEAD_END where a mask allows some token (finite [B, Q]) and the request's own bans forbid all of them."""
    banned = finite & (processed.amax(-1) == float("-inf"))
    return torch.where(banned & (status == int(MaskStatus.OK)), int(MaskStatus.DEAD_END), status)


def log_probabilities(logits: Tensor, probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, Q, 2] float32 of tokens [B, Q]: under the model's logits [B, Q, V], and under `probs` [B, Q, V]."""
    own = logits.to(torch.float32)
    chosen = tokens[..., None]
    raw = own.gather(2, chosen) - own.logsumexp(-1, keepdim=True)
    return torch.cat([raw, probs.gather(2, chosen).log()], 2)


def _output_counts(output_counts: Tensor, before: Tensor, positions: Tensor) -> Tensor:
    """[B, Q, V] float32: occurrences of each token before each position."""
    size, vocab = output_counts.shape
    index = torch.arange(before.shape[1], device=before.device)
    counted = (index < positions[:, None]) & (before >= 0)[:, None]
    counts = output_counts[:, None].expand(size, len(positions), vocab).to(torch.float32, copy=True)
    tokens = before.clamp(min=0)[:, None].expand(size, len(positions), before.shape[1])
    return counts.scatter_add_(2, tokens, counted.to(torch.float32))


def _scattered(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """[B, width] float32: each value at its id. Unused entries add 0 to id 0."""
    dense = torch.zeros(len(ids), width, dtype=torch.float32, device=ids.device)
    return dense.scatter_add_(1, ids.clamp(min=0), values)
