"""A Llama of which each rank has some heads and MLP rows of every layer, and some rows of embedding and head. Norms are replicated."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.parallel import RankGroups, sum_over_ranks
from stepgraph.graphs.layers.quantised import Grouped, pack
from stepgraph.graphs.layers.vocabulary_shard import VocabularyShard, part_of
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.models.experts import ExpertMlp
from stepgraph.runtime.models.files.checkpoint import Checkpoint, kept_quantised
from stepgraph.runtime.models.files.quantised_folder import QuantisedSource
from stepgraph.runtime.models.files.weights import SafetensorsSource, Source, Stored, llama_slices
from stepgraph.runtime.models.llama import Adapted, Llama, empty_weight
from stepgraph.runtime.models.llama_config import ExpertsConfig, LlamaConfig
from stepgraph.runtime.parallel.ranks import Ranks

_ROWS = (
    *(f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
    *("gate_proj.weight", "up_proj.weight", ".w1.weight", ".w3.weight"),  # of an MLP, or of each expert
    "self_attn.sinks",
)
_KV_ROWS = tuple(f"self_attn.{part}_proj.{kind}" for part in "kv" for kind in ("weight", "bias"))
_TOKEN_ROWS = ("model.embed_tokens.weight", "lm_head.weight")
_COLUMNS = ("o_proj.weight", "down_proj.weight", ".w2.weight", "experts.down_proj", "experts.gate_up_proj_bias")
_LAST = "experts.gate_up_proj"  # [experts, hidden, 2 * size], gate and up in turns
_ADDED = ("o_proj.bias", "experts.down_proj_bias")  # to a sum over the ranks: on the first one; zeros on others
_SUMMED = ("output", "down")  # products with some columns of a weight: their sum over the ranks is the whole product


class ShardedExperts(ExpertMlp):
    """config: with the intermediate size of one rank. Every rank has some rows of every expert, and the whole router."""

    def __init__(self, config: LlamaConfig, experts: ExpertsConfig, like: Tensor, groups: RankGroups) -> None:
        super().__init__(config, experts, like)
        self._groups = groups

    def forward(self, states: Tensor) -> Tensor:
        found = super().forward(states)
        sum_over_ranks.out(found, self._groups.current)
        return found


class ShardedLlama(Llama):
    """config: with the heads and the intermediate size of one rank. num_tokens: of which it has some, in embedding and head."""

    def __init__(
        self, config: LlamaConfig, ranks: Ranks, num_tokens: int, feature_layers: Sequence[int], device: str | torch.device
    ) -> None:
        super().__init__(config, feature_layers=feature_layers, device=device)
        self.lora_weights, self.ranks = {}, ranks
        for index, layer in enumerate(self.layers):
            if (experts := config.experts_of(index)) is not None:
                layer.experts = ShardedExperts(config, experts, self.norm, ranks.groups)
        tokens = part_of(num_tokens, ranks.rank, ranks.size)
        self.register_buffer("token_ids", torch.arange(tokens.start, tokens.stop, device=device), persistent=False)
        self.token_ids: Tensor
        self.shard = VocabularyShard(self.token_ids, tokens.start, ranks.groups, ranks.size, num_tokens)
        self.embedding = empty_weight(self.norm, len(self.token_ids), config.hidden_size)
        self.embedding.lookup = self.shard.lookup  # type: ignore[attr-defined]  # drafts may use the parameter too
        self.head = None if config.tied else empty_weight(self.norm, len(self.token_ids), config.hidden_size)

    def adapted(self, index: int, inputs: ModelInput, buffers: StaticBuffers) -> Adapted:
        return self._summed

    def _summed(self, name: str, states: Tensor, product: Tensor) -> Tensor:
        if name in _SUMMED:
            sum_over_ranks.out(product, self.ranks.groups.current)
        return product


PartSource: TypeAlias = SafetensorsSource | QuantisedSource


class ShardSource:
    """The part of every tensor that one rank has. Nothing else is read from the files, except for scales of quantised weights."""

    def __init__(self, source: PartSource, rank: int, size: int, kv_heads: int, num_tokens: int) -> None:
        """kv_heads: of the whole model. Where they are fewer than ranks, neighbouring ranks have the same one."""
        self._source, self._rank, self._size, self._kv_size = source, rank, size, min(size, kv_heads)
        self._tokens = part_of(num_tokens, rank, size)
        self.tensors = {name: stored._replace(shape=self._shape(name, stored)) for name, stored in source.tensors.items()}

    def read(self, name: str) -> Tensor:
        dim = _split_dimension(name)
        found = self._source.read(name) if dim is None else self._source.read_part(name, dim, self._part(name, dim))
        return torch.zeros_like(found) if name.endswith(_ADDED) and self._rank else found

    read_scales = read

    def read_grouped(self, name: str) -> Iterator[Grouped]:
        assert isinstance(self._source, QuantisedSource), name
        dim = _split_dimension(name)
        return self._source.read_grouped(name) if dim is None else self._source.read_grouped(name, dim, self._part(name, dim))

    def _part(self, name: str, dim: int) -> slice:
        length, part = self.tensors[name].shape[dim], self._rank * self._parts(name) // self._size
        return self._tokens if name in _TOKEN_ROWS else slice(part * length, (part + 1) * length)

    def _parts(self, name: str) -> int:
        return self._kv_size if name.endswith(_KV_ROWS) else self._size

    def _shape(self, name: str, stored: Stored) -> tuple[int, ...]:
        dim = _split_dimension(name)
        if name in _TOKEN_ROWS:
            return self._tokens.stop - self._tokens.start, stored.shape[1]
        return tuple(length // self._parts(name) if index == dim else length for index, length in enumerate(stored.shape))


def _split_dimension(name: str) -> int | None:
    """The dimension of a stored tensor that the ranks divide; None: each has it whole."""
    endings: dict[int, tuple[str, ...]] = {0: (*_ROWS, *_TOKEN_ROWS), 1: _COLUMNS, 2: (_LAST,)}
    return next((dim for dim, ending in endings.items() if name.endswith(ending)), None)


@dataclass(frozen=True)
class ShardedCheckpoint(Checkpoint):
    """One rank's part of a checkpoint. next_source: the next rank's part, to compare what it loaded with these files."""

    ranks: Ranks = field(kw_only=True)
    next_source: Source = field(kw_only=True)

    def outline(self, feature_layers: Sequence[int] = ()) -> Llama:
        return self.make_room(ShardedLlama(self.config, self.ranks, len(self.vocabulary.tokens), feature_layers, "meta"))

    def load(self, device: str | torch.device, feature_layers: Sequence[int] = (), progress: bool = False) -> Llama:
        model = self.make_room(ShardedLlama(self.config, self.ranks, len(self.vocabulary.tokens), feature_layers, device))
        self.fill(model, progress)
        model.origin = self.path.name
        self.compare(model)
        return model

    def compare(self, model: Llama) -> None:
        """ValueError on every rank if one has loaded other weights than the rank before it finds for it in its own files."""
        own, following = list[int](), list[int]()
        for name, target in self.slices.items():
            if kind := self.packed.get(target.parameter):
                own.append(checksum(model.get_parameter(target.parameter)[target.tiles]))
                following.append(checksum(torch.cat([pack(kind, rows) for rows in self.next_source.read_grouped(name)])))
            else:
                own.append(checksum(target.of(model)))
                following.append(checksum(self.next_source.read(name).to(self.config.dtype)))
        found = self.ranks.gather(torch.tensor([own, following]))
        for rank, (_, expected) in enumerate(found):
            loaded = (rank + 1) % self.ranks.size
            for name, one, other in zip(self.slices, found[loaded][0].tolist(), expected.tolist(), strict=True):
                if one != other:
                    raise ValueError(f"{self.path}: {name}: rank {loaded} loaded other weights than the file of rank {rank} has for it")


def checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)


def check_divisible(checkpoint: object, size: int) -> Checkpoint:
    """ValueError for a model that cannot be divided among `size` ranks."""
    expected = "expected a folder of safetensors files of Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3 or GPT-OSS"
    if not isinstance(checkpoint, Checkpoint) or not isinstance(checkpoint.source, PartSource) or checkpoint.config.fused:
        raise ValueError(f"path: got a model that tensor_parallel={size} does not divide, {expected}")
    config = checkpoint.config
    divided = {name: getattr(config, name) for name in ("num_heads", "intermediate_size", "num_kv_heads")}
    if config.experts is not None:
        divided["moe_intermediate_size"] = config.experts.size
    if size % config.num_kv_heads == 0:
        del divided["num_kv_heads"]
    for name, length in divided.items():
        if length % size:
            raise ValueError(f"tensor_parallel: got {size} for a model with {name}={length}, expected a divisor of it")
    try:
        _divide(checkpoint, 0, size)
    except ValueError as error:
        raise ValueError(
            f"tensor_parallel: got {size} with weights='quantised', expected parts of whole tiles and groups: {error}"
        ) from None
    return checkpoint


def _divide(checkpoint: Checkpoint, rank: int, size: int) -> Checkpoint:
    """With the config and the tensors of one rank. Embedding and head do not stay quantised: their parts are no whole tiles."""
    config, kv_heads = checkpoint.config, checkpoint.config.num_kv_heads
    heads, middle = config.num_heads // size, config.intermediate_size // size
    experts = None if config.experts is None else replace(config.experts, size=config.experts.size // size)
    local = replace(config, num_heads=heads, num_kv_heads=max(1, kv_heads // size), intermediate_size=middle, experts=experts)
    assert isinstance(checkpoint.source, PartSource)
    source = ShardSource(checkpoint.source, rank, size, kv_heads, len(checkpoint.vocabulary.tokens))
    part = replace(checkpoint, source=source, slices=llama_slices(local), config=local, packed={})
    layers = {name: target for name, target in part.slices.items() if name not in _TOKEN_ROWS}
    return replace(part, packed=kept_quantised(replace(part, slices=layers))) if checkpoint.packed else part


def shard(checkpoint: Checkpoint, ranks: Ranks) -> ShardedCheckpoint:
    """The part of `ranks.rank`."""
    tensors = sorted(checkpoint.source.tensors.items())
    ranks.require_equal("the configs and tensor tables of the models", repr((checkpoint.config, checkpoint.packed, tensors)).encode())
    own, following = (_divide(checkpoint, rank % ranks.size, ranks.size) for rank in (ranks.rank, ranks.rank + 1))
    return ShardedCheckpoint(
        own.path,
        own.source,
        own.slices,
        own.config,
        own.vocabulary,
        own.mtp_modules,
        packed=own.packed,
        ranks=ranks,
        next_source=following.source,
    )
