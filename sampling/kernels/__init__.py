"""Kernels that a round calls on any device: one custom operation each, plain torch or C on the CPU, Triton on a GPU.

These functions make the outputs, bring the inputs into the layout that the programs read, and check shapes.
"""

import torch

from stepgraph.sampling.kernels import cpu as native
from stepgraph.sampling.kernels import operation
from stepgraph.sampling.kernels.chain import chain_accept
from stepgraph.sampling.kernels.choice import masked_argmax, race
from stepgraph.sampling.kernels.filter_choice import choose_filters
from stepgraph.sampling.kernels.filters import distribution, draw
from stepgraph.sampling.kernels.mask_rows import mask_status
from stepgraph.sampling.kernels.processors import GrammarMask, Processed, process
from stepgraph.sampling.kernels.rejection import reject_sample

__all__ = [
    "GrammarMask",
    "Processed",
    "chain_accept",
    "choose_filters",
    "distribution",
    "draw",
    "implementation",
    "mask_status",
    "masked_argmax",
    "process",
    "race",
    "reject_sample",
]


def implementation(device: torch.device | str) -> str:
    """What the kernels run as on `device`, for people to read."""
    if torch.device(device).type == "cuda":
        why = operation.why_no_triton(torch.device(device))
        return f"torch reference ({why})" if why else "triton"
    why = native.why_not()
    return f"torch reference (in C: {why})" if why else "C for masked choices, mask tags and acceptance, torch reference for the rest"
