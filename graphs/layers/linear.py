"""Products and embeddings with weights that are plain or packed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from stepgraph.graphs.layers.dense import product
from stepgraph.graphs.layers.quantised import quantised_product, quantised_rows


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product`, or `quantised_product` with packed weights."""
    return (quantised_product if weight.dtype is torch.uint8 else product)(states, weight, bias)


def lookup(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the embedding, [N, in]; `dtype` if it is packed."""
    return quantised_rows(tokens, weight, dtype) if weight.dtype is torch.uint8 else functional.embedding(tokens, weight)
