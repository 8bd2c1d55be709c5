"""Masks that host nodes have filled, into the rows of a round."""

from __future__ import annotations

from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
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
