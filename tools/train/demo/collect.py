"""Answers of the demonstration's target to generated prompts under their schemas, with hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from stepgraph import Constraint
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from tools.train.collect import save_answers
from tools.train.demo.prompts import DemoPrompt, make_prompt
from tools.train.heads import default_feature_layers
from tools.train.saved_states import SavedStates
from tools.train.texts import Encoder

LONGEST_PROMPT = 320


def save_demo_answers(target: Path, folder: Path, count: int, new_tokens: int, progress: bool = False) -> SavedStates:
    """Let the target answer the prompts of the first `count` seeds greedily; skips answers that are in the folder."""
    checkpoint = open_checkpoint(target, torch.bfloat16)
    model = checkpoint.load("cpu", default_feature_layers(checkpoint.config.num_layers), progress)
    prompts = {ids: Constraint.json_schema(each.schema) if each.schema else None for ids, each in unique_prompts(target, count)}
    return save_answers(model, checkpoint.vocabulary, prompts, new_tokens, 0.0, folder, progress)


def unique_prompts(target: Path, count: int, *, held_out: bool = False) -> list[tuple[tuple[int, ...], DemoPrompt]]:
    """The distinct prompts of the first `count` seeds, with their ids."""
    found: dict[tuple[int, ...], DemoPrompt] = {}
    for ids, each in encode_prompts(target, (make_prompt(seed, held_out=held_out) for seed in range(count))):
        found.setdefault(ids, each)
    return list(found.items())


def encode_prompts(target: Path, prompts: Iterator[DemoPrompt]) -> Iterator[tuple[tuple[int, ...], DemoPrompt]]:
    """Prompts of at most LONGEST_PROMPT tokens, with their ids."""
    encoder = Encoder(target, will_answer=True)
    for each in prompts:
        ids = encoder.conversation(each.messages).token_ids
        if len(ids) <= LONGEST_PROMPT:
            yield ids, each
