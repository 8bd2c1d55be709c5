"""Masks that host nodes have filled, into the rows of a round."""

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
    writes=("row_tags", "row_masks"),
    triton=True,
    c=CKernel("scatter_masks", lambda *tensors: all(each.is_contiguous() for each in tensors)),
)
def scatter_masks(rows: Contiguous, tags: Contiguous, masks: Contiguous, row_tags: Tensor, row_masks: Tensor) -> None:
    """Write masks [B, words] and tags [B, TAG_FIELDS] into their rows [R, positions, ...]; tags[:, 2] is the position."""
    row_masks.index_put_((rows, tags[:, 2]), masks)
    row_tags.index_put_((rows, tags[:, 2]), tags)


def place_masks(buffers: StaticBuffers, rows: Tensor, stage: int) -> None:
    """Copy one stage of uploaded masks into the masks of `rows`; each tag holds the index among the row's K + 1 masks."""
    tags, masks = buffers.batch_tags[stage, : len(rows)], buffers.batch_masks[stage, : len(rows)]
    scatter_masks(rows, tags, masks, buffers.row_tags, buffers.row_masks)


def host_mask(buffers: StaticBuffers, after: Batch, step: int) -> GrammarMask:
    """The mask that guides draft `step` of rows with grammars on the host, or on both."""
    if "grammar_arena" in buffers:  # the masks of grammars on the device are only in their rows
        rows, (tags, masks) = after.rows, (each[:, step - 1 : step] for each in (buffers.row_tags, buffers.row_masks))
    else:
        rows, (tags, masks) = None, (each[step - 1, : len(after.rows), None] for each in (buffers.batch_tags, buffers.batch_masks))
    owner, generated, constraint = (after.column(column) for column in (Column.OWNER, Column.GENERATED, Column.CONSTRAINED))
    status, constrained = kernels.mask_status(tags, owner, generated, constraint, step - 1, rows)
    return GrammarMask(masks, rows, constrained, status)
