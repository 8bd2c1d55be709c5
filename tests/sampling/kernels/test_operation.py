"""Arguments that a C kernel does not support, and a missing library, run as the reference with the same results."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import drafting, host_nodes, proposing
from stepgraph.graphs.layers import dense, experts, lora, quantised, slot_mapping
from stepgraph.sampling import bitmask, native
from stepgraph.sampling.grammar.automaton import library as automaton_library
from stepgraph.sampling.grammar.status import TAG_FIELDS, MaskStatus
from stepgraph.sampling.kernels import choice
from stepgraph.sampling.kernels.operation import Operation
from stepgraph.sampling.native import Unavailable

MADE = torch.Generator().manual_seed(5)
PAGE, LONGEST = 4, 12
TABLES = torch.tensor([[1, 2, 3], [4, 5, 6]])
POSITIONS, SLOTS = torch.tensor([[2, 3, 4], [5, 6, 7]]), torch.tensor([[6, 7, 8], [21, 22, 0]])
WANTED = torch.tensor([[True, True, False], [True, True, True]])
OK, TRUE = torch.full((2, 3), int(MaskStatus.OK)), torch.ones(2, 3, dtype=torch.bool)
SAMPLED, DRAFTS, STOPS = torch.tensor([[1, 2, 3], [1, 2, 3]]), torch.tensor([[1, 0], [1, 2]]), torch.tensor([[-1, 3], [-1, -1]])
LEGAL = bitmask.pack(torch.tensor([[True] * 40, [False] * 40]))
PACKED = quantised.pack(quantised.KINDS["Q8_0"], quantised.Grouped(torch.full((16, 32), 17), torch.ones(16, 1)))
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


# The operation, its inputs, and the tensors that it writes.
OPERATIONS: dict[str, tuple[Operation[..., Any], list[Any], list[Any]]] = {
    "product": (
        dense.product,
        [numbers(3, 8), numbers(5, 8), numbers(5)],
        [torch.zeros(3, 5)],
    ),
    "slot_product": (
        lora.slot_product,
        [numbers(4, 8), torch.tensor([1, 2]), numbers(3, 5, 8), numbers(4, 5)],
        [torch.zeros(4, 5)],
    ),
    "choose_experts": (
        experts.choose_experts,
        [numbers(3, 8), 2, True, numbers(8), 4, 2, 2.5],
        [torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.int64)],
    ),
    "expert_product": (
        experts.expert_product,
        [numbers(2, 8), torch.tensor([[1, 0], [1, 2]]), numbers(15, 8), 3, numbers(15)],
        [torch.zeros(4, 5)],
    ),
    "combine_experts": (experts.combine_experts, [numbers(4, 8), numbers(2, 2)], [torch.zeros(2, 8)]),
    "expert_product, packed": (
        experts.expert_product,
        [numbers(2, 32), torch.tensor([[1, 0], [1, 2]]), PACKED.repeat(3, 1, 1), 3, numbers(48)],
        [torch.zeros(4, 16)],
    ),
    "product, packed": (
        dense.product,
        [numbers(3, 32), PACKED, numbers(16)],
        [torch.zeros(3, 16)],
    ),
    "quantised_rows": (quantised.quantised_rows, [torch.tensor([3, 0]), PACKED, torch.float32], [torch.zeros(2, 32)]),
    "rms_norm": (
        dense.rms_norm,
        [numbers(3, 8), numbers(8), 1e-5, 0.0],
        [torch.zeros(3, 8)],
    ),
    "add_rms_norm": (
        dense.add_rms_norm,
        [numbers(3, 8), numbers(3, 8), numbers(8), 1e-5, 1.0],
        [torch.zeros(3, 8), torch.zeros(3, 8)],
    ),
    "activate_and_mul": (dense.activate_and_mul, [numbers(3, 8), dense.Activation.SILU], [torch.zeros(3, 4)]),
    "place_tokens": (
        slot_mapping.place_tokens,
        [torch.tensor([[7, 8, 9], [1, -1, 3]]), torch.tensor([2, 9]), torch.tensor([4, 11]), TABLES, 0, PAGE, LONGEST, None, None],
        like(POSITIONS, POSITIONS, POSITIONS),
    ),
    "shift_entries": (slot_mapping.shift_entries, [POSITIONS, SLOTS, TABLES, PAGE, 1], like(POSITIONS, POSITIONS)),
    "rope_angles": (
        slot_mapping.rope_angles,
        [torch.tensor([0, 5]), torch.tensor([1.0, 0.25]), torch.float32, 1.5],
        [torch.zeros(2, 1, 4), torch.zeros(2, 1, 4)],
    ),
    "scatter_masks": (
        host_nodes.scatter_masks,
        [torch.tensor([2, 0]), torch.tensor([[0, 7, 1, 1], [1, 7, 0, 1]]), LEGAL],
        [
            torch.zeros(3, 2, TAG_FIELDS, dtype=torch.int64),
            torch.zeros(3, 2, 2, dtype=torch.int32),
            torch.tensor([-1, 8]),
            torch.zeros(2, dtype=torch.int64),
        ],
    ),
    "store_drafts": (
        drafting.store_drafts,
        [torch.tensor([2, 0]), torch.tensor([[4, 5, -1], [7, -2, -1]])],
        [torch.zeros(3, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)],
    ),
    "select_draft": (
        drafting.select_draft,
        [
            torch.tensor([4, 5]),
            ALIVE,
            ALIVE,
            torch.tensor([3, 3]),
            1,
            torch.tensor([1, 0]),
            torch.zeros(2, 2, dtype=torch.int64),
            torch.tensor([[9, 9], [9, 9]]),
            None,
            LEGAL,
            ALIVE,
            OK[:, 0].contiguous(),
            torch.zeros(2, 2, dtype=torch.bool),
            None,
            None,
        ],
        [torch.zeros(2, dtype=torch.int64)],
    ),
    "choose_chain": (
        proposing.choose_chain,
        [
            torch.tensor([[9, 9]] * 2),
            torch.ones(2, dtype=torch.int64),
            torch.tensor([2, 2]),
            40,
            torch.tensor([0, 1]),
            LEGAL[:, None].repeat(1, 2, 1),
            ALIVE,
            OK,
            None,
            None,
        ],
        [torch.zeros(2, 2, dtype=torch.int64)],
    ),
    "append_tokens": (
        proposing.append_tokens,
        [torch.tensor([2, 0]), torch.tensor([[4, 5], [6, 7]]), torch.tensor([1, 2]), torch.tensor([0, 3])],
        [torch.zeros(3, 6, dtype=torch.int32)],
    ),
    "mask_status": (
        choice.mask_status,
        [TAGS, torch.tensor([0, 1]), torch.tensor([7, 8]), torch.tensor([0, 5]), 3, None],
        [torch.zeros(2, 1, dtype=torch.int64), *like(ALIVE)],
    ),
    "chain_accept": (
        choice.chain_accept,
        [SAMPLED, TRUE, DRAFTS, torch.tensor([2, 2]), OK, STOPS, torch.tensor([9, 2]), None],
        [torch.zeros(2, dtype=torch.int64) for _ in range(3)],
    ),
}


@pytest.mark.skipif(bool(native.why_not()), reason=native.why_not())
@pytest.mark.parametrize("name", OPERATIONS)
def test_outputs_with_gaps_run_as_the_reference(name: str) -> None:
    operation, inputs, outputs = OPERATIONS[name]
    dense, gaps = [tensor.clone() for tensor in outputs], [spread(tensor) for tensor in outputs]
    assert operation.prepare(*inputs, *dense) is not None, "C supports these inputs"
    assert operation.prepare(*inputs, *gaps) is None, "C does not support outputs with gaps"
    operation.out(*inputs, *dense)
    operation.out(*inputs, *gaps)
    assert any(bool(tensor.any()) for tensor in dense), "nothing was written"
    for one, other in zip(dense, gaps, strict=True):
        torch.testing.assert_close(one, other)


def test_shifted_entries_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = slot_mapping.shift_entries(POSITIONS, SLOTS, TABLES, PAGE, 1)
    monkeypatch.setattr(native, "load", lambda: Unavailable("they were not built"))
    again = slot_mapping.shift_entries(POSITIONS, SLOTS, TABLES, PAGE, 1)
    assert all(map(torch.equal, found, again))


def test_missing_library_is_reported_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise Unavailable("they were not built")

    monkeypatch.setattr(native, "find_library", missing)
    native.load.cache_clear()

    def caller() -> weakref.ref[object]:
        held = threading.Event()
        assert native.why_not() == "they were not built"
        with contextlib.suppress(Unavailable):
            automaton_library.functions()
        return weakref.ref(held)

    try:
        assert caller()() is None, "the reason keeps the frames of its first callers"
    finally:
        monkeypatch.undo()
        native.load.cache_clear()
