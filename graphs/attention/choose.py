"""What the attention of one engine runs as: chosen once, before anything is captured, and told with its reasons.

Rounds and prompts may run as different things: FlashInfer plans prompts with the lengths that the host knows, and does not
split the keys of a round, for which the kernel of our own is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from stepgraph.graphs.attention.paged import AttentionShape, by_reference
from stepgraph.graphs.attention.probe import TOLERANCE, differs
from stepgraph.graphs.model import Attend
from stepgraph.sampling.kernels import operation

if TYPE_CHECKING:
    from stepgraph.graphs.attention.flashinfer import PlannedAttention

WISHES = ("auto", "flashinfer", "triton", "reference")
LEAST_CAPABILITY = (8, 0)
MOST_HEAD_SIZE = 256
FLASHINFER_HEAD_SIZES = (64, 128, 256)  # that its programs are built and tested for
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionChoice:
    """`rounds` and `prompts` are names of WISHES but for auto, or native on the CPU; empty where no model says that it attends."""

    rounds: str = ""
    prompts: str = ""
    passed_over: tuple[str, ...] = ()  # what would have been taken first, and why it was not
    planned: PlannedAttention | None = None

    def round_call(self) -> Attend | None:
        """For one call of a model in a round; None: the operation, which is a kernel on a GPU and on a CPU that has one."""
        if self.rounds == "flashinfer" and self.planned is not None:
            return self.planned.rounds()
        return by_reference if self.rounds == "reference" else None

    def prompt_call(self, first: int, count: int) -> Attend | None:
        """For one call of a model with `count` tokens of a prompt, from position `first` on."""
        if self.prompts == "flashinfer" and self.planned is not None:
            return self.planned.prompt(first, count)
        return by_reference if self.prompts == "reference" else None

    def __str__(self) -> str:
        names = self.rounds if self.rounds == self.prompts else f"rounds {self.rounds}, prompts {self.prompts}"
        return "; ".join((names, *self.passed_over))


OPERATION = AttentionChoice()


def choose_attention(device: torch.device, wanted: str, shapes: tuple[AttentionShape, ...], page_size: int) -> AttentionChoice:
    """For models that ask for `shapes`. May build FlashInfer's kernels, which takes minutes.

    auto takes the kernel for rounds, and FlashInfer for prompts where a probe on the device finds it equal to the reference;
    plain torch where neither can be. On the CPU it takes the kernel in C where that was built. ValueError where another wish cannot be met.
    """
    if wanted not in WISHES:
        raise ValueError(f"attention: got {wanted!r}, want one of {', '.join(map(repr, WISHES))}")
    if wanted == "reference":
        return AttentionChoice("reference", "reference")
    if wanted == "auto" and not shapes:
        return OPERATION
    if wanted == "auto" and device.type != "cuda":
        why = operation.why_no_c(*(shape.dtype for shape in shapes))
        return AttentionChoice("reference", "reference", (f"no native: {why}",)) if why else AttentionChoice("native", "native")
    found = {name: _candidate(name, device, shapes, page_size) for name in WISHES[1:] if wanted in ("auto", name)}
    if wanted != "auto":
        if found[wanted].why_not:
            raise ValueError(f"attention: got {wanted!r}, want what runs on {device}, and it does not: {found[wanted].why_not}")
        return AttentionChoice(wanted, wanted, (), found[wanted].planned)
    rounds = next(name for name in ("triton", "reference") if not found[name].why_not)
    prompts = next(name for name in ("flashinfer", rounds) if not found[name].why_not)
    passed_over = tuple(f"no {name}: {one.why_not}" for name, one in found.items() if one.why_not)
    return AttentionChoice(rounds, prompts, passed_over, found["flashinfer"].planned)


class _Candidate(NamedTuple):
    why_not: str  # empty where it can be
    planned: PlannedAttention | None = None


def _candidate(name: str, device: torch.device, shapes: tuple[AttentionShape, ...], page_size: int) -> _Candidate:
    if name == "reference":
        return _Candidate("")
    why = unfit(name, device, shapes)
    if why or name == "triton":
        return _Candidate(why)
    try:
        log.warning("flashinfer's attention is built or loaded for %s; the first time takes some minutes", device)
        module = importlib.import_module("stepgraph.graphs.attention.flashinfer")
        planned = module.PlannedAttention(device, page_size, shapes)
        wrong = (differs(planned.rounds, planned.prompt, shape, page_size, device) for shape in dict.fromkeys(shapes))
        return _Candidate(next(filter(None, wrong), ""), planned)
    except Exception as error:  # whatever a compiler, a loader or a driver may raise
        return _Candidate(operation.reason(error))


def unfit(name: str, device: torch.device, shapes: tuple[AttentionShape, ...]) -> str:
    """Why triton or flashinfer cannot serve these models, as far as that can be said without running its attention."""
    if device.type != "cuda":
        return f"it is for CUDA devices, not for {device.type}"
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'stepgraph[cuda]'"
    if name == "triton" and (why := operation.why_no_triton(device)):
        return why
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"it needs compute capability {'.'.join(map(str, LEAST_CAPABILITY))}, and this GPU has {'.'.join(map(str, capability))}"
    if name == "flashinfer" and not shapes:
        return "no model of the engine says in `attends` what it asks of attention"
    for shape in shapes:
        if shape.dtype not in TOLERANCE:
            return f"it is for bfloat16 and float16, not for {str(shape.dtype).removeprefix('torch.')}"
        if shape.size > MOST_HEAD_SIZE or (name == "flashinfer" and shape.size not in FLASHINFER_HEAD_SIZES):
            sizes = ", ".join(map(str, FLASHINFER_HEAD_SIZES)) if name == "flashinfer" else f"up to {MOST_HEAD_SIZE}"
            return f"its heads are of {sizes} numbers, not of {shape.size}"
    return ""
