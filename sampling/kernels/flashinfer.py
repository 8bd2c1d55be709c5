"""The filters by FlashInfer, which decides which weights are kept; they are normalised here. Imported only where it was chosen.

Every argument passed to it is a device tensor: a number would be baked into the graph. Rows without a finite logit are passed as
zeros, because NaN makes its top-p search endless. Its top-k keeps a scratch buffer per device, allocated at the first call: the probe
before every choice makes that call before anything is captured.
"""

from __future__ import annotations

from typing import Any

import flashinfer.sampling
import torch
from torch import Tensor

from stepgraph.sampling import sampler
from stepgraph.sampling.kernels.filters import race


def distribution(logits: Tensor, params: Tensor, probs: Tensor) -> None:
    batch, positions, width = logits.shape
    position_params = params[:, None].expand(batch, positions, params.shape[1]).reshape(batch * positions, -1)
    weighed = sampler.token_weights(logits.reshape(batch * positions, width), position_params)
    weights, top_k, top_p = weighed.weights, weighed.top_k.squeeze(1), weighed.top_p.squeeze(1)
    top_k_or_all = torch.where((top_k > 0) & (top_k < width), top_k, width).to(torch.int32)
    top_k_weights = flashinfer.sampling.top_k_mask_logits(weights, top_k_or_all)  # minus infinity for weights that are dropped
    kept = torch.where((top_k_weights >= 0) & (weights >= weighed.min_p), weights, 0.0)
    normalised = kept / sampler.from_units(sampler.to_units(kept).sum(-1, keepdim=True)).clamp(min=1.0)
    top_p_or_all = torch.where(weighed.alive.squeeze(1), top_p, 1.0)
    in_top_p = flashinfer.sampling.top_p_renorm_probs(normalised, top_p_or_all) > 0
    kept = torch.where(in_top_p | (weighed.top_p >= 1), kept, 0.0)
    probs.copy_(sampler.normalised(weighed, kept).view(probs.shape))


def draw(logits: Tensor, params: Tensor, *others: Any) -> None:
    seed, position, purpose, rows, row_probs, ids, token = others
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    distribution(logits[:, None], params, probs[:, None])
    if ids is not None:
        probs = torch.zeros(len(logits), row_probs.shape[1], device=logits.device).index_copy_(1, ids, probs)
    row_probs.index_copy_(0, rows, probs)
    token.copy_(race(probs, seed, position, purpose))
