"""Hidden states of the training texts, saved in a folder in the format of the engine."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

from stepgraph import Constraint, Engine, EngineConfig, SamplingParams, Vocabulary
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import ModelInput
from stepgraph.runtime.hidden_states import SHARDS, SavedText, StatesWriter, states_layout
from stepgraph.runtime.models.llama import Llama
from tools.train.saved_states import SavedStates
from tools.train.texts import Text

PAGE_SIZE = 64
SHARD_BYTES = 64 << 20
ROWS = 32  # concurrent answers
CHECK_TOKENS = 64  # tokens for checking saved states
MAX_RELATIVE_ERROR = 0.1  # tolerance for another order of additions in bfloat16


def save_states(target: Llama, texts: Sequence[Text], folder: Path, progress: bool = False) -> SavedStates:
    """Run the target over every text that is not in the folder yet. An interrupt keeps the finished texts."""
    layout = states_layout(target)
    known = SavedStates(folder) if any(folder.glob(SHARDS)) else ()
    done = len(known)
    if [Text(tuple(saved.token_ids.tolist()), saved.prompt_length) for saved in known] != list(texts[:done]):
        raise ValueError(f"{folder}: belongs to other texts; expected the same --data and --max-length, or a new --out")
    total_bytes = sum(len(text.token_ids) for text in texts) * layout.width * target.feature_dtype.itemsize
    if progress:
        print(f"hidden states: {len(texts)} texts, {total_bytes / 2**20:.0f} MiB in {folder}", file=sys.stderr, flush=True)
    writer = StatesWriter(folder, layout, SHARD_BYTES)
    try:
        for saved in tqdm(forward(target, texts[done:]), desc="target", unit="text", initial=done, total=len(texts), disable=not progress):
            while not writer.put(saved) and not writer.error:
                time.sleep(0.05)  # wait for the disk
            if writer.error:
                break
    finally:
        writer.close()
    if writer.error:
        raise ValueError(writer.error)
    return SavedStates(folder)


@torch.no_grad()
def forward(target: Llama, texts: Sequence[Text]) -> Iterator[SavedText]:
    """Hidden states of each text, in one pass."""
    device = target.embedding.device
    longest = max((len(text.token_ids) for text in texts), default=1)
    pages = -(-longest // PAGE_SIZE)
    limits = Limits(1, 0, longest, PAGE_SIZE, pages, target.vocab_size, target.vocab_size, target.feature_size)
    buffers = StaticBuffers(target.cache_specs(limits), device)
    tables = torch.arange(1, pages + 1, device=device)[None]
    for text in texts:
        tokens = torch.tensor(text.token_ids, device=device)
        positions = torch.arange(len(tokens) - 1, device=device)[None]
        output = target.forward(ModelInput(tokens[None, :-1], positions, positions + PAGE_SIZE, tables, PAGE_SIZE), buffers)
        yield SavedText(tokens.cpu(), text.prompt_length, output.next_features[0].cpu(), output.hidden[0].cpu())


@torch.no_grad()
def check_states(states: SavedStates, target: Llama) -> None:
    """Check that saved states belong to this target: sizes match, and the states of the first text are reproduced."""
    got, expected = states.layout, states_layout(target)
    if any(getattr(got, name) != getattr(expected, name) for name in ("vocab_size", "feature_layers", "feature_size", "hidden_size")):
        raise ValueError(f"{states.folder}: got states of {got}, expected states of {expected}")
    if not len(states):
        raise ValueError(f"{states.folder}: got no texts, expected at least one")
    text = states[0]
    part = Text(tuple(text.token_ids[:CHECK_TOKENS].tolist()), 1)
    found = next(forward(target, [part]))
    error = float((found.hidden.float() - text.hidden[: CHECK_TOKENS - 1].float()).norm() / text.hidden[: CHECK_TOKENS - 1].float().norm())
    if error > MAX_RELATIVE_ERROR:
        raise ValueError(f"{states.folder}: the states of its first text are {error:.0%} off, expected states of this target")


def save_answers(
    target: Llama,
    vocabulary: Vocabulary,
    prompts: Mapping[tuple[int, ...], Constraint | None],
    new_tokens: int,
    temperature: float,
    folder: Path,
    progress: bool = False,
) -> SavedStates:
    """Let the target answer prompts under their constraints and save its states: training data like the texts that a head will draft.

    Skips prompts whose answers are in the folder, and refuses a folder with answers to other prompts.
    """
    known = SavedStates(folder) if any(folder.glob(SHARDS)) else ()
    answered = {tuple(text.token_ids[: text.prompt_length].tolist()) for text in known}
    if not answered <= prompts.keys():
        raise ValueError(f"{folder}: belongs to other prompts; expected the same --data and --max-length, or a new --out")
    rows = min(ROWS, len(prompts))
    config = EngineConfig(
        max_rows=rows,
        num_speculative_tokens=0,
        max_length=max(map(len, prompts)) + new_tokens,
        page_size=PAGE_SIZE,
        buckets=(rows,),
        greedy_only=temperature == 0,
        compile_isolation="none",  # the grammars are trusted
        save_hidden_states=folder,
        states_shard_bytes=SHARD_BYTES,
    )
    remaining = ((seed, prompt) for seed, prompt in enumerate(prompts) if prompt not in answered)
    with (
        Engine(target, vocabulary=vocabulary, config=config) as engine,
        tqdm(total=len(prompts), initial=len(answered), desc="answers", unit="text", disable=not progress) as bar,
    ):
        engine.capture()
        while True:
            for seed, prompt in itertools.islice(remaining, max(0, rows - engine.stats().waiting)):
                sampling = SamplingParams(temperature=temperature, seed=seed)
                engine.submit(prompt, constraint=prompts[prompt], sampling=sampling, max_new_tokens=new_tokens)
            if not engine.has_work:
                break
            bar.update(sum(event.finish_reason is not None for event in engine.step()))
    stats = engine.stats()
    if stats.saving_error or stats.unsaved_texts:
        raise ValueError(f"{folder}: {stats.unsaved_texts} texts could not be saved: {stats.saving_error or 'the disk is too slow'}")
    return SavedStates(folder)
