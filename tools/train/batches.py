"""Training batches from saved states: whole texts in a seeded order, each position with the target's distribution.

The distribution is normalised over all tokens of the target. A batch keeps the part that the head can propose without rescaling,
so that positions where the target prefers other tokens have little weight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from stepgraph.runtime.hidden_states import SavedText
from stepgraph.runtime.models.llama import Llama
from tools.train.plan import TrainingPlan
from tools.train.saved_states import SavedStates

_SLICE = 256  # positions whose full logits are in memory at once


class Predictions(NamedTuple):
    """The target's prediction at every state of one text."""

    logsumexp: Tensor  # [n - 1] float32, logsumexp over all tokens
    best: Tensor  # [n - 1] int64, its most probable token


class Batch(NamedTuple):
    """P pairs of concatenated texts, and C chains that start at pairs near enough to an answer to predict some of it.

    For each of S steps: input tokens, target states, and whether the step counts.
    """

    features: Tensor  # [P, F]
    lengths: tuple[int, ...]  # pairs of each text
    chain_starts: tuple[int, ...]  # the pair of each text at which its first chain starts
    tokens: tuple[Tensor, ...]  # input tokens per step: [P], later [C]
    hidden: Tensor  # [P + texts * S, H] target states to predict
    logsumexp: Tensor  # [P + texts * S]
    best: Tensor  # [P + texts * S]
    label_indices: tuple[Tensor, ...]  # per step [C], index of the state to predict in the three above
    loss_masks: tuple[Tensor, ...]  # per step [C] bool


class TrainingSet:
    """Training and held-out texts; split and order depend on their tokens and the seed only, not on the order in which they were saved."""

    def __init__(self, states: SavedStates, target: Llama, plan: TrainingPlan) -> None:
        self._states, self._target, self._plan = states, target, plan
        numbers = [_split_number(states.token_ids(index), plan.seed) for index in range(len(states))]
        usable = sorted((index for index, length in enumerate(states.lengths) if length >= 3), key=numbers.__getitem__)
        self.held_out = [index for index in usable if numbers[index] < plan.eval_share]
        self.training = [index for index in usable if numbers[index] >= plan.eval_share]
        self.predictions: list[Predictions] = []
        if not self.training or not self.held_out:
            found = f"{len(self.training)} texts to learn from and {len(self.held_out)} held out"
            raise ValueError(f"--data: got {found}, expected at least one of each; give more texts or another --eval-share")

    def prepare(self, cache: Path, num_tokens: int, progress: bool = False) -> None:
        """Compute the target's prediction at every state, or read it from the cache. Ids from `num_tokens` on are padding."""
        if cache.exists():
            stored = load_file(cache)
            sizes = [length - 1 for length in self._states.lengths]
            if len(stored["total"]) != sum(sizes):
                raise ValueError(f"{cache}: belongs to other texts; expected the same --data, or a new --out")
            totals, bests = (stored[name].split(sizes) for name in ("total", "best"))
            self.predictions = [Predictions(*pair) for pair in zip(totals, bests, strict=True)]
            return
        bar = tqdm(self._states, desc="predictions", unit="text", disable=not progress)
        self.predictions = [predictions(self._target, text, num_tokens) for text in bar]
        tensors = {
            "total": torch.cat([each.logsumexp for each in self.predictions]),
            "best": torch.cat([each.best for each in self.predictions]),
        }
        part = cache.with_suffix(".part")
        save_file(tensors, part)
        part.replace(cache)

    def frequencies(self) -> Tensor:
        """[vocab_size] frequency of each token in the training data: in the texts and as the target's best token."""
        found = torch.zeros(self._target.vocab_size, dtype=torch.int64)
        for index in self.training:
            text = self._states[index]
            first = max(2, text.prompt_length)
            for tokens in (text.token_ids[first:], self.predictions[index].best[first - 1 :]):
                found += torch.bincount(tokens, minlength=len(found))
        return found

    def shuffled_batches(self) -> Iterator[list[int]]:
        """The texts of every batch, endlessly; every pass over the texts has a new order."""
        epoch = 0
        while True:
            generator = torch.Generator().manual_seed(self._plan.seed * 1_000_003 + epoch)
            positions = torch.randperm(len(self.training), generator=generator).tolist()
            yield from self.group_by_tokens([self.training[position] for position in positions])
            epoch += 1

    def group_by_tokens(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Whole texts in this order, up to the token limit of a batch."""
        group: list[int] = []
        size = 0
        for index in indices:
            length = min(self._states.lengths[index], self._plan.longest)
            if group and size + length > self._plan.batch_tokens:
                yield group
                group, size = [], 0
            group.append(index)
            size += length
        if group:
            yield group

    def batch(self, indices: Sequence[int]) -> Batch:
        """The batch of these texts."""
        steps = self._plan.unrolled
        parts: list[tuple[Tensor, ...]] = []
        tokens: list[list[Tensor]] = [[] for _ in range(steps)]
        labels: list[list[Tensor]] = [[] for _ in range(steps)]
        counted_positions: list[list[Tensor]] = [[] for _ in range(steps)]
        lengths: list[int] = []
        chain_starts: list[int] = []
        base = 0
        for index in indices:
            text, predicted = self._states[index], self.predictions[index]
            ids = text.token_ids[: self._plan.longest]
            states, pairs = len(ids) - 1, len(ids) - 2
            features = text.features if self._plan.kind == "eagle3" else text.hidden
            parts.append((features[:pairs], text.hidden[:states], predicted.logsumexp[:states], predicted.best[:states]))
            begin = min(pairs, max(0, text.prompt_length - 1 - steps))  # its last step predicts the answer's first token
            for step in range(steps):
                position = torch.arange(begin if step else 0, pairs)
                tokens[step].append(ids[(position + 1 + step).clamp(max=len(ids) - 1)])
                label_positions = position[len(position) - (pairs - begin) :] + 1 + step
                labels[step].append(base + label_positions.clamp(max=states - 1))
                counted_positions[step].append((label_positions < states) & (label_positions + 1 >= text.prompt_length))
            lengths.append(pairs)
            chain_starts.append(begin)
            base += states
        features, hidden, logsumexp, best = (torch.cat(column) for column in zip(*parts, strict=True))
        columns = (tuple(torch.cat(each) for each in column) for column in (tokens, labels, counted_positions))
        step_tokens, label_indices, loss_masks = columns
        return Batch(features, tuple(lengths), tuple(chain_starts), step_tokens, hidden, logsumexp, best, label_indices, loss_masks)

    def prompts(self, most: int, longest: int) -> list[list[int]]:
        """Prompts from held-out texts."""
        found = []
        for index in self.held_out[:most]:
            text = self._states[index]
            cut = text.prompt_length if text.prompt_length > 1 else len(text.token_ids) // 2
            found.append(text.token_ids[: max(1, min(cut, longest))].tolist())
        return found


@torch.no_grad()
def predictions(target: Llama, text: SavedText, num_tokens: int) -> Predictions:
    """Logits in the target's dtype, as in an engine."""
    device = target.embedding.device
    totals, bests = [], []
    for part in text.hidden.split(_SLICE):
        logits = target.logits(part.to(device, target.config.dtype))[:, :num_tokens].float()
        totals.append(logits.logsumexp(-1).cpu())
        bests.append(logits.argmax(-1).cpu())
    return Predictions(torch.cat(totals), torch.cat(bests))


def to_device(batch: Batch, device: torch.device) -> Batch:
    parts = [part if isinstance(part, tuple) and isinstance(part[0], int) else _to(part, device) for part in batch]
    return Batch(*parts)  # type: ignore[arg-type]


def _to(part: Tensor | tuple[Tensor, ...], device: torch.device) -> Tensor | tuple[Tensor, ...]:
    return part.to(device) if isinstance(part, Tensor) else tuple(each.to(device) for each in part)


def _split_number(token_ids: Tensor, seed: int) -> float:
    """A number from 0 to 1 that depends on the text and the seed only."""
    digest = hashlib.sha256(str(seed).encode() + token_ids.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def embed(target: Llama, tokens: Tensor) -> Tensor:
    return functional.embedding(tokens, target.embedding).float()
