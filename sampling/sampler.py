"""Masked logits to the distribution of a request, and a distribution to a token. Pure tensor functions.

The order is vLLM's: temperature, min-p, top-k, top-p. One threshold on the weights decides which tokens are kept, so equal weights are
kept or dropped together. Weights are computed with operations that every device rounds alike, and summed as integers: the result
depends neither on the device, nor on the order of a sum, nor on the rest of the batch. A row with temperature 0 is greedy: its
distribution is one token, the lowest id among the most probable.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

UNIT_BITS = 40  # a weight of 1 is 2**40 units; 2**22 of them fit an int64
MIN_LOG_WEIGHT = -86.0  # a weight with a smaller logarithm is 0; it would be less than 5e-38
LOG2_E = math.log2(math.e)
LN2_HEAD = 0.693359375  # nine bits: its product with any exponent is exact
LN2_TAIL = math.log(2) - LN2_HEAD
# (exp(r) - 1 - r) / r**2 for |r| <= log(2) / 2, fitted at Chebyshev's points, each coefficient a float32.
EXP_COEFFICIENTS = (0.5, 0.16666576266288757, 0.04166646674275398, 0.008363181725144386, 0.0013933652080595493)


class Param(IntEnum):
    """Columns of a row's sampling parameters, float32."""

    TEMPERATURE = 0
    TOP_K = 1  # 0: all tokens
    TOP_P = 2
    MIN_P = 3
    REPETITION_PENALTY = 4  # this and the following: processors.py
    PRESENCE_PENALTY = 5
    FREQUENCY_PENALTY = 6
    MIN_NEW_TOKENS = 7
    TOP_LOGPROBS = 8


class TokenWeights(NamedTuple):
    """Logits [B, ..., V] as weights, and the settings of their rows, [B, ..., 1] each."""

    weights: Tensor  # [B, ..., V] float32, 1 for the most probable token; zeros in a row whose largest logit is not finite
    most_probable: Tensor  # int64, the lowest id among the most probable
    alive: Tensor  # bool: the largest logit is finite
    greedy: Tensor  # bool
    top_k: Tensor  # float32, 0 or less: all tokens
    top_p: Tensor
    min_p: Tensor


class VocabColumns:
    """The tokens of the last dimension of tensors [..., V]: here the whole vocabulary. A subclass may have a part of it."""

    def ids(self, values: Tensor) -> Tensor:
        """[V] int64: the token of each column of `values` [..., V]."""
        return torch.arange(values.shape[-1], device=values.device)

    def part(self, values: Tensor) -> Tensor:
        """The values of these columns, of values [..., all tokens]."""
        return values

    def whole(self, values: Tensor) -> Tensor:
        """Values [..., all tokens] from values [..., these columns]."""
        return values

    def local(self, tokens: Tensor) -> tuple[Tensor, Tensor | bool]:
        """The column of each token, and whether it is one of these columns; the column is 0 if not."""
        return tokens, True

    def best(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value over all tokens, and the lowest id that has it, [..., 1] each."""
        best, token = values.max(-1, keepdim=True)
        return best, token

    def ranked(self, values: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The largest values over all tokens and their ids, [..., count] each; lower ids first among equals; padded with minus infinity."""
        padded = torch.nn.functional.pad(values, (0, max(0, count - values.shape[-1])), value=float("-inf"))
        least, ids = padded.topk(count).values[..., -1:], torch.arange(padded.shape[-1], dtype=torch.int32, device=values.device)
        # topk takes any of equal values; a stable sort of all takes several times as long.
        order = torch.where(padded == least, ids, padded.shape[-1]).masked_fill(padded > least, -1)
        tokens = order.topk(count, largest=False).indices.sort().values
        ordered = padded.gather(-1, tokens).sort(stable=True, dim=-1, descending=True)
        return ordered.values, tokens.gather(-1, ordered.indices)

    def pick(self, values: Tensor, tokens: Tensor) -> Tensor:
        """[..., N] values of tokens [..., N]."""
        return values.gather(-1, tokens)

    def total(self, amounts: Tensor) -> Tensor:
        """Sums over all tokens, from sums over these columns."""
        return amounts

    def logsumexp(self, values: Tensor) -> Tensor:
        return values.logsumexp(-1, keepdim=True)

    def min_kept_weight(self, weighed: TokenWeights) -> Tensor:
        """[B, ..., 1]: the smallest weight that is kept."""
        weights, top_k, top_p = weighed.weights, weighed.top_k, weighed.top_p
        ordered, final = weights.sort(-1, descending=True).values, weights.shape[-1] - 1
        last = (top_k.to(torch.int64) - 1).clamp(0, final)
        least = torch.where(top_k > 0, ordered.gather(-1, last.expand(*weights.shape[:-1], 1)), 0.0)
        least = torch.maximum(least, weighed.min_p)
        running = to_units(torch.where(ordered >= least, ordered, 0.0)).cumsum(-1)
        enough = top_p.to(torch.float64) * running[..., -1:].to(torch.float64)
        short = (running.to(torch.float64) < enough).sum(-1, keepdim=True).clamp(max=final)  # tokens before the one that reaches top_p
        return torch.where(top_p < 1, torch.maximum(least, ordered.gather(-1, short)), least)


ALL_COLUMNS = VocabColumns()


def distribution(logits: Tensor, params: Tensor, columns: VocabColumns = ALL_COLUMNS) -> Tensor:
    """Probabilities [B, ..., V] float32 of masked logits [B, ..., V] under params [B, 4 or more], columns as in Param.

    All zeros if the largest logit of the row is not finite: no token can be drawn then.
    """
    weighed = token_weights(logits, params, columns)
    return normalised(weighed, torch.where(weighed.weights >= columns.min_kept_weight(weighed), weighed.weights, 0.0), columns)


def token_weights(logits: Tensor, params: Tensor, columns: VocabColumns = ALL_COLUMNS) -> TokenWeights:
    shape = (-1, *[1] * (logits.dim() - 1))
    temperature, top_k, top_p, min_p = (params[:, column].view(shape) for column in range(Param.MIN_P + 1))
    greedy = temperature <= 0
    values = logits.to(torch.float32)
    best, most_probable = columns.best(values)
    alive = torch.isfinite(best)
    scaled = (values - best) / torch.where(greedy, 1.0, temperature)  # subtract first: a quotient of a logit may be infinite
    return TokenWeights(torch.where(alive, portable_exp(scaled), 0.0), most_probable, alive, greedy, top_k, top_p, min_p)


def normalised(weighed: TokenWeights, kept: Tensor, columns: VocabColumns = ALL_COLUMNS) -> Tensor:
    """Probabilities [B, ..., V] of the kept weights, zeros elsewhere; in a greedy row 1 for the most probable token."""
    probabilities = kept / from_units(columns.total(to_units(kept).sum(-1, keepdim=True)))
    probabilities = torch.where(weighed.greedy, (columns.ids(kept) == weighed.most_probable).to(torch.float32), probabilities)
    return torch.where(weighed.alive, probabilities, 0.0)


def portable_exp(values: Tensor) -> Tensor:
    """exp of float32 values <= 0, within 1.1 ulp, 0 below MIN_LOG_WEIGHT. The same bits on every device."""
    bounded = values.clamp(min=MIN_LOG_WEIGHT)
    power = torch.floor(bounded * LOG2_E + 0.5)
    rest = (bounded - power * LN2_HEAD) - power * LN2_TAIL
    series = torch.full_like(rest, EXP_COEFFICIENTS[-1])
    for coefficient in EXP_COEFFICIENTS[-2::-1]:
        series = series * rest + coefficient
    scale = ((power.to(torch.int32) + 127) << 23).view(torch.float32)
    return torch.where(values < MIN_LOG_WEIGHT, 0.0, (series * rest * rest + rest + 1.0) * scale)


def to_units(weights: Tensor) -> Tensor:
    """Weights up to 1 as integers, rounded down, whose sums are exact in any order."""
    return (weights * 2.0**UNIT_BITS).to(torch.int64)


def from_units(total: Tensor) -> Tensor:
    """A sum of units as float32, rounded once."""
    return total.to(torch.float32) * 2.0**-UNIT_BITS
