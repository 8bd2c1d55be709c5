"""The exponential function and the random numbers of the references. Compiled without fused multiply-add, they are rounded alike."""

from __future__ import annotations

import triton
import triton.language as tl

from stepgraph.sampling import sampler
from stepgraph.sampling.rng import BELOW_ONE, GOLDEN, MIX_1, MIX_2

_LOWEST = tl.constexpr(sampler.MIN_LOG_WEIGHT)
_LOG2_E = tl.constexpr(sampler.LOG2_E)
_LN2_HEAD = tl.constexpr(sampler.LN2_HEAD)
_LN2_TAIL = tl.constexpr(sampler.LN2_TAIL)
_SERIES_0, _SERIES_1, _SERIES_2, _SERIES_3, _SERIES_4 = (tl.constexpr(coefficient) for coefficient in sampler.EXP_COEFFICIENTS)
_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_BELOW_ONE = tl.constexpr(BELOW_ONE)
_TINY = tl.constexpr(2.0**-63)
_LAST_POSITIVE = tl.constexpr((1 << 63) - 1)


@triton.jit
def portable_exp(values):
    """As sampler.portable_exp, bit for bit."""
    bounded = tl.maximum(values, _LOWEST)
    power = tl.floor(bounded * _LOG2_E + 0.5)
    rest = (bounded - power * _LN2_HEAD) - power * _LN2_TAIL
    series = (((_SERIES_4 * rest + _SERIES_3) * rest + _SERIES_2) * rest + _SERIES_1) * rest + _SERIES_0
    scale = ((power.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(values < _LOWEST, 0.0, (series * rest * rest + rest + 1.0) * scale)


@triton.jit
def _mix(value):
    """As rng._mix."""
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * _MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _chance(key):
    """The upper 63 bits of a key as a number between 0 and 1."""
    return tl.minimum((((key >> 1) & _LAST_POSITIVE).to(tl.float32) + 0.5) * _TINY, _BELOW_ONE)


@triton.jit
def uniform(seed, position, index, SALT: tl.constexpr):
    """As rng.uniform, bit for bit. All int64."""
    return _chance(_mix(_mix(_mix(seed + SALT) + position * _GOLDEN) + index * _GOLDEN))


@triton.jit
def coin(seed, position, SALT: tl.constexpr):
    """As rng.uniform without an index, bit for bit."""
    return _chance(_mix(_mix(seed + SALT) + position * _GOLDEN))


@triton.jit
def exponential(seed, position, index, SALT: tl.constexpr):
    """As rng.exponential but for the last bit: log1p is made of log, corrected for the rounding of 1 - u."""
    chance = uniform(seed, position, index, SALT)
    rest = 1.0 - chance
    rounded = 1.0 - rest  # the number that was subtracted, after rounding
    corrected = -tl.log(rest) * tl.math.div_rn(chance, tl.where(rounded == 0, 1.0, rounded))
    return tl.where(rounded == 0, chance, corrected)
