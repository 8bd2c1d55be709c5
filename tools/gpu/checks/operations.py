"""Calls of device operations on random inputs: for comparisons with the reference, for times, and for counts of the bytes they move."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stepgraph.sampling import bitmask, sampler
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.kernels import choice, filters, processors, rejection
from stepgraph.sampling.kernels.operation import Operation
from stepgraph.sampling.rng import Purpose
from stepgraph.sampling.sampler import Param
from tools.gpu.checks.masks import MAX_BIASES, make_case, tag_inputs

SETTINGS = [[0.7, 50, 0.9, 0.01], [1.0, 0, 1, 0], [0.0, 0, 1, 0], [1.3, 0, 0.95, 0], [1.0, 5, 1, 0], [2.0, 0, 0.5, 0.05], [1.0, 0, 1e-6, 0]]
FILTERED, UNFILTERED = SETTINGS[:2]
Run = Callable[..., object]


@dataclass(frozen=True)
class Call:
    """One call of an operation. Outputs have arbitrary content; `writes`: positions of inputs that it changes; near: tolerance.

    least_bytes: what any implementation moves, without caches.
    """

    operation: Operation[Any, Any]
    shape: str
    inputs: tuple[Any, ...]
    outputs: tuple[Tensor, ...]
    least_bytes: int = 0
    writes: tuple[int, ...] = ()
    tol: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.operation.name} {self.shape}"

    def kernel(self) -> None:
        self.operation.out(*self.inputs, *self.outputs)

    def reference(self) -> None:
        self.operation.run_reference(*self.inputs, *self.outputs)

    def triton(self, *arguments: Any, **constants: int) -> None:
        """Run the Triton program itself, as `out` does on a GPU."""
        getattr(importlib.import_module(self.operation.triton), self.operation.name)(*arguments, **constants)

    def results(self, run: Run) -> list[Tensor]:
        """Outputs and changed inputs after `run` on copies of them."""
        inputs = [_copy(value) if index in self.writes else value for index, value in enumerate(self.inputs)]
        outputs = [output.clone() for output in self.outputs]
        run(*inputs, *outputs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a pinned result is read without a wait
        return [*outputs, *(inputs[index] for index in self.writes)]

    def different_rows(self, run: Run | None = None) -> list[int]:
        """Rows of every result in which `run` (default: the operation on this device) differs from the reference; NaN equals NaN."""
        found, expected = self.results(run or self.operation.out), self.results(self.operation.run_reference)
        equal = [one.isclose(other, self.tol, self.tol, equal_nan=True) for one, other in zip(found, expected, strict=True)]
        return [int((~each).reshape(len(each), -1).any(1).sum()) for each in equal]

    def difference(self, expected: Sequence[Tensor] | None = None) -> str:
        """Where results of the operation first differ from those of the reference, or from `expected`; empty if they do not."""
        found, expected = self.results(self.operation.out), expected or self.results(self.operation.run_reference)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            unequal = ~one.isclose(other, self.tol, self.tol, equal_nan=True)
            if bool(unequal.any()):
                at = tuple(unequal.nonzero()[0].tolist())
                values = f"{one[at].item()}, expected {other[at].item()}; {int(unequal.sum())} of {one.numel()} numbers differ"
                return f"{self.name}: result {number} at {at} is {values}"
        return ""

    def at_later_position(self, step: int) -> Call:
        """The same call of reject_sample at later positions, which give other random numbers."""
        *others, length = self.inputs
        return replace(self, inputs=(*others, length + 10 * step))


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides; pinned if the tensor is: the device accesses it."""
    return tensor.new_empty_strided(tensor.shape, tensor.stride(), pin_memory=tensor.is_pinned()).copy_(tensor)


def filler(device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, -9, device=device)


def masked_argmax(
    device: torch.device, batch: int, positions: int, width: int, dtype: torch.dtype = torch.bfloat16, *, all_masked: bool = False
) -> Call:
    """Logits (padded, with ties and a NaN), masks of many densities, permuted rows; every second row without a grammar."""
    rng = torch.Generator().manual_seed(width)
    logits = (torch.randn(batch, positions, width + 64, generator=rng) * 4).round(decimals=1)
    logits[0, 0, width // 2] = float("nan")
    logits[..., width:] = float("inf")
    density = torch.logspace(-4, 0, batch)[torch.randperm(batch, generator=rng)][:, None, None]
    words = bitmask.pack(torch.rand(batch, positions, width, generator=rng) < density)
    words[batch // 2, -1] = 0
    rows = torch.randperm(batch, generator=rng)
    constrained = (torch.arange(batch) % 2 == 0) | all_masked
    status = torch.full((batch, positions), int(MaskStatus.OK))
    status[batch // 3] = int(MaskStatus.OK if all_masked else MaskStatus.COMPLETE)
    padded = logits.to(device=device, dtype=dtype)
    inputs = (padded[..., :width], words.to(device), rows.to(device), constrained.to(device), None, status.to(device))
    outputs = torch.ones(batch, positions, dtype=torch.bool, device=device), filler(device, batch, positions)
    least = batch * positions * (-(-width // BITS_PER_WORD) * 4 + 9 + width * dtype.itemsize)
    shape = f"B={batch} Q={positions} V={width} {str(dtype)[6:]}"
    return Call(choice.masked_argmax, shape, inputs, outputs, least)


def free_argmax(device: torch.device, batch: int, positions: int, width: int, dtype: torch.dtype = torch.bfloat16) -> Call:
    """The same without masks, as in rounds without grammars."""
    masked = masked_argmax(device, batch, positions, width, dtype)
    inputs = (masked.inputs[0], None, None, None, None, None)
    return replace(masked, shape=f"{masked.shape} free", inputs=inputs, least_bytes=batch * positions * (width * dtype.itemsize + 9))


def filter_inputs(batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Logits [N, V] with ties in every second row and one row of -inf, and sampling settings of every kind, on the CPU."""
    logits = torch.randn(batch, width, generator=torch.Generator().manual_seed(batch + width)) * 3
    logits[::2].round_()
    if batch > 1:
        logits[batch // 2] = float("-inf")
    return logits, torch.tensor(SETTINGS).repeat(-(-batch // len(SETTINGS)), 1)[:batch]


def draw(device: torch.device, batch: int, width: int, setting: list[float] | None = None) -> Call:
    """The draw of a token. setting: of all rows; by default rows have every kind. Bytes of listed weights are not counted: they are few."""
    logits, params = (tensor.to(device) for tensor in filter_inputs(batch, width))
    if setting is not None:
        params = torch.tensor([setting] * batch, device=device)
    seed = torch.arange(batch, device=device)
    inputs = (logits, params, seed, seed, int(Purpose.DRAFT), seed, torch.zeros_like(logits), None)
    shape = f"N={batch} V={width}{' top-k top-p' if setting == FILTERED else ''}"
    outputs = (filler(device, batch),)
    return Call(filters.draw, shape, inputs, outputs, logits.nbytes * 2 + batch * 40, writes=(6,))


def distribution(device: torch.device, batch: int, width: int) -> Call:
    logits, params = (tensor.to(device) for tensor in filter_inputs(batch, width))
    outputs = (torch.full((batch, 1, width), 7.5, device=device),)
    return Call(filters.distribution, f"N={batch} V={width}", (logits[:, None], params), outputs)


def log_probabilities(device: torch.device, batch: int, positions: int, width: int) -> Call:
    """Logits with infinities and a NaN; results in a part of a wider table."""
    rng = torch.Generator().manual_seed(width)
    logits = torch.randn(batch, positions, width + 5, generator=rng) * 9
    logits[0], logits[1, 0, : width // 2], logits[-1, -1, 3] = float("-inf"), float("-inf"), float("nan")
    probs = torch.rand(batch, positions, width, generator=rng)
    tokens = torch.randint(0, width, (batch, positions), generator=rng)
    found = torch.full((batch, positions + 1, 2), 7.5, device=device)[:, :positions]
    inputs = (logits.to(device)[..., :width], probs.to(device), tokens.to(device), found)
    least = batch * positions * (width * 4 + 28)
    return Call(processors.log_probabilities, f"B={batch} Q={positions} V={width}", inputs, (), least, writes=(3,), tol=1e-5)


def top_logprobs(device: torch.device, batch: int, positions: int, width: int) -> Call:
    """Ties, infinities, a distribution with fewer tokens than requested, and a row that requests none; results in a wider table."""
    rng, most = torch.Generator().manual_seed(width), 6
    logits = (torch.randn(batch, positions, width + 5, generator=rng) * 3).round(decimals=1)
    logits[1, 0, : width // 2] = float("-inf")
    probs = torch.rand(batch, positions, width, generator=rng)
    probs[..., 3:] *= torch.rand(batch, positions, 1, generator=rng) > 0.5
    params = torch.zeros(batch + 2, len(Param))
    params[:, Param.TOP_LOGPROBS] = torch.arange(batch + 2) % (most + 1)
    rows = torch.randperm(batch, generator=rng) + 2
    shape, pinned = (3, batch + 1, positions + 1, 2 * most), device.type == "cuda"
    rings = torch.full(shape, -7, dtype=torch.int32, pin_memory=pinned), torch.full(shape, 7.5, pin_memory=pinned)
    inputs = (logits.to(device)[..., :width], probs.to(device), rows.to(device), params.to(device), filler(device, 1).fill_(4), *rings)
    least = batch * positions * width * 8
    return Call(processors.top_logprobs, f"B={batch} Q={positions} V={width}", inputs, (), least, writes=(5, 6), tol=1e-5)


def chain_accept(device: torch.device, batch: int, k: int) -> Call:
    rng = torch.Generator().manual_seed(k)

    def pick(high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, (batch, *shape), generator=rng)

    sampled = pick(5, k + 1)
    drafts = torch.where(pick(4, k) > 0, sampled[:, :k], pick(5, k, low=-1))
    status = torch.where(pick(4, k + 1) > 0, int(MaskStatus.OK), pick(len(MaskStatus), k + 1))
    on_cpu = (sampled, pick(10, k + 1) > 0, drafts, pick(k + 1), status, pick(7, 3, low=-1), pick(12, low=1))
    outputs = tuple(filler(device, batch) for _ in range(3))
    least = batch * ((k + 1) * 17 + k * 8 + 3 * 8 + 5 * 8)
    inputs = (*(tensor.to(device) for tensor in on_cpu), None)
    return Call(choice.chain_accept, f"B={batch} K={k}", inputs, outputs, least)


def reject_sample(device: torch.device, batch: int, k: int, width: int) -> Call:
    """Permuted rows, every fourth greedy, drafts from distributions near the target's; a few drafts are certain or without a legal mask.

    At least the positions of accepted certain drafts, the one after the accepted drafts, and the distribution of a rejected one are read.
    """
    options: Any = {"generator": torch.Generator(device).manual_seed(batch + k), "device": device}  # the largest takes a minute on a CPU
    kinds = torch.tensor([UNFILTERED, FILTERED, [0.0, 0, 1, 0], [1.6, 0, 1, 0]], device=device)
    settings = kinds.repeat(-(-batch // 4), 1)[:batch]
    logits = torch.randn(batch, k + 1, width, **options) * 3
    target = sampler.distribution(logits, settings)
    offered = sampler.distribution(logits[:, :k] + torch.randn(batch, k, width, **options), settings)
    drafts = (offered / torch.empty_like(offered).exponential_(generator=options["generator"])).argmax(-1)
    rows = torch.randperm(batch, **options)
    chance = torch.rand(batch, k + 1, **options)
    status = torch.where(chance < 0.96, int(MaskStatus.OK), torch.where(chance < 0.98, int(MaskStatus.ILLEGAL), int(MaskStatus.FAULT)))
    certain = (settings[:, :1] <= 0) | (torch.rand(batch, k, **options) < 0.1)
    finite, draft_count = torch.ones(batch, k + 1, dtype=torch.bool, device=device), torch.full((batch,), k, device=device)
    seed, length = torch.randint(0, 2**62, (batch,), **options), torch.randint(1, 9000, (batch,), **options)
    draft_probs = torch.zeros_like(offered).index_copy_(0, rows, offered)
    inputs = (target, draft_probs, rows, certain, finite, drafts, draft_count, status, seed, length)
    _, accepted = rejection.reject_sample(*inputs)
    rejected = torch.nn.functional.pad(~certain, (0, 1)).gather(1, accepted[:, None]).squeeze(1)
    raced = batch + int((certain & (torch.arange(k, device=device) < accepted[:, None])).sum())
    facts = k * (8 + 4 + 4 + 1 + 1 + 8) + 8 + 5 * 8  # of a row: drafts, p and q of each, certain, finite, status; settings
    least = (raced + int(rejected.sum())) * width * 4 + batch * (facts + (k + 2) * 8)
    outputs = filler(device, batch, k + 1), filler(device, batch)
    shape = f"B={batch} K={k} V={width}"
    return Call(rejection.reject_sample, shape, inputs, outputs, least)


def mask_status(device: torch.device, batch: int, positions: int) -> Call:
    tags, owner, generated, constrained, rows = tag_inputs(batch, positions, device)
    inputs, least = (tags, owner, generated, constrained, 2, rows), batch * (positions * 5 * 8 + 4 * 8 + 1)
    return Call(choice.mask_status, f"B={batch} N={positions}", inputs, (filler(device, batch, positions), rows < 0), least)


def process_logits(
    device: torch.device, batch: int, positions: int, width: int, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Call:
    """Every kind of row (tools/gpu/checks/masks.py)."""
    case = make_case(batch, positions, width, dtype, **changes).on(device)
    kind = "own vocabulary" if case.ids is not None else "free" if case.mask is None else "masked"
    return Call(processors.process_logits, f"B={batch} Q={positions} V={width} {str(dtype)[6:]} {kind}", case.arguments(()), case.outputs())


def process_all_masked(device: torch.device, batch: int, positions: int, width: int) -> Call:
    """bfloat16, every row with a mask in use. Of four rows three request biases, penalties or stop tokens."""
    case = make_case(batch, positions, width, torch.bfloat16).on(device)
    assert case.mask is not None and case.rows is not None
    mask = case.mask._replace(constrained=torch.ones_like(case.mask.constrained), status=torch.ones_like(case.mask.status))
    case = case._replace(mask=mask)
    params, lines = case.settings.params[case.rows], batch * positions
    penalised = (params[:, Param.PRESENCE_PENALTY] != 0).sum().item()
    repeated = (params[:, Param.REPETITION_PENALTY] != 1).sum().item()
    biased = (case.settings.bias_ids[case.rows, 0] >= 0).sum().item()
    marked = int((mask.masks != 0).sum())  # a word without a bit spares its 32 logits
    penalties = width * (4 * penalised + repeated)  # output counts and prompt tokens, once for all positions of a row
    facts = biased * MAX_BIASES * 12 + batch * (len(Param) * 4 + 24)
    least = lines * (-(-width // BITS_PER_WORD) * 4 + 33) + marked * BITS_PER_WORD * 2 + lines * width * 4 + penalties + facts
    shape = f"B={batch} Q={positions} V={width} with requests"
    return Call(processors.process_logits, shape, case.arguments(()), case.outputs(), int(least))
