"""Chi-square, in float64 and without scipy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """How likely counts at least this odd are under `probabilities`. Cells expected fewer than 5 times are put together;
    a count where the probability is 0 is impossible: p = 0."""
    observed, share = counts.to(torch.float64), probabilities.to(torch.float64)
    if bool((observed[share <= 0] > 0).any()):
        return 0.0
    expected = share / share.sum() * observed.sum()
    rare = expected < 5
    cells = [(float(o), float(e)) for o, e, r in zip(observed, expected, rare, strict=True) if not r]
    if bool(rare.any()) and float(expected[rare].sum()) > 1:
        cells.append((float(observed[rare].sum()), float(expected[rare].sum())))
    if len(cells) < 2:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return float(
        torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), torch.tensor(statistic / 2, dtype=torch.float64))
    )


def likelihood_ratio(counts: Tensor, probabilities: Tensor) -> Tensor:
    """Of every row of counts [N, V] half the likelihood-ratio chi-square, `sum(observed * log(observed / expected))`; infinite
    where something impossible was counted."""
    observed, share = counts.to(torch.float64), probabilities.to(torch.float64)
    expected = share / share.sum(-1, keepdim=True) * observed.sum(-1, keepdim=True)
    return torch.where(observed > 0, observed * (observed / expected).log(), 0.0).sum(-1)


def likelihood_ratio_bound(statistic: float, freedom: int) -> float:
    """No less than the probability that right counts give this statistic or more, summed over rows of `freedom` in all.

    The bound of Agrawal (Finite-sample concentration of the multinomial in relative entropy, 2020): it holds for any counts,
    where the tails of Pearson's statistic are only right for large ones.
    """
    if statistic <= freedom:
        return 1.0
    if math.isinf(statistic):
        return 0.0
    return math.exp(freedom - statistic + (freedom * math.log(statistic / freedom) if freedom else 0.0))
