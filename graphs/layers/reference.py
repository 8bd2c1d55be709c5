"""Operations of torch for references; on the CPU, a row has the same bits in any batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

PRODUCT_ROWS = 16  # of a matrix product on the CPU: MKL and oneDNN sum in an order that depends on the number of rows


def matrix_product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product, by blocks of rows. MKL also sums in another order with one column, and with rows that are not multiples of 16 bytes."""
    rows, columns, extra = len(states), len(weight), -states.shape[1] % 4
    if states.device.type == "cpu":
        states = functional.pad(states, (0, extra, 0, -rows % PRODUCT_ROWS))
        weight = functional.pad(weight, (0, extra)) if extra else weight
        if columns == 1:
            weight, bias = weight.expand(2, -1), None if bias is None else bias.expand(2)
        return torch.cat([functional.linear(part, weight, bias) for part in states.split(PRODUCT_ROWS)])[:rows, :columns]
    return functional.linear(states, weight, bias)


def sigmoid(values: Tensor) -> Tensor:
    """torch.sigmoid and silu round the last elements of a tensor differently."""
    return 1 / (1 + torch.exp(-values.clamp(min=-80.0)))  # the gradient of an infinite power would be NaN
