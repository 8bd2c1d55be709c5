"""The rotary frequencies of a model, read from its `config.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from stepgraph.runtime.models.files.config_fields import UnsupportedConfigError, count_field, flag_field, number_field, require_off
from stepgraph.runtime.models.llama_config import GEMMA, GLM, GPT_OSS, PHI, RopeConfig

ORIGINAL_LENGTH = "original_max_position_embeddings"


def read_ropes(config: Mapping[str, Any], architecture: str, head_size: int) -> tuple[RopeConfig, RopeConfig | None]:
    """From `rope_theta` with `rope_scaling`, or both in `rope_parameters`: of all layers, and of layers with a window if others.

    Gemma 3 has two objects there, or `rope_local_base_freq` for layers with a window.
    """
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local, theta = None, 10_000.0
    if architecture == GEMMA and isinstance(fields, Mapping):
        stated, fields = fields.get("sliding_attention", {}), fields.get("full_attention", fields)
        local, theta = _rope({"rope_theta": config.get("rope_local_base_freq")}, stated, theta), 1_000_000.0
    if architecture in (PHI, GLM) and isinstance(fields, Mapping):
        if architecture == GLM:
            require_off(fields, {"rope_type": "default", "type": "default"})
        return _partial_rope({"partial_rotary_factor": 1.0 if architecture == PHI else 0.5, **config, **fields}, head_size), None
    require_off(config, {"partial_rotary_factor": 1})
    theta = 150_000.0 if architecture == GPT_OSS else theta
    return _rope({"head_size": head_size, **config}, fields, theta), local


def _rope(config: Mapping[str, Any], fields: Any, default_theta: float) -> RopeConfig:
    if not isinstance(fields, Mapping):
        raise ValueError(f"config.rope_scaling: got {fields!r:.200}, expected an object")
    require_off(fields, {"partial_rotary_factor": 1})
    theta = number_field({**config, **fields}, "rope_theta", 0.0, 1e12, default=default_theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "yarn":
        return _yarn(fields, theta, count_field(config, "head_size", 1024))
    if kind not in ("linear", "llama3"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default', 'linear', 'llama3' or 'yarn'")
    factor = number_field(fields, "factor", 0.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta, factor)
    low, high = number_field(fields, "low_freq_factor", 0.0, 1e6), number_field(fields, "high_freq_factor", 0.0, 1e6)
    if low >= high:
        raise ValueError(f"config.rope_scaling.high_freq_factor: got {high}, expected more than low_freq_factor={low}")
    return RopeConfig(theta, factor, low, high, count_field(fields, ORIGINAL_LENGTH, 1 << 30))


def _yarn(fields: Mapping[str, Any], theta: float, head_size: int) -> RopeConfig:
    """Frequencies with few periods in the original length are divided by the factor, those with many stay, between them both are mixed."""
    factor, original = number_field(fields, "factor", 0.0, 1e6), count_field(fields, ORIGINAL_LENGTH, 1 << 30)
    periods = [number_field(fields, name, 0.0, 1e6, default=default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    first, last = (head_size * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta)) for count in periods)
    if flag_field(fields, "truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    ramp = (torch.arange(head_size // 2, device="cpu").double() - first) / (last - first or 0.001)
    ramp = ramp.clamp(0, 1)
    magnitude = number_field(fields, "attention_factor", 0.0, 1e3, default=_yarn_magnitude(fields, factor))
    return RopeConfig(theta, divisors=tuple((1 / (ramp / factor + 1 - ramp)).tolist()), magnitude=magnitude)


def _yarn_magnitude(fields: Mapping[str, Any], factor: float) -> float:
    if not fields.get("mscale") or not fields.get("mscale_all_dim"):
        return yarn_scale(factor, 1.0)
    own, other = (yarn_scale(factor, number_field(fields, name, 0.0, 1e3)) for name in ("mscale", "mscale_all_dim"))
    return own / other


def yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1


def _partial_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """config: also the fields of `rope_scaling`. A part of each head may be rotated; longrope has the divisors of its original length."""
    theta = number_field(config, "rope_theta", 0.0, 1e12, default=10_000.0)
    rotated = int(head_size * number_field(config, "partial_rotary_factor", 0.0, 1.0 + 1e-9, default=1.0))
    if rotated < 2 or rotated % 2:
        raise ValueError(f"config.partial_rotary_factor: got {rotated} of {head_size} numbers, expected an even number of them")
    kind = config.get("rope_type", config.get("type", "default"))
    whole = None if rotated == head_size else rotated
    if kind == "default":
        return RopeConfig(theta, rotated=whole)
    if kind not in ("longrope", "su"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default' or 'longrope'")
    divisors, original = config.get("short_factor"), count_field(config, ORIGINAL_LENGTH, 1 << 30)
    numbers = isinstance(divisors, list) and all(isinstance(each, (int, float)) and each > 0 for each in divisors)
    if not isinstance(divisors, list) or not numbers or len(divisors) != rotated // 2:
        raise ValueError(f"config.rope_scaling.short_factor: got {divisors!r:.200}, expected {rotated // 2} numbers above 0")
    longer = max(1.0, count_field(config, "max_position_embeddings", 1 << 30) / original)
    magnitude = number_field(config, "attention_factor", 0.0, 1e3, default=math.sqrt(1 + math.log(longer) / math.log(max(2, original))))
    return RopeConfig(theta, rotated=whole, divisors=tuple(divisors), magnitude=magnitude)
