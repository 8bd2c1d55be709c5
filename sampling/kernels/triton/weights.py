"""Weights as the Triton programs make them: of operations that are rounded alike everywhere. Compiled without fused multiply-add."""

from __future__ import annotations

import triton
import triton.language as tl

from stepgraph.sampling import sampler

_LOWEST = tl.constexpr(sampler.LOWEST)
_LOG2_E = tl.constexpr(sampler.LOG2_E)
_LN2_HEAD = tl.constexpr(sampler.LN2_HEAD)
_LN2_TAIL = tl.constexpr(sampler.LN2_TAIL)
_SERIES_0, _SERIES_1, _SERIES_2, _SERIES_3, _SERIES_4 = (tl.constexpr(coefficient) for coefficient in sampler.SERIES)


@triton.jit
def portable_exp(values):
    """As sampler.portable_exp, bit for bit."""
    bounded = tl.maximum(values, _LOWEST)
    power = tl.floor(bounded * _LOG2_E + 0.5)
    rest = (bounded - power * _LN2_HEAD) - power * _LN2_TAIL
    series = (((_SERIES_4 * rest + _SERIES_3) * rest + _SERIES_2) * rest + _SERIES_1) * rest + _SERIES_0
    scale = ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(values < _LOWEST, 0.0, (series * rest * rest + rest + 1.0) * scale)
