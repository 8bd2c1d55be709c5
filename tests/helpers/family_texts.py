"""Prompts for the tiny models in tests/helpers/families.py, and greedy decoding by `transformers` without a cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from stepgraph import Constraint, Engine, EngineConfig, Job, SamplingParams
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.sampling.grammar import CompiledConstraint, GrammarCompiler, MaskStatus
from tests.helpers.families import folder_of, hf_model
from tests.helpers.grammar_texts import fill_mask

CONSTRAINTS = (None, Constraint.regex("[a-f]{3,9}[0-9]+[A-Z]?"), Constraint.choice(["yes", "no", "never"]), Constraint.json_object())
CONFIG = EngineConfig(
    max_rows=3,
    num_speculative_tokens=0,
    max_length=64,
    page_size=4,
    prefill_chunk=5,
    backend="tape",
    buckets=(1, 3),
    compile_isolation="none",  # starting a worker per engine is slow
)
PROMPTS = [[7, 30, 5], [9], [40 + index for index in range(17)], [12, 12, 3, 90, 33, 100], [60, 61, 62, 63, 64, 65, 66, 67]]


@functools.cache
def compiled(family: str, constraint: Constraint) -> CompiledConstraint:
    return GrammarCompiler(open_checkpoint(folder_of(family)).vocabulary).compile(constraint)


@functools.cache
def plain(
    family: str,
    prompt: tuple[int, ...],
    constraint: Constraint | None,
    count: int,
    guess: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[list[int], str]:
    """Greedy tokens without a cache: by one pass over `guess` as far as it is right, then a pass over the whole text for each token."""
    vocabulary = open_checkpoint(folder_of(family)).vocabulary
    matcher = None if constraint is None else compiled(family, constraint).matcher()
    tokens, read, rows = list[int](), list(guess), torch.empty(0)
    while len(tokens) < count:
        if not len(rows) > len(tokens) or tokens != read[: len(tokens)]:
            read = read if not len(rows) else tokens[:]
            with torch.no_grad():
                rows = hf_model(family, dtype)(torch.tensor([[*prompt, *read]])).logits[0, len(prompt) - 1 :, : len(vocabulary.tokens)]
        logits = rows[len(tokens)]
        if matcher is not None:
            status, legal = fill_mask(matcher, vocabulary.mask_words)
            if status != MaskStatus.OK:
                return tokens, {MaskStatus.COMPLETE: "constraint_complete", MaskStatus.DEAD_END: "dead_end"}[status]
            logits = torch.full_like(logits, -torch.inf).index_copy_(0, torch.tensor(legal), logits[legal])
        tokens.append(int(logits.argmax()))
        if matcher is not None:
            assert matcher.accept_token(tokens[-1])
        if tokens[-1] in vocabulary.stop_token_ids:
            return tokens, "stop"
    return tokens, "length"


def decode(engine: Engine, prompts: list[list[int]], constraint: Constraint | None = None, **sampling: Any) -> list[Job]:
    params = SamplingParams(temperature=0, **sampling)
    if constraint is not None:
        engine.compile(constraint)  # so that no request waits for a compile and rows are assigned in order
    jobs = [engine.submit(prompt, constraint=constraint, sampling=params, max_new_tokens=24) for prompt in prompts]
    for _ in engine.stream():
        pass
    return jobs
