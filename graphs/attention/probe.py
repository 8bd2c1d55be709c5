"""Compares an attention implementation with the reference: in rounds, captured once and replayed, and in prompts, by chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stepgraph.graphs.attention.paged import AttentionShape, attention, by_reference
from stepgraph.graphs.model import Attend, ModelInput
from stepgraph.sampling.cuda_graphs import replayed

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
Rounds = Callable[[], Attend | None]
Prompts = Callable[[int, int], Attend | None]


class Probe:
    """Four rows over a cache with NaN wherever no row has an entry; refilled in place for every case."""

    rows, count, most = 4, 5, 300
    rounds = ((7, 300, 0, 64), (300, 6, 65, 0), (5, 0, 17, 131))  # lengths; every second row has an inert position, 0: all are
    prompts = ((0, 37), (37, 150), (187, 1), (188, 112))

    def __init__(self, shape: AttentionShape, page_size: int, device: torch.device) -> None:
        self.shape, self.page_size, self.device = shape, page_size, device
        pages = -(-(self.most + self.count) // page_size)
        made = torch.Generator().manual_seed(shape.size)
        self.tables = (torch.randperm(self.rows * pages, generator=made) + 1).view(self.rows, pages).to(device)
        slots = (self.rows * pages + 1) * page_size
        self.entries = torch.randn(2, slots, shape.kv_heads, shape.size, generator=made).to(device, shape.dtype)
        self.cache = torch.full_like(self.entries, torch.nan)
        self.query = torch.randn(self.rows, self.most, shape.heads, shape.size, generator=made).to(device, shape.dtype)
        self.positions = torch.zeros(self.rows, self.count, dtype=torch.int64, device=device)
        self.slots = torch.zeros_like(self.positions)

    def hold(self, lengths: tuple[int, ...]) -> None:
        """Rows of these lengths, whose last live query is at the last entry."""
        self.cache.fill_(torch.nan)
        for row, end in enumerate(lengths):
            held = self._slots(row, torch.arange(end, device=self.device))
            self.cache[:, held] = self.entries[:, held]
            inert = row % 2 if end else self.count
            positions = (end - self.count + inert + torch.arange(self.count, device=self.device)).clamp(min=0)
            self.positions[row] = positions
            self.slots[row] = torch.where(positions < end, self._slots(row, positions), positions % self.page_size)

    def round(self) -> tuple[Tensor, ModelInput]:
        return self.query[:, : self.count], ModelInput(self.positions, self.positions, self.slots, self.tables, self.page_size)

    def prompt(self, first: int, count: int) -> tuple[Tensor, ModelInput]:
        """Of row 1."""
        positions = first + torch.arange(count, device=self.device)[None]
        return self.query[1:2, :count], ModelInput(positions, positions, self._slots(1, positions), self.tables[1:2], self.page_size)

    def wrong(self, found: Tensor, query: Tensor, inputs: ModelInput, window: int | None) -> bool:
        expected = attention(query, self.cache[0], self.cache[1], inputs._replace(attend=by_reference), window)
        live = inputs.slots >= self.page_size
        near = TOLERANCE.get(self.shape.dtype, 1e-5)
        return not torch.allclose(found[live].float(), expected[live].float(), rtol=near, atol=near)

    def _slots(self, row: int, positions: Tensor) -> Tensor:
        return self.tables[row, positions // self.page_size] * self.page_size + positions % self.page_size


def differs(rounds: Rounds, prompts: Prompts, shape: AttentionShape, page_size: int, device: torch.device) -> str:
    """How `rounds`, captured once and replayed, or `prompts` differ from the reference; empty if they do not."""
    probe = Probe(shape, page_size, device)
    for window in dict.fromkeys(shape.windows):
        probe.hold(probe.rounds[0])
        query, inputs = probe.round()
        output = torch.empty_like(query)

        def step(query: Tensor = query, inputs: ModelInput = inputs, window: int | None = window, output: Tensor = output) -> None:
            output.copy_(attention(query, probe.cache[0], probe.cache[1], inputs._replace(attend=rounds()), window))

        replay = replayed(step, device)
        for lengths in probe.rounds:
            probe.hold(lengths)
            replay()
            if probe.wrong(output, query, inputs, window):
                return f"its rounds are not the reference's for rows of {', '.join(map(str, lengths))} tokens{_window(window)}"
        for first, count in probe.prompts:
            probe.hold((0, first + count, 0, 0))
            query, inputs = probe.prompt(first, count)
            found = attention(query, probe.cache[0], probe.cache[1], inputs._replace(attend=prompts(first, count)), window)
            if probe.wrong(found, query, inputs, window):
                return f"its prompts are not the reference's for {count} tokens after {first}{_window(window)}"
    return ""


def _window(window: int | None) -> str:
    return f" in a window of {window}" if window else ""
