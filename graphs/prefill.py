"""Prompts: one chunk of one row at a time, between rounds. Never inside a graph, so its shapes follow the prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from stepgraph.graphs.attention_choice import OPERATION, AttentionChoice
from stepgraph.graphs.batch import cache_slots
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.model import DraftModel, ModelInput, TargetModel
from stepgraph.graphs.shapes import Limits


def prefill(
    buffers: StaticBuffers,
    row: int,
    start: int,
    count: int,
    target: TargetModel,
    draft: DraftModel | None,
    limits: Limits,
    attention: AttentionChoice = OPERATION,
) -> None:
    """Fill both caches with one chunk of a prompt, and note its tokens for the penalties; runs between rounds, never inside a graph.

    `prompt` holds the tokens at start .. start + count. The target takes the first `count` of them; the draft, fed with
    the features of the position before, takes the last `count`, and at the very start of a prompt its first token too.
    """
    block_tables = buffers.row_block_tables[row : row + 1]
    tokens = buffers.prompt[None, : count + 1]
    buffers.row_prompt_seen[row].scatter_(0, tokens[0], True)
    positions = torch.arange(start, start + count + 1, device=tokens.device)[None]
    slots = cache_slots(block_tables, positions, limits)

    def inputs(first: int, end: int, features: Tensor | None = None) -> ModelInput:
        part, attend = slice(first, end), attention.prompt_call(start + first, end - first)
        return ModelInput(tokens[:, part], positions[:, part], slots[:, part], block_tables, limits.page_size, features, attend=attend)

    # No position comes before the first token.
    features = torch.zeros(1, 1, limits.feature_size, dtype=target.feature_dtype, device=tokens.device)
    if count:
        features = torch.cat([features, target.forward(inputs(0, count), buffers).features], 1)
    if draft is not None:
        skip = 1 if start else 0
        draft.forward(inputs(skip, count + 1, features[:, skip:]), buffers)
