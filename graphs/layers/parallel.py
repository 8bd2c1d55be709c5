"""Sums over the ranks of a tensor-parallel model, as an operation that a tape records and replays, and CUDA captures."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.graphs.backends import EagerContext
from stepgraph.graphs.context import current_context
from stepgraph.graphs.layers.dense import Residual
from stepgraph.sampling.kernels.operation import operation

_INDICES = itertools.count()


class GatherSum:
    """Sums over a group, added in the order of the ranks. Other implementations: rank_sums.py."""

    # add_rms_norm of states [N, H], the sum of all parts, weight and epsilon, in one kernel; None: not supported
    fused_add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Residual] | None = None

    def __init__(self, group: dist.ProcessGroup, seconds: float, *_: object) -> None:
        self.group, self.seconds = group, seconds

    def add(self, states: Tensor) -> None:
        """Replace `states` by its sum over the ranks."""
        # Not all_reduce: the order of its additions depends on the position in the tensor, so the bits of a row would depend on the batch.
        first, second, *others = gather(self.group, states, self.seconds).unbind()
        torch.add(first, second, out=states)
        for part in others:
            states.add_(part)


# An operation's schema has numbers and tensors, so it names a group, and the implementation of its sums, by an index.
_GROUPS: dict[int, GatherSum] = {}


@dataclass(frozen=True)
class RankGroups:
    """The indices of two groups of the same ranks. NCCL orders the work of a group by the calls of the host, and the launch of a graph is
    one call, so work that is not in a graph has a communicator of its own."""

    graph: int  # for steps that are recorded, also for their warm-ups
    eager: int

    @property
    def current(self) -> int:
        """The group of the step that this thread runs or records."""
        try:
            return self.eager if isinstance(current_context(), EagerContext) else self.graph
        except RuntimeError:  # outside of a step, such as a chunk of a prompt
            return self.eager

    @property
    def members(self) -> tuple[GatherSum, GatherSum]:
        return _GROUPS[self.graph], _GROUPS[self.eager]

    @property
    def sums(self) -> GatherSum:
        """The implementation of sums in the current group."""
        return _GROUPS[self.current]


def set_sums(groups: RankGroups, sums: Sequence[GatherSum]) -> None:
    """sums: the implementations for recorded steps and for other work."""
    _GROUPS[groups.graph], _GROUPS[groups.eager] = sums


def register_group(group: dist.ProcessGroup, seconds: float) -> int:
    """Register a group whose sums fail after `seconds`. Returns its index for `sum_over_ranks`."""
    index = next(_INDICES)
    _GROUPS[index] = GatherSum(group, seconds)
    return index


def forget_groups(groups: RankGroups) -> None:
    """Free the threads and descriptors of these groups."""
    for index in (groups.graph, groups.eager):
        _GROUPS.pop(index, None)


def gather(group: dist.ProcessGroup, values: Tensor, seconds: float) -> Tensor:
    """[size, ...]: `values` of every rank of a group. RuntimeError if a rank is lost, or does not call it in time."""
    from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # some builds of torch are without it

    options, gathered = AllgatherOptions(), values.new_empty(group.size() * values.numel())
    options.timeout = datetime.timedelta(seconds=seconds)
    options.asyncOp = False  # on a GPU: on the current stream, not on one of the group
    work = group._allgather_base(gathered, values.flatten(), options)
    if work is not None:
        work.wait()
    return gathered.view(group.size(), *values.shape)


def all_reduce(group: dist.ProcessGroup, states: Tensor, seconds: float) -> None:
    """Replace `states` by its sum over a group, added in an order that the library chooses."""
    from torch.distributed.distributed_c10d import AllreduceOptions

    options = AllreduceOptions()
    options.timeout, options.asyncOp = datetime.timedelta(seconds=seconds), False
    work = group.allreduce([states], options)
    if work is not None:
        work.wait()


def _no_outputs(states: Tensor, *_: object) -> None:
    assert states.is_contiguous(), f"strides {states.stride()}"


@operation(_no_outputs, writes=("states",))
def sum_over_ranks(states: Tensor, group: int) -> None:
    """Replace `states` by its sum over the ranks of a group, added in their order unless another implementation was chosen. Every rank
    calls it in the same order."""
    _GROUPS[group].add(states)


@operation(_no_outputs, writes=("found",))
def gather_over_ranks(values: Tensor, found: Tensor, group: int) -> None:
    """Write `values` of every rank of a group to `found` [size, ...], in the order of the ranks. Every rank calls it in the same order."""
    found.copy_(gather(_GROUPS[group].group, values, _GROUPS[group].seconds))
