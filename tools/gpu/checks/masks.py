"""Random inputs of the operations on masks, tags and processors."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import bitmask, kernels
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.kernels.processors import RowSettings
from stepgraph.sampling.sampler import Param

MAX_BIASES, MAX_STOPS = 32, 4
KINDS = 4  # of rows: defaults; biases and bans; penalties; all of these and early stop tokens


class Case(NamedTuple):
    """The arguments of kernels.process."""

    logits: Tensor
    settings: RowSettings
    rows: Tensor | None
    before: Tensor
    first: int
    mask: kernels.GrammarMask | None
    ids: Tensor | None

    def on(self, device: torch.device) -> Case:
        def moved(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        mask = None if self.mask is None else kernels.GrammarMask(*(moved(value) for value in self.mask))
        settings = RowSettings(*(value.to(device) for value in self.settings))
        return Case(*(moved(value) for value in self))._replace(mask=mask, settings=settings)

    def arguments(self, outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Arguments of the operation."""
        *tables, generated = self.settings
        mask = self.mask or (None, None, None, None)
        return (self.logits, *mask, self.ids, self.rows, *tables, generated, self.before, self.first, *outputs)

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Output tensors with arbitrary content."""
        shape, device = self.logits.shape, self.logits.device
        numbers = torch.full(shape[:2], -9, device=device)
        return torch.full(shape, 7.5, device=device), numbers == -9, numbers


def make_case(
    batch: int,
    positions: int,
    vocabulary: int,
    dtype: torch.dtype,
    *,
    draft_vocabulary: int = 0,
    masked: bool = True,
    first: int = 0,
    seed: int = 0,
) -> Case:
    """Rows of every kind in permuted order, with masks of many densities: some empty, some not in use.

    Logits have ties, infinities, a NaN, and padding that must not be read. own: size of the draft's own vocabulary, 0 for none.
    """
    rng = torch.Generator().manual_seed(seed + vocabulary)
    tables, width, drafts = batch + 2, draft_vocabulary or vocabulary, first + positions - 1
    logits = (torch.randn(batch, positions, width + 64, generator=rng) * 4).round(decimals=1)
    logits[torch.rand(logits.shape, generator=rng) < 0.05] = -math.inf
    logits[0, 0, width // 2], logits[-1, -1, width // 3], logits[..., width:] = math.nan, math.inf, math.nan
    rows = torch.randperm(tables, generator=rng)[:batch]
    ids = torch.randperm(vocabulary, generator=rng)[:draft_vocabulary].sort().values if draft_vocabulary else None
    before = torch.randint(0, vocabulary, (drafts, batch), generator=rng).T  # strided like batch_drafts
    before[torch.arange(batch) % 3 == 2, drafts // 2 :] = -1
    settings = make_settings(tables, vocabulary, rows, before, rng)
    mask = _grammar_mask(batch, positions, vocabulary, rng) if masked else None
    return Case(logits.to(dtype)[..., :width], settings, rows, before, first, mask, ids)


def make_settings(tables: int, vocabulary: int, rows: Tensor, before: Tensor, rng: torch.Generator) -> RowSettings:
    """Settings whose kinds alternate along `rows`; some draft tokens already occurred in the output."""
    kind = torch.zeros(tables, dtype=torch.int64)
    kind[rows] = torch.arange(len(rows)) % KINDS
    penalised, biased = kind >= 2, (kind == 1) | (kind == 3)

    def pick(values: tuple[float, ...], otherwise: float) -> Tensor:
        drawn = torch.tensor(values)[torch.randint(0, len(values), (tables,), generator=rng)]
        return torch.where(penalised, drawn, otherwise)

    params = torch.full((tables, len(Param)), 0.5)
    params[:, Param.REPETITION_PENALTY] = pick((1.0, 1.3, 0.7), 1.0)
    params[:, Param.PRESENCE_PENALTY] = pick((0.3, -1.1), 0.0)
    params[:, Param.FREQUENCY_PENALTY] = pick((0.7, -0.3), 0.0)
    params[:, Param.MIN_NEW_TOKENS] = torch.where(kind == 3, 6.0, 0.0)
    count = min(MAX_BIASES - 1, vocabulary)
    bias_ids = torch.full((tables, MAX_BIASES), -1)
    bias_ids[:, :count] = torch.rand(tables, vocabulary, generator=rng).topk(count, 1).indices  # distinct
    bias_ids[~biased] = -1
    biases = torch.randn(tables, MAX_BIASES, generator=rng)
    biases[torch.rand(biases.shape, generator=rng) < 0.2] = -math.inf
    stop_ids = torch.randint(-1, vocabulary, (tables, MAX_STOPS), generator=rng)
    counts = torch.randint(-3, 4, (tables, vocabulary), generator=rng, dtype=torch.int32).clamp(min=0)
    if before.shape[1]:
        counts[rows, before[:, 0].clamp(min=0)] += 2
    return RowSettings(
        params=params,
        bias_ids=bias_ids,
        biases=torch.where(bias_ids >= 0, biases, 0.0),
        stop_ids=stop_ids,
        prompt_seen=torch.rand(tables, vocabulary, generator=rng) < 0.3,
        output_counts=counts,
        generated=torch.randint(0, 9, (len(rows), 3), generator=rng)[:, 1],  # a column, as in the round
    )


def _grammar_mask(batch: int, positions: int, vocabulary: int, rng: torch.Generator) -> kernels.GrammarMask:
    """Bits beyond the vocabulary are set and must be ignored."""
    density = torch.logspace(-4, 0, batch * positions)[torch.randperm(batch * positions, generator=rng)].view(batch, positions, 1)
    allowed = torch.rand(batch, positions, -(-vocabulary // BITS_PER_WORD) * BITS_PER_WORD, generator=rng) < density
    allowed[..., vocabulary:] = True
    rows = torch.randperm(batch, generator=rng)
    packed = bitmask.pack(allowed)
    packed[rows[batch // 2], -1] = 0
    other = torch.randint(0, len(MaskStatus), (batch, positions), generator=rng)
    status = torch.where(torch.rand(batch, positions, generator=rng) < 0.8, int(MaskStatus.OK), other)
    return kernels.GrammarMask(packed, rows, torch.arange(batch) % 5 != 4, status)


def tag_inputs(batch: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tags [R, N, 4], some fields of which are wrong; owner, generated, constrained (three in four) [R]; permuted rows."""
    rng = torch.Generator().manual_seed(batch + positions)
    rows = torch.randperm(batch + 2, generator=rng)[:batch]
    state = torch.randint(0, 50, (batch + 2, 7), generator=rng)
    tags = torch.randint(0, 50, (batch + 2, positions, 4), generator=rng)
    tags[..., :2], tags[..., 2] = state[:, None, :2], torch.arange(2, 2 + positions)
    tags[..., 3] = torch.randint(0, len(MaskStatus), tags.shape[:2], generator=rng)
    wrong = torch.rand(*tags.shape[:2], 3, generator=rng) < 0.1
    tags[..., :3] += wrong.to(torch.int64)
    state[:, 5] = torch.arange(1, batch + 3) % 4
    tags, state, rows = (tensor.to(device) for tensor in (tags, state, rows))
    return tags, state[:, 0], state[:, 1], state[:, 5], rows
