"""Sizes and options of Llama-family models and of EAGLE-3 heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.layers.dense import Activation
from stepgraph.graphs.layers.lora import LoraWeight
from stepgraph.graphs.model import AttentionShape


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position frequencies. With `original_length`, Llama 3.1's scaling, else linear scaling by `factor`, then by `divisors`."""

    theta: float = 10_000.0
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int | None = None  # in tokens
    rotated_size: int | None = None  # number of rotated elements of a head; None: all
    divisors: tuple[float, ...] = ()  # one for each frequency
    magnitude: float = 1.0  # factor of cosines and sines

    def frequencies(self, size: int) -> Tensor:
        """[rotated_size / 2] float32 radians per position, for heads of `size` elements."""
        size = self.rotated_size or size
        powers = torch.arange(0, size, 2, dtype=torch.int64, device="cpu").float() / size
        frequencies = 1.0 / (self.theta**powers)
        if self.original_length is None:
            return frequencies / (torch.tensor(self.divisors) if self.divisors else self.factor)
        # Frequencies with many periods in the original length are kept, those with few are scaled, and those between are interpolated.
        periods = self.original_length * frequencies / (2 * math.pi)
        kept = (periods - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


class Routing(NamedTuple):
    """A router by sigmoid, in float32: see `choose_experts`."""

    num_groups: int
    groups_per_token: int
    scale: float


@dataclass(frozen=True)
class ExpertsConfig:
    """The MLP of some layers: a router and experts, of which every token takes a few."""

    num_experts: int
    experts_per_token: int
    expert_size: int  # intermediate size of each expert
    normalised: bool  # whether the weights of the taken experts sum to one
    # Names in files: of the MLP in a layer, and of gate, up and down in an expert; None: the layout of GPT-OSS.
    stored_names: tuple[str, str, str, str] | None
    dense_layers: frozenset[int] = frozenset()  # layers with a dense MLP
    routing: Routing | None = None  # None: softmax
    shared_size: int = 0  # intermediate size of the shared MLP, which every token takes

    @property
    def biased(self) -> bool:
        return self.stored_names is None


@dataclass(frozen=True)
class LatentConfig:
    """Latent attention: queries, keys and values are projected from small states, which are projected from the hidden state."""

    query_rank: int | None  # size of the state of queries; None: queries are projected from the hidden state
    rank: int  # size of the state of keys and values
    unrotated_size: int  # number of elements of a query or key that are not rotated
    rotated_size: int
    value_size: int
    interleaved: bool  # the two elements of a rotated pair are adjacent

    @property
    def size(self) -> int:
        return self.unrotated_size + self.rotated_size

    def products(self, heads: int) -> dict[str, tuple[str, int, int]]:
        """The products with the small states, by parameter name: name in files, number of outputs and of inputs."""
        entries = "kv_b_proj", heads * (self.unrotated_size + self.value_size), self.rank
        query = {} if self.query_rank is None else {"query": ("q_b_proj", heads * self.size, self.query_rank)}
        return query | {"entries": entries}


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple[int | None, ...]  # attention window of each layer, in positions; None: unlimited
    norm_epsilon: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None  # of layers with a window, if different
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
    latent: LatentConfig | None = None
    sinks: bool = False  # see attention.paged.attention
    tied: bool = False  # the embedding is also the unembedding
    max_positions: int = 1 << 20
    dtype: torch.dtype = torch.float32  # of the weights and the cache

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_parts(self) -> dict[str, int]:
        """Numbers of outputs of the parts of the first product of attention, by name in files."""
        query, entry = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        if self.latent is not None:
            first = {"q_proj": query} if self.latent.query_rank is None else {"q_a_proj": self.latent.query_rank}
            return first | {"kv_a_proj_with_mqa": self.latent.rank + self.latent.rotated_size}
        return {"qkv_proj": query + 2 * entry} if self.fused else {"q_proj": query, "k_proj": entry, "v_proj": entry}

    @property
    def qkv_size(self) -> int:
        return sum(self.qkv_parts.values())

    @property
    def value_size(self) -> int:
        return self.head_size if self.latent is None else self.latent.value_size

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.dtype, self.num_heads, self.num_kv_heads, self.head_size, self.windows, sinks=self.sinks)

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def embedding_factor(self) -> float:
        """The scale of embeddings, rounded to `dtype` as in transformers."""
        return float(torch.tensor(self.embedding_scale, dtype=self.dtype, device="cpu"))

    @property
    def has_llama_layers(self) -> bool:
        """Whether layers have exactly the parts of a Llama layer, stored under the same names, as draft heads require."""
        plain = replace(self, output_norms=False, norm_offset=0.0, activation=Activation.SILU, attention_scale=None, embedding_scale=1.0)
        plain = replace(plain, fused=False, experts=None, latent=None, sinks=False)
        return self == replace(plain, rope=replace(self.rope, rotated_size=None, divisors=()), local_rope=None)

    def products(self, experts: ExpertsConfig | None) -> dict[str, tuple[int, dict[str, int]]]:
        """The products of a layer, without those of experts, by parameter name: number of inputs, and numbers of outputs by the name of the
        module in files."""
        attended, middle, prefix, names = self.num_heads * self.value_size, self.intermediate_size, "mlp", ("gate_up", "down")
        products = {
            "qkv": (self.hidden_size, {f"self_attn.{part}": size for part, size in self.qkv_parts.items()}),
            "output": (attended, {"self_attn.o_proj": self.hidden_size}),
        }
        for name, (part, size, inner) in {} if self.latent is None else self.latent.products(self.num_heads).items():
            products[f"latent.{name}"] = inner, {f"self_attn.{part}": size}
        if experts is not None:
            middle, prefix, names = experts.shared_size, "mlp.shared_experts", ("experts.shared_gate_up", "experts.shared_down")
        if middle:
            gate_up = {f"{prefix}.gate_up_proj": 2 * middle} if self.fused else {f"{prefix}.gate_proj": middle, f"{prefix}.up_proj": middle}
            products |= {names[0]: (self.hidden_size, gate_up), names[1]: (middle, {f"{prefix}.down_proj": self.hidden_size})}
        return products

    def lora_weights(self, name: str) -> dict[str, LoraWeight]:
        """The weights that adapters change, by the names of their buffers in a model `name`."""
        return {
            f"{name}_{index}_{weight.rpartition('.')[2]}": LoraWeight(
                {f"model.layers.{index}.{part}": size for part, size in parts.items()}, inner
            )
            for index in range(self.num_layers)
            for weight, (inner, parts) in self.products(self.experts_of(index)).items()
        }


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and options of one head. `layer.vocab_size` is the target's, since the head reads the target's tokens."""

    layer: LlamaConfig
    feature_layers: tuple[int, ...]  # layers of the target whose inputs are fused
    target_hidden_size: int
    draft_vocab_size: int  # tokens that the head can propose
    norm_before_residual: bool = False  # the residual connection around attention starts from the normalised state
