"""The attention programs in Triton's interpreter, against the reference. test_kernels.py runs this file in a process of its own."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import triton

import tests.helpers.fast_interpreter  # noqa: F401
from stepgraph.graphs.attention.float8 import ENTRIES, from_entries, to_entries
from stepgraph.graphs.attention.paged import attention
from stepgraph.graphs.attention.triton import paged as paged_programs
from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv
from stepgraph.graphs.layers.triton import slot_mapping as rope_programs
from tests.graphs.attention.test_paged import Case, make_case
from tests.helpers.hazards import hazards
from tools.launch_bytes import counting

assert triton.knobs.runtime.interpret, "run by test_kernels.py, with TRITON_INTERPRET=1"


FLOAT8_CACHE = torch.empty(0, dtype=ENTRIES)
More = tuple[float, torch.Tensor | None]  # softcap, sinks


def run(case: Case, window: int = 0, least_part: int = paged_programs.MIN_PART_KEYS, more: More = (0.0, None)) -> torch.Tensor:
    """On an output with arbitrary content."""
    query, keys, values, (_, positions, slots, tables, size, *_) = case
    output = torch.full_like(query, 7.5)
    paged_programs.paged_attention(
        query, keys, values, positions, slots, tables, size, window, query.shape[3] ** -0.5, *more, output, least_part=least_part
    )
    return output


def compare(case: Case, window: int = 0, tolerance: float = 2e-6, more: More = (0.0, None)) -> None:
    expected = attention(case.query, case.keys, case.values, case.inputs, window or None, None, *more)
    live = case.inputs.slots >= case.inputs.page_size
    for least_part in (paged_programs.MIN_PART_KEYS, 4096):  # several parts, and one
        found = run(case, window, least_part, more)
        assert torch.isfinite(found).all(), "the output of an inert query is not finite"
        torch.testing.assert_close(found[live].float(), expected[live].float(), rtol=tolerance, atol=tolerance)


LENGTHS = [9, 150, 0, 260]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "count", "window"),
    [(4, 2, 64, 5, 0), (3, 3, 96, 1, 40), (9, 3, 64, 4, 130), (8, 1, 128, 9, 0), (1, 1, 192, 3, 1), (4, 2, 64, 1, 0)],
)
def test_attention_equals_the_reference(heads: int, kv_heads: int, size: int, count: int, window: int) -> None:
    compare(make_case(LENGTHS, count, heads, kv_heads, size, page=16), window)


@pytest.mark.parametrize(("softcap", "has_sinks", "window"), [(0.5, False, 0), (0.0, True, 40), (5.0, True, 0)])
def test_soft_capped_scores_and_sinks(softcap: float, has_sinks: bool, window: int) -> None:
    """A window that excludes the first part does not exclude the sink."""
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1)) if has_sinks else None
    compare(make_case(LENGTHS, 3, 6, 2, 64, page=16), window, more=(softcap, sinks))


@pytest.mark.parametrize(("size", "count", "window"), [(64, 5, 0), (96, 1, 40), (128, 34, 0)])
def test_caches_in_eight_bits(size: int, count: int, window: int) -> None:
    """Equal to a float32 cache with the same numbers; the caches hold NaN after each row's last position."""
    case = make_case(LENGTHS, count, 4, 2, size, page=16)
    entries = (torch.randn_like(case.keys) * 3 for _ in range(2))
    keys, values = (
        to_entries(torch.where(given.isnan(), given, entry), FLOAT8_CACHE) for given, entry in zip(case[1:3], entries, strict=True)
    )
    wide = case._replace(keys=from_entries(keys), values=from_entries(values))
    assert bool(wide.keys.isnan().any())
    for least_part in (paged_programs.MIN_PART_KEYS, 4096):
        found, expected = run(case._replace(keys=keys, values=values), window, least_part), run(wide, window, least_part)
        assert torch.isfinite(expected).all() and torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_entries_in_eight_bits_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    """Every float16 number, including infinity and NaN, and numbers between float8 values and above the largest; not rotated."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    value = bits.view(torch.float16).to(dtype)
    value = value if dtype is torch.float16 else value * 1.0009765625
    value, slots = value.view(-1, 2, 256), torch.arange(128)
    cosines, sines = torch.ones(128, 1, 256, dtype=dtype), torch.zeros(128, 1, 256, dtype=dtype)
    key = value.nan_to_num(0, 0, 0).flip(0)
    query, caches = key[:, :1].contiguous(), [torch.zeros(2, 128, 2, 256, dtype=torch.uint8) for _ in range(2)]
    for run_it, cache in zip((rope_programs.rope_and_write_kv, rope_and_write_kv.run_reference), caches, strict=True):
        arguments: list[Any] = [query, key, value, cosines, sines, slots, *cache, torch.empty_like(query)]
        run_it(*arguments)
    assert torch.equal(from_entries(caches[0]).nan_to_num(1e9), from_entries(caches[1]).nan_to_num(1e9))
    assert int(from_entries(caches[0]).isnan().sum()) == int(value.isnan().sum()) > 0


@pytest.mark.parametrize(("page", "size"), [(16, 256), (32, 64), (64, 96)])
def test_pages_and_heads_of_all_sizes(page: int, size: int) -> None:
    compare(make_case([70, 200], 5, 2, 1, size, page=page))


def test_prompt_with_several_blocks_of_queries() -> None:
    compare(make_case([150, 60], 50, 2, 1, 64, page=16), 60)


@pytest.mark.parametrize(("size", "page"), [(64, 16), (96, 64), (128, 32), (192, 16), (256, 64)])
def test_half_precision(size: int, page: int) -> None:
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float16, 0.003))[: 1 + (size in (64, 256))]:
        compare(make_case([9, 200], 4, 4, 2, size, dtype, page=page), 150, tolerance=tolerance)


@pytest.mark.parametrize("count", range(1, 10))
def test_largest_number_of_queries_in_a_round(count: int) -> None:
    """Three heads per group: not a power of two, also multiplied by the queries."""
    compare(make_case([count, 30], count, 3, 1, 64, page=16), 20)


@pytest.mark.parametrize(("length", "window"), [(8_200, 0), (32_750, 300)])
def test_long_rows(length: int, window: int) -> None:
    """Longer parts, most of which are outside of the window."""
    case = make_case([length], 2, 2, 1, 64, page=64)
    torch.testing.assert_close(run(case, window), case.run(window or None), rtol=2e-6, atol=2e-6)


def test_grids_of_a_long_chunk_are_within_the_limits_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = MagicMock()
    for name in ("attend_part", "combine_parts"):
        monkeypatch.setattr(paged_programs, name, programs)
    query, cache, positions, tables = (
        torch.empty(shape, device="meta") for shape in ((1, 16_384, 32, 128), (131_088, 8, 128), (1, 16_384), (1, 8192))
    )
    paged_programs.paged_attention(query, cache, cache, positions, positions, tables, 16, 0, 1.0, 0.0, None, query)
    for call in programs.__getitem__.call_args_list:
        (grid,) = call.args
        assert grid[0] < 1 << 31 and all(size <= 65_535 for size in grid[1:]), grid


def test_row_is_independent_of_the_batch() -> None:
    """Alone, at any index of a batch of any size, beside inert rows."""
    case = make_case(LENGTHS, 4, 4, 2, 64, page=16)
    together = run(case)
    for rows in ([0], [1], [2], [3, 2], [2, 3, 1, 0], [2, 2, 1, 2, 2, 2]):
        found = run(case.rows(torch.tensor(rows)))
        assert torch.equal(found, together[rows])


def test_batch_without_live_positions_reads_nothing() -> None:
    case = make_case([0, 0], 3, 2, 1, 64, page=16)
    assert bool(case.keys.isnan().all())
    for least_part in (paged_programs.MIN_PART_KEYS, 4096):
        assert torch.equal(run(case, least_part=least_part), torch.zeros_like(case.query))


def test_nan_is_kept_when_parts_are_combined() -> None:
    """NaN must reach the logits of its row, where it is detected; the other row is unchanged."""
    case = make_case([300, 200], 2, 2, 1, 64, page=16)
    for least_part in (paged_programs.MIN_PART_KEYS, 4096):
        clean = run(case, least_part=least_part)
        case.query[0, 1, 0, 5] = torch.nan
        faulty = run(case, least_part=least_part)
        assert bool(faulty[0, 1, 0].isnan().all())
        faulty[0, 1, 0] = clean[0, 1, 0]
        assert torch.equal(faulty, clean)
        case.query[0, 1, 0, 5] = 1.0


@pytest.mark.parametrize(("lengths", "window"), [([600, 40], 0), ([600], 70), ([600], 9)])
def test_keys_that_no_query_sees_are_not_read(lengths: list[int], window: int) -> None:
    """At most a part's further keys in each row, and every key once for all heads of a group."""
    case = make_case(lengths, 3, 6, 2, 64, page=16)
    with counting() as moved:
        run(case, window)
    seen = sum(min(length, window + 2 if window else length) for length in lengths)
    nbytes = 2 * case.keys[0].nbytes
    assert seen * nbytes < moved.loaded < (seen + paged_programs.MIN_PART_KEYS * len(lengths)) * nbytes


@pytest.mark.parametrize(
    ("dtype", "size", "rotated"),
    [(torch.float32, 64, 64), (torch.float32, 96, 72), (torch.bfloat16, 128, 128), (torch.float16, 6, 6), (torch.float16, 7, 4)],
)
def test_rope_and_cache_write_equal_the_reference(dtype: torch.dtype, size: int, rotated: int) -> None:
    """Parts of one product and separate tensors; bit-equal except in bfloat16, which the interpreter truncates."""
    rng = torch.Generator().manual_seed(size)
    for packed in (True, False):
        mixed = torch.randn(5, 7, size, generator=rng).to(dtype)
        parts = [part if packed else part.clone() for part in mixed.split([3, 2, 2], 1)]
        cosines, sines = (torch.randn(5, 1, rotated, generator=rng).to(dtype) for _ in range(2))
        slots = torch.tensor([9, 0, 4, 11, 7])
        found, expected = (
            [torch.full(shape, 7.5, dtype=dtype) for shape in ((5, 3, size), (12, 2, size), (12, 2, size))] for _ in range(2)
        )
        for run_it, outputs in ((rope_programs.rope_and_write_kv, found), (rope_and_write_kv.run_reference, expected)):
            arguments: list[Any] = [*parts, cosines, sines, slots, *outputs[1:], outputs[0]]
            run_it(*arguments)
        tol = 2**-6 if dtype is torch.bfloat16 else 0.0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tol, atol=tol)


def test_too_large_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="got heads of size 300, expected at most 256"):
        run(make_case([9], 1, 2, 1, 300, page=16))


def test_the_last_entry_of_every_part_counts() -> None:
    """Rows that end at the end of a part, one before and one after it."""
    for end in (128, 129, 255, 256):
        compare(make_case([end], 1, 2, 1, 64, page=16))


def test_accesses_of_different_threads_and_programs_are_ordered() -> None:
    with hazards() as found:
        compare(make_case([9, 150], 2, 2, 1, 64, page=16))
        test_rope_and_cache_write_equal_the_reference(torch.float32, 64, 64)
    assert found == set()
