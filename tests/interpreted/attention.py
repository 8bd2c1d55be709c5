"""The attention programs in Triton's interpreter, against the reference. test_kernels.py runs this file in a process of its own."""

from __future__ import annotations

import pytest
import torch
import triton

from stepgraph.graphs.attention import attention
from stepgraph.graphs.attention_kernels import split
from tests.test_attention import Case, make_case

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"


def run(case: Case, window: int = 0, least_part: int = split.LEAST_PART) -> torch.Tensor:
    """Into memory full of garbage."""
    query, keys, values, (_, positions, slots, tables, size, *_) = case
    output = torch.full_like(query, 7.5)
    split.attention(query, keys, values, positions, slots, tables, size, window, query.shape[3] ** -0.5, output, least_part=least_part)
    return output


def compare(case: Case, window: int = 0, tolerance: float = 2e-6) -> None:
    expected = attention(case.query, case.keys, case.values, case.inputs, window or None)
    live = case.inputs.slots >= case.inputs.page_size
    for least_part in (split.LEAST_PART, 4096):  # several parts, and one
        found = run(case, window, least_part)
        assert torch.isfinite(found).all(), "an inert query gives numbers too"
        torch.testing.assert_close(found[live].float(), expected[live].float(), rtol=tolerance, atol=tolerance)


LENGTHS = [9, 150, 0, 260]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "count", "window"),
    [(4, 2, 64, 5, 0), (3, 3, 96, 1, 40), (9, 3, 64, 4, 130), (8, 1, 128, 9, 0), (1, 1, 192, 3, 1), (4, 2, 64, 1, 0)],
)
def test_it_equals_the_reference(heads: int, kv_heads: int, size: int, count: int, window: int) -> None:
    compare(make_case(LENGTHS, count, heads, kv_heads, size, page=16), window)


@pytest.mark.parametrize(("page", "size"), [(16, 256), (32, 64), (64, 96)])
def test_pages_and_heads_of_all_sizes(page: int, size: int) -> None:
    compare(make_case([70, 200], 5, 2, 1, size, page=page))


def test_a_prompt_takes_several_blocks_of_queries() -> None:
    compare(make_case([150, 60], 50, 2, 1, 64, page=16), 60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    compare(make_case([9, 200], 4, 4, 2, 64, dtype, page=16), tolerance=0.02)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    case = make_case(LENGTHS, 4, 4, 2, 64, page=16)
    together = run(case)
    for row in range(3):
        assert torch.equal(run(case.rows(slice(row, row + 1)))[0], together[row])


def test_heads_that_are_too_wide_are_refused() -> None:
    with pytest.raises(ValueError, match="got heads of 300 numbers, want at most 256"):
        run(make_case([9], 1, 2, 1, 300, page=16))


def test_the_last_entry_of_every_part_counts() -> None:
    """Where a row ends exactly with a part, one before, one after."""
    for end in (128, 129, 255, 256):
        compare(make_case([end], 1, 2, 1, 64, page=16))
