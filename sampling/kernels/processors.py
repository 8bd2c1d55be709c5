"""The mask of a place and everything that a request asks of its logits, in one pass over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import bitmask, processors
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels.operation import contiguous, dense, operation
from stepgraph.sampling.processors import RowSettings


class GrammarMask(NamedTuple):
    """The masks of B rows at Q places, and which of them hold."""

    masks: Tensor  # [R, Q, words] int32
    rows: Tensor | None  # [B] int64: row b reads masks[rows[b]]; None: masks[b]
    ruled: Tensor  # [B] bool: rows that have a mask at all
    status: Tensor  # [B, Q] int64 MaskStatus; where a ruled row's is not OK, no token is legal, whatever its mask says


class Processed(NamedTuple):
    """What is left of the logits of B rows at Q places."""

    logits: Tensor  # [B, Q, V] float32, minus infinity for what is not legal
    finite: Tensor  # [B, Q] bool: the best of them is a number
    status: Tensor  # [B, Q] int64 MaskStatus: the ruling's, and DEAD_END where the request itself forbids all that is legal


def process(
    logits: Tensor,
    settings: RowSettings,
    rows: Tensor | None,
    before: Tensor,
    first: int = 0,
    ruling: GrammarMask | None = None,
    ids: Tensor | None = None,
) -> Processed:
    """bitmask.apply, processors.process and processors.mark_dead_ends of logits [B, Q, V] at the places from `first` on.

    Row b reads the settings of row rows[b] ([B] int64; None: row b), but for settings.generated and before [B, N], which are
    the batch's own. Logits are float32, bfloat16 or float16, of any leading strides; ids as for processors.process.
    """
    positions, width = logits.shape[1:]
    masks, mask_rows, ruled, status = ruling or (None, None, None, None)
    vocabulary = settings.output_counts.shape[1]
    assert ids is not None or width == vocabulary, f"logits {logits.shape}, output_counts {settings.output_counts.shape}"
    if masks is not None and status is not None:
        assert masks.dtype is torch.int32 and masks.shape[1] == positions, f"masks {masks.dtype} {masks.shape}, logits {logits.shape}"
        assert masks.shape[2] * bitmask.WORD >= vocabulary, f"masks {masks.shape}, output_counts {settings.output_counts.shape}"
        assert status.shape == logits.shape[:2], f"status {status.shape}, logits {logits.shape}"
        masks, status = dense(masks), status.contiguous()
    assert settings.bias_ids.shape[1] > 0, "room for one bias at least"
    *tables, generated = settings
    processed = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    finite = torch.empty(logits.shape[:2], dtype=torch.bool, device=logits.device)
    judged = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    process_operation(
        dense(logits),
        masks,
        contiguous(mask_rows),
        contiguous(ruled),
        status,
        contiguous(ids),
        contiguous(rows),
        *(table.contiguous() for table in tables),
        generated,
        before,
        first,
        processed,
        finite,
        judged,
    )
    return Processed(processed, finite, judged)


def process_reference(
    logits: Tensor,
    masks: Tensor | None,
    mask_rows: Tensor | None,
    ruled: Tensor | None,
    status: Tensor | None,
    ids: Tensor | None,
    rows: Tensor | None,
    params: Tensor,
    bias_ids: Tensor,
    biases: Tensor,
    stop_ids: Tensor,
    prompt_seen: Tensor,
    output_counts: Tensor,
    generated: Tensor,
    before: Tensor,
    first: int,
    processed: Tensor,
    finite: Tensor,
    judged: Tensor,
) -> None:
    masked = logits
    if masks is not None and ruled is not None:
        masked = bitmask.apply(logits, masks if mask_rows is None else masks[mask_rows], ruled, ids, status)
    tables = (params, bias_ids, biases, stop_ids, prompt_seen, output_counts)
    settings = RowSettings._make([*(table if rows is None else table[rows] for table in tables), generated])
    processed.copy_(processors.process(masked, settings, before, first, ids))
    told = torch.full_like(judged, int(MaskStatus.OK)) if status is None else status
    judged.copy_(processors.mark_dead_ends(told, torch.isfinite(masked.amax(-1)), processed))
    finite.copy_(torch.isfinite(processed.amax(-1)))


process_operation = operation(
    "processors",
    "process",
    "(Tensor logits, Tensor? masks, Tensor? mask_rows, Tensor? ruled, Tensor? status, Tensor? ids, Tensor? rows, Tensor params, "
    "Tensor bias_ids, Tensor biases, Tensor stop_ids, Tensor prompt_seen, Tensor output_counts, Tensor generated, Tensor before, "
    "int first, Tensor(a!) processed, Tensor(b!) finite, Tensor(c!) judged) -> ()",
    process_reference,
)
