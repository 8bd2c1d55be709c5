"""Temperature, min-p, top-k and top-p: the distribution that a request asks for, and a token drawn from it in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling import rng, sampler
from stepgraph.sampling.kernels.filter_choice import FLASHINFER, filter_module
from stepgraph.sampling.kernels.operation import Dense, DenseFloats, Longs, operation
from stepgraph.sampling.sampler import Columns


def _race_outputs(weights: Tensor, *_: object) -> Tensor:
    assert weights.dim() == 2 and weights.dtype is torch.float32, f"weights {weights.dtype} {weights.shape}"
    return torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)


@operation(_race_outputs, triton=True, c=True)
def race(weights: Dense, seed: Longs, position: Longs, purpose: int) -> Tensor:
    """sampler.race with the noise rng.exponential(seed, position, purpose, token), which is never stored.

    weights [N, V] float32; seed, position [N] int64; purpose: an rng.Purpose. Returns [N] int64.
    """
    return drawn(weights, seed, position, purpose)


def drawn(weights: Tensor, seed: Tensor, position: Tensor, purpose: int, columns: Columns = sampler.ALL) -> Tensor:
    """`race` over these columns."""
    noise = rng.exponential(seed[:, None], position[:, None], rng.Purpose(purpose), columns.ids(weights))
    return sampler.race(weights, noise, columns)


def _check(logits: Tensor, params: Tensor) -> None:
    assert params.dtype is torch.float32, f"params {params.dtype}"
    assert params.shape[0] == logits.shape[0] and params.shape[1] > sampler.Param.MIN_P, f"logits {logits.shape}, params {params.shape}"


def _distribution_outputs(logits: Tensor, params: Tensor) -> Tensor:
    assert logits.dim() == 3, f"logits {logits.shape}"
    _check(logits, params)
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@operation(_distribution_outputs, triton=filter_module, flashinfer=FLASHINFER, c=True, takes=lambda logits, _: logits.shape[-1] > 0)
def distribution(logits: DenseFloats, params: Dense) -> Tensor:
    """sampler.distribution of logits [B, Q, V], of any float type, and params [B, 4 or more] float32 -> [B, Q, V] float32."""
    return sampler.distribution(logits, params)


def _draw_outputs(
    logits: Tensor, params: Tensor, seed: Tensor, position: Tensor, purpose: int, rows: Tensor, row_probs: Tensor, ids: Tensor | None
) -> Tensor:
    assert logits.dim() == 2, f"logits {logits.shape}"
    _check(logits, params)
    width = row_probs.shape[1]
    assert row_probs.dtype is torch.float32 and row_probs.stride(1) == 1, f"row_probs {row_probs.dtype}, strides {row_probs.stride()}"
    assert logits.shape[1] == (width if ids is None else len(ids)) <= width, f"logits {logits.shape}, row_probs {row_probs.shape}"
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


def _c_draws(logits: Tensor, params: Tensor, *others: Any) -> bool:
    ids = others[-1]
    return logits.shape[-1] > 0 and (ids is None or bool((ids[:1] >= 0).all() and (ids.diff() > 0).all()))  # scattered in place


@operation(_draw_outputs, writes=("row_probs",), triton=filter_module, flashinfer=FLASHINFER, c=True, takes=_c_draws)
def draw(
    logits: DenseFloats,
    params: Dense,
    seed: Longs,
    position: Longs,
    purpose: int,
    rows: Longs,
    row_probs: Tensor,
    ids: Longs | None = None,
) -> Tensor:
    """sampler.distribution of logits [N, V], written to the rows of row_probs [R, W] float32, and `race` over it: tokens [N] int64.

    rows [N] int64. With `ids` [V] int64 the logits belong to those tokens of a vocabulary of W: probabilities are written at these
    ids, the other columns have to be zeros already, and each token races with the noise of its id. Without a finite best logit the
    token is 0.
    """
    probs = sampler.distribution(logits, params)
    if ids is None:
        row_probs.index_copy_(0, rows, probs)
    else:
        row_probs.index_put_((rows[:, None], ids), probs)
        probs = torch.zeros(len(logits), row_probs.shape[1], device=logits.device).index_copy_(1, ids, probs)
    return race.reference(probs, seed, position, purpose)
