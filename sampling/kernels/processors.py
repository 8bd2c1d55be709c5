"""Grammar masks, biases, bans and penalties of a request applied to logits, at every position of a round.

The order is vLLM's: logit_bias and bad tokens, min_new_tokens, then the repetition, frequency and presence penalties. A grammar's
mask may be applied before or after: minus infinity stays minus infinity. A position counts the drafts before it as if they had been
emitted, because its logits are only used if they are accepted. Also what requests receive of the result: log-probabilities, and with
`top_logprobs` the most probable tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.sampling import bitmask
from stepgraph.sampling.grammar.status import BITS_PER_WORD, MaskStatus
from stepgraph.sampling.kernels.choice import GrammarMask
from stepgraph.sampling.kernels.operation import Contiguous, Dense, DenseFloats, Flags, Float32s, Ints, Longs, StridedLongs, operation
from stepgraph.sampling.sampler import ALL_COLUMNS, Param, VocabColumns

MAX_EARLIER_DRAFTS = 64  # drafts that the kernel in C has room for, as in processors.c


class RowSettings(NamedTuple):
    """Settings and histories of B rows. V is the target's vocabulary."""

    params: Tensor  # [B, len(Param)] float32
    bias_ids: Tensor  # [B, M] int64, distinct; the used ones first, then -1
    biases: Tensor  # [B, M] float32, minus infinity for a bad token, 0 where unused
    stop_ids: Tensor  # [B, S] int64, -1 where unused
    prompt_seen: Tensor  # [B, V] bool
    output_counts: Tensor  # [B, V] int32
    generated: Tensor  # [B] int64, tokens emitted so far


class Processed(NamedTuple):
    """The processed logits of B rows at Q positions."""

    logits: Tensor  # [B, Q, V] float32, minus infinity for tokens that are not legal
    finite: Tensor  # [B, Q] bool: the largest of them is finite
    status: Tensor  # [B, Q] int64 MaskStatus: of the grammar mask, and DEAD_END where the request itself forbids every legal token


def process(
    logits: Tensor,
    settings: RowSettings,
    rows: Tensor | None,
    earlier_drafts: Tensor,
    first: int = 0,
    mask: GrammarMask | None = None,
    ids: Tensor | None = None,
) -> Processed:
    """bitmask.apply, apply_settings and mark_dead_ends of logits [B, Q, V] at the positions from `first` on.

    Row b reads the settings of row rows[b] ([B] int64; None: row b), except settings.generated and earlier_drafts [B, N], those of
    the batch. Logits are float32, bfloat16 or float16; ids as for apply_settings.
    """
    masks, mask_rows, constrained, status = mask or (None, None, None, None)
    return process_logits(logits, masks, mask_rows, constrained, status, ids, rows, *settings, earlier_drafts, first)


def _process_outputs(logits: Tensor, masks: Tensor | None, *others: Any) -> Processed:
    _mask_rows, _constrained, status, ids, _rows, *settings_of_rows, _earlier_drafts, _first = others
    settings = RowSettings._make(settings_of_rows)
    bias_ids, output_counts = settings.bias_ids, settings.output_counts
    (batch, positions, width), vocabulary = logits.shape, output_counts.shape[1]
    assert ids is not None or width == vocabulary, f"logits {logits.shape}, output_counts {output_counts.shape}"
    if masks is not None and status is not None:
        assert masks.dtype is torch.int32 and masks.shape[1] == positions, f"masks {masks.dtype} {masks.shape}, logits {logits.shape}"
        assert masks.shape[2] * BITS_PER_WORD >= vocabulary, f"masks {masks.shape}, output_counts {output_counts.shape}"
        assert status.shape == logits.shape[:2], f"status {status.shape}, logits {logits.shape}"
    assert bias_ids.shape[1] > 0, "room for one bias at least"
    finite = torch.empty(batch, positions, dtype=torch.bool, device=logits.device)
    final_status = torch.empty(batch, positions, dtype=torch.int64, device=logits.device)
    return Processed(torch.empty(logits.shape, dtype=torch.float32, device=logits.device), finite, final_status)


def _c_supports(logits: Tensor, earlier_drafts: Tensor) -> bool:
    return logits.shape[2] > 0 and earlier_drafts.shape[1] <= MAX_EARLIER_DRAFTS


@operation(_process_outputs, triton=True, c=True, supports=_c_supports)
def process_logits(
    logits: DenseFloats,
    masks: Dense | None,
    mask_rows: Longs | None,
    constrained: Flags | None,
    status: Longs | None,
    ids: Longs | None,
    rows: Longs | None,
    params: Float32s,
    bias_ids: Longs,
    biases: Float32s,
    stop_ids: Longs,
    prompt_seen: Flags,
    output_counts: Ints,
    generated: StridedLongs,
    earlier_drafts: StridedLongs,
    first: int,
) -> Processed:
    """`process` with every tensor as an argument of its own."""
    masked = logits
    if masks is not None and constrained is not None:
        masked = bitmask.apply(logits, masks if mask_rows is None else masks[mask_rows], constrained, ids, status)
    tables = (params, bias_ids, biases, stop_ids, prompt_seen, output_counts)
    settings = RowSettings._make([*(table if rows is None else table[rows] for table in tables), generated])
    processed = apply_settings(masked, settings, earlier_drafts, first, ids)
    mask_status = torch.full(logits.shape[:2], int(MaskStatus.OK), device=logits.device) if status is None else status
    return mark_dead_ends(mask_status, torch.isfinite(masked.amax(-1)), processed)


def apply_settings(logits: Tensor, rows: RowSettings, earlier_drafts: Tensor, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Logits [B, Q, V] of the positions first, first + 1, ... as float32, after everything except temperature and filters.

    earlier_drafts [B, N] int64: drafts at the positions from 0 on, -1 where there is none. ids [V]: the target's token of each logit, for
    a draft with a vocabulary of its own; None: its index.
    """
    positions = torch.arange(first, first + logits.shape[1], device=logits.device)
    counts = _output_counts(rows.output_counts, earlier_drafts, positions)
    bias = _scatter_by_id(rows.biases, rows.bias_ids, rows.prompt_seen.shape[1])
    stops = _scatter_by_id((rows.stop_ids >= 0).to(torch.float32), rows.stop_ids, rows.prompt_seen.shape[1]) > 0
    prompt_seen = rows.prompt_seen
    if ids is not None:
        counts, bias, stops, prompt_seen = counts[..., ids], bias[:, ids], stops[:, ids], prompt_seen[:, ids]
    repetition, presence, frequency, min_new_tokens = (
        rows.params[:, column, None, None]
        for column in (Param.REPETITION_PENALTY, Param.PRESENCE_PENALTY, Param.FREQUENCY_PENALTY, Param.MIN_NEW_TOKENS)
    )
    result = logits.to(torch.float32) + bias[:, None]
    before_minimum = (rows.generated[:, None] + positions)[:, :, None] < min_new_tokens
    result = torch.where(before_minimum & stops[:, None], float("-inf"), result)
    emitted = counts > 0
    repeated = torch.where(result > 0, result / repetition, result * repetition)
    result = torch.where(emitted | prompt_seen[:, None], repeated, result)
    return result - frequency * counts - presence * emitted


def mark_dead_ends(status: Tensor, finite: Tensor, logits: Tensor, columns: VocabColumns = ALL_COLUMNS) -> Processed:
    """Processed logits, with DEAD_END where a mask allows some token (finite [B, Q]) and the request's own bans forbid all of them."""
    largest = columns.best(logits)[0][..., 0]
    banned = finite & (largest == float("-inf")) & (status == int(MaskStatus.OK))
    return Processed(logits, torch.isfinite(largest), torch.where(banned, int(MaskStatus.DEAD_END), status))


@operation(lambda *_: None, writes=("found",), triton=True)
def log_probabilities(logits: Dense, probs: Dense, tokens: Contiguous, found: Tensor) -> None:
    """Write to `found` [B, Q, 2] float32 the log-probabilities of tokens [B, Q]: under logits [B, Q, V], and under `probs` [B, Q, V]."""
    write_log_probabilities(logits, probs, tokens, found)


def write_log_probabilities(logits: Tensor, probs: Tensor, tokens: Tensor, found: Tensor, columns: VocabColumns = ALL_COLUMNS) -> None:
    wide_logits, token_index = logits.to(torch.float32), tokens[..., None]
    found[..., :1] = columns.pick(wide_logits, token_index) - columns.logsumexp(wide_logits)
    found[..., 1:] = columns.pick(probs, token_index).log()


def _output_counts(output_counts: Tensor, earlier_drafts: Tensor, positions: Tensor) -> Tensor:
    """[B, Q, V] float32: occurrences of each token before each position."""
    size, vocab = output_counts.shape
    index = torch.arange(earlier_drafts.shape[1], device=earlier_drafts.device)
    counted = (index < positions[:, None]) & (earlier_drafts >= 0)[:, None]
    counts = output_counts[:, None].expand(size, len(positions), vocab).to(torch.float32, copy=True)
    tokens = earlier_drafts.clamp(min=0)[:, None].expand(size, len(positions), earlier_drafts.shape[1])
    return counts.scatter_add_(2, tokens, counted.to(torch.float32))


def _scatter_by_id(values: Tensor, ids: Tensor, width: int) -> Tensor:
    """[B, width] float32: each value at its id. Unused entries add 0 to id 0."""
    dense = torch.zeros(len(ids), width, dtype=torch.float32, device=ids.device)
    return dense.scatter_add_(1, ids.clamp(min=0), values)


@operation(lambda *_: None, writes=("ids_ring", "values_ring"), triton=True, c=True, mapped=True)
def top_logprobs(
    logits: DenseFloats, probs: Dense, rows: Longs, params: Float32s, published: Longs, ids_ring: Ints, values_ring: Float32s
) -> None:
    """Write the N most probable tokens of each position to the next slot of the rings: first under the model's logits, then under `probs`.

    logits, probs [B, Q, V]; rows [B] int64; params [R, columns] float32, whose column TOP_LOGPROBS is a row's N, at most N'; published
    [1] int64. In pinned memory: ids_ring [S, slots, Q', 2 * N'] int32, and values_ring float32 with log-probabilities; in falling
    order, ties by lower id, then -1 and minus infinity. Entries from N on keep their content.
    """
    values, ids = ranked_log_probabilities(logits, probs, ids_ring.shape[3] // 2)
    write_ranked.reference(values, ids, rows, params, published, ids_ring, values_ring)


def ranked_log_probabilities(logits: Tensor, probs: Tensor, count: int, columns: VocabColumns = ALL_COLUMNS) -> tuple[Tensor, Tensor]:
    """Values and ids [B, Q, 2 * count], as in the rings of top_logprobs."""
    wide_logits = logits.to(torch.float32)
    best, tokens = columns.ranked(torch.stack([wide_logits, probs], 2), count)
    values = torch.cat([best[:, :, 0] - columns.logsumexp(wide_logits), best[:, :, 1].clamp(min=0).log()], 2)
    return values, torch.where(values == float("-inf"), -1, tokens.flatten(2))


@operation(lambda *_: None, writes=("ids_ring", "values_ring"), mapped=True)
def write_ranked(
    values: Tensor, ids: Tensor, rows: Tensor, params: Tensor, published: Tensor, ids_ring: Tensor, values_ring: Tensor
) -> None:
    """Write values and ids of ranked_log_probabilities to the rings of top_logprobs"""
    max_entries, positions, slot = ids_ring.shape[3] // 2, values.shape[1], published % len(ids_ring)
    requested = (torch.arange(max_entries, device=values.device) < params[rows, Param.TOP_LOGPROBS, None]).repeat(1, 2)[:, None]
    for entries, ring in ((ids, ids_ring), (values, values_ring)):
        copy = ring.to(values.device, non_blocking=True)
        part = copy[:, : len(rows), :positions]
        part.index_copy_(0, slot, torch.where(requested, entries.to(ring.dtype), part.index_select(0, slot)[0])[None])
        ring.copy_(copy, non_blocking=True)


def read_top_logprobs(ids: Tensor, values: Tensor, requested: int) -> Iterator[list[tuple[tuple[int, float], ...]]]:
    """For each position of a line of the rings, the `requested` most probable tokens under the model's logits, and those under `probs`."""
    half = ids.shape[-1] // 2
    for line, line_values in zip(ids.tolist(), values.tolist(), strict=True):
        ranked = [[*zip(line[start:], line_values[start:], strict=True)][:requested] for start in (0, half)]
        yield [tuple(pair for pair in pairs if pair[0] >= 0) for pairs in ranked]
