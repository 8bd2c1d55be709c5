"""The implementation of the filters on a device: chosen once, before anything is captured, and reported with the reasons."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import sampler
from stepgraph.sampling.cuda_graphs import replayed
from stepgraph.sampling.fields import reason
from stepgraph.sampling.kernels import triton as programs

FILTERS = ("auto", "triton", "flashinfer", "torch")
FLASHINFER = "stepgraph.sampling.kernels.flashinfer"
MODULES = {"flashinfer": FLASHINFER, "triton": "stepgraph.sampling.kernels.triton.filters", "torch": ""}  # "": the reference
Filter = Callable[[Tensor, Tensor, Tensor], None]  # logits [B, Q, V], params [B, 4], probs [B, Q, V], written
log = logging.getLogger(__name__)


class FilterChoice(NamedTuple):
    name: str  # flashinfer, triton or torch
    passed_over: tuple[str, ...]  # preferred implementations, and why they cannot be used

    def __str__(self) -> str:
        return "; ".join((self.name, *self.passed_over))


_chosen: dict[torch.device, FilterChoice] = {}


def choose_filters(device: torch.device | str, requested: str = "auto") -> FilterChoice:
    """Choose for `device` and keep the choice for later captures. May build FlashInfer's kernels, which takes a minute.

    auto: triton, else flashinfer where a probe on the device finds it equal to the reference, else torch; on the CPU torch.
    ValueError if another implementation is requested and cannot run.
    """
    if requested not in FILTERS:
        raise ValueError(f"filters: got {requested!r}, expected one of {', '.join(map(repr, FILTERS))}")
    indexed = _indexed(torch.device(device))
    passed_over: list[str] = []
    for name in FILTERS[1:] if requested == "auto" else (requested,):
        why = why_not(name, indexed)
        if not why:
            _chosen[indexed] = FilterChoice(name, tuple(passed_over))
            return _chosen[indexed]
        passed_over.append(f"no {name}: {why}")
    raise ValueError(f"filters: got {requested!r}, expected an implementation that runs on {indexed}: {why}")


def chosen_filters(device: torch.device | str) -> FilterChoice:
    """The choice for `device`; without one, triton if it can run."""
    indexed = _indexed(torch.device(device))
    return _chosen.get(indexed) or FilterChoice("triton" if not why_not("triton", indexed) else "torch", ())


def filter_module(device: torch.device) -> str:
    """The module whose functions run the filters on `device`; empty for the reference."""
    return MODULES[chosen_filters(device).name]


def why_not(name: str, device: torch.device) -> str:
    """Why the filters cannot run as `name` on `device`; empty if they can."""
    if name == "torch":
        return ""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if name == "triton":
        return programs.why_no_triton(device)
    try:
        module = importlib.import_module(MODULES[name])
        log.warning("building or loading FlashInfer's sampling kernels for %s; the first time takes a minute or two", device)
        return differs(module.distribution, device) or breaks_in_a_graph(module.distribution, device)
    except Exception as error:  # of a compiler, a loader or a driver
        return reason(error)


def probes(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Logits and params that expose faults of filters: many ties, odd and large widths, dead rows, every setting alone and together."""
    rows = [
        [1.0, 0, 1, 0],
        [0.7, 5, 1, 0],
        [1.0, 0, 0.9, 0],
        [1.3, 50, 0.5, 0.01],
        [0.0, 0, 1, 0],
        [1.0, 1, 1e-6, 0],
        [2.0, 2**24, 0.999, 1.0],
    ]
    found = []
    for seed, width in enumerate((33, 4_099, 131_071, 151_936)):
        made = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(rows), 2, width, generator=made) * 4
        logits[:, 0].round_()
        logits[:, 1, width // 3 :] = float("-inf")
        logits[1, 0], logits[2, 1], logits[3, 1, 7] = float("-inf"), 0.0, float("nan")
        found.append((logits.to(device), torch.tensor(rows, device=device)))
    return found


def differs(run: Filter, device: torch.device) -> str:
    """How the tokens that `run` keeps, or their probabilities, differ from the reference; empty if they do not."""
    for logits, params in probes(device):
        expected, probs = sampler.distribution(logits, params), torch.full(logits.shape, -1.0, device=device)
        run(logits, params, probs)
        wrong = ((probs > 0) != (expected > 0)).sum()
        if wrong:
            return f"it keeps other tokens than the reference: {int(wrong)} of a probe of {logits.shape[-1]} tokens differ"
        if not torch.allclose(probs, expected, rtol=1e-5, atol=0):
            return f"its probabilities are not the reference's in a probe of {logits.shape[-1]} tokens"
    return ""


def breaks_in_a_graph(run: Filter, device: torch.device) -> str:
    """How replays of a captured `run` differ from the reference, also after settings changed; empty if they do not."""
    logits, params = probes(device)[-1]
    probs = torch.empty(logits.shape, device=device)
    replay = replayed(lambda: run(logits, params, probs), device)
    for _ in range(2):
        params.copy_(params.roll(1, 0))
        replay()
        if not torch.equal(probs > 0, sampler.distribution(logits, params) > 0):
            return "its replay in a CUDA graph keeps other tokens than the reference"
    return ""


def _indexed(device: torch.device) -> torch.device:
    """With an index, as in Tensor.device."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
