"""Static memory and sizes: the spec table is what is allocated, and a bad one is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stepgraph.graphs import BufferSpec, GraphKey, Limits, StaticBuffers
from stepgraph.graphs.buffers import Column, round_specs
from stepgraph.graphs.shapes import bucket_sizes, checked_buckets, dispatch, graph_keys

SIZES: dict[str, Any] = {
    "max_rows": 3,
    "num_speculative_tokens": 4,
    "max_length": 50,
    "page_size": 16,
    "num_pages": 12,
    "vocab_size": 70,
    "num_tokens": 68,
    "feature_size": 3,
}


def test_the_spec_table_is_what_is_allocated() -> None:
    specs = round_specs(Limits(**SIZES))
    buffers = StaticBuffers(specs)
    assert list(buffers) == [spec.name for spec in specs]
    for spec in specs:
        tensor = buffers[spec.name]
        assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, spec.dtype)
        assert bool((tensor == spec.fill).all())
        assert tensor is getattr(buffers, spec.name)
        assert spec.name.endswith("_host") == (spec.memory == "pinned")
        assert tensor.numel() == 0 or buffers.owner_of(tensor[..., -1:]) == (spec.name, spec.memory)
    assert buffers.nbytes == sum(tensor.nbytes for tensor in (buffers[name] for name in buffers))
    assert buffers.row_state.shape == (4, len(Column)) and buffers.row_masks.shape == (4, 5, 3)


def test_reset_refills_in_place_and_the_fingerprint_tells_a_rebinding() -> None:
    module = nn.Linear(2, 2)
    buffers = StaticBuffers([BufferSpec("x", (3,), torch.int32, fill=7)], constants={"module": module})
    before = buffers.fingerprint()
    buffers.x.zero_()
    buffers.reset()
    assert buffers.x.tolist() == [7, 7, 7] and buffers.fingerprint() == before
    assert buffers.owner_of(module.weight[0]) == ("module.weight", "constant")
    assert buffers.owner_of(torch.zeros(1)) is None
    assert StaticBuffers([BufferSpec("x", (3,), torch.int32)]).fingerprint() != before
    with pytest.raises(AttributeError, match="no tensor 'y'"):
        buffers.y  # noqa: B018


def test_a_static_buffer_cannot_be_rebound() -> None:
    buffers = StaticBuffers([BufferSpec("x", (3,), torch.int32)])
    tensor = buffers.x
    with pytest.raises(AttributeError, match=r"buffers.x is static and cannot be rebound; write into it: buffers.x.copy_"):
        buffers.x = buffers.x + 1
    buffers.x += 1
    assert buffers.x is tensor and tensor.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BufferSpec("x_host", (1,), torch.int32), r"BufferSpec.name: got 'x_host' in device memory, expected the suffix _host"),
        (lambda: BufferSpec("x", (1,), torch.int32, "pinned"), r"BufferSpec.name: got 'x' in pinned memory"),
        (lambda: BufferSpec("not a name", (1,), torch.int32), r"BufferSpec.name: got 'not a name', expected a public Python identifier"),
        (lambda: BufferSpec("_x", (1,), torch.int32), r"BufferSpec.name: got '_x'"),
        (lambda: BufferSpec("reset", (1,), torch.int32), r"BufferSpec.name: got 'reset', a method of StaticBuffers"),
        (lambda: BufferSpec("x", (2, -1), torch.int32), r"BufferSpec.shape of 'x': got \(2, -1\), expected a tuple of integers >= 0"),
        (lambda: BufferSpec("x", 4, torch.int32), r"BufferSpec.shape of 'x': got 4, expected a tuple"),  # type: ignore[arg-type]
        (lambda: BufferSpec("x", (4,), "float32"), r"BufferSpec.dtype of 'x': got 'float32', expected a torch.dtype"),  # type: ignore[arg-type]
        (lambda: BufferSpec("x", (4,), torch.int32, "gpu"), r"BufferSpec.memory of 'x': got 'gpu'"),  # type: ignore[arg-type]
        (lambda: StaticBuffers([BufferSpec("x", (1,), torch.int32)] * 2), r"StaticBuffers.specs: 'x' is declared twice"),
        (lambda: Limits(**{**SIZES, "max_rows": 0}), r"Limits.max_rows: got 0, expected a whole number >= 1"),
        (lambda: Limits(**{**SIZES, "page_size": 2.5}), r"Limits.page_size: got 2.5"),
        (lambda: Limits(**{**SIZES, "num_speculative_tokens": 9}), r"Limits.num_speculative_tokens: got 9, expected 0 to 8"),
        (lambda: Limits(**{**SIZES, "num_pages": 3}), r"Limits.num_pages: got 3, expected >= 4 for one row of max_length=50"),
        (lambda: Limits(**{**SIZES, "num_tokens": 71}), r"Limits.num_tokens: got 71, expected at most vocab_size=70"),
        (lambda: checked_buckets([1.5, 4], 4), r"buckets: got \[1.5, 4\]"),  # type: ignore[list-item]
        (lambda: checked_buckets(4, 4), r"buckets: got 4"),  # type: ignore[arg-type]
        (lambda: checked_buckets([], 4), r"buckets: got \[\], expected integers >= 1 of which the largest is max_rows=4"),
        (lambda: checked_buckets([1, 8], 4), r"buckets: got \[1, 8\]"),
    ],
)
def test_bad_sizes_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_buckets_and_keys() -> None:
    assert [bucket_sizes(rows) for rows in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]
    keys = graph_keys((1, 4), greedy_only=True)
    assert keys == (GraphKey(4, True), GraphKey(4, False), GraphKey(1, True), GraphKey(1, False)), "largest first"
    assert [str(key) for key in keys[:2]] == ["rows=4 constrained greedy", "rows=4 free greedy"]
    assert len(graph_keys((1, 4))) == 8


def test_limits_follow_from_each_other() -> None:
    limits = Limits(**SIZES)
    assert (limits.rows, limits.dummy_row, limits.positions, limits.pages_per_row) == (4, 3, 5, 4)
    assert (limits.cache_slots, limits.mask_words, limits.ring_depth) == (13 * 16, 3, 3)


@given(max_rows=st.integers(1, 40), extra=st.lists(st.integers(1, 40), max_size=4))
@settings(max_examples=60)
def test_dispatch_is_total(max_rows: int, extra: list[int]) -> None:
    for sizes in (bucket_sizes(max_rows), checked_buckets([*[size for size in extra if size <= max_rows], max_rows], max_rows)):
        for batch in range(1, max_rows + 1):
            for constrained in (False, True):
                key = dispatch(sizes, batch, constrained)
                assert key.rows in sizes and key.rows >= batch and key.constrained == constrained
                assert not any(batch <= size < key.rows for size in sizes), "the smallest that fits"
