"""Sums over the ranks of a tensor-parallel model, as an operation that a tape records and replays."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.sampling.kernels.operation import operation

_GROUPS: list[dist.ProcessGroup] = []  # an operation's schema has numbers and tensors, so it names a group by its index here


def register_group(group: dist.ProcessGroup) -> int:
    """The number of a group in `sum_over_ranks`."""
    _GROUPS.append(group)
    return len(_GROUPS) - 1


def _no_outputs(states: Tensor, group: int) -> None:
    assert states.is_contiguous(), f"strides {states.stride()}"


@operation(_no_outputs, writes=("states",))
def sum_over_ranks(states: Tensor, group: int) -> None:
    """Replace `states` by its sum over the ranks of a group, added in the order of the ranks. Every rank calls it in the same order"""
    # Not all_reduce: the order of its additions depends on the position in the tensor, so the bits of a row would depend on the batch.
    parts = [torch.empty_like(states) for _ in range(_GROUPS[group].size())]
    _GROUPS[group].allgather([parts], [states]).wait()
    torch.add(parts[0], parts[1], out=states)
    for part in parts[2:]:
        states.add_(part)
