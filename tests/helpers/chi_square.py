"""Chi-square, in float64 and without scipy."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of counts under `probabilities`. Cells expected fewer than 5 times are merged; p is 0 if a count has
    probability 0."""
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
    """Half the likelihood-ratio chi-square of each row of counts [N, V], `sum(observed * log(observed / expected))`; infinite
    if a count has probability 0."""
    observed, share = counts.to(torch.float64), probabilities.to(torch.float64)
    expected = share / share.sum(-1, keepdim=True) * observed.sum(-1, keepdim=True)
    return torch.where(observed > 0, observed * (observed / expected).log(), 0.0).sum(-1)


def likelihood_ratio_bound(statistic: float, freedom: int) -> float:
    """An upper bound on the probability that correct counts reach this sum over rows, with `freedom` degrees of freedom in total.

    The bound of Agrawal (Finite-sample concentration of the multinomial in relative entropy, 2020): it holds for any counts,
    where the tails of Pearson's statistic are only right for large ones.
    """
    if statistic <= freedom:
        return 1.0
    if math.isinf(statistic):
        return 0.0
    return math.exp(freedom - statistic + (freedom * math.log(statistic / freedom) if freedom else 0.0))
