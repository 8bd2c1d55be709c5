"""A Llama of which each rank has some heads and MLP rows of every layer, and some rows of embedding and head. Norms are replicated."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.dense import Residual
from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.lora import ProductHook
from stepgraph.graphs.layers.parallel import RankGroups, sum_over_ranks
from stepgraph.graphs.layers.quantised import Grouped
from stepgraph.graphs.layers.vocabulary_shard import VocabularyShard, rank_slice
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.models.draft_llama import DraftLlama, TokenMap
from stepgraph.runtime.models.files.checkpoint import Checkpoint, quantised_parameters
from stepgraph.runtime.models.files.draft import DraftCheckpoint, StoredDraft
from stepgraph.runtime.models.files.quantised_folder import QuantisedSource
from stepgraph.runtime.models.files.weights import SafetensorsSource, StoredTensor, llama_slices
from stepgraph.runtime.models.llama import Llama, LlamaLayer, unchanged
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.runtime.parallel.ranks import Ranks

_TOKEN_ROWS = ("model.embed_tokens.weight", "lm_head.weight")
_ROW_PARALLEL_BIASES = ("o_proj.bias", "experts.down_proj_bias")  # biases of a sum over the ranks: loaded on rank 0, zeros on other ranks
_ROW_PARALLEL = ("output", "down")  # products with a part of a weight's columns: their sum over the ranks is the whole product
MIN_LAYER_WEIGHTS = 7_000_000  # in a layer of a draft model that is divided; measured, see docs/tensor-parallel.md


class ShardedLayer(LlamaLayer):
    def __init__(self, config: LlamaConfig, index: int, like: Tensor, groups: RankGroups) -> None:
        super().__init__(config, index, like)
        self._groups = groups

    @property
    def fused(self) -> Callable[[Tensor, Tensor, Tensor, float], Residual] | None:
        """The fused sum, residual connection and norm, if it was chosen and no operation is between them; otherwise None."""
        sums, between = self._groups.sums, self.attention_output_norm is not None or self.experts is not None or self.config.norm_offset
        return None if between else sums.fused_add_rms_norm

    def finish(self, states: Tensor, attended: Tensor, next_norm: Tensor, product_hook: ProductHook = unchanged) -> Residual:
        if (fused := self.fused) is None:
            return super().finish(states, attended, next_norm, product_hook)
        states, normed = fused(states, attended, self.mlp_norm, self.config.norm_epsilon)
        return fused(states, self.mlp(normed, product_hook), next_norm, self.config.norm_epsilon)


class ShardedLayers(Llama):
    """A Llama with divided layers. config: with the heads and intermediate size of one rank. Listed before other base classes."""

    def divide(self, ranks: Ranks) -> None:
        """Called once, at the end of `__init__`."""
        self.lora_weights, self.ranks = {}, ranks
        for index in range(len(self.layers)):
            layer = self.layers[index] = ShardedLayer(self.config, index, self.norm, ranks.groups)
            if layer.experts is not None:  # every rank has some rows of each expert, and the whole router
                layer.experts.register_forward_hook(lambda module, inputs, found: sum_over_ranks.out(found, ranks.groups.current))

    def product_hook(self, index: int, inputs: ModelInput, buffers: StaticBuffers) -> ProductHook:
        layer = self.layers[index]
        assert isinstance(layer, ShardedLayer)
        return self._summed if layer.fused is None else unchanged

    def _summed(self, name: str, states: Tensor, product: Tensor) -> Tensor:
        if name in _ROW_PARALLEL:
            sum_over_ranks.out(product, self.ranks.groups.current)
        return product


class ShardedDraft(ShardedLayers, DraftLlama):
    """Only layers are divided: every rank has the whole embedding and head, so that choosing drafts needs no messages."""

    def __init__(self, config: LlamaConfig, token_map: TokenMap | None, ranks: Ranks, device: str | torch.device) -> None:
        DraftLlama.__init__(self, config, token_map, device=device)
        self.divide(ranks)


class ShardedLlama(ShardedLayers):
    """num_tokens: rows of the whole embedding and head, of which each rank has a part."""

    def __init__(
        self, config: LlamaConfig, ranks: Ranks, num_tokens: int, feature_layers: Sequence[int], device: str | torch.device
    ) -> None:
        super().__init__(config, feature_layers=feature_layers, device=device)
        self.divide(ranks)
        tokens = rank_slice(num_tokens, ranks.rank, ranks.size)
        self.register_buffer("token_ids", torch.arange(tokens.start, tokens.stop, device=device), persistent=False)
        self.token_ids: Tensor
        self.shard = VocabularyShard(self.token_ids, tokens.start, ranks.groups, ranks.size, num_tokens)
        self.embedding = empty_weight(self.norm, len(self.token_ids), config.hidden_size)
        self.embedding.embed_tokens = self.shard.embed_tokens  # type: ignore[attr-defined]  # a draft may share the parameter
        self.head = None if config.tied else empty_weight(self.norm, len(self.token_ids), config.hidden_size)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(filter(None, [self.ranks.note_of_sums]))


PartSource: TypeAlias = SafetensorsSource | QuantisedSource


class ShardSource:
    """The part of every tensor that one rank has. Nothing else is read from the files, except for scales of quantised weights."""

    def __init__(self, checkpoint: Checkpoint, rank_config: LlamaConfig, rank: int, size: int, tokens: slice | None) -> None:
        """checkpoint: of the whole model. rank_config: the config of one rank. tokens: rows of embedding and head; None: all.

        If there are fewer key-value heads than ranks, neighbouring ranks share a head."""
        assert isinstance(checkpoint.source, PartSource)
        self._source, self._rank = checkpoint.source, rank
        self.tensors: dict[str, StoredTensor] = dict(checkpoint.source.tensors)
        self._parts = dict[str, tuple[int, list[slice | None]]]()  # of divided tensors: the dimension, and this rank's parts of it
        outline = Llama(rank_config, device="meta")
        for name, target in llama_slices(rank_config).items():
            whole, own = self.tensors[name].shape, target.stored_shape(outline)
            if name in _TOKEN_ROWS and tokens:
                own, self._parts[name] = (tokens.stop - tokens.start, whole[1]), (0, [tokens])
            elif whole != own:
                dim = next(dim for dim, length in enumerate(own) if length != whole[dim])
                start, parts = 0, list[slice | None]()
                for length, width in zip(_lengths(checkpoint.config, name, whole[dim]), _lengths(rank_config, name, own[dim]), strict=True):
                    first = start + rank * (length // width) // size * width
                    parts.append(slice(first, first + width))
                    start += length
                self._parts[name] = dim, parts
            self.tensors[name] = self.tensors[name]._replace(shape=own)

    def read(self, name: str) -> Tensor:
        dim, parts = self._parts.get(name, (0, [None]))
        found = [self._source.read(name, dim, part) for part in parts]
        joined = found[0] if len(found) == 1 else torch.cat(found, dim)
        return torch.zeros_like(joined) if name.endswith(_ROW_PARALLEL_BIASES) and self._rank else joined

    def read_grouped(self, name: str) -> Iterator[Grouped]:
        dim, parts = self._parts.get(name, (0, [None]))
        for part in parts:
            yield from self._source.read_grouped(name, dim, part)


def _lengths(config: LlamaConfig, name: str, length: int) -> tuple[int, ...]:
    """Lengths of the weights that a stored tensor concatenates."""
    query, key = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    fused = {"qkv_proj.weight": (query, key, key), "gate_up_proj.weight": (config.intermediate_size,) * 2}
    return next((lengths for ending, lengths in fused.items() if name.endswith(ending)), (length,))


@dataclass(frozen=True)
class ShardedCheckpoint(Checkpoint):
    """One rank's part of a checkpoint."""

    ranks: Ranks = field(kw_only=True)

    def make(self, device: str | torch.device, feature_layers: Sequence[int]) -> Llama:
        return ShardedLlama(self.config, self.ranks, len(self.vocabulary.tokens), feature_layers, device)


def require_equal_weights(checkpoint: Checkpoint, ranks: Ranks) -> None:
    """ValueError on every rank unless the first rows of all matrices, and all vectors, are equal."""
    source = checkpoint.source
    assert isinstance(source, PartSource)
    names = sorted(source.tensors)
    first_rows = (source.read(name, 0, slice(0, 1) if len(source.tensors[name].shape) > 1 else None) for name in names)
    checksums = [zlib.crc32(rows.contiguous().view(-1).view(torch.uint8).numpy().data) for rows in first_rows]
    found = ranks.gather(torch.tensor(checksums))
    for rank, own in enumerate(found):
        if different := (own != found[0]).nonzero().flatten().tolist():
            raise ValueError(f"{checkpoint.path}: {names[different[0]]}: rank {rank} has other weights than rank 0")


def check_divisible(checkpoint: object, size: int) -> Checkpoint:
    """ValueError for a model that cannot be divided among `size` ranks."""
    families = "Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, Gemma 3, Phi 3, GPT-OSS, DeepSeek-V3 or GLM-4.5"
    expected = f"expected a folder of safetensors files of {families}"
    if not isinstance(checkpoint, Checkpoint) or not isinstance(checkpoint.source, PartSource):
        raise ValueError(f"path: got a model that tensor_parallel={size} does not divide, {expected}")
    config = checkpoint.config
    divided = {name: getattr(config, name) for name in ("num_heads", "intermediate_size", "num_kv_heads")}
    if config.experts is not None:
        divided["moe_intermediate_size"] = config.experts.expert_size
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


def _divide(checkpoint: Checkpoint, rank: int, size: int, tokens: bool = True) -> Checkpoint:
    """The checkpoint with the config and the tensors of one rank. tokens: divide also embedding and head, which then do not stay quantised,
    since their parts are not whole tiles."""
    config = checkpoint.config
    heads, middle = config.num_heads // size, config.intermediate_size // size
    experts = config.experts
    experts = experts and replace(experts, expert_size=experts.expert_size // size, shared_size=experts.shared_size // size)
    local = replace(config, num_heads=heads, num_kv_heads=max(1, config.num_kv_heads // size), intermediate_size=middle, experts=experts)
    source = ShardSource(checkpoint, local, rank, size, rank_slice(len(checkpoint.vocabulary.tokens), rank, size) if tokens else None)
    part = replace(checkpoint, source=source, slices=llama_slices(local), config=local, packed={})
    layers = {name: target for name, target in part.slices.items() if name not in _TOKEN_ROWS or not tokens}
    return replace(part, packed=quantised_parameters(replace(part, slices=layers))) if checkpoint.packed else part


def shard(checkpoint: Checkpoint, ranks: Ranks) -> ShardedCheckpoint:
    """This rank's part of the model."""
    tensors = sorted(checkpoint.source.tensors.items())
    ranks.require_equal("the configs and tensor tables of the models", repr((checkpoint.config, checkpoint.packed, tensors)).encode())
    require_equal_weights(checkpoint, ranks)
    return ShardedCheckpoint(**vars(_divide(checkpoint, ranks.rank, ranks.size)), ranks=ranks)


def shard_draft(draft: StoredDraft | None, ranks: Ranks) -> StoredDraft | None:
    """This rank's part of a draft model whose layers are large enough. Other drafts are whole on every rank."""
    if not isinstance(draft, DraftCheckpoint) or draft.model is None:
        return draft
    last = LlamaLayer(draft.model.config, draft.model.config.num_layers - 1, torch.empty(0, device="meta"))
    if sum(parameter.numel() for parameter in last.parameters()) < MIN_LAYER_WEIGHTS:
        return draft
    try:
        own = _divide(check_divisible(draft.model, ranks.size), ranks.rank, ranks.size, tokens=False)
    except ValueError:  # not divisible, or another format
        return draft
    tensors = sorted(draft.source.tensors.items())
    ranks.require_equal("the configs and tensor tables of the drafts", repr((own.config, own.packed, tensors)).encode())
    require_equal_weights(draft.model, ranks)

    def make(target_model: object, device: str | torch.device) -> DraftLlama:
        return ShardedDraft(own.config, draft.token_map, ranks, device)

    return replace(draft, source=own.source, slices=own.slices, packed=own.packed, make=make)
