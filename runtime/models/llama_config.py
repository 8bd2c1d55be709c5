"""What a model of the Llama family looks like, read from a `config.json`. Numbers are checked here, before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stepgraph.runtime.models.rope import RopeConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_MOST_PARAMETERS = 1 << 42


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]  # of each layer: how many positions back it sees; None: all
    norm_epsilon: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False  # queries and keys are normalised, each head for itself
    tied: bool = False  # the logits are taken with the embedding
    max_positions: int = 1 << 20
    dtype: torch.dtype = torch.float32  # of the weights and the cache

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """The config of a Hugging Face folder. ValueError names the field that is missing, out of range or not supported."""
    architecture = _architecture(config)
    refuse_unsupported(config)
    hidden = _count(config, "hidden_size", 1 << 17)
    layers = _count(config, "num_hidden_layers", 4096)
    heads = _count(config, "num_attention_heads", 4096)
    kv_heads = _count(config, "num_key_value_heads", 4096, default=heads)
    if heads % kv_heads:
        raise ValueError(f"config.num_key_value_heads: got {kv_heads}, want a divisor of num_attention_heads={heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.num_attention_heads: got {heads}, want a divisor of hidden_size={hidden}, or a head_dim")
    head_size = _count(config, "head_dim", 1024, default=hidden // heads)
    if head_size % 2:
        raise ValueError(f"config.head_dim: got {head_size}, want an even number")
    bias = _flag(config, "attention_bias") if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    found = LlamaConfig(
        vocab_size=_count(config, "vocab_size", 1 << 24),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size", 1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        windows=_windows(config, architecture, layers),
        norm_epsilon=_number(config, "rms_norm_eps", 0.0, 1.0, default=1e-6),
        rope=_rope(config),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias,
        head_norms=architecture == "Qwen3ForCausalLM",
        tied=_flag(config, "tie_word_embeddings"),
        max_positions=_count(config, "max_position_embeddings", 1 << 30, default=1 << 20),
        dtype=_dtype(config),
    )
    check_size(found)
    return found


def mtp_count(config: Mapping[str, Any]) -> int:
    """MTP modules that come with the model."""
    return _count(config, "num_nextn_predict_layers", 64, least=0, default=0)


def check_size(config: LlamaConfig) -> None:
    """Sizes may be plausible one by one and absurd together."""
    per_layer = config.hidden_size * (config.qkv_size + config.num_heads * config.head_size + 3 * config.intermediate_size)
    parameters = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    if parameters > _MOST_PARAMETERS:
        raise ValueError(f"config: its sizes make {parameters:.1e} parameters, want at most {_MOST_PARAMETERS:.1e}")


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Fields that would change the arithmetic and are not implemented: an error, not another model."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"config.hidden_act: got {config['hidden_act']!r:.100}, want 'silu'")
    for name in ("mlp_bias", "quantization_config", "attention_multiplier", "logits_scaling", "final_logit_softcapping"):
        if config.get(name):
            raise ValueError(f"config.{name}: got {config[name]!r:.200}, which is not supported")
    for name in ("partial_rotary_factor", "pretraining_tp"):
        if config.get(name, 1) not in (1, None):
            raise ValueError(f"config.{name}: got {config[name]!r:.100}, want 1")


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise ValueError(f"config.architectures: got {names!r:.100}, want one of {', '.join(ARCHITECTURES)}")
    return str(names[0])


def _windows(config: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, ...]:
    """Which layers slide: as `layer_types` says, else as the family has it."""
    kinds = config.get("layer_types")
    if kinds is None:
        if architecture.startswith("Qwen") and _flag(config, "use_sliding_window"):
            first = _count(config, "max_window_layers", 4096, least=0, default=layers)
        else:
            first = 0 if architecture == "MistralForCausalLM" and config.get("sliding_window") is not None else layers
        slides: Sequence[bool] = [layer >= first for layer in range(layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise ValueError(f"config.layer_types: got {kinds!r:.200}, want {layers} of {known}")
        slides = [kind == "sliding_attention" for kind in kinds]
    if not any(slides):
        return (None,) * layers
    window = _count(config, "sliding_window", 1 << 30)
    return tuple(window if slide else None for slide in slides)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """`rope_theta` with `rope_scaling`, or both in `rope_parameters`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.rope_scaling: got {given!r:.200}, want an object")
    refuse_unsupported(given)
    theta = _number({**config, **given}, "rope_theta", 0.0, 1e12, default=10_000.0)
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3"):
        raise ValueError(f"config.rope_scaling.rope_type: got {kind!r:.100}, want 'default', 'linear' or 'llama3'")
    factor = _number(given, "factor", 0.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta, factor)
    low, high = _number(given, "low_freq_factor", 0.0, 1e6), _number(given, "high_freq_factor", 0.0, 1e6)
    if low >= high:
        raise ValueError(f"config.rope_scaling.high_freq_factor: got {high}, want more than low_freq_factor={low}")
    return RopeConfig(theta, factor, low, high, _count(given, "original_max_position_embeddings", 1 << 30))


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"config.dtype: got {name!r:.100}, want one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _count(config: Mapping[str, Any], name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"config.{name}: got {value!r:.100}, want a whole number from {least} to {most}")
    return value


def _number(config: Mapping[str, Any], name: str, above: float, below: float, *, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        raise ValueError(f"config.{name}: got {value!r:.100}, want a number between {above} and {below}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.{name}: got {value!r:.100}, want true or false")
    return bool(value)
