"""Paged attention against plain float64 loops over single queries, and its independence from other rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from stepgraph.graphs import BufferSpec, Limits, StaticBuffers, TapeBackend, run_eager
from stepgraph.graphs.attention.paged import attention, paged_attention
from stepgraph.graphs.attention.reference import PART, by_reference, reference_attention
from stepgraph.graphs.model import cache_specs
from stepgraph.graphs.model_call import Attend, ModelInput

PAGE = 8


class Case(NamedTuple):
    """One call. The cache has NaN where no row has an entry: in the scratch page and after each row's last position."""

    query: Tensor
    keys: Tensor
    values: Tensor
    inputs: ModelInput

    def rows(self, rows: slice | Tensor) -> Case:
        tokens, positions, slots, tables, *_ = self.inputs
        inputs = ModelInput(tokens[rows], positions[rows], slots[rows], tables[rows], self.inputs.page_size)
        return Case(self.query[rows], self.keys, self.values, inputs)

    def queries(self, queries: slice) -> Case:
        tokens, positions, slots, tables, *_ = self.inputs
        inputs = ModelInput(tokens[:, queries], positions[:, queries], slots[:, queries], tables, self.inputs.page_size)
        return Case(self.query[:, queries], self.keys, self.values, inputs)

    def run(self, window: int | None = None, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
        return attention(self.query, self.keys, self.values, self.inputs, window, softcap=softcap, sinks=sinks)


def make_case(
    lengths: list[int], count: int, heads: int = 4, kv_heads: int = 2, size: int = 16, dtype: torch.dtype = torch.float32, page: int = PAGE
) -> Case:
    """Row b has entries at 0 .. lengths[b] - 1; its last live query is at the last of them, later ones are inert.

    A row of length 0 is inert altogether. Every second row has one inert query.
    """
    made = torch.Generator().manual_seed(sum(lengths) + count)
    batch, pages = len(lengths), -(-(max(lengths) + count) // page)
    tables = (torch.randperm(pages * batch, generator=made) + 1).view(batch, pages)
    inert = torch.arange(batch) % 2
    ends = torch.tensor(lengths)
    positions = ((ends - count + inert)[:, None] + torch.arange(count)).clamp(min=0)
    slots = tables.gather(1, positions // page) * page + positions % page
    slots = torch.where(positions < ends[:, None], slots, positions % page)
    shape = ((pages * batch + 1) * page, kv_heads, size)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    for row, end in enumerate(lengths):
        indices = torch.arange(end)
        own = tables[row, indices // page] * page + indices % page
        keys[own], values[own] = (torch.randn(end, kv_heads, size, generator=made) for _ in range(2))
    query = torch.randn(batch, count, heads, size, generator=made)
    inputs = ModelInput(torch.zeros(batch, count, dtype=torch.int64), positions, slots, tables, page)
    return Case(query.to(dtype), keys.to(dtype), values.to(dtype), inputs)


def plain(case: Case, row: int, index: int, window: int | None, softcap: float = 0.0, sinks: Tensor | None = None) -> Tensor:
    """[heads, size] in float64, one head at a time."""
    query, keys, values, inputs = case
    page = inputs.page_size
    position = int(inputs.positions[row, index])
    seen = [p for p in range(position + 1) if window is None or position - p < window]
    slots = [int(inputs.block_tables[row, p // page]) * page + p % page for p in seen]
    found = []
    for head in range(query.shape[2]):
        mine = head // (query.shape[2] // keys.shape[1])
        scores = keys[slots, mine].double() @ query[row, index, head].double() / query.shape[3] ** 0.5
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        sink = torch.empty(0).double() if sinks is None else sinks[head : head + 1].double()
        found.append(torch.cat([scores, sink]).softmax(0)[: len(slots)] @ values[slots, mine].double())
    return torch.stack(found)


@pytest.mark.parametrize("window", [None, 1, 7, 200])
@pytest.mark.parametrize("sizes", [(4, 2, 16, 5), (3, 3, 8, 1), (9, 3, 64, 4), (4, 1, 96, 9), (2, 2, 16, 20)])
def test_attention_equals_plain_attention_over_the_prefix(sizes: tuple[int, int, int, int], window: int | None) -> None:
    heads, kv_heads, size, count = sizes
    case = make_case([max(3, count), 21 + count, PART + 40, 2 * PART + 9, 0], count, heads, kv_heads, size)
    output = case.run(window)
    assert torch.isfinite(output).all(), "an inert query gives finite numbers as well"
    live = (case.inputs.slots >= PAGE).nonzero().tolist()
    assert len(live) > 3 * (count - 1)
    for row, index in live:
        torch.testing.assert_close(output[row, index].double(), plain(case, row, index, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by", [None, by_reference])
@pytest.mark.parametrize(("softcap", "has_sinks", "window"), [(0.5, False, None), (0.0, True, 7), (20.0, True, None)])
def test_soft_capped_scores_and_sinks(softcap: float, has_sinks: bool, window: int | None, by: Attend | None) -> None:
    """Also independent of other rows."""
    case = make_case([5, PART + 40, 2 * PART + 9], 5, 4, 2, 16)
    case = case._replace(inputs=case.inputs._replace(attend=by))
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(3)) if has_sinks else None
    output = case.run(window, softcap, sinks)
    for row, index in (case.inputs.slots >= PAGE).nonzero().tolist():
        torch.testing.assert_close(output[row, index].double(), plain(case, row, index, window, softcap, sinks), rtol=1e-5, atol=1e-5)
    for row in range(3):
        alone = case.rows(slice(row, row + 1))
        alone = alone._replace(inputs=alone.inputs._replace(attend=by))
        assert torch.equal(alone.run(window, softcap, sinks)[0], output[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_is_independent_of_the_batch(dtype: torch.dtype) -> None:
    """With and without other rows and queries, with short and long page tables."""
    uneven = [PART + 72, 2 * PART + 34]  # the table is not a multiple of the part size
    many = [40, 3 * PART + 11, 6, 0, 2 * PART + 1]
    for heads, kv_heads, size, lengths in ((4, 2, 16, many), (4, 4, 16, uneven), (9, 3, 64, many), (4, 1, 32, uneven)):
        case = make_case(lengths, 6, heads, kv_heads, size, dtype)
        together = case.run(30), case.run()
        for row in range(len(lengths)):
            alone = case.rows(slice(row, row + 1))
            assert torch.equal(alone.run(30)[0], together[0][row]) and torch.equal(alone.run()[0], together[1][row])
        for first in range(5):
            live = (case.inputs.slots[:, first : first + 1] >= PAGE).all(1)
            one = case.queries(slice(first, first + 1)).run()
            assert torch.equal(one[live, 0], together[1][live, first])


def test_half_precision_is_rounded_once() -> None:
    case = make_case([30, 200], 3, dtype=torch.bfloat16)
    exact = attention(case.query.float(), case.keys.float(), case.values.float(), case.inputs)
    assert torch.equal(case.run(), exact.bfloat16())


def test_wrong_arguments_are_refused() -> None:
    case = make_case([9, 9], 2)
    with pytest.raises(ValueError, match=r"attention.keys: got .* expected"):
        attention(case.query[:, :, :3], case.keys, case.values, case.inputs)
    with pytest.raises(ValueError, match=r"attention.query: got .* expected .* positions"):
        attention(case.query[:1], case.keys, case.values, case.inputs)
    with pytest.raises(ValueError, match=r"attention.keys: got torch.float32 .*, expected torch.bfloat16"):
        attention(case.query.bfloat16(), case.keys, case.values, case.inputs)
    with pytest.raises(ValueError, match=r"attention.window: got 0, expected a whole number >= 1, or None"):
        attention(case.query, case.keys, case.values, case.inputs, window=0)
    with pytest.raises(ValueError, match=r"attention.sinks: got shape \(3,\), expected \(\d+,\)"):
        attention(case.query, case.keys, case.values, case.inputs, sinks=torch.zeros(3))


@pytest.mark.parametrize("attend", [paged_attention, reference_attention])
def test_no_query(attend: Any) -> None:
    none = torch.zeros(1, 0, dtype=torch.int64)
    cache = torch.zeros(8, 1, 16)
    assert attend(torch.zeros(1, 0, 2, 16), cache, cache, none, none, none, 8, 0, 1.0).shape == (1, 0, 2, 16)


def test_tape_writes_and_reads_the_cache_in_place() -> None:
    limits = Limits(2, 2, 24, PAGE, 6, 10, 10, 0)
    specs = (
        *cache_specs("a", 2, limits, 2, 16, torch.float32),
        *(BufferSpec(name, (2, 3), torch.int64) for name in ("positions", "slots", "tables")),
        BufferSpec("states", (2, 3, 4, 16), torch.float32),
        BufferSpec("seen", (2, 3, 4, 16), torch.float32),
    )
    backend = TapeBackend(poison="every")
    buffers = StaticBuffers(specs, backend.device)
    buffers.tables.copy_(torch.tensor([[1, 2, 3], [6, 5, 4]]))

    def step(b: StaticBuffers) -> None:
        inputs = ModelInput(b.positions, b.positions, b.slots, b.tables, PAGE)
        for layer in range(2):
            b.a_keys[layer].index_put_((b.slots,), b.states[:, :, :2])
            b.a_values[layer].index_put_((b.slots,), b.states[:, :, 2:])
            b.seen.add_(attention(b.states, b.a_keys[layer], b.a_values[layer], inputs))

    recorded = backend.capture(step, buffers)
    assert recorded.report.nodes.get("copied", 0) == 0
    caches = [buffers.a_keys, buffers.a_values, buffers.seen]
    for start in (0, 3, 6):
        buffers.positions.copy_(start + torch.arange(3))
        buffers.slots.copy_(buffers.tables.gather(1, buffers.positions // PAGE) * PAGE + buffers.positions % PAGE)
        buffers.states.normal_(generator=torch.Generator().manual_seed(start))
        before = [cache.clone() for cache in caches]
        recorded.replay()
        replayed = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        run_eager(step, buffers)
        assert all(torch.equal(*pair) for pair in zip(caches, replayed, strict=True))
    backend.close()
