"""Reads the `config.json` of a Llama-family model. All sizes are checked before anything is allocated."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from stepgraph.graphs.layers.dense import Activation
from stepgraph.runtime.models.llama_config import ExpertsConfig, LatentConfig, LlamaConfig, RopeConfig, Routing
from stepgraph.sampling.fields import check_value, is_int, one_of, whole

ARCHITECTURES = tuple(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "Phi3", "Mixtral", "Qwen3Moe", "GptOss", "DeepseekV3", "Glm4Moe")
)
LLAMA, MISTRAL, QWEN_2, QWEN_3, GEMMA, PHI, MIXTRAL, QWEN_EXPERTS, GPT_OSS, DEEPSEEK, GLM = ARCHITECTURES
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MTP_COUNT = "num_nextn_predict_layers"
_MAX_PARAMETERS = 1 << 42
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_MAX_HEAD_SIZE = 1024
LAYER_TYPES = ("full_attention", "sliding_attention")
# Where the fields are absent, as in transformers.
_HEAD_SIZES = {GEMMA: 256, GPT_OSS: 64, QWEN_3: 128}
_WINDOWS = dict.fromkeys((MISTRAL, QWEN_2, QWEN_3, QWEN_EXPERTS, GEMMA), 4096) | {GPT_OSS: 128}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, _ORIGINAL_LENGTH: 4096}
_UNSUPPORTED = {  # fields that change the computation and are not implemented, and the values that turn them off
    "pretraining_tp": 1,
    "is_causal": True,
    **dict.fromkeys(("mlp_bias", "attention_multiplier", "logits_scaling"), False),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"), False),
}
_REQUIRED_ROUTING = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}


class UnsupportedConfigError(ValueError):
    """A well-formed config with an option that the class does not implement."""


def require_off(config: Mapping[str, Any], options: Mapping[str, object]) -> None:
    """Raises UnsupportedConfigError for an option that is on. options: names, and the value that turns each off."""
    for name, off in options.items():
        if config.get(name, off) not in (off, None):
            raise UnsupportedConfigError(f"config.{name}: got {config[name]!r:.100}, expected {off!r}")


def dtype_field(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    check_value("config.dtype", name, one_of(DTYPES))
    return DTYPES[name]


def count_field(config: Mapping[str, Any], name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
    value: Any = config.get(name)
    value = default if value is None else value
    check_value(f"config.{name}", value, whole(least, most))
    return int(value)


def number_field(config: Mapping[str, Any], name: str, above: float, below: float, *, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        raise ValueError(f"config.{name}: got {value!r:.100}, expected a number between {above} and {below}")
    return float(value)


def flag_field(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.{name}: got {value!r:.100}, expected true or false")
    return bool(value)


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The LlamaConfig of a config.json. Raises ValueError for a field that is missing, out of range or not supported."""
    architecture = _architecture(config)
    gemma, gpt_oss, deepseek, glm = (architecture == name for name in (GEMMA, GPT_OSS, DEEPSEEK, GLM))
    require_off(config, _UNSUPPORTED)
    if gpt_oss:
        require_off(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True})
    activation = "hidden_activation" if gemma else "hidden_act"
    require_off(config, {activation: "gelu_pytorch_tanh" if gemma else "silu"})
    hidden = count_field(config, "hidden_size", 1 << 17)
    layers = count_field(config, "num_hidden_layers", 4096)
    heads = count_field(config, "num_attention_heads", 4096)
    config = {"head_dim": _HEAD_SIZES.get(architecture), "sliding_window": _WINDOWS.get(architecture), **config}
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
    biased = (LLAMA, QWEN_3, GEMMA, QWEN_EXPERTS)
    bias = gpt_oss or (flag_field(config, "attention_bias") if architecture in biased else False)
    windows = _windows(config, architecture, layers)
    rope, local_rope = _ropes(config, architecture, head_size if latent is None else latent.rotated_size)
    # Beyond the original length, longrope uses other divisors, which would change the cache entries of all tokens before.
    longrope = architecture == PHI and rope.divisors
    limits = _with_rope_fields(config) if longrope else config
    positions = count_field(limits, _ORIGINAL_LENGTH if longrope else "max_position_embeddings", 1 << 30, default=1 << 20)
    scale = number_field(config, "query_pre_attn_scalar", 0.0, 1e6, default=256.0) ** -0.5 if gemma else None
    if latent is not None:
        rope = replace(rope, rotated_size=latent.rotated_size)
        with _naming_fields(config, _rope_name(config), config.get(_rope_name(config))):
            scale = _latent_scale(config, latent.size)
    llama_config = LlamaConfig(
        vocab_size=count_field(config, "vocab_size", 1 << 24),
        hidden_size=hidden,
        intermediate_size=count_field(config, "intermediate_size", 1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        windows=windows,
        norm_epsilon=number_field(config, "rms_norm_eps", 0.0, 1.0, default=1e-5 if architecture in (PHI, MIXTRAL, GPT_OSS, GLM) else 1e-6),
        rope=rope,
        local_rope=local_rope,
        qkv_bias=bias or architecture == QWEN_2 or (glm and flag_field(config, "attention_bias")),
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
    _check_total_size(llama_config)
    return llama_config


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
    """ValueError for an absurd total: each size may be in range on its own."""
    wide = 3 * max(config.intermediate_size, config.experts.num_experts * config.experts.expert_size if config.experts else 0)
    per_layer = config.hidden_size * (config.qkv_size + config.num_heads * config.head_size + wide)
    parameters = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"config: got sizes for {parameters:.1e} parameters, expected at most {_MAX_PARAMETERS:.1e}")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedConfigError(f"config.architectures: got {names!r:.100}, expected one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, by the rules of the architecture, some of which read `layer_types`."""
    alternates, stated = architecture in (GEMMA, GPT_OSS), config.get("layer_types")
    if alternates:
        period = 2 if architecture == GPT_OSS else count_field(config, "sliding_window_pattern", 4096, default=6)
        sliding = [(layer + 1) % period != 0 for layer in range(layers)]
    else:
        first = 0 if architecture in (MISTRAL, PHI, MIXTRAL) and config.get("sliding_window") is not None else layers
        if architecture.startswith("Qwen") and flag_field(config, "use_sliding_window"):
            alternates = architecture != QWEN_EXPERTS
            first = count_field(config, "max_window_layers", 4096, least=0, default=28) if alternates and stated is None else 0
        sliding = [layer >= first for layer in range(layers)]
    if stated is not None:
        rule = ["sliding_attention" if slides else "full_attention" for slides in sliding]
        if not isinstance(stated, list) or len(stated) != layers or any(kind not in LAYER_TYPES for kind in stated):
            raise ValueError(f"config.layer_types: got {stated!r:.200}, expected {layers} of {LAYER_TYPES}")
        # Some engines follow the field, and others, such as transformers, ignore it.
        if not alternates and stated != rule:
            raise ValueError(f"config.layer_types: got {stated!r:.200}, expected {rule[0]!r} for all layers of this {architecture}")
        sliding = [kind == "sliding_attention" for kind in stated]
    if not any(sliding):
        return (None,) * layers
    window = count_field(config, "sliding_window", 1 << 30)
    return tuple(window if slides else None for slides in sliding)


def _read_latent(config: Mapping[str, Any]) -> LatentConfig:
    """The attention of models like DeepSeek-V3."""
    require_off(config, {"attention_bias": False})
    query_rank = None if config.get("q_lora_rank") is None else count_field(config, "q_lora_rank", 1 << 17)
    rotated = count_field(config, "qk_rope_head_dim", _MAX_HEAD_SIZE)
    if rotated % 2:
        raise ValueError(f"config.qk_rope_head_dim: got {rotated}, expected an even number")
    plain = count_field(config, "qk_nope_head_dim", _MAX_HEAD_SIZE)
    value_size = count_field(config, "v_head_dim", plain + rotated)
    rank = count_field(config, "kv_lora_rank", 1 << 17)
    return LatentConfig(query_rank, rank, plain, rotated, value_size, flag_field(config, "rope_interleave", default=True))


def _latent_scale(config: Mapping[str, Any], size: int) -> float:
    """The scale of attention scores. With `mscale_all_dim` it grows with the logarithm of the factor of positions."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if fields.get("rope_type", fields.get("type", "default")) == "default" or not fields.get("mscale_all_dim"):
        return float(size**-0.5)
    factor = number_field(fields, "factor", 0.0, 1e6)
    return float(size**-0.5 * _yarn_scale(factor, number_field(fields, "mscale_all_dim", 0.0, 1e3)) ** 2)


def _read_grouped_experts(config: Mapping[str, Any], layers: int) -> ExpertsConfig:
    """The experts of models like DeepSeek-V3 and GLM-4.5."""
    require_off(config, _REQUIRED_ROUTING)
    deepseek = DEEPSEEK in config["architectures"]
    name = "n_routed_experts" if config.get("n_routed_experts") is not None else "num_local_experts"
    count, size = count_field(config, name, 1024), count_field(config, "moe_intermediate_size", 1 << 20)
    groups = count_field(config, "n_group", count)
    if count % groups or count // groups < 2:
        raise ValueError(f"config.n_group: got {groups}, expected a divisor of {name}={count}, with two experts or more in a group")
    routing = Routing(
        groups,
        count_field(config, "topk_group", groups),
        number_field(config, "routed_scaling_factor", 0.0, 1e6, default=2.5 if deepseek else 1.0),
    )
    return ExpertsConfig(
        count,
        count_field(config, "num_experts_per_tok", routing.groups_per_token * (count // groups)),
        size,
        flag_field(config, "norm_topk_prob", default=True),
        ("mlp", "gate_proj", "up_proj", "down_proj"),
        frozenset(range(min(layers, count_field(config, "first_k_dense_replace", 4096, least=0, default=3 if deepseek else 1)))),
        routing,
        size * count_field(config, "n_shared_experts", 1024, least=0, default=1),
    )


def _ropes(config: Mapping[str, Any], architecture: str, head_size: int) -> tuple[RopeConfig, RopeConfig | None]:
    """Frequencies of all layers, and of window layers if different: by `rope_theta` and `rope_scaling`, or by `rope_parameters`.

    Gemma 3 has two objects in `rope_parameters`, or `rope_local_base_freq` for layers with a window.
    """
    if (stated := config.get("rope_scaling")) and config.get("rope_parameters") not in (None, {}, stated):
        raise ValueError(f"config.rope_scaling: got {stated!r:.200} beside rope_parameters, expected one of them")
    fields = config.get("rope_parameters") or stated or (_GPT_OSS_ROPE if architecture == GPT_OSS else {})
    if architecture in (PHI, GLM) and isinstance(fields, Mapping):
        share = 1.0 if architecture == PHI else 0.5
        with _naming_fields(config, _rope_name(config), fields, _ORIGINAL_LENGTH):
            if architecture == GLM:
                require_off(fields, {"rope_type": "default", "type": "default"})
            return _partial_rope({"partial_rotary_factor": share, **_with_rope_fields(config)}, head_size), None
    require_off(config, {"partial_rotary_factor": 1})
    if architecture == GEMMA:
        return _gemma_ropes(config, head_size)
    theta = {GPT_OSS: 150_000.0, MIXTRAL: 1_000_000.0}.get(architecture, 10_000.0)
    with _naming_fields(config, _rope_name(config), fields):
        return _rope(config, fields, theta, head_size), None


def _rope_name(config: Mapping[str, Any]) -> str:
    return "rope_parameters" if config.get("rope_parameters") else "rope_scaling"


@contextlib.contextmanager
def _naming_fields(config: Mapping[str, Any], where: str, fields: Any, outside: str = "") -> Iterator[None]:
    """Add `where` to the names of its fields in errors. outside: a name that is read outside of it only."""
    try:
        yield
    except ValueError as error:
        name, _, rest = str(error).removeprefix("config.").removeprefix("rope_scaling.").partition(":")
        is_outside = name == outside or (name == _ORIGINAL_LENGTH and config.get(name) is not None)
        if isinstance(fields, Mapping) and name in (*fields, "factor", "low_freq_factor", "high_freq_factor") and not is_outside:
            error.args = (f"config.{where}.{name}:{rest}",)
        raise


def _gemma_ropes(config: Mapping[str, Any], head_size: int) -> tuple[RopeConfig, RopeConfig]:
    """`rope_scaling` is that of layers without a window, where `type` has no effect, as in transformers."""
    parts, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(parts, Mapping) or not parts.keys() <= set(LAYER_TYPES):
        raise ValueError(f"config.rope_parameters: got {parts!r:.200}, expected an object for each of {LAYER_TYPES}")
    if scaling and (not isinstance(scaling, Mapping) or "rope_type" not in scaling):
        raise ValueError(f"config.rope_scaling: got {scaling!r:.200}, expected an object with rope_type")
    inner = {"max_position_embeddings": config.get("max_position_embeddings")}
    found = list[RopeConfig]()
    for kind, name, default in zip(LAYER_TYPES, ("rope_theta", "rope_local_base_freq"), (1_000_000.0, 10_000.0), strict=True):
        is_old = kind == "full_attention" and scaling
        where, fields = ("rope_scaling", scaling) if is_old else (f"rope_parameters.{kind}", parts.get(kind) or {})
        with _naming_fields(inner, where, fields):
            found.append(_rope({"rope_theta": config.get(name), **inner}, fields, default, head_size))
            require_off(fields, {"truncate": True})  # transformers reads it outside these objects
    return found[0], found[1]


def _with_rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `rope_parameters` take precedence, except for the original length, which is read outside only, as in transformers."""
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {**config, **stated, _ORIGINAL_LENGTH: config.get(_ORIGINAL_LENGTH)}


def _rope(config: Mapping[str, Any], fields: Any, default_theta: float, head_size: int) -> RopeConfig:
    if not isinstance(fields, Mapping):
        raise ValueError(f"config.rope_scaling: got {fields!r:.200}, expected an object")
    require_off(fields, {"partial_rotary_factor": 1})
    # As in transformers: the original length outside takes precedence; if there is none, it is the number of positions.
    outside = {} if config.get(_ORIGINAL_LENGTH) is None else {_ORIGINAL_LENGTH: config[_ORIGINAL_LENGTH]}
    fields = {_ORIGINAL_LENGTH: config.get("max_position_embeddings"), **fields, **outside}
    theta = number_field({**config, **fields}, "rope_theta", 1.0, 1e12, default=default_theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "yarn":
        return _yarn(fields, theta, head_size)
    if kind not in ("linear", "llama3"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default', 'linear', 'llama3' or 'yarn'")
    factor = number_field(fields, "factor", 0.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta, factor)
    low, high = number_field(fields, "low_freq_factor", 0.0, 1e6), number_field(fields, "high_freq_factor", 0.0, 1e6)
    if low >= high:
        raise ValueError(f"config.rope_scaling.high_freq_factor: got {high}, expected more than low_freq_factor={low}")
    return RopeConfig(theta, factor, low, high, count_field(fields, _ORIGINAL_LENGTH, 1 << 30))


def _yarn(fields: Mapping[str, Any], theta: float, head_size: int) -> RopeConfig:
    """Frequencies with few periods in the original length are divided by the factor, those with many kept, those between interpolated."""
    factor, original = number_field(fields, "factor", 0.0, 1e6), count_field(fields, _ORIGINAL_LENGTH, 1 << 30)
    periods = [number_field(fields, name, 0.0, 1e6, default=default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    first, last = (head_size * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta)) for count in periods)
    if flag_field(fields, "truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    ramp = (torch.arange(head_size // 2, device="cpu").double() - first) / (last - first or 0.001)
    ramp = ramp.clamp(0, 1)
    multiple = number_field(fields, "attn_factor", 0.0, 1e3, default=1.0)  # as in vLLM; transformers ignores it
    magnitude = number_field(fields, "attention_factor", 0.0, 1e3, default=_yarn_magnitude(fields, factor) * multiple)
    return RopeConfig(theta, divisors=tuple((1 / (ramp / factor + 1 - ramp)).tolist()), magnitude=magnitude)


def _yarn_magnitude(fields: Mapping[str, Any], factor: float) -> float:
    if not fields.get("mscale") or not fields.get("mscale_all_dim"):
        return _yarn_scale(factor, 1.0)
    own, other = (_yarn_scale(factor, number_field(fields, name, 0.0, 1e3)) for name in ("mscale", "mscale_all_dim"))
    return own / other


def _yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(max(factor, 1.0)) + 1


def _partial_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """config: includes the fields of `rope_scaling`. Part of each head may be rotated; longrope: divisors up to its original length."""
    theta = number_field(config, "rope_theta", 0.0, 1e12, default=10_000.0)
    rotated = int(head_size * number_field(config, "partial_rotary_factor", 0.0, 1.0 + 1e-9, default=1.0))
    if rotated < 2 or rotated % 2:
        raise ValueError(f"config.partial_rotary_factor: got {rotated} of {head_size} numbers, expected an even number of them")
    kind = config.get("rope_type", config.get("type", "default"))
    whole = None if rotated == head_size else rotated
    if kind == "default":
        return RopeConfig(theta, rotated_size=whole)
    if kind not in ("longrope", "su"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default' or 'longrope'")
    divisors, original = config.get("short_factor"), count_field(config, _ORIGINAL_LENGTH, 1 << 30)
    numbers = isinstance(divisors, list) and all(isinstance(each, (int, float)) and each > 0 for each in divisors)
    if not isinstance(divisors, list) or not numbers or len(divisors) != rotated // 2:
        raise ValueError(f"config.rope_scaling.short_factor: got {divisors!r:.200}, expected {rotated // 2} numbers above 0")
    longer = number_field(config, "factor", 0.0, 1e6, default=count_field(config, "max_position_embeddings", 1 << 30) / original)
    longer = max(1.0, longer)
    magnitude = number_field(config, "attention_factor", 0.0, 1e3, default=math.sqrt(1 + math.log(longer) / math.log(max(2, original))))
    return RopeConfig(theta, rotated_size=whole, divisors=tuple(divisors), magnitude=magnitude)
