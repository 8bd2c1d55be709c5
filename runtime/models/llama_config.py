"""The configs of Llama-family models and of EAGLE-3 heads; the former read from a `config.json`, checked before anything is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import Activation
from stepgraph.graphs.layers.lora import LoraWeight
from stepgraph.graphs.model import AttentionShape
from stepgraph.sampling.fields import is_int

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_GEMMA, _PHI, _MIXTRAL, _QWEN_EXPERTS, _GPT_OSS = (f"{name}ForCausalLM" for name in ("Gemma3", "Phi3", "Mixtral", "Qwen3Moe", "GptOss"))
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    _GEMMA,
    _PHI,
    _MIXTRAL,
    _QWEN_EXPERTS,
    _GPT_OSS,
)
_MAX_PARAMETERS = 1 << 42
_ORIGINAL = "original_max_position_embeddings"
# Options that are not implemented, with the values that turn them off.
_UNSUPPORTED = {"pretraining_tp": 1}


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
    """Rotary position frequencies. With `original_length`, Llama 3.1's scaling, else linear scaling by `factor`, then by `divisors`."""

    theta: float = 10_000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int | None = None  # in tokens
    turned: int | None = None  # how many numbers of a head are rotated; None: all
    divisors: tuple[float, ...] = ()  # one for each frequency
    magnitude: float = 1.0  # a factor of cosines and sines

    def frequencies(self, size: int) -> Tensor:
        """[turned / 2] float32 radians per position, for heads of `size` numbers."""
        size = self.turned or size
        powers = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        frequencies = 1.0 / (self.theta**powers)
        if self.original_length is None:
            return frequencies / (torch.tensor(self.divisors) if self.divisors else self.factor)
        # Frequencies with many periods in the original length stay, those with few are scaled, and between them both are mixed.
        periods = self.original_length * frequencies / (2 * math.pi)
        kept = (periods - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class ExpertsConfig:
    """The MLP of some layers: a router and experts, of which every token takes a few."""

    count: int
    taken: int  # by each token
    size: int  # the intermediate size of each
    normalised: bool  # the probabilities of those taken sum to one
    # Names in files: of the MLP in a layer, and of gate, up and down in an expert; None: as GPT-OSS has them.
    stored: tuple[str, str, str, str] | None
    dense_layers: frozenset[int] = frozenset()  # with an MLP as in other models

    @property
    def biased(self) -> bool:
        return self.stored is None


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
    local_rope: RopeConfig | None = None  # of layers with a window, if another
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False  # RMS norm of every query and key head
    output_norms: bool = False  # norms of the outputs of attention and MLP, before they are added
    norm_offset: float = 0.0  # added to the weights of all norms
    fused: bool = False  # stored with q, k and v as one weight, gate and up as another
    activation: Activation = Activation.SILU
    attention_scale: float | None = None  # of scores; None: head_size ** -0.5
    embedding_scale: float = 1.0
    experts: ExpertsConfig | None = None
    sinks: bool = False  # see attention.paged.attention
    tied: bool = False  # the embedding is also the unembedding
    max_positions: int = 1 << 20
    dtype: torch.dtype = torch.float32  # of the weights and the cache

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.dtype, self.num_heads, self.num_kv_heads, self.head_size, self.windows, sinks=self.sinks)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def embedding_factor(self) -> float:
        """The scale of embeddings as a number of `dtype`, as transformers multiplies with."""
        return float(torch.tensor(self.embedding_scale, dtype=self.dtype, device="cpu"))

    @property
    def has_llama_layers(self) -> bool:
        """Whether layers have the parts of a Llama's and no others, as those of draft heads, stored under the same names."""
        plain = replace(self, output_norms=False, norm_offset=0.0, activation=Activation.SILU, attention_scale=None, embedding_scale=1.0)
        plain = replace(plain, fused=False, experts=None, sinks=False)
        return self == replace(plain, rope=replace(self.rope, turned=None, divisors=()), local_rope=None)

    def lora_weights(self, name: str) -> dict[str, LoraWeight]:
        """The weights that adapters change, by the names of their buffers in a model `name`. Experts are none of them."""
        hidden, middle = self.hidden_size, self.intermediate_size
        query, entry = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        qkv = {"self_attn.q_proj": query, "self_attn.k_proj": entry, "self_attn.v_proj": entry}
        gate_up = {"mlp.gate_proj": middle, "mlp.up_proj": middle}
        weights = {
            "qkv": (hidden, {"self_attn.qkv_proj": self.qkv_size} if self.fused else qkv),
            "output": (query, {"self_attn.o_proj": hidden}),
            "gate_up": (hidden, {"mlp.gate_up_proj": 2 * middle} if self.fused else gate_up),
            "down": (middle, {"mlp.down_proj": hidden}),
        }
        return {
            f"{name}_{index}_{weight}": LoraWeight({f"model.layers.{index}.{part}": size for part, size in parts.items()}, inner)
            for index in range(self.num_layers)
            for weight, (inner, parts) in weights.items()
            if self.experts_of(index) is None or weight in ("qkv", "output")
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
    gemma, gpt_oss = architecture == _GEMMA, architecture == _GPT_OSS
    _check_unsupported(config)
    if gpt_oss:
        require_off(config, {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True})
    activation = "hidden_activation" if gemma else "hidden_act"
    require_off(config, {activation: "gelu_pytorch_tanh" if gemma else "silu"})
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
    biased = ("LlamaForCausalLM", "Qwen3ForCausalLM", _GEMMA, _QWEN_EXPERTS)
    bias = gpt_oss or (flag_field(config, "attention_bias") if architecture in biased else False)
    windows = _windows(config, architecture, layers)
    rope, local_rope = _ropes(config, architecture, head_size)
    # A text beyond the original length of longrope would change the entries of all its tokens.
    positions = count_field(
        config, _ORIGINAL if architecture == _PHI and rope.divisors else "max_position_embeddings", 1 << 30, default=1 << 20
    )
    scale = _number(config, "query_pre_attn_scalar", 0.0, 1e6, default=256.0) ** -0.5 if gemma else None
    found = LlamaConfig(
        vocab_size=count_field(config, "vocab_size", 1 << 24),
        hidden_size=hidden,
        intermediate_size=count_field(config, "intermediate_size", 1 << 20),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        windows=windows,
        norm_epsilon=_number(config, "rms_norm_eps", 0.0, 1.0, default=1e-6),
        rope=rope,
        local_rope=local_rope,
        qkv_bias=bias or architecture == "Qwen2ForCausalLM",
        output_bias=bias,
        head_norms=gemma or architecture.startswith("Qwen3"),
        output_norms=gemma,
        norm_offset=float(gemma),
        fused=architecture == _PHI,
        activation=Activation.GELU_TANH if gemma else Activation.LIMITED if gpt_oss else Activation.SILU,
        sinks=gpt_oss,
        attention_scale=scale,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        experts=_experts(config, architecture, layers),
        tied=flag_field(config, "tie_word_embeddings", default=gemma),
        max_positions=positions,
        dtype=_dtype(config),
    )
    _check_total_size(found)
    return found


def _experts(config: Mapping[str, Any], architecture: str, layers: int) -> ExpertsConfig | None:
    if architecture not in (_MIXTRAL, _QWEN_EXPERTS, _GPT_OSS):
        return None
    name = "num_experts" if config.get("num_experts") is not None else "num_local_experts"
    count = count_field(config, name, 1024)
    taken = count_field(config, "num_experts_per_tok", count)
    if architecture != _QWEN_EXPERTS:
        size = count_field(config, "intermediate_size", 1 << 20)
        return ExpertsConfig(count, taken, size, True, ("block_sparse_moe", "w1", "w3", "w2") if architecture == _MIXTRAL else None)
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
    require_off(config, _UNSUPPORTED)
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
            first = 0 if architecture in ("MistralForCausalLM", _PHI, _MIXTRAL) and config.get("sliding_window") is not None else layers
        sliding: Sequence[bool] = [layer >= first for layer in range(layers)]
        if architecture in (_GEMMA, _GPT_OSS):
            period = 2 if architecture == _GPT_OSS else count_field(config, "sliding_window_pattern", 4096, default=6)
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


def _ropes(config: Mapping[str, Any], architecture: str, head_size: int) -> tuple[RopeConfig, RopeConfig | None]:
    """From `rope_theta` with `rope_scaling`, or both in `rope_parameters`: of all layers, and of layers with a window if others.

    Gemma 3 has two objects there, or `rope_local_base_freq` for layers with a window.
    """
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    local, theta = None, 10_000.0
    if architecture == _GEMMA and isinstance(fields, Mapping):
        stated, fields = fields.get("sliding_attention", {}), fields.get("full_attention", fields)
        local, theta = _rope({"rope_theta": config.get("rope_local_base_freq")}, stated, theta), 1_000_000.0
    if architecture == _PHI and isinstance(fields, Mapping):
        return _phi_rope({**config, **fields}, head_size), None
    require_off(config, {"partial_rotary_factor": 1})
    theta = 150_000.0 if architecture == _GPT_OSS else theta
    return _rope({"head_size": head_size, **config}, fields, theta), local


def _rope(config: Mapping[str, Any], fields: Any, default_theta: float) -> RopeConfig:
    if not isinstance(fields, Mapping):
        raise ValueError(f"config.rope_scaling: got {fields!r:.200}, expected an object")
    _check_unsupported(fields)
    require_off(fields, {"partial_rotary_factor": 1})
    theta = _number({**config, **fields}, "rope_theta", 0.0, 1e12, default=default_theta)
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "yarn":
        return _yarn(fields, theta, count_field(config, "head_size", 1024))
    if kind not in ("linear", "llama3"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default', 'linear', 'llama3' or 'yarn'")
    factor = _number(fields, "factor", 0.0, 1e6)
    if kind == "linear":
        return RopeConfig(theta, factor)
    low, high = _number(fields, "low_freq_factor", 0.0, 1e6), _number(fields, "high_freq_factor", 0.0, 1e6)
    if low >= high:
        raise ValueError(f"config.rope_scaling.high_freq_factor: got {high}, expected more than low_freq_factor={low}")
    return RopeConfig(theta, factor, low, high, count_field(fields, _ORIGINAL, 1 << 30))


def _yarn(fields: Mapping[str, Any], theta: float, head_size: int) -> RopeConfig:
    """Frequencies with few periods in the original length are divided by the factor, those with many stay, between them both are mixed."""
    require_off(fields, {"mscale": None, "mscale_all_dim": None})
    factor, original = _number(fields, "factor", 0.0, 1e6), count_field(fields, _ORIGINAL, 1 << 30)
    periods = [_number(fields, name, 0.0, 1e6, default=default) for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))]
    first, last = (head_size * math.log(original / (count * 2 * math.pi)) / (2 * math.log(theta)) for count in periods)
    if flag_field(fields, "truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    ramp = (torch.arange(head_size // 2, device="cpu").double() - first) / (last - first or 0.001)
    ramp = ramp.clamp(0, 1)
    magnitude = _number(fields, "attention_factor", 0.0, 1e3, default=0.1 * math.log(max(factor, 1.0)) + 1)
    return RopeConfig(theta, divisors=tuple((1 / (ramp / factor + 1 - ramp)).tolist()), magnitude=magnitude)


def _phi_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """config: also the fields of `rope_scaling`. A part of each head may be rotated; longrope has the divisors of its original length."""
    theta = _number(config, "rope_theta", 0.0, 1e12, default=10_000.0)
    turned = int(head_size * _number(config, "partial_rotary_factor", 0.0, 1.0 + 1e-9, default=1.0))
    if turned < 2 or turned % 2:
        raise ValueError(f"config.partial_rotary_factor: got {turned} of {head_size} numbers, expected an even number of them")
    kind = config.get("rope_type", config.get("type", "default"))
    whole = None if turned == head_size else turned
    if kind == "default":
        return RopeConfig(theta, turned=whole)
    if kind not in ("longrope", "su"):
        raise UnsupportedConfigError(f"config.rope_scaling.rope_type: got {kind!r:.100}, expected 'default' or 'longrope'")
    divisors, original = config.get("short_factor"), count_field(config, _ORIGINAL, 1 << 30)
    numbers = isinstance(divisors, list) and all(isinstance(each, (int, float)) and each > 0 for each in divisors)
    if not isinstance(divisors, list) or not numbers or len(divisors) != turned // 2:
        raise ValueError(f"config.rope_scaling.short_factor: got {divisors!r:.200}, expected {turned // 2} numbers above 0")
    longer = max(1.0, count_field(config, "max_position_embeddings", 1 << 30) / original)
    magnitude = _number(config, "attention_factor", 0.0, 1e3, default=math.sqrt(1 + math.log(longer) / math.log(max(2, original))))
    return RopeConfig(theta, turned=whole, divisors=tuple(divisors), magnitude=magnitude)


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


def flag_field(config: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = config.get(name, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"config.{name}: got {value!r:.100}, expected true or false")
    return bool(value)
