"""The Triton program that judges mask rows by their tags, and how it is launched. Imported only where Triton is: `register.py` decides."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from stepgraph.sampling.grammar.status import MaskStatus

_NONE = tl.constexpr(int(MaskStatus.NONE))
_OK = tl.constexpr(int(MaskStatus.OK))


@triton.jit
def tag_status(
    tags,  # [R, N, 4] int64
    rows,  # [B] int64; not read unless HAS_ROWS
    owner,  # [B] int64
    generated,  # [B] int64
    constrained,  # [B] bool
    status,  # [B, N] int64, written
    places,
    first,
    tags_row_step,
    tags_place_step,
    owner_step,
    generated_step,
    HAS_ROWS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """acceptance.mask_status for one row. PLACES is a power of two."""
    row = tl.program_id(0).to(tl.int64)
    tag_row = row
    if HAS_ROWS:
        tag_row = tl.load(rows + row)
    place = tl.arange(0, PLACES)
    inside = place < places
    source = tags + tag_row * tags_row_step + place * tags_place_step
    mine = tl.load(source, mask=inside, other=0) == tl.load(owner + row * owner_step)
    mine = mine & (tl.load(source + 1, mask=inside, other=0) == tl.load(generated + row * generated_step))
    mine = mine & (tl.load(source + 2, mask=inside, other=0) == place + first)
    told = tl.where(mine, tl.load(source + 3, mask=inside, other=_NONE), _NONE)
    ruled = tl.load(constrained + row).to(tl.int32) != 0
    tl.store(status + row * places + place, tl.where(ruled, told, _OK), mask=inside)


def mask_status(
    tags: Tensor, rows: Tensor | None, owner: Tensor, generated: Tensor, constrained: Tensor, first: int, status: Tensor
) -> None:
    batch, places = status.shape
    tag_status[(batch,)](
        tags,
        owner if rows is None else rows,
        owner,
        generated,
        constrained,
        status,
        places,
        first,
        *tags.stride()[:2],
        owner.stride(0),
        generated.stride(0),
        HAS_ROWS=rows is not None,
        PLACES=triton.next_power_of_2(places),
        num_warps=1,
    )
