"""The fields of a `config.json` of models like DeepSeek-V3 and GLM-4.5: latent attention, and experts in groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepgraph.runtime.models.files.config_fields import count_field, flag_field, number_field, require_off
from stepgraph.runtime.models.files.rope_fields import yarn_scale
from stepgraph.runtime.models.llama_config import ExpertsConfig, LatentConfig, Routing

_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
_MOST_HEAD = 1024


def read_latent(config: Mapping[str, Any]) -> LatentConfig:
    require_off(config, {"attention_bias": False})
    query_rank = None if config.get("q_lora_rank") is None else count_field(config, "q_lora_rank", 1 << 17)
    rotated = count_field(config, "qk_rope_head_dim", _MOST_HEAD)
    if rotated % 2:
        raise ValueError(f"config.qk_rope_head_dim: got {rotated}, expected an even number")
    plain = count_field(config, "qk_nope_head_dim", _MOST_HEAD)
    value_size = count_field(config, "v_head_dim", plain + rotated)
    rank = count_field(config, "kv_lora_rank", 1 << 17)
    return LatentConfig(query_rank, rank, plain, rotated, value_size, flag_field(config, "rope_interleave", default=True))


def latent_scale(config: Mapping[str, Any], size: int) -> float:
    """Of scores. With `mscale_all_dim` they grow with the logarithm of the factor of positions."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if fields.get("rope_type", fields.get("type", "default")) == "default" or not fields.get("mscale_all_dim"):
        return float(size**-0.5)
    factor = number_field(fields, "factor", 0.0, 1e6)
    return float(size**-0.5 * yarn_scale(factor, number_field(fields, "mscale_all_dim", 0.0, 1e3)) ** 2)


def read_grouped_experts(config: Mapping[str, Any], layers: int) -> ExpertsConfig:
    require_off(config, _ONLY)
    name = "n_routed_experts" if config.get("n_routed_experts") is not None else "num_local_experts"
    count, size = count_field(config, name, 1024), count_field(config, "moe_intermediate_size", 1 << 20)
    groups = count_field(config, "n_group", count)
    if count % groups or count // groups < 2:
        raise ValueError(f"config.n_group: got {groups}, expected a divisor of {name}={count}, with two experts or more in a group")
    routing = Routing(
        groups, count_field(config, "topk_group", groups), number_field(config, "routed_scaling_factor", 0.0, 1e6, default=1.0)
    )
    return ExpertsConfig(
        count,
        count_field(config, "num_experts_per_tok", routing.groups_taken * (count // groups)),
        size,
        flag_field(config, "norm_topk_prob", default=True),
        ("mlp", "gate_proj", "up_proj", "down_proj"),
        frozenset(range(min(layers, count_field(config, "first_k_dense_replace", 4096, least=0, default=0)))),
        routing,
        size * count_field(config, "n_shared_experts", 1024, least=0, default=0),
    )
