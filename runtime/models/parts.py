"""What modules of several families are made of: weights without values, and functions that change products."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

Adapted = Callable[[str, Tensor, Tensor], Tensor]  # the name of a weight, its input and its product -> the result


def empty_weight(like: Tensor, *shape: int) -> nn.Parameter:
    """An uninitialised parameter with the dtype and device of `like`."""
    return nn.Parameter(like.new_empty(shape), requires_grad=False)
