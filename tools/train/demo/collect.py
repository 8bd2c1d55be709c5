"""Answers of the demonstration's target to generated prompts under their schemas, with hidden states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig
from stepgraph.runtime.extras.states_folder import INDEX, SavedStates
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from tools.train.demo.prompts import DemoPrompt, prompt
from tools.train.heads import default_feature_layers
from tools.train.texts import Encoder

LONGEST_PROMPT = 320
ROWS = 16  # concurrent answers
SHARD_BYTES = 64 << 20


def collect(target: Path, folder: Path, count: int, new_tokens: int, progress: bool = False) -> SavedStates:
    """Let the target answer the prompts of the first `count` seeds greedily; skips answers that are in the folder."""
    checkpoint = open_checkpoint(target, torch.bfloat16)
    model = checkpoint.load("cpu", default_feature_layers(checkpoint.config.num_layers), progress)
    held: set[tuple[int, ...]] = set()
    if (folder / INDEX).exists():
        held = {tuple(text.token_ids[: text.prompt_length].tolist()) for text in SavedStates(folder)}
    config = EngineConfig(
        max_rows=ROWS,
        num_speculative_tokens=0,
        max_length=LONGEST_PROMPT + new_tokens,
        buckets=(ROWS,),
        greedy_only=True,
        compile_isolation="none",  # no isolation: the schemas are trusted
        max_queued=2 * ROWS,
        save_hidden_states=folder,
        states_shard_bytes=SHARD_BYTES,
    )
    asked = [each for each in unique(target, count) if each[0] not in held]
    with (
        Engine(model, vocabulary=checkpoint.vocabulary, config=config) as engine,
        tqdm(total=count, initial=count - len(asked), desc="answers", unit="text", disable=not progress) as bar,
    ):
        engine.capture()
        waiting = iter(asked)
        while True:
            while engine.stats().waiting < ROWS and (pair := next(waiting, None)) is not None:
                constraint = Constraint.json_schema(pair[1].schema) if pair[1].schema else None
                engine.submit(pair[0], constraint=constraint, max_new_tokens=new_tokens)
            if not engine.has_work:
                break
            bar.update(sum(event.finish_reason is not None for event in engine.step()))
    stats = engine.stats()
    if stats.saving_error or stats.unsaved_texts:
        raise ValueError(f"{folder}: {stats.unsaved_texts} texts could not be saved: {stats.saving_error or 'the disk is too slow'}")
    return SavedStates(folder)


def unique(target: Path, count: int, *, held_out: bool = False) -> list[tuple[tuple[int, ...], DemoPrompt]]:
    """The distinct prompts of the first `count` seeds, with their ids."""
    found: dict[tuple[int, ...], DemoPrompt] = {}
    for ids, each in encoded(target, (prompt(seed, held_out=held_out) for seed in range(count))):
        found.setdefault(ids, each)
    return list(found.items())


def encoded(target: Path, prompts: Iterator[DemoPrompt]) -> Iterator[tuple[tuple[int, ...], DemoPrompt]]:
    encoder = Encoder(target, answered=True)
    for each in prompts:
        ids = encoder.conversation(each.messages).token_ids
        assert len(ids) <= LONGEST_PROMPT, f"{len(ids)} tokens: {json.dumps(each.messages)}"
        yield ids, each
