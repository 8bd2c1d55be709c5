"""The configs of Llama-family models and of EAGLE-3 heads; the former read from a `config.json`, checked before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.layers.lora import LoraWeight
from stepgraph.sampling.fields import is_int

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_MAX_PARAMETERS = 1 << 42
# Options that are not implemented, with the values that turn them off.
_UNSUPPORTED = {"hidden_act": "silu", "partial_rotary_factor": 1, "pretraining_tp": 1}


class TargetSizes(Protocol):
    """What a draft's config is compared with."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...


class UnsupportedConfigError(ValueError):
    """A config that is well-formed, and needs something that the class does not implement."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position frequencies. With `original_length`, Llama 3.1's scaling, else linear scaling by `factor`."""

    theta: float = 10_000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int | None = None  # in tokens

    def frequencies(self, size: int) -> Tensor:
        """[size / 2] float32 radians per position, for heads of `size` numbers."""
        powers = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        frequencies = 1.0 / (self.theta**powers)
        if self.original_length is None:
            return frequencies / self.factor
        # Frequencies with many periods in the original length stay, those with few are scaled, and between them both are mixed.
        periods = self.original_length * frequencies / (2 * math.pi)
        kept = (periods - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]  # attention window of each layer, in positions; None: unlimited
    norm_epsilon: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False  # RMS norm of every query and key head
    tied: bool = False  # the embedding is also the unembedding
    max_positions: int = 1 << 20
    dtype: torch.dtype = torch.float32  # of the weights and the cache

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    def lora_weights(self, name: str) -> dict[str, LoraWeight]:
        """The weights that adapters change, by the names of their buffers in a model `name`."""
        hidden, middle = self.hidden_size, self.intermediate_size
        query, entry = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        weights = {
            "qkv": (hidden, {"self_attn.q_proj": query, "self_attn.k_proj": entry, "self_attn.v_proj": entry}),
            "output": (query, {"self_attn.o_proj": hidden}),
            "gate_up": (hidden, {"mlp.gate_proj": middle, "mlp.up_proj": middle}),
            "down": (middle, {"mlp.down_proj": hidden}),
        }
        return {
            f"{name}_{index}_{weight}": LoraWeight({f"model.layers.{index}.{part}": size for part, size in parts.items()}, inner)
            for index in range(self.num_layers)
            for weight, (inner, parts) in weights.items()
        }


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and options of one head. `layer.vocab_size` is the target's, since the head reads the target's tokens."""

    layer: LlamaConfig
    feature_layers: tuple[int, ...]  # layers of the target whose inputs are fused
    target_hidden_size: int
    draft_vocab_size: int  # tokens that the head can propose
    norm_before_residual: bool = False  # the residual connection around attention takes the normalised state


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """From the fields of a config.json. Raises ValueError for a field that is missing, out of range or not supported."""
    architecture = _architecture(config)
    _check_unsupported(config)
    hidden = count_field(config, "hidden_size", 1 << 17)
    layers = count_field(config, "num_hidden_layers", 4096)
    heads = count_field(config, "num_attention_heads", 4096)
    kv_heads = count_field(config, "num_key_value_heads", 4096, default=heads)
    if heads % kv_heads:
        raise ValueError(f"config.num_key_value_heads: got {kv_heads}, expected a divisor of num_attention_heads={heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"config.num_attention_heads: got {heads}, expected a divisor of hidden_size={hidden}, or a head_dim")
    head_size = count_field(config, "head_dim", 1024, default=hidden // heads)
    if head_size % 2:
        raise ValueError(f"config.head_dim: got {head_size}, expected an even number")
    bias = flag_field(config, "attention_bias") if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") else False
    found = LlamaConfig(
        vocab_size=count_field(config, "vocab_size", 1 << 24),
        hidden_size=hidden,
        intermediate_size=count_field(config, "intermediate_size", 1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        windows=_windows(config, architecture, layers),
        norm_epsilon=_number(config, "rms_norm_eps", 0.0, 1.0, default=1e-6),
        rope=_rope(config),
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias,
        head_norms=architecture == "Qwen3ForCausalLM",
        tied=flag_field(config, "tie_word_embeddings"),
        max_positions=count_field(config, "max_position_embeddings", 1 << 30, default=1 << 20),
        dtype=_dtype(config),
    )
    _check_total_size(found)
    return found


def _check_total_size(config: LlamaConfig) -> None:
    """Sizes can be in range one by one and still make an absurd total."""
    per_layer = config.hidden_size * (config.qkv_size + config.num_heads * config.head_size + 3 * config.intermediate_size)
    parameters = config.num_layers * per_layer + config.vocab_size * config.hidden_size
    if parameters > _MAX_PARAMETERS:
        raise ValueError(f"config: got sizes for {parameters:.1e} parameters, expected at most {_MAX_PARAMETERS:.1e}")


def _check_unsupported(config: Mapping[str, Any]) -> None:
    """Raises ValueError for a field that changes the computation and is not implemented."""
    require_off(config, _UNSUPPORTED)
    for name in ("mlp_bias", "quantization_config", "attention_multiplier", "logits_scaling", "final_logit_softcapping"):
        if config.get(name):
            raise UnsupportedConfigError(f"config.{name}: got {config[name]!r:.200}, which is not supported")


def require_off(config: Mapping[str, Any], options: Mapping[str, object]) -> None:
    """options: the values that turn them off."""
    for name, off in options.items():
        if config.get(name, off) not in (off, None):
            raise UnsupportedConfigError(f"config.{name}: got {config[name]!r:.100}, expected {off!r}")


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
            first = 0 if architecture == "MistralForCausalLM" and config.get("sliding_window") is not None else layers
        sliding: Sequence[bool] = [layer >= first for layer in range(layers)]
    else:
        known = ("full_attention", "sliding_attention")
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
            raise ValueError(f"config.layer_types: got {kinds!r:.200}, expected {layers} of {known}")
        sliding = [kind == "sliding_attention" for kind in kinds]
    if not any(sliding):
        return (None,) * layers
    window = count_field(config, "sliding_window", 1 << 30)
    return tuple(window if slides else None for slides in sliding)


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """`rope_theta` with `rope_scaling`, or both in `rope_parameters`."""
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(fields, Mapping):
        raise ValueError(f"config.rope_scaling: got {fields!r:.200}, expected an object")
    _check_unsupported(fields)
    theta = _number({**config, **fields}, "rope_theta", 0.0, 1e12, default=10_000.0)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind not in ("linear", "llama3"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default', 'linear' or 'llama3'")
    factor = _number(fields, "factor", 0.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta, factor)
    low, high = _number(fields, "low_freq_factor", 0.0, 1e6), _number(fields, "high_freq_factor", 0.0, 1e6)
    if low >= high:
        raise ValueError(f"config.rope_scaling.high_freq_factor: got {high}, expected more than low_freq_factor={low}")
    return RopeConfig(theta, factor, low, high, count_field(fields, "original_max_position_embeddings", 1 << 30))


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(f"config.dtype: got {name!r:.100}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


def count_field(config: Mapping[str, Any], name: str, most: int, *, least: int = 1, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not is_int(value) or not least <= value <= most:
        raise ValueError(f"config.{name}: got {value!r:.100}, expected a whole number from {least} to {most}")
    return value


def _number(config: Mapping[str, Any], name: str, above: float, below: float, *, default: float | None = None) -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value < below:
        raise ValueError(f"config.{name}: got {value!r:.100}, expected a number between {above} and {below}")
    return float(value)


def flag_field(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.{name}: got {value!r:.100}, expected true or false")
    return bool(value)
