"""Sampling operations of a round on any device: torch or C on the CPU, Triton or FlashInfer on a GPU. docs/operations.md lists them."""

import torch

from stepgraph.sampling import native
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.kernels.advance import advance_fill
from stepgraph.sampling.kernels.choice import Emission, GrammarMask, chain_accept, mask_status, masked_argmax, most_probable
from stepgraph.sampling.kernels.filters import choose_filters, distribution, draw
from stepgraph.sampling.kernels.processors import Processed, log_probabilities, process, top_logprobs
from stepgraph.sampling.kernels.rejection import reject_sample

__all__ = [
    "Emission",
    "GrammarMask",
    "Processed",
    "advance_fill",
    "chain_accept",
    "choose_filters",
    "describe",
    "distribution",
    "draw",
    "log_probabilities",
    "mask_status",
    "masked_argmax",
    "most_probable",
    "process",
    "reject_sample",
    "top_logprobs",
]


def describe(device: torch.device | str) -> str:
    """The implementation of the operations on `device`, for reports."""
    if torch.device(device).type == "cuda":
        why = programs.why_no_triton(torch.device(device))
        return f"torch ({why})" if why else "triton"
    why = native.why_not()
    return f"torch (no C: {why})" if why else "C where an operation has it, else torch"
