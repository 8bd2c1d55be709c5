"""Masks that host nodes have filled in pinned memory, to the batch and to the rows of a round: one launch, and no copy before it."""

from __future__ import annotations

from torch import Tensor

from stepgraph.graphs.batch import Batch
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import kernels
from stepgraph.sampling.kernels import GrammarMask
from stepgraph.sampling.kernels.c_kernel import CKernel
from stepgraph.sampling.kernels.operation import Contiguous, operation


@operation(
    lambda *_: None,
    writes=("batch_tags", "batch_masks", "row_tags", "row_masks", "batch_forced"),
    triton=True,
    c=CKernel("scatter_masks", lambda *tensors: all(each is None or each.is_contiguous() for each in tensors)),
    mapped=True,
)
def scatter_masks(
    rows: Contiguous,
    tags: Contiguous,
    masks: Contiguous,
    batch_tags: Tensor,
    batch_masks: Tensor,
    row_tags: Tensor,
    row_masks: Tensor,
    forced: Contiguous | None = None,
    batch_forced: Tensor | None = None,
) -> None:
    """Write masks, tags and forced tokens of host nodes into the batch, and masks and tags into their rows.

    rows [B] int64. In pinned memory: tags [B, TAG_FIELDS] int64, tags[:, 2] is the position in the row; masks [B, words] int32; forced
    [B] int64. batch_tags, batch_masks, batch_forced: as these; row_tags, row_masks [R, positions, ...].
    """
    pairs = ((tags, batch_tags), (masks, batch_masks), (forced, batch_forced))
    for source, copy in pairs:
        if source is not None and copy is not None:
            copy.copy_(source, non_blocking=True)
    row_masks.index_put_((rows, batch_tags[:, 2]), batch_masks)
    row_tags.index_put_((rows, batch_tags[:, 2]), batch_tags)


def place_masks(buffers: StaticBuffers, rows: Tensor, stage: int) -> None:
    """Upload one stage of masks of `rows`; each tag holds the index among the row's K + 1 masks."""
    b, forces = buffers, "forced_host" in buffers and stage < len(buffers.forced_host)

    def part(tensor: Tensor) -> Tensor:
        return tensor[stage, : len(rows)]

    forced, batch_forced = (part(b.forced_host), part(b.batch_forced)) if forces else (None, None)
    host, batch = (part(b.tags_host), part(b.masks_host)), (part(b.batch_tags), part(b.batch_masks))
    scatter_masks(rows, *host, *batch, b.row_tags, b.row_masks, forced, batch_forced)


def host_mask(buffers: StaticBuffers, after: Batch, step: int) -> GrammarMask:
    """The mask that guides draft `step` of rows with grammars on the host, or on both."""
    if "grammar_arena" in buffers:  # the masks of grammars on the device are only in their rows
        rows, (tags, masks) = after.rows, (each[:, step - 1 : step] for each in (buffers.row_tags, buffers.row_masks))
    else:
        rows, (tags, masks) = None, (each[step - 1, : len(after.rows), None] for each in (buffers.batch_tags, buffers.batch_masks))
    owner, generated, constraint = (after.column(column) for column in (Column.OWNER, Column.GENERATED, Column.CONSTRAINED))
    status, constrained = kernels.mask_status(tags, owner, generated, constraint, step - 1, rows)
    return GrammarMask(masks, rows, constrained, status)
