"""What the filters of kernels/filters.py run as on a device: chosen once, before anything is captured, and told with its reasons."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import sampler
from stepgraph.sampling.cuda_graphs import replayed
from stepgraph.sampling.kernels import operation

WISHES = ("auto", "flashinfer", "triton", "torch")
PROGRAMS = {"flashinfer": "flashinfer_filters", "triton": "filters", "torch": ""}  # a module of programs/; "": the reference
Filter = Callable[[Tensor, Tensor, Tensor], None]  # logits [B, Q, V], params [B, 4], probs [B, Q, V], written
log = logging.getLogger(__name__)


class FilterChoice(NamedTuple):
    name: str  # flashinfer, triton or torch
    passed_over: tuple[str, ...]  # what would have been taken first, and why it was not

    def __str__(self) -> str:
        return "; ".join((self.name, *self.passed_over))


_chosen: dict[torch.device, FilterChoice] = {}


def choose_filters(device: torch.device | str, wanted: str = "auto") -> FilterChoice:
    """Choose for `device` and remember it for what is captured from now on. May build flashinfer's kernels, which takes a minute.

    auto takes flashinfer where a probe on the device finds it equal to the reference, else triton, else plain torch; on the CPU
    plain torch. ValueError where another wish cannot be met.
    """
    if wanted not in WISHES:
        raise ValueError(f"filters: got {wanted!r}, want one of {', '.join(map(repr, WISHES))}")
    place = _indexed(torch.device(device))
    passed_over: list[str] = []
    for name in WISHES[1:] if wanted == "auto" else (wanted,):
        why = why_not(name, place)
        if not why:
            _chosen[place] = FilterChoice(name, tuple(passed_over))
            return _chosen[place]
        passed_over.append(f"no {name}: {why}")
    raise ValueError(f"filters: got {wanted!r}, want what runs on {place}, and it does not: {why}")


def chosen_filters(device: torch.device | str) -> FilterChoice:
    """What was chosen for `device`; where nobody asked, triton if it is there."""
    place = _indexed(torch.device(device))
    return _chosen.get(place) or FilterChoice("triton" if not why_not("triton", place) else "torch", ())


def programs_for(device: torch.device) -> str:
    return PROGRAMS[chosen_filters(device).name]


def why_not(name: str, device: torch.device) -> str:
    """Why the filters cannot run as `name` on `device`; empty where they can."""
    if name == "torch":
        return ""
    if device.type != "cuda":
        return f"it is for CUDA devices, not for {device.type}"
    if name == "triton":
        return operation.why_no_triton(device)
    try:
        programs = importlib.import_module(f"stepgraph.sampling.kernels.triton.{PROGRAMS[name]}")
        log.warning("flashinfer's sampling kernels are built or loaded for %s; the first time takes a minute or two", device)
        return differs(programs.distribution, device) or breaks_in_a_graph(programs.distribution, device)
    except Exception as error:  # whatever a compiler, a loader or a driver may raise
        return operation.reason(error)


def probes(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Logits and params at which filters go wrong: many ties, odd and large widths, dead rows, every setting alone and together."""
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
    for place, width in enumerate((33, 4_099, 131_071, 151_936)):
        made = torch.Generator().manual_seed(place)
        logits = torch.randn(len(rows), 2, width, generator=made) * 4
        logits[:, 0].round_()
        logits[:, 1, width // 3 :] = float("-inf")
        logits[1, 0], logits[2, 1], logits[3, 1, 7] = float("-inf"), 0.0, float("nan")
        found.append((logits.to(device), torch.tensor(rows, device=device)))
    return found


def differs(run: Filter, device: torch.device) -> str:
    """Where `run` keeps other tokens than the reference, or gives them other probabilities; empty where it does not."""
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
    """Whether `run`, captured once, gives on replay what it gives outside, also for settings that changed since."""
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
    """With a number, as tensors have it."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
