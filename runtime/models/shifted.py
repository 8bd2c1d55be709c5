"""Heads that guess from a state and the token behind it keep their entries at the state's position, not at the token's."""

from __future__ import annotations

from stepgraph.graphs.attention.paged import by_reference
from stepgraph.graphs.layers.slot_mapping import shift_entries
from stepgraph.graphs.model import ModelInput


def shifted(inputs: ModelInput, count: int) -> ModelInput:
    """The same tokens with their cache entries `count` positions earlier. Those of the first `count` tokens of a history are inert.

    A head is trained on pairs of a state and the token `count` behind it, so nothing in its training stands for those tokens: an
    entry of theirs would be seen by every later query. Neither are those written that other requests share.
    """
    positions, slots = shift_entries(inputs.positions, inputs.slots, inputs.block_tables, inputs.page_size, count, inputs.shared)
    attend = inputs.attend if inputs.attend is by_reference else None  # a plan is for the tokens' own positions
    return inputs._replace(positions=positions, slots=slots, attend=attend)
