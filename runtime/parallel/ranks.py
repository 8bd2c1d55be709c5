"""The ranks of a tensor-parallel engine: one process each, started by torchrun."""

from __future__ import annotations

import datetime
import hashlib
import os

import torch
import torch.distributed as dist
from torch import Tensor

from stepgraph.graphs.layers.parallel import register_group
from stepgraph.sampling.fields import clip_repr, is_int

TIMEOUT_SECONDS = 60.0  # where EngineConfig.round_timeout_seconds is None


class RankError(RuntimeError):
    """The ranks of a tensor-parallel engine differ, or one of them is lost or late."""


class Ranks:
    """This process among `size` of them. `graph`: the communicator of recorded sums; another one compares what the ranks do."""

    def __init__(self, size: object, seconds: float) -> None:
        """Joins the process group of torchrun unless the program did so. ValueError for a size other than its number of processes."""
        if not is_int(size) or size < 2:
            raise ValueError(f"tensor_parallel: got {clip_repr(size)}, expected an integer >= 1")
        joined = dist.is_available() and dist.is_initialized()
        if not joined and not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise ValueError(f"tensor_parallel: got {size} in one process, expected 1, or `torchrun --nproc-per-node {size} PROGRAM`")
        self.seconds, self._notes = seconds, hashlib.sha256()
        timeout = datetime.timedelta(seconds=self.seconds)
        if not joined:
            dist.init_process_group("gloo", timeout=timeout)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        if self.size != size:
            raise ValueError(f"tensor_parallel: got {size} with {self.size} processes, expected {self.size}")
        self.graph = register_group(dist.new_group(backend="gloo", timeout=timeout))
        self._control = dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, values: Tensor) -> list[Tensor]:
        """`values` of every rank. RankError if a rank is lost, or does not call it in time."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        try:
            dist.all_gather(found, values, group=self._control)
        except RuntimeError as error:
            late = f"another rank is lost, or did not answer within {self.seconds:g} s"
            raise RankError(f"rank {self.rank} of {self.size}: {late}: {error}") from error
        return found

    def note(self, value: object) -> None:
        """Add to what `require_same_notes` compares."""
        self._notes.update(repr(value).encode())

    def require_same_notes(self) -> None:
        """RankError unless every rank has made the same notes."""
        self.require_equal("the requests or the results of the steps before", self._notes.digest())

    def require_equal(self, what: str, value: bytes) -> None:
        """RankError unless `value` is the same on every rank."""
        digest = hashlib.sha256(value).digest()
        found = self.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        differing = [rank for rank, other in enumerate(found) if not torch.equal(other, found[0])]
        if differing:
            raise RankError(f"rank {self.rank} of {self.size}: {what} differ between rank 0 and ranks {differing}")
