"""What a request asks of the logits before anything is drawn from them. Pure tensor functions, at every place of a round.

The order is vLLM's: logit_bias and bad tokens, min_new_tokens, then the repetition, frequency and presence penalties. A
grammar's mask may come before or after: what is minus infinity stays so. A place counts the drafts in front of it, as if
they had been emitted: it is only used where they hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.sampler import Param


class RowSettings(NamedTuple):
    """What B rows asked for, and what they have said so far. V is the target's vocabulary."""

    params: Tensor  # [B, len(Param)] float32
    bias_ids: Tensor  # [B, M] int64, distinct; the used ones first, then -1
    biases: Tensor  # [B, M] float32, minus infinity for a bad token, 0 where unused
    stop_ids: Tensor  # [B, S] int64, -1 where unused
    prompt_seen: Tensor  # [B, V] bool
    output_counts: Tensor  # [B, V] int32
    generated: Tensor  # [B] int64, tokens emitted so far


def process(logits: Tensor, rows: RowSettings, before: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Logits [B, Q, V] of the places first, first + 1, ... as float32, after everything but temperature and filters.

    before [B, N] int64: the drafts at the places from 0 on, -1 where there is none. ids: which of the target's tokens each
    logit stands for, where that is not its own place (a draft's own vocabulary).
    """
    places = torch.arange(first, first + logits.shape[1], device=logits.device)
    counts = _output_counts(rows.output_counts, before, places)
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
    early = (rows.generated[:, None] + places)[:, :, None] < least
    result = torch.where(early & stops[:, None], float("-inf"), result)
    said = counts > 0
    repeated = torch.where(result > 0, result / repetition, result * repetition)
    result = torch.where(said | prompt_seen[:, None], repeated, result)
    return result - frequency * counts - presence * said


def mark_dead_ends(status: Tensor, finite: Tensor, processed: Tensor) -> Tensor:
    """Status [B, Q], DEAD_END where a mask allows some token (finite [B, Q]) and the request's own bans leave none of them."""
    banned = finite & (processed.amax(-1) == float("-inf"))
    return torch.where(banned & (status == int(MaskStatus.OK)), int(MaskStatus.DEAD_END), status)


def log_probabilities(logits: Tensor, probs: Tensor, tokens: Tensor) -> Tensor:
    """[B, Q, 2] float32 of tokens [B, Q]: under the model's own logits [B, Q, V], and under what they were drawn from [B, Q, V]."""
    own = logits.to(torch.float32)
    chosen = tokens[..., None]
    raw = own.gather(2, chosen) - own.logsumexp(-1, keepdim=True)
    return torch.cat([raw, probs.gather(2, chosen).log()], 2)


def _output_counts(output_counts: Tensor, before: Tensor, places: Tensor) -> Tensor:
    """[B, Q, V] float32: how often each token was said before each place."""
    size, vocab = output_counts.shape
    index = torch.arange(before.shape[1], device=before.device)
    counted = (index < places[:, None]) & (before >= 0)[:, None]
    counts = output_counts[:, None].expand(size, len(places), vocab).to(torch.float32, copy=True)
    tokens = before.clamp(min=0)[:, None].expand(size, len(places), before.shape[1])
    return counts.scatter_add_(2, tokens, counted.to(torch.float32))


def _scattered(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """[B, width] float32: each value at its id. Unused places carry 0 and add it to id 0, which changes nothing."""
    dense = torch.zeros(len(ids), width, dtype=torch.float32, device=ids.device)
    return dense.scatter_add_(1, ids.clamp(min=0), values)
