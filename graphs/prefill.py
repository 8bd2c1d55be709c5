"""Prompts: one chunk of one row at a time, between rounds. Not part of a graph, so shapes may depend on the prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stepgraph.graphs.attention.paged import OPERATION, AttentionChoice
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.layers.slot_mapping import cache_slots
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import DraftModel, Embeddings, ModelInput, TargetModel, run_model


@dataclass(frozen=True)
class Chunk:
    """One part of a prompt."""

    row: int
    start: int
    count: int
    shared: int = 0  # cache entries below this position are shared with other rows: they are read, never written
    spans: tuple[tuple[int, Tensor], ...] = ()  # offset from `start` and host tensor [n, E] that replaces the tokens' embeddings


def prefill(
    buffers: StaticBuffers,
    chunk: Chunk,
    target: TargetModel,
    draft: DraftModel | None,
    limits: Limits,
    attention: AttentionChoice = OPERATION,
    states_host: Tensor | None = None,
) -> None:
    """Fill both caches with one chunk of a prompt.

    `buffers.prompt` holds the tokens at start .. start + count. The target processes the first `count` of them; the draft, which
    takes the features of the position before, the last `count`, and at the start of a prompt also its first token.
    states_host: pinned [count, width] for the target's saved states.
    """
    row, start, count, shared = chunk.row, chunk.start, chunk.count, chunk.shared
    block_tables = buffers.row_block_tables[row : row + 1]
    tokens = buffers.prompt[None, : count + 1]
    positions = torch.arange(start, start + count + 1, device=tokens.device)[None]
    slots = torch.where(positions < shared, positions % limits.page_size, cache_slots(block_tables, positions, limits.page_size))

    def inputs(first: int, end: int, features: Tensor | None = None) -> ModelInput:
        part, attend = slice(first, end), attention.prompt_call(start + first, end - first)
        return ModelInput(
            tokens[:, part], positions[:, part], slots[:, part], block_tables, limits.page_size, features, attend=attend, shared=shared
        )

    embeddings = _embeddings(chunk, target.feature_dtype, tokens.device)
    # No position comes before the first token.
    features = torch.zeros(1, 1, limits.feature_size, dtype=target.feature_dtype, device=tokens.device)
    if count:
        output = run_model("target", target, inputs(0, count)._replace(embeddings=_part(embeddings, 0, count)), buffers)
        features = torch.cat([features, output.next_features], 1)
        if states_host is not None:
            states_host.copy_(output.saved_states(states_host.shape[-1])[0], non_blocking=True)
    skip = 1 if start else 0
    if draft is not None and skip <= count:
        given = _part(embeddings, skip, count + 1) if getattr(draft, "shares_embeddings", False) else None
        run_model("draft", draft, inputs(skip, count + 1, features[:, skip:])._replace(embeddings=given), buffers)


def _part(embeddings: Embeddings | None, first: int, end: int) -> Embeddings | None:
    return None if embeddings is None else Embeddings(embeddings.values[:, first:end], embeddings.given[:, first:end])


def _embeddings(chunk: Chunk, dtype: torch.dtype, device: torch.device) -> Embeddings | None:
    """Of all tokens of the chunk, with the one after its last, which only the draft processes."""
    if not chunk.spans:
        return None
    values = torch.zeros(1, chunk.count + 1, chunk.spans[0][1].shape[1], dtype=dtype, device=device)
    given = torch.zeros(1, chunk.count + 1, dtype=torch.bool, device=device)
    for offset, span in chunk.spans:
        values[0, offset : offset + len(span)].copy_(span, non_blocking=True)
        given[0, offset : offset + len(span)].fill_(True)
    return Embeddings(values, given)
