"""A causal language model of `transformers` over static buffers: its modules run with the paged attention of this package.

Imported only where a model needs it, because `transformers` is an optional dependency. The modules reach the attention through
transformers' attention interface; positions, cache slots and block tables come from ModelInput, so no mask is built.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.context import temporarily_set
from stepgraph.graphs.layers.lora import LoraWeight
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import AttentionShape, cache_specs
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.draft_llama import TokenMap, TokenMapped
from stepgraph.runtime.models.files.weights import row_slices, whole_slices
from stepgraph.runtime.models.transformers_layers import CURRENT, DecoderCall, FusedLinear, LayerAttention, replace_modules
from stepgraph.sampling.fields import check_value, whole

PAGED_ATTENTION, INSPECTED_ATTENTION = "stepgraph", "stepgraph_inspected"  # names in transformers' attention interface
_IGNORED_OPTIONS = {"dropout", "position_ids", "use_cache", "sliding_window", "is_causal", "output_attentions"}  # have no effect here
_PROBED_TOKENS = 2


@dataclass(frozen=True)
class ModelSizes:
    """The sizes in a config that engines and drafts use."""

    vocab_size: int
    hidden_size: int
    max_positions: int
    dtype: torch.dtype
    attention: tuple[LayerAttention, ...]

    @property
    def num_layers(self) -> int:
        return len(self.attention)


class _Inspection:
    """Replaces a DecoderCall for tensors without data: collects the attention parameters of every layer."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerAttention] = {}
        self.masks: dict[int, Any] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, **options: Any) -> Tensor:
        index: Any = getattr(module, "layer_idx", None)
        name = f"{type(module).__name__} of layer {index}"
        if index is None or index in self.layers:
            raise ValueError(f"{name}: got a second attention, expected one per layer")
        scale, softcap, sinks = (options.pop(option, None) for option in ("scaling", "softcap", "s_aux"))
        unknown = [option for option, given in options.items() if option not in _IGNORED_OPTIONS and given is not None]
        if unknown or options.get("is_causal") is False:
            raise ValueError(f"{name}: got the option {(unknown or ['is_causal=False'])[0]} of attention, which is not supported")
        sizes = query.shape[1], key.shape[1], key.shape[3], value.shape[3]
        if sizes[0] % sizes[1] or sizes[3] > sizes[2] or query.shape[3] != sizes[2]:
            raise ValueError(f"{name}: got queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)}")
        scale = float(sizes[2] ** -0.5 if scale is None else scale)
        self.layers[index] = LayerAttention(*sizes, None, scale, float(softcap or 0.0), sinks is not None)
        self.masks[index] = mask
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def _attention(
    module: nn.Module, *tensors: Any, attention_mask: Any = None, stepgraph: DecoderCall | _Inspection | None = None, **options: Any
) -> tuple[Tensor, None]:
    if stepgraph is None:
        raise ValueError(f"{type(module).__name__} does not pass keyword arguments to its attention, which is required here")
    return stepgraph.attend(module, *(*tensors, attention_mask)[:4], **options), None  # some families pass the mask by name


AttentionInterface.register(PAGED_ATTENTION, _attention)
AttentionInterface.register(INSPECTED_ATTENTION, _attention)
AttentionMaskInterface.register(INSPECTED_ATTENTION, lambda **options: options["mask_function"])  # PAGED_ATTENTION has none: no masks


def inspect_model(model: PreTrainedModel) -> ModelSizes:
    """The sizes of a model on the meta device that was made with INSPECTED_ATTENTION. ValueError names an unsupported layer, and why."""
    config, inspection = model.config.get_text_config(), _Inspection()
    decoder = decoder_of(model)
    ids = torch.zeros(1, _PROBED_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            decoder(input_ids=ids, position_ids=ids, attention_mask=ids.bool(), use_cache=False, stepgraph=inspection)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        why = "a call without data failed, as a captured round or an attention outside transformers' attention interface would"
        raise ValueError(f"{why}: {error}") from None
    layers, positions = range(config.num_hidden_layers), getattr(config, "max_position_embeddings", None) or 1 << 20
    missing = [index for index in layers if index not in inspection.layers]
    if missing:
        kinds = getattr(config, "layer_types", None) or [type(_layers(decoder, config)[missing[0]]).__name__] * len(layers)
        raise ValueError(f"layer {missing[0]} ({kinds[missing[0]]}) does not use the attention interface, and its state is not supported")
    windows = {id(mask): _window(index, mask, positions) for index, mask in inspection.masks.items()}
    found = tuple(inspection.layers[index]._replace(window=windows[id(inspection.masks[index])]) for index in layers)
    return ModelSizes(config.vocab_size, config.hidden_size, positions, model.dtype, found)


def _window(layer: int, mask: Any, positions: int) -> int | None:
    """The attention window of a mask function. ValueError for a mask that is not causal with at most a window."""
    query = min(positions, 1 << 17) - 2
    key_positions = torch.arange(query + 2)
    zero = torch.zeros((), dtype=torch.int64)
    try:
        visible = torch.broadcast_to(mask(zero, zero, torch.tensor(query), key_positions), key_positions.shape)
    except (TypeError, RuntimeError, NotImplementedError):
        visible = torch.zeros_like(key_positions, dtype=torch.bool)
    count = int(visible.sum())
    if not count or not torch.equal(visible, (key_positions <= query) & (key_positions > query - count)):
        raise ValueError(f"layer {layer}: its attention mask is neither causal nor causal with a window, and is not supported")
    return None if count > query else count


def decoder_of(model: PreTrainedModel) -> nn.Module:
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    if decoder is model or all(child is not decoder for child in model.children()):
        raise ValueError("its decoder is not one of its own modules, which is required here")
    return decoder


def _layers(decoder: nn.Module, config: Any) -> nn.ModuleList:
    lists = [module for module in decoder.children() if isinstance(module, nn.ModuleList) and len(module) >= config.num_hidden_layers]
    if len(lists) != 1:
        raise ValueError(f"{type(decoder).__name__}: got {len(lists)} lists of layers, expected one")
    return lists[0]


class _PassThrough(nn.Module):
    """Replaces the decoder, so that the model's own forward computes logits from a hidden state."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> MoeModelOutputWithPast:
        output = MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
        output.cross_attentions = output.shared_kv_states = None  # some families pass them on
        return output


class TransformersModel(nn.Module):
    """A target. model: loaded, with PAGED_ATTENTION. sizes: from `inspect_model`. feature_layers, name: as in Llama."""

    def __init__(self, model: PreTrainedModel, sizes: ModelSizes, *, feature_layers: Sequence[int] = (), name: str = "target") -> None:
        super().__init__()
        self.config, self.name, self.feature_layers, self.origin = sizes, name, tuple(feature_layers), ""
        for layer in self.feature_layers:
            check_value("feature_layers", layer, whole(0, sizes.num_layers))
        self.vocab_size, self.hidden_size, self.embedding_size = sizes.vocab_size, sizes.hidden_size, sizes.hidden_size
        self.feature_size, self.feature_dtype = sizes.hidden_size * max(1, len(self.feature_layers)), sizes.dtype
        self.family = type(model).__name__
        self.decoder, output = decoder_of(model), model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._output = next((child_name for child_name, child in model.named_children() if child is output), "")
        originals = {stored: weakref.ref(parameter) for stored, parameter in model.named_parameters()}
        self.head = copy.copy(model)  # shares every parameter
        self.head._modules = {name: _PassThrough() if child is self.decoder else child for name, child in model._modules.items()}
        decoder_name = next(child_name for child_name, child in model.named_children() if child is self.decoder)
        replace_modules(self.decoder, decoder_name, sizes.attention)
        for child_name, child in self.head.named_children():
            if type(child) is nn.Linear:
                setattr(self.head, child_name, FusedLinear({child_name: child}))
        self.lora_weights: dict[str, LoraWeight] = {}
        for index, module in enumerate(module for module in self.decoder.modules() if isinstance(module, FusedLinear)):
            module.lora_name = f"{name}_lora{index}"
            self.lora_weights[module.lora_name] = LoraWeight(module.parts, module.weight.shape[1])
        own = {parameter: own_name for own_name, parameter in self.named_parameters()}
        kept = ((stored, original()) for stored, original in originals.items())
        self.stored_slices = whole_slices({stored: own[parameter] for stored, parameter in kept if parameter in own})
        for path, module in self.named_modules():
            for kind in ("weight", "bias") if isinstance(module, FusedLinear) else ():
                if getattr(module, kind) is not None:
                    self.stored_slices |= row_slices({f"{part}.{kind}": rows for part, rows in module.parts.items()}, f"{path}.{kind}")
        products = [module for module in self.modules() if isinstance(module, (FusedLinear, nn.Embedding))]
        known = {id(weight) for module in products for weight in module.parameters()}
        # Whether on the CPU a row has the same bits in any batch. Routers and experts multiply without nn.Linear.
        self.batch_invariant = all(weight.dim() == 1 or id(weight) in known for weight in self.parameters())
        self._save_layer_inputs(_layers(self.decoder, model.config.get_text_config()))
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, layer_attention in enumerate(sizes.attention):
            shapes.setdefault((layer_attention.kv_heads, layer_attention.size), []).append(index)
        self._groups = shapes  # layers by the shape of their cache entries
        self._cache_of = {index: (number, place) for number, layers in enumerate(shapes.values()) for place, index in enumerate(layers)}
        grouped: dict[AttentionShape, list[int | None]] = {}
        for each in sizes.attention:
            shape = AttentionShape(sizes.dtype, each.heads, each.kv_heads, each.size, (), each.softcap > 0, each.sinks)
            grouped.setdefault(shape, []).append(each.window)
        self.attends = tuple(shape._replace(windows=tuple(windows)) for shape, windows in grouped.items())

    @property
    def notes(self) -> tuple[str, ...]:
        varies = "" if self.batch_invariant else "; the last bits of its results may depend on the batch"
        return (f"{self.name}: {self.family} of transformers{varies}",)

    @property
    def embedding(self) -> nn.Parameter:
        """[vocab_size, hidden_size], for a draft that shares it. ValueError if the model scales its embeddings."""
        module = cast("PreTrainedModel", self.decoder).get_input_embeddings()
        if type(module) is not nn.Embedding:
            raise ValueError(f"{self.family}: its embeddings are scaled, expected a draft with embed_tokens.weight of its own")
        return cast("nn.Parameter", module.weight)

    @property
    def unembedding(self) -> nn.Parameter:
        return self.head.get_parameter(f"{self._output}.weight")

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        if limits.max_length > self.config.max_positions:
            accepted = f"at most the {self.config.max_positions} positions of the {self.name}"
            raise ValueError(f"EngineConfig.max_length: got {limits.max_length}, expected {accepted}")
        return [
            spec
            for number, ((heads, size), layers) in enumerate(self._groups.items())
            for spec in cache_specs(self._cache_name(number), len(layers), limits, heads, size, self.config.dtype)
        ]

    def cache_of(self, layer: int, buffers: StaticBuffers) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, [slots, kv_heads, size] each."""
        number, place = self._cache_of[layer]
        name = self._cache_name(number)
        return buffers[f"{name}_keys"][place], buffers[f"{name}_values"][place]

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        token_inputs: Mapping[str, Tensor] = {"input_ids": inputs.tokens}
        if inputs.embeddings is not None:
            embedded = cast("PreTrainedModel", self.decoder).get_input_embeddings()(inputs.tokens)
            token_inputs = {"inputs_embeds": torch.where(inputs.embeddings.given[..., None], inputs.embeddings.values, embedded)}
        hidden, layer_inputs = self.decode(token_inputs, inputs, buffers)
        features = [layer_inputs[layer] for layer in self.feature_layers]
        return ModelOutput(hidden, torch.cat(features, -1) if features else None)

    def decode(self, token_inputs: Mapping[str, Tensor], inputs: ModelInput, buffers: StaticBuffers) -> tuple[Tensor, Mapping[int, Tensor]]:
        """[B, Q, H] states after the last norm, and the inputs of the feature layers. token_inputs: ids or embeddings."""
        call = DecoderCall(self.config.attention, self.cache_of, inputs, buffers, {})
        with temporarily_set(CURRENT, "call", call):
            output = self.decoder(**token_inputs, position_ids=inputs.positions, use_cache=False, stepgraph=call)
        return output.last_hidden_state, call.layer_inputs

    def logits(self, hidden: Tensor) -> Tensor:
        output = self.head(inputs_embeds=hidden.reshape(1, -1, hidden.shape[-1]), use_cache=False)
        logits: Tensor = output.logits.view(*hidden.shape[:-1], -1)
        return logits

    def _cache_name(self, number: int) -> str:
        return self.name if len(self._groups) == 1 else f"{self.name}{number}"

    def _save_layer_inputs(self, layers: nn.ModuleList) -> None:
        """Register hooks that save the inputs of the feature layers in the call."""

        def keep(index: int, options: Mapping[str, Any], states: Tensor | tuple[Tensor, ...]) -> None:
            options["stepgraph"].layer_inputs[index] = states if isinstance(states, Tensor) else states[0]

        for index in self.feature_layers:
            if index < len(layers):
                layers[index].register_forward_pre_hook(
                    lambda module, args, options, index=index: keep(index, options, args or options["hidden_states"]), with_kwargs=True
                )
            else:
                layers[index - 1].register_forward_hook(
                    lambda module, args, options, output, index=index: keep(index, options, output), with_kwargs=True
                )


class DraftTransformers(TokenMapped, TransformersModel):
    def __init__(self, model: PreTrainedModel, sizes: ModelSizes, token_map: TokenMap | None = None) -> None:
        super().__init__(model, sizes, name="draft")
        self.set_token_map(token_map, model.device)
