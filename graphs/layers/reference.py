"""Operations of torch for references; on the CPU, a row has the same bits in any batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIN_PRODUCT_ROWS = 16  # in a matrix product on the CPU: with fewer rows, MKL and oneDNN sum in another order, on some processors


def matrix_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`. MKL also sums in another order with one column, and with rows that are not multiples of 16 bytes."""
    rows, columns, extra = len(states), len(weight), -states.shape[1] % 4
    if states.device.type == "cpu":
        if extra or rows < MIN_PRODUCT_ROWS:
            states, weight = functional.pad(states, (0, extra, 0, max(0, MIN_PRODUCT_ROWS - rows))), functional.pad(weight, (0, extra))
        if columns == 1:
            weight, bias = weight.expand(2, -1), None if bias is None else bias.expand(2)
    return functional.linear(states, weight, bias)[:rows, :columns]


def sigmoid(values: Tensor) -> Tensor:
    """torch.sigmoid and silu round the last elements of a tensor differently."""
    return 1 / (1 + torch.exp(-values.clamp(min=-80.0)))  # the gradient of an infinite power would be NaN
