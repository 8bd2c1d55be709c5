"""Bytes that the attention kernel loads and stores, over the least possible, counted in Triton's interpreter.

An address counts once per instruction, since a warp reads it once; no caching between instructions is assumed. The least is
each cache entry that a query sees, once per cache head, plus queries, outputs, positions and pages. `expected` is computed from
the tile sizes and must equal the count. TRITON_INTERPRET=1 must be set.

    TRITON_INTERPRET=1 python -m tools.bench_attention
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from stepgraph.graphs.attention.triton import paged as paged_programs
from stepgraph.graphs.model_call import ModelInput


class Shape(NamedTuple):
    """One call. Every row has `queries` live queries at its end."""

    lengths: tuple[int, ...]
    queries: int
    heads: int
    kv_heads: int
    size: int
    window: int = 0
    max_length: int = 4096
    page: int = 16

    def __str__(self) -> str:
        rows = f"{len(self.lengths)}x{self.lengths[0]}" if len(set(self.lengths)) == 1 else "+".join(map(str, self.lengths))
        window = f" window={self.window}" if self.window else ""
        return f"keys={rows} of {self.max_length} Q={self.queries} heads={self.heads}/{self.kv_heads}x{self.size}{window}"


SHAPES = (
    Shape((1000,), 5, 8, 2, 128),
    Shape((4000,), 5, 8, 2, 128),
    Shape((4000,), 5, 8, 2, 128, window=500),
    Shape((1000, 30, 200), 1, 8, 2, 64),
    Shape((100,), 5, 8, 2, 64, max_length=128),
)
ITEM, INDEX, SUM = 2, 8, 4  # bytes of an element, of a position or page number, of a running sum


class MovedBytes:
    """Bytes loaded and stored."""

    def __init__(self) -> None:
        self.loaded = self.stored = 0


@contextlib.contextmanager
def counting() -> Iterator[MovedBytes]:
    """Count accesses by wrapping the interpreter's loads and stores."""
    builder: Any = triton.runtime.interpreter.InterpreterBuilder
    load, store, moved = builder.create_masked_load, builder.create_masked_store, MovedBytes()

    def bytes_of(pointers: Any, mask: Any) -> int:
        width: int = pointers.get_element_ty().primitive_bitwidth
        addresses = np.broadcast_to(pointers.data, np.broadcast_shapes(pointers.data.shape, mask.data.shape))[mask.data.astype(bool)]
        return len(np.unique(addresses)) * width // 8

    def counted_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        moved.loaded += bytes_of(pointers, mask)
        return load(self, pointers, mask, *others)

    def counted_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        moved.stored += bytes_of(pointers, mask)
        return store(self, pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        yield moved
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store


def run(shape: Shape) -> None:
    batch, pages = len(shape.lengths), -(-shape.max_length // shape.page)
    tables = torch.arange(1, batch * pages + 1).view(batch, pages)
    positions = torch.tensor(shape.lengths)[:, None] - shape.queries + torch.arange(shape.queries)
    slots = tables.gather(1, positions // shape.page) * shape.page + positions % shape.page
    keys = torch.randn((batch * pages + 1) * shape.page, shape.kv_heads, shape.size).bfloat16()
    query = torch.randn(batch, shape.queries, shape.heads, shape.size).bfloat16()
    inputs = ModelInput(positions, positions, slots, tables, shape.page)
    arguments = (inputs.positions, inputs.slots, inputs.block_tables, shape.page, shape.window, 1.0, 0.0, None, torch.empty_like(query))
    paged_programs.paged_attention(query, keys, keys.clone(), *arguments)


def least(shape: Shape) -> int:
    """Least bytes that any implementation must move."""
    total = 0
    for length in shape.lengths:
        seen = length if not shape.window else min(length, shape.window + shape.queries - 1)
        total += 2 * seen * shape.kv_heads * shape.size * ITEM + -(-seen // shape.page) * INDEX
        total += 2 * shape.queries * shape.heads * shape.size * ITEM + 2 * shape.queries * INDEX
    return total


def expected(shape: Shape) -> int:
    """Bytes that the kernel moves, computed from its tiles."""
    groups = shape.heads // shape.kv_heads
    keys = -(-shape.max_length // shape.page) * shape.page
    tile, (part, parts) = paged_programs.tile_for(groups * shape.queries, shape.size), paged_programs.parts_of(keys)
    return sum(
        shape.kv_heads * _part(shape, tile, length, rows, range(index, index + part), keys, parts)
        for length in shape.lengths
        for rows in _blocks(groups * shape.queries, tile.rows)
        for index in range(0, part * parts, part)
    ) + sum(shape.heads * shape.queries * _join(shape, length, part, parts) for length in shape.lengths if parts > 1)


def _blocks(rows: int, most: int) -> list[range]:
    return [range(start, min(start + most, rows)) for start in range(0, rows, most)]


def _part(shape: Shape, tile: paged_programs.Tile, length: int, rows: range, positions: range, capacity: int, parts: int) -> int:
    """Bytes of one kernel instance: row length, queries, keys and values of its part, its results. Pages are read one step ahead."""
    groups = shape.heads // shape.kv_heads
    total = 2 * shape.queries * INDEX + len({row // groups for row in rows}) * INDEX + len(rows) * shape.size * ITEM

    def pages(start: int, stop: int) -> int:
        return len({index // shape.page for index in range(start, min(start + tile.keys, stop))}) * INDEX

    total += pages(positions.start, capacity)
    latest, earliest = (length - shape.queries + row // groups for row in (rows[-1], rows[0]))
    begin, end = positions.start, min(latest + 1, positions.stop)
    if shape.window:
        begin = max(begin, (earliest - shape.window + 1) // tile.keys * tile.keys)
        total += pages(begin, end)
    for start in range(begin, end, tile.keys):
        total += 2 * min(tile.keys, end - start) * shape.size * ITEM + pages(start + tile.keys, end)
    if parts == 1:
        return total + len(rows) * shape.size * ITEM
    return total + len(rows) * SUM + sum(_sees(shape, length, row // groups, positions) for row in rows) * (SUM + tile.size * SUM)


def _sees(shape: Shape, length: int, query: int, positions: range) -> bool:
    position = length - shape.queries + query
    oldest = position - shape.window + 1 if shape.window else 0
    return positions.start <= position and positions.stop > oldest


def _join(shape: Shape, length: int, part: int, parts: int) -> int:
    """Bytes of combining the parts of one query and head, averaged over the queries."""
    moved = 0
    for query in range(shape.queries):
        seen = [index // part for index in range(0, part * parts, part) if _sees(shape, length, query, range(index, index + part))]
        moved += (parts + seen[-1] + 1) * SUM + len(seen) * (SUM + shape.size * SUM) + shape.size * ITEM
    return moved // shape.queries


def figures(shape: Shape) -> dict[str, Any]:
    with counting() as moved:
        run(shape)
    total = moved.loaded + moved.stored
    return {
        "shape": str(shape),
        "least_bytes": least(shape),
        "expected_bytes": expected(shape),
        "loaded_bytes": moved.loaded,
        "stored_bytes": moved.stored,
        "counted_over_least": round(total / least(shape), 3),
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    assert triton.knobs.runtime.interpret, "set TRITON_INTERPRET=1"
    found = []
    for shape in SHAPES:
        found.append(figures(shape))
        print(found[-1]["shape"], *(f"{name}={value}" for name, value in list(found[-1].items())[1:]), flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
