"""take_batch, publish_results and end_round: slots, headers, and the end of a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.publishing import FINISH_COLUMN, end_round, publish_results, take_batch
from stepgraph.graphs.round_specs import Counter
from stepgraph.graphs.row_layout import ResultLayout
from stepgraph.sampling.grammar.status import FinishCode

DUMMY, SLOTS, CAPACITY, DRAFTS = 6, 5, 3, 2
RUNNING, STOP = int(FinishCode.RUNNING), int(FinishCode.STOP)
Call = Callable[..., Any]


class Case(NamedTuple):
    """Arguments of publish_results and end_round: a batch of 3 in rings with room for 6 rows."""

    results: Tensor
    logprobs: Tensor
    rows: Tensor
    control: Tensor
    counters: Tensor
    done: Tensor
    ring: Tensor
    logprobs_ring: Tensor
    headers: Tensor

    def publish(self, call: Call) -> None:
        call(self.results, self.logprobs, self.counters[Counter.PUBLISHED :], self.ring, self.logprobs_ring)

    def end(self, call: Call) -> None:
        call(self.results, self.rows, self.control, self.counters, self.done, self.headers, DUMMY, CAPACITY)


def case(published: int, finish: tuple[int, ...], control: tuple[int, int, int] = (0, 0, 0), launch: int = 7) -> Case:
    made, width = torch.Generator().manual_seed(published), ResultLayout(DRAFTS).width
    results = torch.randint(0, 99, (3, width), generator=made)
    results[:, FINISH_COLUMN] = torch.tensor(finish)
    logprobs = torch.randn(3, DRAFTS + 1, 2, generator=made)
    return Case(
        results,
        logprobs,
        torch.tensor([4, 1, DUMMY]),
        torch.tensor(control),
        torch.tensor([launch, published]),
        torch.full((1,), 9, dtype=torch.int32),
        torch.full((SLOTS, 6, width), -1),
        torch.full((SLOTS, 6, DRAFTS + 1, 2), -1.0),
        torch.full((SLOTS, len(Counter)), -1),
    )


def check_batch(take: Call) -> None:
    ring = torch.arange(SLOTS * 6).view(SLOTS, 6)
    for number in (0, 4, 5, 13):
        rows = torch.full((7,), -1)
        take(torch.tensor([number, 1]), ring, rows[:3])
        assert rows.tolist() == [*ring[number % SLOTS, :3].tolist(), -1, -1, -1, -1]


def check_slot(publish: Call, end: Call) -> None:
    for published in (0, 4, 5, 13):
        one = case(published, (RUNNING, RUNNING, 0), (0, 0, published))
        before, slot = [one.ring.clone(), one.logprobs_ring.clone(), one.headers.clone()], published % SLOTS
        one.publish(publish)
        one.end(end)
        before[0][slot, :3], before[1][slot, :3], before[2][slot] = one.results, one.logprobs, torch.tensor([7, published + 1])
        assert all(map(torch.equal, before, (one.ring, one.logprobs_ring, one.headers)))
        assert one.counters.tolist() == [7, published + 1] and one.done.tolist() == [0]


ENDS = [  # finish codes (the third row is the dummy row), control in the order of Control, whether the launch ends after 9 rounds
    ((RUNNING, RUNNING, 0), (0, 0, 8), False),
    ((RUNNING, STOP, 0), (0, 0, 8), False),
    ((RUNNING, STOP, 0), (0, 1, 8), True),
    ((RUNNING, RUNNING, 0), (0, 1, 8), False),
    ((STOP, STOP, 0), (0, 0, 8), True),
    ((RUNNING, RUNNING, 0), (7, 0, 8), False),
    ((RUNNING, RUNNING, 0), (8, 0, 8), True),
    ((RUNNING, RUNNING, 0), (0, 0, 9 - CAPACITY), True),
    ((RUNNING, RUNNING, 0), (0, 0, 10 - CAPACITY), False),
]


def check_end(end: Call, finish: tuple[int, ...], control: tuple[int, int, int], ends: bool) -> None:
    one = case(9, finish, control)
    one.end(end)
    assert one.done.tolist() == [int(ends)]


@pytest.mark.parametrize("operation", [take_batch, take_batch.reference], ids=["C", "reference"])
def test_batch_is_read_from_the_slot_of_the_round(operation: Call) -> None:
    check_batch(operation)


@pytest.mark.parametrize("operation", [publish_results, publish_results.reference], ids=["C", "reference"])
def test_results_and_header_are_in_the_next_slot(operation: Call) -> None:
    check_slot(operation, end_round)


@pytest.mark.parametrize(("finish", "control", "ends"), ENDS)
def test_end_of_a_launch(finish: tuple[int, ...], control: tuple[int, int, int], ends: bool) -> None:
    check_end(end_round, finish, control, ends)
