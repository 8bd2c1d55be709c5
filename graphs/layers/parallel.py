"""Sums over the ranks of a tensor-parallel model, as an operation that a tape records and replays."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.sampling.kernels.operation import operation

# An operation's schema has numbers and tensors, so it names a group by its index here.
_GROUPS: list[tuple[dist.ProcessGroup, float]] = []


def register_group(group: dist.ProcessGroup, seconds: float) -> int:
    """The number of a group in `sum_over_ranks`, whose sums fail after `seconds`."""
    _GROUPS.append((group, seconds))
    return len(_GROUPS) - 1


def gather(group: dist.ProcessGroup, values: Tensor, seconds: float) -> list[Tensor]:
    """`values` of every rank of a group. RuntimeError if a rank is lost, or does not call it in time."""
    from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # some builds of torch are without it

    options, found = AllgatherOptions(), [torch.empty_like(values) for _ in range(group.size())]
    options.timeout = datetime.timedelta(seconds=seconds)
    group.allgather([found], [values], options).wait()
    return found


def _no_outputs(states: Tensor, *_: object) -> None:
    assert states.is_contiguous(), f"strides {states.stride()}"


@operation(_no_outputs, writes=("states",))
def sum_over_ranks(states: Tensor, group: int) -> None:
    """Replace `states` by its sum over the ranks of a group, added in the order of the ranks. Every rank calls it in the same order"""
    # Not all_reduce: the order of its additions depends on the position in the tensor, so the bits of a row would depend on the batch.
    processes, seconds = _GROUPS[group]
    first, second, *others = gather(processes, states, seconds)
    torch.add(first, second, out=states)
    for part in others:
        states.add_(part)


@operation(_no_outputs, writes=("found",))
def gather_over_ranks(values: Tensor, found: Tensor, group: int) -> None:
    """Write `values` of every rank of a group to `found` [size, ...], in the order of the ranks. Every rank calls it in the same order"""
    processes, seconds = _GROUPS[group]
    found.copy_(torch.stack(gather(processes, values, seconds)))
