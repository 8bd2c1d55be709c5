"""Limits, graph keys, and the choice of a key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepgraph.graphs import GraphKey, Limits
from stepgraph.graphs.graph_key import GraphTable
from stepgraph.graphs.graph_set import GraphSet, bucket_sizes, graph_keys, host_buckets

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Limits(**{**SIZES, "max_rows": 0}), r"Limits.max_rows: got 0, expected a whole number >= 1"),
        (lambda: Limits(**{**SIZES, "page_size": 2.5}), r"Limits.page_size: got 2.5"),
        (
            lambda: Limits(**{**SIZES, "num_speculative_tokens": 9}),
            r"Limits.num_speculative_tokens: got 9, expected .* 0 to 8",
        ),
        (lambda: Limits(**{**SIZES, "num_pages": 3}), r"Limits.num_pages: got 3, expected >= 4 for one row of max_length=50"),
        (lambda: Limits(**{**SIZES, "num_tokens": 71}), r"Limits.num_tokens: got 71, expected at most vocab_size=70"),
        (lambda: bucket_sizes(4, [1.5, 4]), r"buckets: got \[1.5, 4\]"),  # type: ignore[list-item]
        (lambda: bucket_sizes(4, 4), r"buckets: got 4"),  # type: ignore[arg-type]
        (lambda: bucket_sizes(4, []), r"buckets: got \[\], expected integers >= 1 of which the largest is max_rows=4"),
        (lambda: bucket_sizes(4, [1, 8]), r"buckets: got \[1, 8\]"),
    ],
)
def test_invalid_limits_and_buckets_raise_value_error(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_buckets_and_keys() -> None:
    assert [bucket_sizes(rows) for rows in (1, 2, 5, 8)] == [(1,), (1, 2), (1, 2, 4, 5), (1, 2, 4, 8)]
    keys = graph_keys((1, 4), greedy_only=True)
    assert keys == (GraphKey(4, True), GraphKey(4, False), GraphKey(1, True), GraphKey(1, False)), "largest first"
    assert [str(key) for key in keys[:2]] == ["rows=4 constrained greedy", "rows=4 free greedy"]
    assert len(graph_keys((1, 4))) == 8


def test_grammars_on_the_device_take_at_most_half_as_many_more_graphs() -> None:
    keys = graph_keys(bucket_sizes(8), device=True)
    assert len(keys) == len(set(keys)) == 20 and len(graph_keys(bucket_sizes(8))) == 16
    assert [key.rows for key in keys if key.constrained and not key.device and not key.sampled] == [8, 2]
    assert list(map(str, graph_keys((1, 2, 4), True, True)[:4])) == [
        "rows=4 device greedy",
        "rows=4 constrained greedy",
        "rows=4 free greedy",
        "rows=2 device greedy",
    ]
    assert [host_buckets(sizes) for sizes in ((4,), (1, 4), (1, 2, 4), (1, 2, 4, 8, 9))] == [(4,), (4,), (1, 4), (1, 4, 9)]


def test_derived_limits() -> None:
    limits = Limits(**SIZES)
    assert (limits.rows, limits.dummy_row, limits.positions, limits.pages_per_row) == (4, 3, 5, 4)
    assert (limits.cache_slots, limits.mask_words, limits.ring_depth) == (13 * 16, 3, 3)


@given(max_rows=st.integers(1, 40), extra=st.lists(st.integers(1, 40), max_size=4))
@settings(max_examples=60)
def test_dispatch_is_total(max_rows: int, extra: list[int]) -> None:
    for sizes in (bucket_sizes(max_rows), bucket_sizes(max_rows, [*[size for size in extra if size <= max_rows], max_rows])):
        on_host, on_device = (GraphTable(sizes, host_sizes, GraphSet.record_one) for host_sizes in (sizes, host_buckets(sizes)))
        for batch in range(1, max_rows + 1):
            for constrained in (False, True):
                key = on_host.key_for(batch, constrained, False)
                assert key.rows in sizes and key.rows >= batch and key.constrained == constrained
                assert not any(batch <= size < key.rows for size in sizes), "the smallest key that fits"
            for device in (False, True):
                assert on_device.key_for(batch, True, False, device) in graph_keys(sizes, device=True)
