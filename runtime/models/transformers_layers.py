"""Modules that replace equivalent modules of `transformers`, so that a round has fewer nodes.

Whether two modules are equivalent is not read from the class: `replace_modules` runs both on the same input and compares the results.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import SiLUActivation

from stepgraph.graphs.attention.float8 import to_entries
from stepgraph.graphs.attention.paged import attention
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.dense import activate_and_mul, add_rms_norm, product, rms_norm
from stepgraph.graphs.layers.lora import add_lora
from stepgraph.graphs.layers.slot_mapping import rope_and_write_kv, rope_angles
from stepgraph.graphs.model_call import ModelInput

_NUM_TOKENS = 5  # of the inputs for comparisons
_TOLERANCE = 1e-4  # tolerance relative to the largest value, in float32
_PAGE_SIZE = 16
_POSITION_STEP = 40_001  # between the positions compared: large, so that every use of positions shows


CURRENT = threading.local()  # .call: the call of a decoder that runs in this thread: others may run the same model for other engines


class LayerAttention(NamedTuple):
    heads: int
    kv_heads: int
    size: int  # of queries and keys
    value_size: int  # at most `size`: values are padded with zeros
    window: int | None
    scale: float
    softcap: float = 0.0
    sinks: bool = False


class DecoderCall(NamedTuple):
    """One call of a decoder; passed through its modules as a keyword argument."""

    layers: Sequence[LayerAttention]
    cache_of: Callable[[int, StaticBuffers], tuple[Tensor, Tensor]]
    inputs: ModelInput
    buffers: StaticBuffers
    layer_inputs: dict[int, Tensor]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, s_aux: Tensor | None = None, **_: Any
    ) -> Tensor:
        """query [B, heads, Q, size], key, value [B, kv_heads, Q, size] -> [B, Q, heads, size]."""
        index: Any = module.layer_idx
        layer = self.layers[index]
        keys, values = self.cache_of(index, self.buffers)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        if layer.value_size < layer.size:
            value = functional.pad(value, (0, layer.size - layer.value_size))
        slots = (self.inputs.slots.flatten(),)
        keys.index_put_(slots, to_entries(key.flatten(0, 1), keys))
        values.index_put_(slots, to_entries(value.flatten(0, 1), values))
        output = attention(query, keys, values, self.inputs, layer.window, layer.scale, layer.softcap, s_aux)
        return output[..., : layer.value_size]


class FusedLinear(nn.Module):
    """nn.Linears with the same input as one product: on the CPU a row has the same bits in any batch. Adapters use their names."""

    def __init__(self, linears: Mapping[str, nn.Linear]) -> None:
        super().__init__()
        modules = list(linears.values())
        weights, biases = ([getattr(each, name) for each in modules] for name in ("weight", "bias"))
        self.weight = weights[0] if len(modules) == 1 else joined(weights)
        self.bias = None if biases[0] is None else biases[0] if len(modules) == 1 else joined(biases)
        self.parts = {name: each.out_features for name, each in linears.items()}
        self.lora_name = ""  # the name of its adapters

    def forward(self, states: Tensor) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        output = product(flat, self.weight, self.bias)
        call: DecoderCall | None = getattr(CURRENT, "call", None) if self.lora_name else None
        if call is not None:
            output = add_lora(self.lora_name, flat, output, call.inputs, call.buffers)
        return output.view(*states.shape[:-1], -1)


def joined(tensors: Sequence[Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(list(tensors)), requires_grad=False)


class Norm(nn.Module):
    """An RMS norm in one operation."""

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states.reshape(-1, states.shape[-1]), self.weight, self.epsilon).view(states.shape)


class Attention(nn.Module):
    """Attention with rotary positions in four operations, and two for norms of heads."""

    parts = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __init__(self, module: Any, path: str, layers: Sequence[LayerAttention]) -> None:
        super().__init__()
        self.layer_idx: int = module.layer_idx
        self.layer = layers[self.layer_idx]
        self.qkv, self.output = FusedLinear(_linears(module, path, self.parts[:3])), FusedLinear(_linears(module, path, self.parts[3:]))
        self.query_norm, self.key_norm = (getattr(module, f"{part}_norm", None) for part in "qk")
        self.sinks = module.sinks if self.layer.sinks else None

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], stepgraph: DecoderCall, **_: object
    ) -> tuple[Tensor, None]:
        layer, inputs = self.layer, stepgraph.inputs
        qkv = self.qkv(hidden_states).view(inputs.tokens.numel(), -1, layer.size)
        query, key, value = qkv.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = (rms_norm(part, norm.weight, norm.epsilon) for part, norm in ((query, self.query_norm), (key, self.key_norm)))
        keys, values = stepgraph.cache_of(self.layer_idx, stepgraph.buffers)
        cosines, sines = (each.reshape(-1, 1, each.shape[-1]) for each in position_embeddings)
        query = rope_and_write_kv(query, key, value, cosines, sines, inputs.slots.flatten(), keys, values)
        query = query.view(*inputs.tokens.shape, layer.heads, layer.size)
        attended = attention(query, keys, values, inputs, layer.window, layer.scale, layer.softcap, self.sinks)
        return self.output(attended.flatten(2)), None


class GatedMlp(nn.Module):
    """A gated MLP in three operations."""

    parts = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__()
        self.gate_up, self.down = FusedLinear(_linears(module, path, self.parts[:2])), FusedLinear(_linears(module, path, self.parts[2:]))

    def forward(self, states: Tensor) -> Tensor:
        output: Tensor = self.down(activate_and_mul(self.gate_up(states)))
        return output


class Layer(nn.Module):
    """A decoder layer: the first residual connection and the second norm are one operation. Adapters use the names of attention and MLP."""

    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp, self.first_norm, self.second_norm = (getattr(module, part) for part in self.parts)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.first_norm(hidden_states), **options)
        flat, weight = hidden_states.reshape(-1, hidden_states.shape[-1]), self.second_norm.weight
        states, normed = add_rms_norm(flat, attended.reshape(flat.shape), weight, self.second_norm.epsilon)
        update: Tensor = self.mlp(normed.view(hidden_states.shape))
        return states.view(hidden_states.shape) + update


class Rotary(nn.Module):
    """Cosines and sines in one operation."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        # As integer bits: .to(bfloat16) rounds every floating-point buffer, and rounded frequencies give wrong positions.
        self.register_buffer("frequency_bits", frequencies.float().view(torch.int32), persistent=False)
        self.frequency_bits: Tensor

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        angles = rope_angles(position_ids.flatten(), self.frequency_bits.view(torch.float32), x.dtype)
        return tuple(each.view(*position_ids.shape, -1) for each in angles)


def replace_modules(decoder: nn.Module, prefix: str, layers: Sequence[LayerAttention]) -> None:
    """Replace modules of a decoder by equivalent ones of this file. On the meta device, which has no data, only nn.Linears.

    prefix: the name of the decoder.
    """
    if not next(decoder.parameters()).is_meta:
        for _, parent, name, child in list(_children(decoder, prefix)):
            if (norm := _norm_of(child)) is not None:
                setattr(parent, name, norm)
        check = _EquivalenceCheck(decoder, layers)
        for path, parent, name, child in list(_children(decoder, prefix)):
            if _is_attention(child, layers):
                check.replace(parent, name, functools.partial(Attention, path=path, layers=layers))
            elif _consists_of(child, GatedMlp.parts, "act_fn") and isinstance(child.act_fn, (nn.SiLU, SiLUActivation)):
                check.replace(parent, name, functools.partial(GatedMlp, path=path))
        for _, parent, name, child in list(_children(decoder, prefix)):
            if child._modules.keys() == set(Layer.parts) and all(isinstance(child.get_submodule(part), Norm) for part in Layer.parts[2:]):
                check.replace(parent, name, Layer)
        if check.rotary is not None:
            decoder.rotary_emb = check.rotary
    for path, parent, name, child in list(_children(decoder, prefix)):
        if type(child) is nn.Linear:
            setattr(parent, name, FusedLinear({path: child}))


class _EquivalenceCheck:
    """Inputs in float32 for which a module and its replacement must return the same."""

    def __init__(self, decoder: nn.Module, layers: Sequence[LayerAttention]) -> None:
        weight = next(decoder.parameters())
        self._generator, self._layers, self._device = torch.Generator().manual_seed(0), layers, weight.device
        self._positions = torch.arange(_NUM_TOKENS, device=weight.device)[None] * _POSITION_STEP
        rotary, states = getattr(decoder, "rotary_emb", None), torch.ones(1, device=weight.device)
        frequencies, self._angles = getattr(rotary, "inv_freq", None), _run(rotary, states, self._positions)
        replacement = Rotary(frequencies) if isinstance(frequencies, Tensor) else None
        self.rotary = replacement if _agree(self._angles, _run(replacement, states, self._positions)) else None

    def replace(self, parent: nn.Module, name: str, make: Callable[[nn.Module], nn.Module]) -> None:
        """Replace a module by the result of `make`, if both compute the same."""
        module = copy.deepcopy(parent.get_submodule(name)).float()
        size = next(each.shape[-1] for each in module.parameters() if each.dim() == 2)
        states = torch.randn(1, _NUM_TOKENS, size, generator=self._generator).to(self._device)
        replacement = make(module)
        # With a single token no two attention scores can be close, so inputs may be large: clamps change the result.
        same = all(_agree(self._run(module, sample), self._run(replacement, sample)) for sample in (states, states[:, :1] * 1000))
        bare = self._run(module, states, False)  # some decoders pass no angles to some layers
        if same and (bare is None or _agree(bare, self._run(replacement, states, False))):
            setattr(parent, name, make(parent.get_submodule(name)))

    def _run(self, module: nn.Module, states: Tensor, with_angles: bool = True) -> tuple[Tensor, ...] | None:
        if isinstance(module, GatedMlp) or hasattr(module, "act_fn"):
            return _run(module, states)
        count = states.shape[1]
        index = torch.arange(count, device=self._device)[None]
        inputs = ModelInput(torch.zeros_like(index), index, index + _PAGE_SIZE, torch.ones_like(index[:, :1]), _PAGE_SIZE)
        angles = tuple(each[:, -count:] for each in self._angles) if with_angles and self._angles is not None else None

        def cache_of(index: int, _: StaticBuffers) -> tuple[Tensor, Tensor]:
            shape = 2 * _PAGE_SIZE, self._layers[index].kv_heads, self._layers[index].size
            return torch.zeros(shape, device=self._device), torch.zeros(shape, device=self._device)

        call = DecoderCall(self._layers, cache_of, inputs, StaticBuffers([]), {})
        position_options = {"position_ids": self._positions[:, -count:], "position_embeddings": angles}
        return _run(module, hidden_states=states, **position_options, attention_mask=None, stepgraph=call)


@torch.no_grad()
def _run(module: Any, *inputs: Tensor, **options: Any) -> tuple[Tensor, ...] | None:
    """The tensors that a module returns; None if it does not accept these arguments."""
    try:
        found = module(*inputs, **options)
    except Exception:  # modules of other families may raise anything
        return None
    return tuple(each for each in (found if isinstance(found, tuple) else (found,)) if each is not None)


def _agree(one: tuple[Tensor, ...] | None, other: tuple[Tensor, ...] | None) -> bool:
    if one is None or other is None or [each.shape for each in one] != [each.shape for each in other]:
        return False
    return all(bool((a - b).abs().max() <= _TOLERANCE * a.abs().max()) for a, b in zip(one, other, strict=True))


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module, str, nn.Module]]:
    """Every submodule, inner ones first: its path, its parent, and its name in the parent."""
    for name, child in module.named_children():
        yield from _children(child, f"{prefix}.{name}")
        yield f"{prefix}.{name}", module, name, child


def _norm_of(module: nn.Module) -> Norm | None:
    weight: object = getattr(module, "weight", None)
    epsilon: object = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float) or weight.dim() != 1:
        return None
    # Norms of some families round differently, or add one to the weight: these are kept.
    states = torch.linspace(-3, 3, 4 * len(weight), device=weight.device).cos().view(4, -1).to(weight.dtype)
    same = torch.equal(module(states), rms_norm.reference(states, weight, epsilon))
    return Norm(weight, epsilon) if same else None


def _linears(module: nn.Module, path: str, parts: Sequence[str]) -> dict[str, nn.Linear]:
    return {f"{path}.{part}": cast("nn.Linear", module.get_submodule(part)) for part in parts}


def _consists_of(module: nn.Module, linears: Sequence[str], *others: str) -> bool:
    """Whether a module has these nn.Linears, all but the last with or all without a bias, and no child outside `others`."""
    children = dict(module.named_children())
    found = [children.pop(name) for name in linears if type(children.get(name)) is nn.Linear]
    return len(found) == len(linears) and children.keys() <= set(others) and len({each.bias is None for each in found[:-1]}) == 1


def _is_attention(module: nn.Module, layers: Sequence[LayerAttention]) -> bool:
    index: Any = getattr(module, "layer_idx", None)
    if index is None or not _consists_of(module, Attention.parts, "q_norm", "k_norm"):
        return False
    layer = layers[index]
    norms = [child for child in module.children() if type(child) is not nn.Linear]
    head_norms = all(isinstance(norm, Norm) and len(norm.weight) == layer.size for norm in norms)
    return head_norms and len(norms) in (0, 2) and layer.size == layer.value_size
