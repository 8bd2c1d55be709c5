"""One rank's part of a vocabulary: rows of the embedding and the head, and the operations on logits of these tokens.

Only logits processors of the user get the logits of all tokens. Otherwise the ranks exchange a value and a token for each position whose
maximum is needed, and histograms of weights for top-k and top-p, in which the smallest kept weight is found digit by digit. Every rank
reduces the same numbers in the same order, so the results have the same bits on all ranks, and those of one process, except for
log-probabilities.
"""

from __future__ import annotations

from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import embed_tokens
from stepgraph.graphs.layers.parallel import RankGroups, gather_over_ranks, sum_over_ranks
from stepgraph.sampling import bitmask, kernels
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import GrammarMask, Processed
from stepgraph.sampling.kernels.filters import race
from stepgraph.sampling.kernels.processors import RowSettings, ranked_log_probabilities, write_log_probabilities, write_ranked
from stepgraph.sampling.kernels.rejection import exact_rejection
from stepgraph.sampling.sampler import TokenWeights, VocabColumns, distribution, to_units

DIGIT_BITS, DIGITS = 10, 3  # of the bits of a weight from 0 to 1: weights have the order of their bits, and the bits of 1 are below 2**30
SamplingOps: TypeAlias = "VocabularyShard | ModuleType"  # the module: sampling.kernels


def rank_slice(total: int, rank: int, size: int) -> slice:
    """Which of `total` tokens a rank has."""
    return slice(total * rank // size, total * (rank + 1) // size)


class VocabularyShard(VocabColumns):
    """The functions of `sampling.kernels` that rounds use, as methods, over logits and probabilities [..., n] of these tokens.

    tokens: [n] int64, those of `rank_slice` as a buffer of the model. groups: of `size` ranks, which divide `total` tokens.
    Where an operation takes the `ids` of logits, they are these tokens, so the argument is None. row_probs, draft_probs [R, ..., all
    tokens] have zeros at the tokens of other ranks, or all values.
    """

    def __init__(self, tokens: Tensor, first: int, groups: RankGroups, size: int, total: int) -> None:
        self.tokens, self.first, self.groups, self.size, self.total_tokens = tokens, first, groups, size, total

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return len(self.tokens)

    def embed_tokens(self, tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, H] embeddings of any tokens [N], of which this rank's table has some."""
        index, is_local = self.local(tokens)
        states = torch.where(is_local[:, None], embed_tokens(index, table, dtype), 0)
        sum_over_ranks.out(states, self.groups.current)
        return states

    def ids(self, values: Tensor) -> Tensor:
        return self.tokens

    def part(self, values: Tensor) -> Tensor:
        return values[..., self.first : self.first + len(self.tokens)]

    def whole(self, values: Tensor) -> Tensor:
        widest = -(-self.total_tokens // self.size)
        (gathered,) = self._gather_ranks(torch.nn.functional.pad(values, (0, widest - values.shape[-1]))).unbind(1)
        parts = (rank_slice(self.total_tokens, rank, self.size) for rank in range(self.size))
        return torch.cat([each[..., : part.stop - part.start] for each, part in zip(gathered.unbind(), parts, strict=True)], -1)

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        index = tokens - self.first
        is_local = (index >= 0) & (index < len(self.tokens))
        return torch.where(is_local, index, 0), is_local

    def best(self, values: Tensor) -> tuple[Tensor, Tensor]:
        best, index = values.to(torch.float32).max(-1, keepdim=True)  # ids are exact in float32: `to_units` allows 2**22 tokens
        gathered, tokens = self._gather_ranks(best, self.tokens[index].to(torch.float32)).unbind(1)
        largest, rank = gathered.max(0, keepdim=True)  # the first of equal ones, whose token is lower
        return largest[0], tokens.gather(0, rank)[0].to(torch.int64)

    def ranked(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        best, index = super().ranked(values.to(torch.float32), count)
        tokens = self.tokens[index.clamp(max=len(self.tokens) - 1)]
        gathered, ids = self._gather_ranks(best, tokens.to(torch.float32)).movedim(0, -2).flatten(-2).unbind(0)  # [..., size * count] each
        largest, index = super().ranked(gathered, count)  # the first of equal ones, whose token is lower
        return largest, ids.gather(-1, index).to(torch.int64)

    def pick(self, values: Tensor, tokens: Tensor) -> Tensor:
        index, is_local = self.local(tokens)
        return self.total(torch.where(is_local, values.gather(-1, index), 0))

    def total(self, amounts: Tensor) -> Tensor:
        totals = amounts.contiguous()
        sum_over_ranks.out(totals, self.groups.current)
        return totals

    def logsumexp(self, values: Tensor) -> Tensor:
        return self._gather_ranks(values.logsumexp(-1, keepdim=True)).squeeze(1).logsumexp(0)

    def min_kept_weight(self, weighed: TokenWeights) -> Tensor:
        weights, top_k, top_p = weighed.weights, weighed.top_k, weighed.top_p
        least = self._largest_reaching(weights, torch.ones_like(weights, dtype=torch.int64), top_k.to(torch.float64))
        least = torch.maximum(torch.where(top_k > 0, least, 0.0), weighed.min_p)
        amounts = to_units(torch.where(weights >= least, weights, 0.0))
        enough = (top_p.to(torch.float64) * self.total(amounts.sum(-1, keepdim=True)).to(torch.float64)).clamp(min=1)  # top_p may be 0
        return torch.where(top_p < 1, torch.maximum(least, self._largest_reaching(weights, amounts, enough)), least)

    def most_probable(self, logits: Tensor, mask: GrammarMask | None, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if mask is not None:
            masks, rows, constrained, status = mask
            logits = bitmask.apply(logits, masks if rows is None else masks[rows], constrained, self.tokens, status)
        best, token = self.best(logits)
        return torch.isfinite(best[..., 0]), token[..., 0]

    def process(
        self,
        logits: Tensor,
        settings: RowSettings,
        rows: Tensor | None,
        earlier_drafts: Tensor,
        first: int = 0,
        mask: GrammarMask | None = None,
        *_: object,
    ) -> Processed:
        processed = kernels.process(logits, settings, rows, earlier_drafts, first, mask, self.tokens)
        status = torch.full_like(processed.status, int(MaskStatus.OK)) if mask is None else mask.status
        best, is_dead_end = self._gather_ranks(processed.logits.amax(-1), (processed.status != status).to(torch.float32)).unbind(1)
        largest = best.amax(0)
        banned = (largest == float("-inf")) & (is_dead_end.amax(0) > 0)  # a mask allows a token of some rank, and the request forbids it
        return Processed(processed.logits, torch.isfinite(largest), torch.where(banned, int(MaskStatus.DEAD_END), status))

    def distribution(self, logits: Tensor, params: Tensor) -> Tensor:
        return distribution(logits, params, self)

    def draw(
        self, logits: Tensor, params: Tensor, seed: Tensor, position: Tensor, purpose: int, rows: Tensor, row_probs: Tensor, *_: object
    ) -> Tensor:
        probs = distribution(logits, params, self)
        row_probs.index_put_((rows[:, None], self.tokens), probs)
        return race(probs, seed, position, purpose, self)

    def reject_sample(
        self, target_probs: Tensor, draft_probs: Tensor, rows: Tensor, certain: Tensor, finite: Tensor, drafts: Tensor, *others: Tensor
    ) -> tuple[Tensor, Tensor]:
        draft_count, status, seed, length = others
        return exact_rejection(target_probs, self.part(draft_probs)[rows], certain, finite, drafts, draft_count, status, seed, length, self)

    def log_probabilities(self, logits: Tensor, probs: Tensor, tokens: Tensor, found: Tensor) -> None:
        write_log_probabilities(logits, probs, tokens, found, self)

    def top_logprobs(
        self, logits: Tensor, probs: Tensor, rows: Tensor, params: Tensor, published: Tensor, ids_ring: Tensor, values_ring: Tensor
    ) -> None:
        values, ids = ranked_log_probabilities(logits, probs, ids_ring.shape[3] // 2, self)
        write_ranked.out(values, ids, rows, params, published, ids_ring, values_ring)

    def _gather_ranks(self, *values: Tensor) -> Tensor:
        """[size, len(values), ...] of all ranks."""
        stacked = torch.stack(values)
        gathered = stacked.new_empty(self.size, *stacked.shape)
        gather_over_ranks.out(stacked, gathered, self.groups.current)
        return gathered

    def _largest_reaching(self, weights: Tensor, amounts: Tensor, target: Tensor) -> Tensor:
        """[..., 1], the largest weight for which the amounts of this and all larger weights sum to `target`; 0 if none does."""
        bits = weights.view(torch.int32).to(torch.int64)
        digits_found = torch.zeros_like(target, dtype=torch.int64).expand(*weights.shape[:-1], 1)  # the digits that are found
        above = torch.zeros_like(digits_found)  # the amounts of the weights that are larger than any that begins with these digits
        for shift in range(DIGIT_BITS * (DIGITS - 1), -1, -DIGIT_BITS):
            counted = torch.where(bits >> (shift + DIGIT_BITS) == digits_found, amounts, 0)
            digits = (bits >> shift) & (2**DIGIT_BITS - 1)
            histogram = torch.zeros(*weights.shape[:-1], 2**DIGIT_BITS, dtype=torch.int64, device=weights.device)
            histogram = self.total(histogram.scatter_add_(-1, digits, counted))
            reached = above + histogram.flip(-1).cumsum(-1).flip(-1)  # with this digit or a larger one
            digit = ((reached.to(torch.float64) >= target).sum(-1, keepdim=True) - 1).clamp(min=0)
            above = reached.gather(-1, digit) - histogram.gather(-1, digit)
            digits_found = (digits_found << DIGIT_BITS) | digit
        return digits_found.to(torch.int32).view(torch.float32)
