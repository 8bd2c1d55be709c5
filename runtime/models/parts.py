"""What modules of several families are made of: weights without values, and functions that change products."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from stepgraph.graphs.layers.huge_pages import empty_in_huge_pages

Adapted = Callable[[str, Tensor, Tensor], Tensor]  # the name of a weight, its input and its product -> the result


def empty_weight(like: Tensor, *shape: int) -> nn.Parameter:
    """An uninitialised parameter with the dtype and device of `like`."""
    return nn.Parameter(empty_in_huge_pages(like, shape), requires_grad=False)
