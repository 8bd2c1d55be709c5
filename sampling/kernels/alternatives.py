"""The likeliest tokens of each position, which requests with `top_logprobs` receive beside the chosen one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from stepgraph.sampling.kernels.c_kernel import FLOATS, CKernel
from stepgraph.sampling.kernels.operation import Contiguous, Dense, operation
from stepgraph.sampling.sampler import Param


def _c_supports(logits: Tensor, probs: Tensor, rows: Tensor, params: Tensor, *others: Tensor) -> bool:
    dense = logits.stride(2) == probs.stride(2) == 1 and all(each.is_contiguous() for each in (rows, params, *others))
    return dense and logits.dtype in FLOATS and params.shape[1] == Param.TOP_LOGPROBS + 1


@operation(lambda *_: None, writes=("ids_ring", "values_ring"), triton=True, c=CKernel("top_logprobs", _c_supports), mapped=True)
def top_logprobs(
    logits: Dense, probs: Dense, rows: Contiguous, params: Contiguous, published: Tensor, ids_ring: Tensor, values_ring: Tensor
) -> None:
    """Write the N likeliest tokens of each position to the next slot of the rings: first under the model's logits, then under `probs`.

    logits, probs [B, Q, V]; rows [B] int64; params [R, columns] float32, whose column TOP_LOGPROBS is a row's N, at most N'; published
    [1] int64. In pinned memory: ids_ring [S, slots, Q', 2 * N'] int32, and values_ring float32 with log-probabilities; in falling
    order, of equal ones the lower id first, then -1 and minus infinity. Entries from N on keep their content.
    """
    most, positions, slot = ids_ring.shape[3] // 2, logits.shape[1], published % len(ids_ring)
    own = logits.to(torch.float32)
    scores = torch.nn.functional.pad(torch.stack([own, probs], 2), (0, max(0, most - own.shape[2])), value=float("-inf"))
    ranked = torch.sort(scores, stable=True, dim=-1, descending=True)
    raw, kept = (ranked.values[..., :most] - own.logsumexp(-1)[..., None, None])[:, :, 0], ranked.values[:, :, 1, :most].clamp(min=0).log()
    values = torch.cat([raw, kept], 2)
    ids = torch.where(values == float("-inf"), -1, ranked.indices[..., :most].flatten(2))
    asked = (torch.arange(most, device=logits.device) < params[rows, Param.TOP_LOGPROBS, None]).repeat(1, 2)[:, None]
    for found, ring in ((ids, ids_ring), (values, values_ring)):
        copy = ring.to(logits.device, non_blocking=True)
        part = copy[:, : len(rows), :positions]
        part.index_copy_(0, slot, torch.where(asked, found.to(ring.dtype), part.index_select(0, slot)[0])[None])
        ring.copy_(copy, non_blocking=True)


def read_top_logprobs(ids: Tensor, values: Tensor, asked: int) -> Iterator[list[tuple[tuple[int, float], ...]]]:
    """For each position of one line of the rings, the `asked` likeliest tokens under the model's logits, and those under `probs`."""
    half = ids.shape[-1] // 2
    for line, line_values in zip(ids.tolist(), values.tolist(), strict=True):
        ranked = [[*zip(line[start:], line_values[start:], strict=True)][:asked] for start in (0, half)]
        yield [tuple(pair for pair in pairs if pair[0] >= 0) for pairs in ranked]
