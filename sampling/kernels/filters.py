"""Temperature, min-p, top-k and top-p: the distribution that a request asks for, and a token drawn from it in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import rng, sampler
from stepgraph.sampling.kernels.choice import race_reference
from stepgraph.sampling.kernels.filter_choice import programs_for
from stepgraph.sampling.kernels.operation import contiguous, dense, operation


def distribution(logits: Tensor, params: Tensor) -> Tensor:
    """sampler.distribution of logits [B, Q, V], of any float type and strides, and params [B, 4 or more] float32 -> [B, Q, V]."""
    assert logits.dim() == 3 and params.dtype is torch.float32, f"logits {logits.shape}, params {params.dtype}"
    assert params.shape[0] == logits.shape[0] and params.shape[1] > sampler.Param.MIN_P, f"logits {logits.shape}, params {params.shape}"
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    distribution_operation(dense(logits), dense(params), probs)
    return probs


def draw(
    logits: Tensor,
    params: Tensor,
    seed: Tensor,
    position: Tensor,
    purpose: rng.Purpose,
    ids: Tensor | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """sampler.distribution of logits [N, V], and choice.race over it: probabilities [N, width] float32 and tokens [N] int64.

    With `ids` [V] int64 the logits stand for those tokens of a vocabulary of `width`: probabilities land at their places, zeros
    elsewhere, and each token races with the noise of its id there. Without a finite best logit the token is 0.
    """
    assert logits.dim() == 2 and params.dtype is torch.float32, f"logits {logits.shape}, params {params.dtype}"
    assert params.shape[0] == logits.shape[0] and params.shape[1] > sampler.Param.MIN_P, f"logits {logits.shape}, params {params.shape}"
    assert (ids is None) == (width is None), "ids and width belong together"
    probs = torch.empty(logits.shape[0], width or logits.shape[1], dtype=torch.float32, device=logits.device)
    token = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    draw_operation(dense(logits), dense(params), seed.contiguous(), position.contiguous(), int(purpose), contiguous(ids), probs, token)
    return probs, token


def distribution_reference(logits: Tensor, params: Tensor, probs: Tensor) -> None:
    probs.copy_(sampler.distribution(logits, params))


def draw_reference(
    logits: Tensor, params: Tensor, seed: Tensor, position: Tensor, purpose: int, ids: Tensor | None, probs: Tensor, token: Tensor
) -> None:
    if ids is None:
        probs.copy_(sampler.distribution(logits, params))
    else:
        probs.zero_().index_copy_(1, ids, sampler.distribution(logits, params))
    race_reference(probs, seed, position, purpose, token)


distribution_operation = operation(
    programs_for, "distribution", "(Tensor logits, Tensor params, Tensor(a!) probs) -> ()", distribution_reference
)
draw_operation = operation(
    programs_for,
    "draw",
    "(Tensor logits, Tensor params, Tensor seed, Tensor position, int purpose, Tensor? ids, Tensor(a!) probs, Tensor(b!) token) -> ()",
    draw_reference,
)
