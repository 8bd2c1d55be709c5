"""Heads that guess from a state and the token behind it keep their entries at the state's position, not at the token's."""

from __future__ import annotations

import torch

from stepgraph.graphs.attention import by_reference
from stepgraph.graphs.model import ModelInput


def shifted(inputs: ModelInput, count: int) -> ModelInput:
    """The same tokens with their cache entries `count` positions earlier. Those of the first `count` tokens of a history are inert.

    A head is trained on pairs of a state and the token `count` behind it, so nothing in its training stands for those tokens: an
    entry of theirs would be seen by every later query. Neither are those written that other requests share.
    """
    page_size, tables = inputs.page_size, inputs.block_tables
    real = (inputs.slots >= page_size) & (inputs.positions >= count + inputs.shared)
    positions = (inputs.positions - count).clamp(min=0)
    slots = tables.gather(1, positions // page_size) * page_size + positions % page_size
    attend = inputs.attend if inputs.attend is by_reference else None  # a plan is for the tokens' own positions
    return inputs._replace(positions=positions, slots=torch.where(real, slots, positions % page_size), attend=attend)
