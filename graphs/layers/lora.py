"""Low-rank adapters (LoRA) in static slots: which one a row uses is a number on the device, so one graph serves all of them.

An adapter adds up(down(x)) to the product of a weight with x. Its two matrices are in static buffers, one entry per slot; slot 0 is
all zeros, for rows without an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.quantised import MAX_INNER
from stepgraph.graphs.layers.reference import PRODUCT_ROWS
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import ModelInput
from stepgraph.sampling.kernels.operation import ContiguousFloats, DenseFloats, StridedLongs, empty_of, operation

ProductHook = Callable[[str, Tensor, Tensor], Tensor]  # the name of a weight, its input and its product -> the result


class LoraWeight(NamedTuple):
    """A weight [outer, inner] that adapters change: the output of one module of the stored model, or of several, one after another."""

    parts: Mapping[str, int]  # output sizes by the names of the modules
    inner: int

    @property
    def outer(self) -> int:
        return sum(self.parts.values())

    def down_shape(self, rank: int) -> tuple[int, int]:
        """Each part has `rank` rows of its own."""
        return len(self.parts) * rank, self.inner

    def up_shape(self, rank: int) -> tuple[int, int]:
        return self.outer, len(self.parts) * rank


def lora_specs(weights: Mapping[str, LoraWeight], limits: Limits, dtype: torch.dtype) -> Iterator[BufferSpec]:
    """The slots of all adapters. weights: by the prefix of their buffers' names."""
    slots, rank = limits.max_loras + 1, limits.max_lora_rank
    for name, weight in weights.items():
        yield BufferSpec(f"{name}_down", (slots, *weight.down_shape(rank)), dtype)
        yield BufferSpec(f"{name}_up", (slots, *weight.up_shape(rank)), dtype)


def _product_outputs(states: Tensor, slots: Tensor, weights: Tensor, base: Tensor | None) -> Tensor:
    assert base is None or base.shape == (len(states), weights.shape[1]), f"{states.shape}, weights {weights.shape}, base {base.shape}"
    return empty_of((len(states), weights.shape[1]), states)


@operation(_product_outputs, triton=True, c=True, supports=lambda states, weights: states.shape[1] == weights.shape[2] <= MAX_INNER)
def slot_product(states: DenseFloats, slots: StridedLongs, weights: ContiguousFloats, base: ContiguousFloats | None = None) -> Tensor:
    """Products with one of several weights: [N, in] by [slots, out, in] -> [N, out], plus `base` [N, out].

    slots [B]: the weight of each N / B consecutive rows. In C a row has the same bits in any batch; slot 0 is not read there.
    """
    states = states.view(len(slots), -1, states.shape[1])
    count = states.shape[1]
    states = torch.nn.functional.pad(states, (0, 0, 0, max(0, PRODUCT_ROWS - count)))
    result = torch.bmm(states, weights[slots].mT)[:, :count].reshape(-1, weights.shape[1])
    return result if base is None else base + result


def add_lora(name: str, states: Tensor, product: Tensor, inputs: ModelInput, buffers: StaticBuffers) -> Tensor:
    """The product of the weight `name` with states [N, in], with what each row's adapter adds to it."""
    if inputs.lora_slots is None:
        return product
    down = slot_product(states, inputs.lora_slots, buffers[f"{name}_down"])
    return slot_product(down, inputs.lora_slots, buffers[f"{name}_up"], product)
