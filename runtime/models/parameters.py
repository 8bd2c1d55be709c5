"""Parameters of models: uninitialised ones, which a loader fills, and random values for tests and measurements."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, scale: float = 1.0) -> None:
    """Random weights. A matrix product keeps the magnitude of its input, times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        spread = scale * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        values = torch.randn(parameter.shape, generator=generator) * spread + float(parameter.dim() == 1)
        parameter.copy_(values)


def empty_weight(like: Tensor, *shape: int) -> nn.Parameter:
    """An uninitialised parameter with the dtype and device of `like`."""
    return nn.Parameter(like.new_empty(shape), requires_grad=False)
