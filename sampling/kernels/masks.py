"""Grammar masks and the request's own settings applied to logits, and the check of a mask row's tag."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import acceptance, bitmask, processors
from stepgraph.sampling.grammar.status import TAG_FIELDS, MaskStatus
from stepgraph.sampling.kernels.operation import CKernel, Contiguous, Dense, operation
from stepgraph.sampling.processors import RowSettings


class GrammarMask(NamedTuple):
    """The masks of B rows at Q positions."""

    masks: Tensor  # [R, Q, words] int32
    rows: Tensor | None  # [B] int64: row b reads masks[rows[b]]; None: masks[b]
    constrained: Tensor  # [B] bool: rows that have a mask
    status: Tensor  # [B, Q] int64 MaskStatus; where a constrained row's is not OK, no token is legal, whatever the mask


class Processed(NamedTuple):
    """The processed logits of B rows at Q positions."""

    logits: Tensor  # [B, Q, V] float32, minus infinity for tokens that are not legal
    finite: Tensor  # [B, Q] bool: the largest of them is finite
    status: Tensor  # [B, Q] int64 MaskStatus: of the grammar mask, and DEAD_END where the request itself forbids every legal token


def _status_outputs(tags: Tensor, owner: Tensor, *_: object) -> Tensor:
    assert tags.dim() == 3 and tags.dtype is torch.int64, f"tags {tags.dtype} {tags.shape}"
    return torch.empty(len(owner), tags.shape[1], dtype=torch.int64, device=tags.device)


def _c_supports(tags: Tensor, owner: Tensor, generated: Tensor, constrained: Tensor, first: int, rows: Tensor | None) -> bool:
    dense = tags.stride(2) == 1 and constrained.is_contiguous() and (rows is None or rows.is_contiguous())
    return dense and tags.shape[2] == TAG_FIELDS and (rows is not None or len(tags) == len(owner))


@operation(_status_outputs, triton=True, c=CKernel("mask_status", _c_supports))
def mask_status(
    tags: Dense, owner: Tensor, generated: Tensor, constrained: Contiguous, first: int = 0, rows: Contiguous | None = None
) -> Tensor:
    """acceptance.mask_status, [B, N] int64, of tags [R, N, 4] of which row b reads rows[b] ([B] int64; None: row b).

    owner, generated [B] int64, constrained [B] bool; first: the index of the first tag.
    """
    return acceptance.mask_status(tags if rows is None else tags[rows], owner, generated, constrained, first)


def process(
    logits: Tensor,
    settings: RowSettings,
    rows: Tensor | None,
    before: Tensor,
    first: int = 0,
    mask: GrammarMask | None = None,
    ids: Tensor | None = None,
) -> Processed:
    """bitmask.apply, processors.process and processors.mark_dead_ends of logits [B, Q, V] at the positions from `first` on.

    Row b reads the settings of row rows[b] ([B] int64; None: row b), except settings.generated and before [B, N], which are those of
    the batch. Logits are float32, bfloat16 or float16; ids as for processors.process.
    """
    masks, mask_rows, constrained, status = mask or (None, None, None, None)
    *tables, generated = settings
    params, bias_ids, biases, stop_ids, prompt_seen, output_counts = tables
    return process_logits(
        logits,
        masks,
        mask_rows,
        constrained,
        status,
        ids,
        rows,
        params,
        bias_ids,
        biases,
        stop_ids,
        prompt_seen,
        output_counts,
        generated,
        before,
        first,
    )


def _process_outputs(
    logits: Tensor,
    masks: Tensor | None,
    mask_rows: Tensor | None,
    constrained: Tensor | None,
    status: Tensor | None,
    ids: Tensor | None,
    rows: Tensor | None,
    params: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    stop_ids: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    *_: object,
) -> Processed:
    (batch, positions, width), vocabulary = logits.shape, output_counts.shape[1]
    assert ids is not None or width == vocabulary, f"logits {logits.shape}, output_counts {output_counts.shape}"
    if masks is not None and status is not None:
        assert masks.dtype is torch.int32 and masks.shape[1] == positions, f"masks {masks.dtype} {masks.shape}, logits {logits.shape}"
        assert masks.shape[2] * bitmask.WORD >= vocabulary, f"masks {masks.shape}, output_counts {output_counts.shape}"
        assert status.shape == logits.shape[:2], f"status {status.shape}, logits {logits.shape}"
    assert bias_ids.shape[1] > 0, "room for one bias at least"
    finite = torch.empty(batch, positions, dtype=torch.bool, device=logits.device)
    judged = torch.empty(batch, positions, dtype=torch.int64, device=logits.device)
    return Processed(torch.empty(logits.shape, dtype=torch.float32, device=logits.device), finite, judged)


@operation(_process_outputs, triton=True)
def process_logits(
    logits: Dense,
    masks: Dense | None,
    mask_rows: Contiguous | None,
    constrained: Contiguous | None,
    status: Contiguous | None,
    ids: Contiguous | None,
    rows: Contiguous | None,
    params: Contiguous,
    bias_ids: Contiguous,
    biases: Contiguous,
    stop_ids: Contiguous,
    prompt_seen: Contiguous,
    output_counts: Contiguous,
    generated: Tensor,
    before: Tensor,
    first: int,
) -> Processed:
    """`process` with every tensor as an argument of its own."""
    masked = logits
    if masks is not None and constrained is not None:
        masked = bitmask.apply(logits, masks if mask_rows is None else masks[mask_rows], constrained, ids, status)
    tables = (params, bias_ids, biases, stop_ids, prompt_seen, output_counts)
    settings = RowSettings._make([*(table if rows is None else table[rows] for table in tables), generated])
    processed = processors.process(masked, settings, before, first, ids)
    known = torch.full(logits.shape[:2], int(MaskStatus.OK), device=logits.device) if status is None else status
    judged = processors.mark_dead_ends(known, torch.isfinite(masked.amax(-1)), processed)
    return Processed(processed, torch.isfinite(processed.amax(-1)), judged)
