"""One call of a model: its input, its output, and the checks of what it returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.sampling.fields import shows_fields

Attend = Callable[..., None]  # (query, keys, values, inputs, window, scale, output), then (softcap, sinks) where a model has either


class Embeddings(NamedTuple):
    """Embeddings that replace those of some tokens, for example of an image."""

    values: Tensor  # [B, Q, E]
    given: Tensor  # [B, Q] bool: positions that they replace


@shows_fields
class ModelInput(NamedTuple):
    """Tokens of one call: B rows of Q positions. Prompts have B = 1 and any Q, rounds any B and a fixed Q. Both are recorded.

    Positions are consecutive. Inert positions at a row's end have a slot in the scratch page (slot < page_size) and a position clamped
    into range; their output is not used. After a shared prefix, a prompt's first position may be the last shared one: its slot is
    in the scratch page, because its cache entry exists, and its output is used.
    """

    tokens: Tensor  # [B, Q] int64
    positions: Tensor  # [B, Q] int64, index of each token in its row's history; a query attends to positions <= its own
    slots: Tensor  # [B, Q] int64, cache slot of each token
    block_tables: Tensor  # [B, pages_per_row] int64; position p is in slot block_table[p // page_size] * page_size + p % page_size
    page_size: int
    features: Tensor | None = None  # draft only, [B, Q, F]: features of the position before each token; zeros at position 0
    step: int = 1  # draft only: which draft of the round, from 1; at 1 and in prompts the features are the target's
    attend: Attend | None = None  # implementation of `attention` in this call; None: the operation
    shared: Tensor | int = 0  # entries below this position are shared with other rows, and `slots` contains none; [1] int64 in prompts
    embeddings: Embeddings | None = None  # prompts only; of a draft only if it has shares_embeddings
    lora_slots: Tensor | None = None  # target only, [B] int64, 0 for a row without an adapter; None: the engine has no slots for them


@shows_fields
class ModelOutput(NamedTuple):
    """What a model returns for B rows of Q positions."""

    hidden: Tensor  # [B, Q, H], input of `logits`
    features: Tensor | None = None  # [B, Q, F], input of the draft: the target's at its first step, its own later; None: `hidden`

    @property
    def next_features(self) -> Tensor:
        return self.hidden if self.features is None else self.features

    def saved_states(self, width: int) -> Tensor:
        """[B, Q, width] features and hidden states concatenated; only the hidden states if `width` is H."""
        states = self.hidden if self.hidden.shape[-1] == width else torch.cat([self.next_features, self.hidden], -1)
        check_shape("target features and hidden", states, *self.hidden.shape[:-1], width)
        return states


def run_model(
    name: str, forward: Callable[[ModelInput, StaticBuffers], ModelOutput], inputs: ModelInput, buffers: StaticBuffers
) -> ModelOutput:
    """The model's output. ValueError if it returned something else. Costs nothing in a replay, which runs no Python."""
    output: object = forward(inputs, buffers)
    if not isinstance(output, ModelOutput):
        raise ValueError(f"{name}.forward: got {type(output).__name__}, expected a ModelOutput; its features may be None")
    for field, tensor in (("hidden", output.hidden), ("features", output.next_features)):
        check_shape(f"{name} {field}", tensor, *inputs.tokens.shape, getattr(tensor, "shape", ["H"])[-1])
    return output


def check_shape(name: str, tensor: Tensor, *sizes: int) -> None:
    """ValueError if a model returned another shape. Costs nothing in a replay, which runs no Python."""
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != sizes:
        raise ValueError(f"{name}: got {type(tensor).__name__} of shape {tuple(getattr(tensor, 'shape', ()))}, expected {sizes}")
