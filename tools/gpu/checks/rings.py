"""Programs that read or write pinned memory, as in a round, against their references on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.host_nodes import scatter_masks
from stepgraph.graphs.publishing import FINISH_COLUMN, end_round, publish_results, take_batch
from stepgraph.sampling.grammar.status import TAG_FIELDS, FinishCode
from stepgraph.sampling.kernels.operation import Operation

SLOTS, ROWS, WIDTH, WORDS, POSITIONS = 5, 6, 20, 1_100, 3  # ring slots, rows each, result width, mask words (more than a tile), positions


class Case(NamedTuple):
    operation: Operation[Any, Any]
    inputs: tuple[Any, ...]
    pinned: frozenset[int]  # positions of the inputs in pinned memory

    def is_equal(self, device: torch.device) -> bool:
        """Whether all inputs are equal after the program on this device and after the reference on copies."""
        found = [self._on(device, index) for index in range(len(self.inputs))]
        getattr(importlib.import_module(self.operation.triton), self.operation.name)(*found)
        if device.type == "cuda":
            torch.cuda.synchronize()
        expected = [value.clone() if isinstance(value, Tensor) else value for value in self.inputs]
        self.operation.reference(*expected)
        pairs = [(one.cpu(), other) for one, other in zip(found, expected, strict=True) if isinstance(other, Tensor)]
        return all(torch.equal(one, other) for one, other in pairs)

    def _on(self, device: torch.device, index: int) -> Any:
        value = self.inputs[index]
        if not isinstance(value, Tensor) or device.type == "cpu":
            return value.clone() if isinstance(value, Tensor) else value
        return value.clone().pin_memory() if index in self.pinned else value.to(device)


def programs(device: torch.device) -> dict[str, Callable[[], bool]]:
    """Name to its comparison with the reference."""
    calls: dict[str, list[Case]] = {}
    for case in cases(torch.Generator().manual_seed(7)):
        calls.setdefault(case.operation.name, []).append(case)
    return {name: partial(_all_equal, found, device) for name, found in calls.items()}


def _all_equal(found: list[Case], device: torch.device) -> bool:
    return all(case.is_equal(device) for case in found)


def cases(rng: torch.Generator) -> Iterator[Case]:
    """Batches of three rows, of which the third is the dummy row."""

    def numbers(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(0, 99, shape, generator=rng, dtype=dtype)

    rows, results, logprobs = torch.tensor([4, 1, ROWS]), numbers(3, WIDTH), torch.randn(3, POSITIONS, 2, generator=rng)
    for number in (1, SLOTS - 1, SLOTS, 13):
        counted, ring = torch.tensor([number]), numbers(SLOTS, ROWS)
        yield Case(take_batch, (counted, ring, numbers(3)), frozenset({1}))
        rings = numbers(SLOTS, ROWS, WIDTH), torch.zeros(SLOTS, ROWS, POSITIONS, 2)
        yield Case(publish_results, (results, logprobs, counted, *rings), frozenset({3, 4}))
        for finish, waiting in ((FinishCode.RUNNING, 1), (FinishCode.STOP, 0), (FinishCode.STOP, 1)):
            results = results.clone()
            results[:, FINISH_COLUMN] = torch.tensor([FinishCode.RUNNING, finish, FinishCode.RUNNING])
            control, counters = torch.tensor([7, waiting, number - 1]), torch.tensor([7, number])
            ends = (control, counters, torch.full((1,), 9, dtype=torch.int32), numbers(SLOTS, 2), ROWS, 3)
            yield Case(end_round, (results, rows, *ends), frozenset({2, 5}))
    for forced in (numbers(3), None):
        tags, masks = numbers(3, TAG_FIELDS), numbers(3, WORDS, dtype=torch.int32)
        tags[:, 2] = torch.tensor([0, POSITIONS - 1, 1])
        of_rows = numbers(ROWS + 1, POSITIONS, TAG_FIELDS), numbers(ROWS + 1, POSITIONS, WORDS, dtype=torch.int32)
        inputs = (rows, tags, masks, *of_rows, forced, None if forced is None else numbers(3))
        yield Case(scatter_masks, inputs, frozenset({1, 2, 5}))
