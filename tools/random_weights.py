"""Random weights for tests and measurements."""

from __future__ import annotations

from typing import TypeVar

import torch

from stepgraph.runtime.models.llama import LlamaBase
from stepgraph.runtime.models.mtp import Mtp

Model = TypeVar("Model", bound=LlamaBase)


@torch.no_grad()
def randomised(model: Model, seed: int = 0, scale: float = 1.0) -> Model:
    """The model, with random weights except for the target's in MTP modules.

    A matrix product keeps the magnitude of its input, times `scale`.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in (model.depths if isinstance(model, Mtp) else model).parameters():
        spread = scale * parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
        values = torch.randn(parameter.shape, generator=generator) * spread + float(parameter.dim() == 1)
        parameter.copy_(values)
    return model
