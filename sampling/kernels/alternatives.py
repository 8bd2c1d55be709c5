"""The most probable tokens of each position, which requests with `top_logprobs` receive beside the chosen one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stepgraph.sampling.kernels.operation import Dense, DenseFloats, Float32s, Ints, Longs, operation
from stepgraph.sampling.sampler import ALL, Columns, Param


def _c_supports(*given: Tensor) -> bool:
    return given[3].shape[1] == Param.TOP_LOGPROBS + 1


@operation(lambda *_: None, writes=("ids_ring", "values_ring"), triton=True, c=True, takes=_c_supports, mapped=True)
def top_logprobs(
    logits: DenseFloats, probs: Dense, rows: Longs, params: Float32s, published: Longs, ids_ring: Ints, values_ring: Float32s
) -> None:
    """Write the N most probable tokens of each position to the next slot of the rings: first under the model's logits, then under `probs`.

    logits, probs [B, Q, V]; rows [B] int64; params [R, columns] float32, whose column TOP_LOGPROBS is a row's N, at most N'; published
    [1] int64. In pinned memory: ids_ring [S, slots, Q', 2 * N'] int32, and values_ring float32 with log-probabilities; in falling
    order, of equal ones the lower id first, then -1 and minus infinity. Entries from N on keep their content.
    """
    values, ids = ranked_log_probabilities(logits, probs, ids_ring.shape[3] // 2)
    write_ranked.reference(values, ids, rows, params, published, ids_ring, values_ring)


def ranked_log_probabilities(logits: Tensor, probs: Tensor, count: int, columns: Columns = ALL) -> tuple[Tensor, Tensor]:
    """Values and ids [B, Q, 2 * count], as in the rings of top_logprobs."""
    own = logits.to(torch.float32)
    best, tokens = columns.ranked(torch.stack([own, probs], 2), count)
    values = torch.cat([best[:, :, 0] - columns.logsumexp(own), best[:, :, 1].clamp(min=0).log()], 2)
    return values, torch.where(values == float("-inf"), -1, tokens.flatten(2))


@operation(lambda *_: None, writes=("ids_ring", "values_ring"), mapped=True)
def write_ranked(
    values: Tensor, ids: Tensor, rows: Tensor, params: Tensor, published: Tensor, ids_ring: Tensor, values_ring: Tensor
) -> None:
    """Write values and ids of ranked_log_probabilities to the rings of top_logprobs"""
    most, positions, slot = ids_ring.shape[3] // 2, values.shape[1], published % len(ids_ring)
    asked = (torch.arange(most, device=values.device) < params[rows, Param.TOP_LOGPROBS, None]).repeat(1, 2)[:, None]
    for found, ring in ((ids, ids_ring), (values, values_ring)):
        copy = ring.to(values.device, non_blocking=True)
        part = copy[:, : len(rows), :positions]
        part.index_copy_(0, slot, torch.where(asked, found.to(ring.dtype), part.index_select(0, slot)[0])[None])
        ring.copy_(copy, non_blocking=True)


def read_top_logprobs(ids: Tensor, values: Tensor, asked: int) -> Iterator[list[tuple[tuple[int, float], ...]]]:
    """For each position of one line of the rings, the `asked` most probable tokens under the model's logits, and those under `probs`."""
    half = ids.shape[-1] // 2
    for line, line_values in zip(ids.tolist(), values.tolist(), strict=True):
        ranked = [[*zip(line[start:], line_values[start:], strict=True)][:asked] for start in (0, half)]
        yield [tuple(pair for pair in pairs if pair[0] >= 0) for pairs in ranked]
