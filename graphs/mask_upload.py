"""Masks that host nodes have filled in pinned memory, to the rows of a round: one launch, and no copy before it."""

from __future__ import annotations

from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Ints, Longs, operation


@operation(lambda *_: None, writes=("row_tags", "row_masks", "batch_forced"), triton=True, c=CKernel("scatter_masks"), mapped=True)
def scatter_masks(
    rows: Longs,
    tags: Longs,
    masks: Ints,
    row_tags: Longs,
    row_masks: Ints,
    forced: Longs | None = None,
    batch_forced: Longs | None = None,
) -> None:
    """Write masks and tags of host nodes into their rows, and forced tokens into the batch.

    rows [B]. In pinned memory: tags [B, TAG_FIELDS], tags[:, 2] is the position in the row; masks [B, words]; forced [B]. row_tags,
    row_masks [R, positions, ...]; batch_forced: as forced.
    """
    tags, masks = (each.to(rows.device, non_blocking=True) for each in (tags, masks))
    row_masks.index_put_((rows, tags[:, 2]), masks)
    row_tags.index_put_((rows, tags[:, 2]), tags)
    if forced is not None and batch_forced is not None:
        batch_forced.copy_(forced, non_blocking=True)


def place_masks(buffers: StaticBuffers, rows: Tensor, stage: int) -> None:
    """Upload one stage of masks of `rows`; each tag holds the index among the row's K + 1 masks."""
    b, size = buffers, len(rows)
    forces = "forced_host" in buffers and stage < len(buffers.forced_host)
    forced = (b.forced_host[stage, :size], b.batch_forced[stage, :size]) if forces else (None, None)
    scatter_masks(rows, b.tags_host[stage, :size], b.masks_host[stage, :size], b.row_tags, b.row_masks, *forced)
