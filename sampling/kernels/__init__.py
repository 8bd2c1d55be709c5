"""Kernels that a round calls on any device: one custom operation each, plain torch on the CPU, Triton on a GPU.

These functions make the outputs, bring the inputs into the layout that the programs read, and check shapes.
"""

from stepgraph.sampling.kernels.chain import chain_accept
from stepgraph.sampling.kernels.choice import masked_argmax, race
from stepgraph.sampling.kernels.filter_choice import choose_filters
from stepgraph.sampling.kernels.filters import distribution, draw
from stepgraph.sampling.kernels.masks import mask_status
from stepgraph.sampling.kernels.processors import Processed, Ruling, process
from stepgraph.sampling.kernels.register import implementation
from stepgraph.sampling.kernels.rejection import reject_sample

__all__ = [
    "Processed",
    "Ruling",
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
