"""What is launched: the batch of a round, and a round in flight."""

from __future__ import annotations

from typing import NamedTuple

from stepgraph.graphs.capture import Event
from stepgraph.graphs.graph_key import Drafting, GraphKey
from stepgraph.runtime.request import ActiveRequest


class BatchKind(NamedTuple):
    """The arguments of GraphSet.key_for, but for the drafting."""

    rows: int
    constrained: bool
    sampled: bool
    device: bool


class DecodeBatch(NamedTuple):
    """What consecutive rounds of the same requests have in common."""

    requests: tuple[ActiveRequest, ...]  # by batch index
    kind: BatchKind
    reads_logprobs: bool  # whether some request reads log-probabilities


def batch_of(requests: tuple[ActiveRequest, ...]) -> DecodeBatch:
    constrained, sampled = any(request.constrained for request in requests), any(request.sampled for request in requests)
    kind = BatchKind(len(requests), constrained, sampled, constrained and not any(request.matcher for request in requests))
    return DecodeBatch(requests, kind, any(request.job.sampling.logprobs for request in requests))


class LaunchedRound(NamedTuple):
    """A launch of one round, or with `is_loop` of many, whose results have not all been read."""

    event: Event
    number: int  # of the launch; its slot in the rings of launches is number % ring_depth
    batch: DecodeBatch
    key: GraphKey
    launched_at: float  # infinity after other work, which the device may still process
    drafting: Drafting
    is_loop: bool = False
    caught_up: bool = False  # whether the draft model first processed skipped tokens
