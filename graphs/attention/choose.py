"""The implementation of an engine's attention: chosen once, before anything is captured, and reported with the reasons.

Rounds and prompts may use different implementations. FlashInfer plans prompts with lengths that the host knows, but does not split
the keys of a round; the Triton program does.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from stepgraph.graphs.attention.paged import OPERATION, AttentionChoice, AttentionShape, by_reference, run_operation
from stepgraph.graphs.attention.probe import TOLERANCE, differs
from stepgraph.graphs.model import Attend
from stepgraph.sampling.kernels import operation

ATTENTION = ("auto", "flashinfer", "triton", "reference")
LEAST_CAPABILITY = (8, 0)
MOST_HEAD_SIZE = 256
FLASHINFER_HEAD_SIZES = (64, 128, 256)  # that its kernels are built and tested for
log = logging.getLogger(__name__)


class _Candidate(NamedTuple):
    why_not: str  # empty if it can run
    round_call: Callable[[], Attend | None] = run_operation
    prompt_call: Callable[[int, int], Attend | None] = run_operation


_REFERENCE = _Candidate("", lambda: by_reference, lambda first, count: by_reference)


def choose_attention(device: torch.device, requested: str, shapes: tuple[AttentionShape, ...], page_size: int) -> AttentionChoice:
    """Choose for models whose attention has `shapes`. May build FlashInfer's kernels, which takes minutes.

    auto: on a GPU the Triton program for rounds, and FlashInfer for prompts where a probe on the device finds it equal to the
    reference; on the CPU the kernel in C; torch where none of these can run. ValueError if another implementation is requested and
    cannot run.
    """
    if requested not in ATTENTION:
        raise ValueError(f"attention: got {requested!r}, expected one of {', '.join(map(repr, ATTENTION))}")
    if requested == "reference":
        return _choice({"reference": _REFERENCE}, "reference", "reference")
    if requested == "auto" and not shapes:
        return OPERATION
    if requested == "auto" and device.type != "cuda":
        why = operation.why_no_c(*(shape.dtype for shape in shapes))
        found = {"native": _Candidate(why), "reference": _REFERENCE}
        return _choice(found, "reference", "reference") if why else _choice(found, "native", "native")
    found = {name: _candidate(name, device, shapes, page_size) for name in ATTENTION[1:] if requested in ("auto", name)}
    if requested != "auto":
        if found[requested].why_not:
            raise ValueError(f"attention: got {requested!r}, expected an implementation that runs on {device}: {found[requested].why_not}")
        return _choice(found, requested, requested)
    rounds = next(name for name in ("triton", "reference") if not found[name].why_not)
    prompts = next(name for name in ("flashinfer", rounds) if not found[name].why_not)
    return _choice(found, rounds, prompts)


def _choice(found: Mapping[str, _Candidate], rounds: str, prompts: str) -> AttentionChoice:
    passed_over = tuple(f"no {name}: {one.why_not}" for name, one in found.items() if one.why_not)
    return AttentionChoice(rounds, prompts, passed_over, found[rounds].round_call, found[prompts].prompt_call)


def _candidate(name: str, device: torch.device, shapes: tuple[AttentionShape, ...], page_size: int) -> _Candidate:
    if name == "reference":
        return _REFERENCE
    why = unfit(name, device, shapes)
    if why or name == "triton":
        return _Candidate(why)
    try:
        log.warning("building or loading FlashInfer's attention for %s; the first time takes some minutes", device)
        module = importlib.import_module("stepgraph.graphs.attention.flashinfer")
        planned = module.PlannedAttention(device, page_size, shapes)
        wrong = (differs(planned.rounds, planned.prompt, shape, page_size, device) for shape in dict.fromkeys(shapes))
        return _Candidate(next(filter(None, wrong), ""), planned.rounds, planned.prompt)
    except Exception as error:  # of a compiler, a loader or a driver
        return _Candidate(operation.reason(error))


def unfit(name: str, device: torch.device, shapes: tuple[AttentionShape, ...]) -> str:
    """Why triton or flashinfer cannot serve these models, as far as it is known without running it."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'stepgraph[cuda]'"
    if name == "triton" and (why := operation.why_no_triton(device)):
        return why
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        least, found = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
        return f"it needs compute capability {least}, this GPU has {found}"
    if name == "flashinfer" and not shapes:
        return "no model of the engine declares its attention in `attends`"
    for shape in shapes:
        if shape.dtype not in TOLERANCE:
            return f"it supports bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
        if shape.size > MOST_HEAD_SIZE or (name == "flashinfer" and shape.size not in FLASHINFER_HEAD_SIZES):
            sizes = ", ".join(map(str, FLASHINFER_HEAD_SIZES)) if name == "flashinfer" else f"up to {MOST_HEAD_SIZE}"
            return f"it supports head sizes {sizes}, not {shape.size}"
    return ""
