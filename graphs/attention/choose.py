"""The implementation of an engine's attention: chosen once, before anything is captured, and reported with the reasons.

Rounds and prompts may use different implementations. FlashInfer plans prompts with lengths that the host knows, but does not split
the keys of a round; the Triton program does.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from stepgraph.graphs.attention.paged import DEFAULT_ATTENTION, AttentionChoice, attention, use_operation
from stepgraph.graphs.attention.reference import by_reference
from stepgraph.graphs.model import AttentionShape
from stepgraph.graphs.model_call import Attend, ModelInput
from stepgraph.sampling.cuda_graphs import capture_replay
from stepgraph.sampling.fields import check_value, error_summary, one_of
from stepgraph.sampling.kernels import triton as programs
from stepgraph.sampling.kernels.c_kernel import why_no_c

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}  # relative and absolute, in the probe
AttentionName = Literal["auto", "flashinfer", "triton", "reference"]
ATTENTION_CHOICES = get_args(AttentionName)
MIN_CAPABILITY = (8, 0)
MAX_HEAD_SIZE = 256
FLASHINFER_HEAD_SIZES = (64, 128, 256)  # sizes that its kernels are built and tested for
RoundAttend = Callable[[], Attend | None]
PromptAttend = Callable[[int, int], Attend | None]
log = logging.getLogger(__name__)


class _Candidate(NamedTuple):
    why_not: str  # empty if it can run
    round_attend: RoundAttend = use_operation
    prompt_attend: PromptAttend = use_operation


_REFERENCE = _Candidate("", lambda: by_reference, lambda first, count: by_reference)


def choose_attention(device: torch.device, requested: str, shapes: tuple[AttentionShape, ...], page_size: int) -> AttentionChoice:
    """Choose for models whose attention has `shapes`. May build FlashInfer's kernels, which takes minutes.

    auto: on a GPU the Triton program for rounds, and FlashInfer for prompts where a probe on the device finds it equal to the
    reference; on the CPU the kernel in C; torch where none of these can run. ValueError if another implementation is requested and
    cannot run.
    """
    check_value("attention", requested, one_of(ATTENTION_CHOICES))
    if requested == "auto" and not shapes:
        return DEFAULT_ATTENTION
    if requested == "auto" and device.type != "cuda":
        why = why_no_c(*(shape.dtype for shape in shapes))
        probed = {"native": _Candidate(why), "reference": _REFERENCE}
        return _choice(probed, "reference", "reference") if why else _choice(probed, "native", "native")
    probed = {name: _candidate(name, device, shapes, page_size) for name in ATTENTION_CHOICES[1:] if requested in ("auto", name)}
    if requested != "auto":
        if probed[requested].why_not:
            raise ValueError(f"attention: got {requested!r}, expected an implementation that runs on {device}: {probed[requested].why_not}")
        return _choice(probed, requested, requested)
    rounds = next(name for name in ("triton", "reference") if not probed[name].why_not)
    prompts = next(name for name in ("flashinfer", rounds) if not probed[name].why_not)
    return _choice(probed, rounds, prompts)


def _choice(candidates: Mapping[str, _Candidate], rounds: str, prompts: str) -> AttentionChoice:
    unavailable = tuple(f"no {name}: {candidate.why_not}" for name, candidate in candidates.items() if candidate.why_not)
    chosen = candidates[prompts]
    return AttentionChoice(rounds, prompts, unavailable, candidates[rounds].round_attend, chosen.prompt_attend, chosen.round_attend)


def _candidate(name: str, device: torch.device, shapes: tuple[AttentionShape, ...], page_size: int) -> _Candidate:
    if name == "reference":
        return _REFERENCE
    why = why_unsupported(name, device, shapes)
    if why or name == "triton":
        return _Candidate(why)
    try:
        log.warning("building or loading FlashInfer's attention for %s; the first time takes some minutes", device)
        module = importlib.import_module("stepgraph.graphs.attention.flashinfer")
        planned = module.PlannedAttention(device, page_size, shapes)
        wrong = (find_difference(planned.rounds, planned.prompt, shape, page_size, device) for shape in dict.fromkeys(shapes))
        return _Candidate(next(filter(None, wrong), ""), planned.rounds, planned.prompt)
    except Exception as error:  # from a compiler, a loader or a driver
        return _Candidate(error_summary(error))


def why_unsupported(name: str, device: torch.device, shapes: tuple[AttentionShape, ...]) -> str:
    """Why triton or flashinfer cannot run these models, as far as is known without running it; empty if no reason is known."""
    if device.type != "cuda":
        return f"it runs on CUDA devices, not on {device.type}"
    if name == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed: pip install 'stepgraph[cuda]'"
    if name == "triton" and (why := programs.why_no_triton(device)):
        return why
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        least, found = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        return f"it needs compute capability {least}, this GPU has {found}"
    if name == "flashinfer" and not shapes:
        return "no model of the engine declares its attention in `attends`"
    for shape in shapes:
        if shape.dtype not in TOLERANCE:
            return f"it supports bfloat16 and float16, not {str(shape.dtype).removeprefix('torch.')}"
        if name == "flashinfer" and (shape.softcap or shape.sinks):
            return "it supports neither soft-capped scores nor sinks here"
        if name == "flashinfer" and shape.float8:
            return "it does not read 8-bit caches here"
        if shape.size > MAX_HEAD_SIZE or (name == "flashinfer" and shape.size not in FLASHINFER_HEAD_SIZES):
            sizes = ", ".join(map(str, FLASHINFER_HEAD_SIZES)) if name == "flashinfer" else f"up to {MAX_HEAD_SIZE}"
            return f"it supports head sizes {sizes}, not {shape.size}"
    return ""


class Probe:
    """Four rows over a cache with NaN wherever no row has an entry; refilled in place for every case."""

    rows, count, most = 4, 5, 300
    round_lengths = ((7, 300, 0, 64), (300, 6, 65, 0), (5, 0, 17, 131))  # lengths; 0: all positions are inert; every second row has one
    prompt_chunks = ((0, 37), (37, 150), (187, 1), (188, 112))

    def __init__(self, shape: AttentionShape, page_size: int, device: torch.device) -> None:
        self.shape, self.page_size, self.device = shape, page_size, device
        pages = -(-(self.most + self.count) // page_size)
        generator = torch.Generator().manual_seed(shape.size)
        self.tables = (torch.randperm(self.rows * pages, generator=generator) + 1).view(self.rows, pages).to(device)
        slots = (self.rows * pages + 1) * page_size
        self.entries = torch.randn(2, slots, shape.kv_heads, shape.size, generator=generator).to(device, shape.dtype)
        self.cache = torch.full_like(self.entries, torch.nan)
        self.query = torch.randn(self.rows, self.most, shape.heads, shape.size, generator=generator).to(device, shape.dtype)
        self.positions = torch.zeros(self.rows, self.count, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.positions)

    def fill_cache(self, lengths: tuple[int, ...]) -> None:
        """Fill the cache for rows of these lengths, whose last live query is at the last entry."""
        self.cache.fill_(torch.nan)
        for row, end in enumerate(lengths):
            filled = self._slots(row, torch.arange(end, device=self.device))
            self.cache[:, filled] = self.entries[:, filled]
            inert = row % 2 if end else self.count
            positions = (end - self.count + inert + torch.arange(self.count, device=self.device)).clamp(min=0)
            self.positions[row] = positions
            self.slots[row] = torch.where(positions < end, self._slots(row, positions), positions % self.page_size)

    def round(self) -> tuple[Tensor, ModelInput]:
        return self.query[:, : self.count], ModelInput(self.positions, self.positions, self.slots, self.tables, self.page_size)

    def prompt(self, first: int, count: int) -> tuple[Tensor, ModelInput]:
        """A chunk of a prompt in row 1."""
        positions = first + torch.arange(count, device=self.device)[None]
        return self.query[1:2, :count], ModelInput(positions, positions, self._slots(1, positions), self.tables[1:2], self.page_size)

    def is_wrong(self, output: Tensor, query: Tensor, inputs: ModelInput, window: int | None) -> bool:
        expected = attention(query, self.cache[0], self.cache[1], inputs._replace(attend=by_reference), window)
        live = inputs.slots >= self.page_size
        tolerance = TOLERANCE.get(self.shape.dtype, 1e-5)
        return not torch.allclose(output[live].float(), expected[live].float(), rtol=tolerance, atol=tolerance)

    def _slots(self, row: int, positions: Tensor) -> Tensor:
        return self.tables[row, positions // self.page_size] * self.page_size + positions % self.page_size


def find_difference(rounds: RoundAttend, prompts: PromptAttend, shape: AttentionShape, page_size: int, device: torch.device) -> str:
    """How `rounds`, captured once and replayed, or `prompts` differ from the reference; empty if they do not."""
    probe = Probe(shape, page_size, device)
    for window in dict.fromkeys(shape.windows):
        probe.fill_cache(probe.round_lengths[0])
        query, inputs = probe.round()
        output = torch.empty_like(query)

        def step(query: Tensor = query, inputs: ModelInput = inputs, window: int | None = window, output: Tensor = output) -> None:
            output.copy_(attention(query, probe.cache[0], probe.cache[1], inputs._replace(attend=rounds()), window))

        replay = capture_replay(step, device)
        for lengths in probe.round_lengths:
            probe.fill_cache(lengths)
            replay()
            if probe.is_wrong(output, query, inputs, window):
                return f"its rounds differ from the reference for rows of {', '.join(map(str, lengths))} tokens{_window(window)}"
        for first, count in probe.prompt_chunks:
            probe.fill_cache((0, first + count, 0, 0))
            query, inputs = probe.prompt(first, count)
            found = attention(query, probe.cache[0], probe.cache[1], inputs._replace(attend=prompts(first, count)), window)
            if probe.is_wrong(found, query, inputs, window):
                return f"its prompts differ from the reference for {count} tokens after {first}{_window(window)}"
    return ""


def _window(window: int | None) -> str:
    return f" in a window of {window}" if window else ""
