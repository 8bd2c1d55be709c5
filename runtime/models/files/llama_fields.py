"""Reads the `config.json` of a Llama-family model. All sizes are checked before anything is allocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stepgraph.graphs.layers.dense import Activation
from stepgraph.runtime.models.files.config_fields import (
    UnsupportedConfigError,
    count_field,
    dtype_field,
    flag_field,
    number_field,
    require_off,
)
from stepgraph.runtime.models.files.rope_fields import ORIGINAL_LENGTH, read_ropes, yarn_scale
from stepgraph.runtime.models.llama_config import (
    ARCHITECTURES,
    DEEPSEEK,
    GEMMA,
    GLM,
    GPT_OSS,
    MIXTRAL,
    PHI,
    QWEN_EXPERTS,
    ExpertsConfig,
    LatentConfig,
    LlamaConfig,
    Routing,
)
from stepgraph.sampling.fields import is_int

_MAX_PARAMETERS = 1 << 42
_MOST_HEAD = 1024
_GROUPED_ONLY = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """From the fields of a config.json. Raises ValueError for a field that is missing, out of range or not supported."""
    architecture = _architecture(config)
    gemma, gpt_oss, deepseek, glm = (architecture == name for name in (GEMMA, GPT_OSS, DEEPSEEK, GLM))
    _check_unsupported(config)
    if gpt_oss:
        require_off(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True})
    activation = "hidden_activation" if gemma else "hidden_act"
    require_off(config, {activation: "gelu_pytorch_tanh" if gemma else "silu"})
    hidden = count_field(config, "hidden_size", 1 << 17)
    layers = count_field(config, "num_hidden_layers", 4096)
    heads = count_field(config, "num_attention_heads", 4096)
    latent = _read_latent(config) if deepseek else None
    if latent is not None:
        require_off(config, {"num_key_value_heads": heads})
        config = {**config, "head_dim": latent.size, "num_key_value_heads": heads}
    kv_heads = count_field(config, "num_key_value_heads", 4096, default=heads)
    if heads % kv_heads:
        raise ValueError(f"config.num_key_value_heads: got {kv_heads}, expected a divisor of num_attention_heads={heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.num_attention_heads: got {heads}, expected a divisor of hidden_size={hidden}, or a head_dim")
    head_size = count_field(config, "head_dim", 1024, default=hidden // heads)
    if head_size % 2:
        raise ValueError(f"config.head_dim: got {head_size}, expected an even number")
    biased = ("LlamaForCausalLM", "Qwen3ForCausalLM", GEMMA, QWEN_EXPERTS)
    bias = gpt_oss or (flag_field(config, "attention_bias") if architecture in biased else False)
    windows = _windows(config, architecture, layers)
    rope, local_rope = read_ropes(config, architecture, head_size if latent is None else latent.rotated)
    # A text beyond the original length of longrope would change the entries of all its tokens.
    positions = count_field(
        config, ORIGINAL_LENGTH if architecture == PHI and rope.divisors else "max_position_embeddings", 1 << 30, default=1 << 20
    )
    scale = number_field(config, "query_pre_attn_scalar", 0.0, 1e6, default=256.0) ** -0.5 if gemma else None
    if latent is not None:
        rope, scale = replace(rope, rotated=latent.rotated), _latent_scale(config, latent.size)
    found = LlamaConfig(
        vocab_size=count_field(config, "vocab_size", 1 << 24),
        hidden_size=hidden,
        intermediate_size=count_field(config, "intermediate_size", 1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        windows=windows,
        norm_epsilon=number_field(config, "rms_norm_eps", 0.0, 1.0, default=1e-6),
        rope=rope,
        local_rope=local_rope,
        qkv_bias=bias or architecture == "Qwen2ForCausalLM" or (glm and flag_field(config, "attention_bias")),
        output_bias=bias,
        head_norms=gemma or architecture.startswith("Qwen3") or (glm and flag_field(config, "use_qk_norm")),
        output_norms=gemma,
        norm_offset=float(gemma),
        fused=architecture == PHI,
        activation=Activation.GELU_TANH if gemma else Activation.LIMITED if gpt_oss else Activation.SILU,
        sinks=gpt_oss,
        attention_scale=scale,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        experts=_read_grouped_experts(config, layers) if deepseek or glm else _experts(config, architecture, layers),
        latent=latent,
        tied=flag_field(config, "tie_word_embeddings", default=gemma),
        max_positions=positions,
        dtype=dtype_field(config),
    )
    _check_total_size(found)
    return found


def _experts(config: Mapping[str, Any], architecture: str, layers: int) -> ExpertsConfig | None:
    if architecture not in (MIXTRAL, QWEN_EXPERTS, GPT_OSS):
        return None
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count = count_field(config, name, 1024)
    taken = count_field(config, "num_experts_per_tok", count)
    if architecture != QWEN_EXPERTS:
        size = count_field(config, "intermediate_size", 1 << 20)
        return ExpertsConfig(count, taken, size, True, ("block_sparse_moe", "w1", "w3", "w2") if architecture == MIXTRAL else None)
    size, step = count_field(config, "moe_intermediate_size", 1 << 20), count_field(config, "decoder_sparse_step", 4096, default=1)
    stated = config.get("mlp_only_layers") or []
    if not isinstance(stated, list) or not all(map(is_int, stated)):
        raise ValueError(f"config.mlp_only_layers: got {stated!r:.200}, expected a list of layer numbers")
    dense = frozenset(layer for layer in range(layers) if layer in stated or (layer + 1) % step)
    names = ("mlp", "gate_proj", "up_proj", "down_proj")
    return ExpertsConfig(count, taken, size, flag_field(config, "norm_topk_prob"), names, dense)


def _check_total_size(config: LlamaConfig) -> None:
    """Sizes can be in range one by one and still make an absurd total."""
    wide = 3 * max(config.intermediate_size, config.experts.count * config.experts.size if config.experts else 0)
    per_layer = config.hidden_size * (config.qkv_size + config.num_heads * config.head_size + wide)
    parameters = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"config: got sizes for {parameters:.1e} parameters, expected at most {_MAX_PARAMETERS:.1e}")


def _check_unsupported(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that changes the computation and is not implemented."""
    require_off(config, {"pretraining_tp": 1})
    names = (
        "mlp_bias",
        "quantization_config",
        "attention_multiplier",
        "logits_scaling",
        "final_logit_softcapping",
        "attn_logit_softcapping",
        "use_bidirectional_attention",
    )
    for name in names:
        if config.get(name):
            raise UnsupportedConfigError(f"config.{name}: got {config[name]!r:.200}, which is not supported")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedConfigError(f"config.architectures: got {names!r:.100}, expected one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, from `layer_types` if given, else by the rules of the architecture."""
    kinds = config.get("layer_types")
    if kinds is None:
        if architecture.startswith("Qwen") and flag_field(config, "use_sliding_window"):
            first = count_field(config, "max_window_layers", 4096, least=0, default=layers)
        else:
            first = 0 if architecture in ("MistralForCausalLM", PHI, MIXTRAL) and config.get("sliding_window") is not None else layers
        sliding: Sequence[bool] = [layer >= first for layer in range(layers)]
        if architecture in (GEMMA, GPT_OSS):
            period = 2 if architecture == GPT_OSS else count_field(config, "sliding_window_pattern", 4096, default=6)
            sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise ValueError(f"config.layer_types: got {kinds!r:.200}, expected {layers} of {known}")
        sliding = [kind == "sliding_attention" for kind in kinds]
    if not any(sliding):
        return (None,) * layers
    window = count_field(config, "sliding_window", 1 << 30)
    return tuple(window if slides else None for slides in sliding)


def _read_latent(config: Mapping[str, Any]) -> LatentConfig:
    """The attention of models like DeepSeek-V3."""
    require_off(config, {"attention_bias": False})
    query_rank = None if config.get("q_lora_rank") is None else count_field(config, "q_lora_rank", 1 << 17)
    rotated = count_field(config, "qk_rope_head_dim", _MOST_HEAD)
    if rotated % 2:
        raise ValueError(f"config.qk_rope_head_dim: got {rotated}, expected an even number")
    plain = count_field(config, "qk_nope_head_dim", _MOST_HEAD)
    value_size = count_field(config, "v_head_dim", plain + rotated)
    rank = count_field(config, "kv_lora_rank", 1 << 17)
    return LatentConfig(query_rank, rank, plain, rotated, value_size, flag_field(config, "rope_interleave", default=True))


def _latent_scale(config: Mapping[str, Any], size: int) -> float:
    """Of scores. With `mscale_all_dim` they grow with the logarithm of the factor of positions."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if fields.get("rope_type", fields.get("type", "default")) == "default" or not fields.get("mscale_all_dim"):
        return float(size**-0.5)
    factor = number_field(fields, "factor", 0.0, 1e6)
    return float(size**-0.5 * yarn_scale(factor, number_field(fields, "mscale_all_dim", 0.0, 1e3)) ** 2)


def _read_grouped_experts(config: Mapping[str, Any], layers: int) -> ExpertsConfig:
    """Of models like DeepSeek-V3 and GLM-4.5."""
    require_off(config, _GROUPED_ONLY)
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
