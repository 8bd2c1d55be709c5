"""Triton programs compiled with the Triton of this environment, which is older than that of the other tests."""

from __future__ import annotations

import pytest
import triton

from tools.aot_kernels import ARCHS, compile_usage, variants


@pytest.mark.parametrize("arch", ARCHS)
def test_programs_that_once_spilled_or_failed_compile_without_spills(arch: int) -> None:
    ends = "in a chain", "find_least fp32", "32 rows, 4 to a cache head, pages of 16"
    programs = [variant for variant in variants() if variant.label.endswith(ends)]
    assert programs and [each.label for each in programs if compile_usage(each, arch).spill_bytes] == []


@pytest.mark.skipif(triton.__version__.startswith("3.4."), reason="with Triton 3.4 (torch 2.8) one of them spills on sm_90")
def test_products_with_packed_weights_do_not_spill() -> None:
    packed = [variant for variant in variants() if variant.label.startswith("packed_")]
    assert packed and [(variant.label, arch) for variant in packed for arch in (80, 90) if compile_usage(variant, arch).spill_bytes] == []


def test_choices_of_tokens_change_no_layout() -> None:
    """A change of layout would move whole tiles through shared memory; a maximum needs one number per warp."""
    programs = [variant for variant in variants() if variant.label.endswith("_candidates bf16")]
    assert len(programs) == 3 and [each.label for each in programs if compile_usage(each, 90).shared_bytes > 4 * each.warps] == []
