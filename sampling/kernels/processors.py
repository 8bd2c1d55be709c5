"""Grammar masks and the request's own settings applied to logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import bitmask, processors
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.kernels.choice import GrammarMask
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation
from stepgraph.sampling.processors import RowSettings


class Processed(NamedTuple):
    """The processed logits of B rows at Q positions."""

    logits: Tensor  # [B, Q, V] float32, minus infinity for tokens that are not legal
    finite: Tensor  # [B, Q] bool: the largest of them is finite
    status: Tensor  # [B, Q] int64 MaskStatus: of the grammar mask, and DEAD_END where the request itself forbids every legal token


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
    return process_logits(logits, masks, mask_rows, constrained, status, ids, rows, *settings, before, first)


def _process_outputs(
    logits: Tensor, masks: Tensor | None, _: object, __: object, status: Tensor | None, ids: Tensor | None, ___: object, *settings: Tensor
) -> Processed:
    bias_ids, output_counts = settings[1], settings[5]
    (batch, positions, width), vocabulary = logits.shape, output_counts.shape[1]
    assert ids is not None or width == vocabulary, f"logits {logits.shape}, output_counts {output_counts.shape}"
    if masks is not None and status is not None:
        assert masks.dtype is torch.int32 and masks.shape[1] == positions, f"masks {masks.dtype} {masks.shape}, logits {logits.shape}"
        assert masks.shape[2] * BITS_PER_WORD >= vocabulary, f"masks {masks.shape}, output_counts {output_counts.shape}"
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
