"""What the parts in C do not take as it lies in memory is done by the references, with the same outcome; and so where there is no C."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import drafting
from stepgraph.graphs.layers import cpu as cpu_kernels
from stepgraph.graphs.layers import dense as pointwise
from stepgraph.graphs.layers import slot_mapping
from stepgraph.graphs.layers.cpu import calls as layer_calls
from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.link.unavailable import Unavailable
from stepgraph.sampling.grammar.status import TAG_FIELDS, MaskStatus
from stepgraph.sampling.kernels import chain, mask_rows
from stepgraph.sampling.kernels import cpu as native
from stepgraph.sampling.kernels.cpu import calls as choice_calls
from stepgraph.sampling.kernels.cpu import loader

MADE = torch.Generator().manual_seed(5)
PAGE, LONGEST = 4, 12
TABLES = torch.tensor([[1, 2, 3], [4, 5, 6]])
POSITIONS, SLOTS = torch.tensor([[2, 3, 4], [5, 6, 7]]), torch.tensor([[6, 7, 8], [21, 22, 0]])
WANTED = torch.tensor([[True, True, False], [True, True, True]])
OK, TRUE = torch.full((2, 3), int(MaskStatus.OK)), torch.ones(2, 3, dtype=torch.bool)
SAMPLED, DRAFTS, STOPS = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 0], [1, 2]]), torch.tensor([[-1, 3], [-1, -1]])
LEGAL = bitmask.pack(torch.tensor([[True] * 40, [False] * 40]))
ALIVE = torch.tensor([True, True])
TAGS = torch.tensor([[[0, 7, 3, int(MaskStatus.OK)]], [[1, 7, 3, int(MaskStatus.OK)]]])


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=MADE)


def like(*tensors: Tensor) -> list[Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def spread(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    room = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    room[..., 0] = tensor
    return room[..., 0]


# The operation, what prepares it in C, its inputs, and what it writes.
Operation = tuple[Callable[..., None], Any, list[Any], list[Tensor]]
OPERATIONS: dict[str, Operation] = {
    "product": (
        pointwise.product_operation,
        cpu_kernels.prepared(layer_calls.product),
        [numbers(3, 8), numbers(5, 8), numbers(5), None],
        [torch.zeros(3, 5)],
    ),
    "rms_norm": (
        pointwise.rms_norm_operation,
        cpu_kernels.prepared(layer_calls.rms_norm),
        [numbers(3, 8), numbers(8), 1e-5],
        [torch.zeros(3, 8)],
    ),
    "gate": (pointwise.gated_operation, cpu_kernels.prepared(layer_calls.gate), [numbers(3, 8)], [torch.zeros(3, 4)]),
    "place_tokens": (
        slot_mapping.place_tokens_operation,
        cpu_kernels.prepared(layer_calls.place_tokens),
        [torch.tensor([[7, 8, 9], [1, -1, 3]]), WANTED, torch.tensor([2, 9]), torch.tensor([4, 11]), TABLES, 0, PAGE, LONGEST],
        like(POSITIONS, POSITIONS, POSITIONS),
    ),
    "shift_entries": (
        slot_mapping.shift_entries_operation,
        cpu_kernels.prepared(layer_calls.shift_entries),
        [POSITIONS, SLOTS, TABLES, PAGE, 1, 2],
        like(POSITIONS, SLOTS),
    ),
    "angles": (
        slot_mapping.angles_operation,
        cpu_kernels.prepared(layer_calls.angles),
        [torch.tensor([0, 5]), torch.tensor([1.0, 0.25])],
        [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)],
    ),
    "place_masks": (
        slot_mapping.place_masks_operation,
        cpu_kernels.prepared(layer_calls.place_masks),
        [torch.tensor([2, 0]), torch.tensor([[0, 7, 1, 1], [1, 7, 0, 1]]), LEGAL],
        [torch.zeros(3, 2, TAG_FIELDS, dtype=torch.int64), torch.zeros(3, 2, 2, dtype=torch.int32)],
    ),
    "settle_draft": (
        drafting.settle_draft_operation,
        cpu_kernels.prepared(layer_calls.settle_draft),
        [torch.tensor([4, 5]), ALIVE, ALIVE, torch.tensor([3, 3]), 1, torch.tensor([9, 9]), None, LEGAL, ALIVE, OK[:, 0].contiguous()],
        [torch.zeros(2, dtype=torch.int64), *like(ALIVE, ALIVE)],
    ),
    "mask_status": (
        mask_rows.mask_status_operation,
        native.prepared(choice_calls.mask_status),
        [TAGS, None, torch.tensor([0, 1]), torch.tensor([7, 8]), ALIVE, 3],
        [torch.zeros(2, 1, dtype=torch.int64)],
    ),
    "chain_accept": (
        chain.chain_accept_operation,
        native.prepared(choice_calls.chain_accept),
        [SAMPLED, TRUE, DRAFTS, torch.tensor([2, 2]), OK, STOPS, torch.tensor([9, 2]), None],
        [torch.zeros(2, dtype=torch.int64) for _ in range(3)],
    ),
}


@pytest.mark.skipif(bool(cpu_kernels.why_not() or native.why_not()), reason=cpu_kernels.why_not() or native.why_not())
@pytest.mark.parametrize("name", OPERATIONS)
def test_outputs_with_gaps_are_the_references_work(name: str) -> None:
    operation, prepare, inputs, outputs = OPERATIONS[name]
    dense, gaps = [tensor.clone() for tensor in outputs], [spread(tensor) for tensor in outputs]
    assert prepare(*inputs, *dense) is not None, "this case is for C"
    assert prepare(*inputs, *gaps) is None, "this one is not"
    operation(*inputs, *dense)
    operation(*inputs, *gaps)
    assert any(bool(tensor.any()) for tensor in dense), "something was written"
    for one, other in zip(dense, gaps, strict=True):
        torch.testing.assert_close(one, other)


def test_places_are_shifted_where_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = slot_mapping.shift_entries(POSITIONS, SLOTS, TABLES, PAGE, 1, 2)
    monkeypatch.setattr(cpu_kernels, "load", lambda: Unavailable("they were not built"))
    again = slot_mapping.shift_entries(POSITIONS, SLOTS, TABLES, PAGE, 1, 2)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("part", [cpu_kernels, native])
def test_a_library_that_is_not_there_is_a_reason_and_no_error(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise Unavailable("they were not built")

    for home in (part, loader):
        monkeypatch.setattr(home, "find_library", missing)
    part.load.cache_clear()
    try:
        assert part.why_not() == "they were not built"
    finally:
        monkeypatch.undo()
        part.load.cache_clear()
