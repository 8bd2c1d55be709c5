"""Temperature, min-p, top-k and top-p: the distribution that a request asks for, and a token drawn from it in the same pass."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.sampling import rng, sampler
from stepgraph.sampling.kernels.filter_choice import FLASHINFER, filter_module
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation


def _race_outputs(weights: Tensor, *_: object) -> Tensor:
    assert weights.dim() == 2 and weights.dtype is torch.float32, f"weights {weights.dtype} {weights.shape}"
    return torch.empty(weights.shape[0], dtype=torch.int64, device=weights.device)


@operation(_race_outputs, triton=True)
def race(weights: Dense, seed: Contiguous, position: Contiguous, purpose: int) -> Tensor:
    """sampler.race with the noise rng.exponential(seed, position, purpose, token), which is never stored.

    weights [N, V] float32; seed, position [N] int64; purpose: an rng.Purpose. Returns [N] int64.
    """
    vocabulary = torch.arange(weights.shape[1], device=weights.device)
    return sampler.race(weights, rng.exponential(seed[:, None], position[:, None], rng.Purpose(purpose), vocabulary))


def _check(logits: Tensor, params: Tensor) -> None:
    assert params.dtype is torch.float32, f"params {params.dtype}"
    assert params.shape[0] == logits.shape[0] and params.shape[1] > sampler.Param.MIN_P, f"logits {logits.shape}, params {params.shape}"


def _distribution_outputs(logits: Tensor, params: Tensor) -> Tensor:
    assert logits.dim() == 3, f"logits {logits.shape}"
    _check(logits, params)
    return torch.empty(logits.shape, dtype=torch.float32, device=logits.device)


@operation(_distribution_outputs, triton=filter_module, flashinfer=FLASHINFER)
def distribution(logits: Dense, params: Dense) -> Tensor:
    """sampler.distribution of logits [B, Q, V], of any float type, and params [B, 4 or more] float32 -> [B, Q, V] float32."""
    return sampler.distribution(logits, params)


def _draw_outputs(
    logits: Tensor, params: Tensor, seed: Tensor, position: Tensor, purpose: int, ids: Tensor | None, width: int | None
) -> tuple[Tensor, Tensor]:
    assert logits.dim() == 2, f"logits {logits.shape}"
    assert (ids is None) == (width is None), "ids and width belong together"
    _check(logits, params)
    probs = torch.empty(logits.shape[0], width or logits.shape[1], dtype=torch.float32, device=logits.device)
    return probs, torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


@operation(_draw_outputs, triton=filter_module, flashinfer=FLASHINFER)
def draw(
    logits: Dense,
    params: Dense,
    seed: Contiguous,
    position: Contiguous,
    purpose: int,
    ids: Contiguous | None = None,
    width: int | None = None,
) -> tuple[Tensor, Tensor]:
    """sampler.distribution of logits [N, V], and `race` over it: probabilities [N, width] float32 and tokens [N] int64.

    With `ids` [V] int64 the logits belong to those tokens of a vocabulary of `width`: probabilities are written at these ids, zeros
    elsewhere, and each token races with the noise of its id. Without a finite best logit the token is 0.
    """
    probs = sampler.distribution(logits, params)
    if ids is not None and width is not None:
        probs = torch.zeros(len(logits), width, device=logits.device).index_copy_(1, ids, probs)
    return probs, race.reference(probs, seed, position, purpose)
