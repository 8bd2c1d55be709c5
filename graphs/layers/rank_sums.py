"""Sums over ranks on GPUs: the implementations, and the choice by a probe on all ranks.

gather: NCCL's all-gather; every rank adds the parts in the order of the ranks, so that the bits of a row do not depend on its batch.
nccl: NCCL's all-reduce.
flashinfer: one kernel of FlashInfer, over memory that the GPUs of one machine map from each other. Where a residual connection and a norm
follow the sum, it includes them. NCCL adds more rows than its memory holds.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.graphs.layers.dense import Residual, add_rms_norm
from stepgraph.graphs.layers.parallel import GatherSum, RankGroups, all_reduce, set_sums
from stepgraph.sampling.cuda_graphs import capture_replay, replay_us
from stepgraph.sampling.fields import error_summary

SUMS_PER_GRAPH, REPEATS = 16, 7  # per measurement
EPSILON, TOLERANCE = 1e-5, {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}
FLASHINFER_TYPES = (torch.float16, torch.bfloat16)
T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]


class RankExchange(Protocol):
    """The ranks of a model."""

    rank: int
    size: int

    def exchange(self, value: object) -> list[Any]:
        """`value` of every rank."""


class NcclSum(GatherSum):
    def __init__(self, group: dist.ProcessGroup, seconds: float, ranks: RankExchange, exchange: Exchange, like: Tensor) -> None:
        super().__init__(group, seconds)
        self._rows, self._width, self._type = len(like), like.shape[1], like.dtype

    def add(self, states: Tensor) -> None:
        if states.dtype != self._type or states.shape[1:] != (self._width,):  # such as counts of weights: the order of sums affects draws
            super().add(states)
        else:
            all_reduce(self.group, states, self.seconds)


class FlashInferSum(NcclSum):
    def __init__(self, group: dist.ProcessGroup, seconds: float, ranks: RankExchange, exchange: Exchange, like: Tensor) -> None:
        super().__init__(group, seconds, ranks, exchange, like)
        if like.dtype not in FLASHINFER_TYPES:
            raise RuntimeError(f"it adds bfloat16 and float16, not {str(like.dtype).removeprefix('torch.')}")
        if like.device.index != ranks.rank:
            raise RuntimeError(f"it needs GPU {ranks.rank} for rank {ranks.rank}, which has {like.device}")
        from flashinfer import comm

        self._comm, self.fused_add_rms_norm = comm, self._fused_add_rms_norm
        self._workspace = comm.create_allreduce_fusion_workspace(
            "trtllm", ranks.size, ranks.rank, len(like), like.shape[1], like.dtype, comm_backend=_comm_backend(ranks, exchange)
        )

    def add(self, states: Tensor) -> None:
        if len(states) > self._rows or states.dtype != self._type or states.shape[1:] != (self._width,):
            super().add(states)
            return
        found, pattern = torch.empty_like(states), self._comm.AllReduceFusionPattern.kAllReduce
        self._comm.allreduce_fusion(states, self._workspace, pattern, output=found, fp32_acc=True)
        states.copy_(found)

    def _fused_add_rms_norm(self, states: Tensor, part: Tensor, weight: Tensor, epsilon: float) -> Residual:
        if len(states) > self._rows:
            super().add(part)
            return add_rms_norm(states, part, weight, epsilon)
        residual = Residual(torch.empty_like(states), torch.empty_like(states))
        self._comm.allreduce_fusion(
            part,
            self._workspace,
            self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=states,
            residual_out=residual.states,
            norm_out=residual.normed,
            rms_gamma=weight,
            rms_eps=epsilon,
            fp32_acc=True,
        )
        return residual


IMPLEMENTATIONS: dict[str, type[GatherSum]] = {"gather": GatherSum, "nccl": NcclSum, "flashinfer": FlashInferSum}


def choose_sums(ranks: RankExchange, groups: RankGroups, like: Tensor) -> str:
    """Use the fastest implementation that works on every rank for the sums of both groups. Returns its name and the reasons.

    like: [N, H], with as many rows as the largest round has. Every rank calls this. RuntimeError if none works.
    """
    times_us, implementations, unavailable = dict[str, float](), dict[str, list[GatherSum]](), list[str]()
    for name, kind in IMPLEMENTATIONS.items():
        attempted, why_not = _run_on_all(ranks, functools.partial(_create_and_measure, kind, ranks, groups, like))
        if attempted is None:
            unavailable.append(f"no {name}: {why_not}")
        else:
            implementations[name], times_us[name] = attempted
    if not times_us:
        raise RuntimeError(f"no sum over ranks works here: {'; '.join(unavailable)}")
    chosen = min(times_us, key=times_us.__getitem__)
    set_sums(groups, implementations[chosen])
    return "; ".join((chosen, *(f"{name} {time_us:.1f} us" for name, time_us in times_us.items()), *unavailable))


class _RankFailed(RuntimeError):
    """The reason for which `run` failed on some rank."""


def _run_on_all(ranks: RankExchange, run: Callable[[Exchange], T]) -> tuple[T | None, str]:
    """The result of `run`, or why it failed, the same on all ranks. `run` may exchange values: a rank whose `run` has failed sends
    the reason instead, so that `run` fails on the others."""

    def exchange_or_raise(why: str, value: object = None) -> list[Any]:
        found = ranks.exchange((why, value))
        for rank, (other, _) in enumerate(found):
            if other:
                raise _RankFailed(f"rank {rank}: {other}")
        return [each for _, each in found]

    try:
        try:
            result = run(lambda value: exchange_or_raise("", value))
        except _RankFailed:
            raise
        except Exception as error:  # from a compiler, a loader or a driver, or for a wrong result
            exchange_or_raise(str(error) if type(error) is RuntimeError else error_summary(error))
            raise
        exchange_or_raise("")
    except _RankFailed as refused:
        return None, str(refused)
    return result, ""


def _rank_values(rank: int, like: Tensor) -> Tensor:
    """Values of a rank; the sums of those of a few ranks are exact in every type and order."""
    made = torch.randint(-8, 9, like.shape, generator=torch.Generator().manual_seed(rank))
    return made.to(like.dtype).to(like.device)


def _create_and_measure(
    kind: type[GatherSum], ranks: RankExchange, groups: RankGroups, like: Tensor, exchange: Exchange
) -> tuple[list[GatherSum], float]:
    """The implementation for both groups, and the microseconds of a sum in a graph on the slowest rank. RuntimeError for a sum that is
    wrong, or differs between ranks."""
    sums_of_groups = [kind(each.group, each.seconds, ranks, exchange, like) for each in groups.members]
    for sums in sums_of_groups:
        for some in (like[:1], like):
            _check_sums(sums, some, ranks, exchange)
    buffer, part, add = torch.empty_like(like), _rank_values(ranks.rank, like), sums_of_groups[0].add

    def step() -> None:
        for _ in range(SUMS_PER_GRAPH):
            buffer.copy_(part)
            add(buffer)

    time_us = replay_us(capture_replay(step, like.device), REPEATS, functools.partial(exchange, None))  # so that the ranks start together
    _require_close("a sum in a graph", buffer, _expected_sum(ranks.size, like), 0.0)
    slowest_us: float = max(exchange(time_us / SUMS_PER_GRAPH))
    return sums_of_groups, slowest_us


def _expected_sum(size: int, like: Tensor) -> Tensor:
    return torch.stack([_rank_values(rank, like) for rank in range(size)]).sum(0, dtype=like.dtype)


def _check_sums(sums: GatherSum, like: Tensor, ranks: RankExchange, exchange: Exchange) -> None:
    total, part = _expected_sum(ranks.size, like), _rank_values(ranks.rank, like)
    found = part.clone()
    sums.add(found)
    _require_close("a sum", found, total, 0.0)
    if sums.fused_add_rms_norm is not None:
        states, weight = _rank_values(ranks.size, like), _rank_values(ranks.size + 1, like[0])
        expected, fused = add_rms_norm.reference(states, total, weight, EPSILON), sums.fused_add_rms_norm(states, part, weight, EPSILON)
        _require_close("a sum with the residual connection", fused.states, expected.states, 0.0)
        _require_close("the norm after a sum", fused.normed, expected.normed, 8 * TOLERANCE[like.dtype])
    drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(ranks.rank)).to(like)
    sums.add(drawn)
    if len(set(exchange(zlib.crc32(drawn.cpu().view(torch.uint8).numpy().data)))) > 1:
        raise RuntimeError("the bits of a sum differ between ranks")


def _require_close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    wrong = ~((actual.float() - expected.float()).abs() <= tolerance)  # also for NaN
    if count := int(wrong.sum()):
        raise RuntimeError(f"{what} is wrong in {count} of {wrong.numel()} values")


def _comm_backend(ranks: RankExchange, exchange: Exchange) -> Any:
    """The backend with which FlashInfer exchanges handles."""
    from flashinfer.comm.mnnvl import CommBackend

    class Backend(CommBackend):  # type: ignore[misc]  # without types
        def Get_rank(self) -> int:
            return ranks.rank

        def Get_size(self) -> int:
            return ranks.size

        def allgather(self, data: Any) -> list[Any]:
            return exchange(data)

        def bcast(self, data: Any, root: int) -> Any:
            return exchange(data)[root]

        def barrier(self) -> None:
            exchange(None)

        def Split(self, color: int, key: int) -> Backend:
            return self  # all ranks are on one machine

    return Backend()
