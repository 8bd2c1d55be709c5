"""Answers of the demonstration's target to generated prompts under their schemas, with hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from stepgraph import Constraint
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from tools.train.collect import answer
from tools.train.demo.prompts import DemoPrompt, prompt
from tools.train.heads import default_feature_layers
from tools.train.saved_states import SavedStates
from tools.train.texts import Encoder

LONGEST_PROMPT = 320


def collect(target: Path, folder: Path, count: int, new_tokens: int, progress: bool = False) -> SavedStates:
    """Let the target answer the prompts of the first `count` seeds greedily; skips answers that are in the folder."""
    checkpoint = open_checkpoint(target, torch.bfloat16)
    model = checkpoint.load("cpu", default_feature_layers(checkpoint.config.num_layers), progress)
    prompts = {ids: Constraint.json_schema(each.schema) if each.schema else None for ids, each in unique(target, count)}
    return answer(model, checkpoint.vocabulary, prompts, new_tokens, 0.0, folder, progress)


def unique(target: Path, count: int, *, held_out: bool = False) -> list[tuple[tuple[int, ...], DemoPrompt]]:
    """The distinct prompts of the first `count` seeds, with their ids."""
    found: dict[tuple[int, ...], DemoPrompt] = {}
    for ids, each in encoded(target, (prompt(seed, held_out=held_out) for seed in range(count))):
        found.setdefault(ids, each)
    return list(found.items())


def encoded(target: Path, prompts: Iterator[DemoPrompt]) -> Iterator[tuple[tuple[int, ...], DemoPrompt]]:
    """Prompts of at most LONGEST_PROMPT tokens, with their ids."""
    encoder = Encoder(target, answered=True)
    for each in prompts:
        ids = encoder.conversation(each.messages).token_ids
        if len(ids) <= LONGEST_PROMPT:
            yield ids, each
