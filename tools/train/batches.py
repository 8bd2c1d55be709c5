"""Saved states as batches to train on: whole texts, in an order that follows from the seed, each place with what the target would say.

The target's distribution is taken over all of its tokens once; of it, a batch keeps the part that the head can propose, unscaled:
where the target wants a token that the head does not have, there is little to learn.
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

from stepgraph.runtime.extras.states_folder import SavedStates, SavedText
from stepgraph.runtime.models.llama import Llama
from tools.train.plan import TrainingPlan

_SLICE = 256  # places whose logits over the whole vocabulary are in memory at once


class Wishes(NamedTuple):
    """What the target said at every state of one text."""

    total: Tensor  # [n - 1] float32, logarithm of the sum over all tokens
    best: Tensor  # [n - 1] int64, its likeliest token


class Batch(NamedTuple):
    """P pairs of texts one behind the other, and C chains that grow from those near enough to an answer to foresee some of it.

    For each of S steps, what the chains take, should say, and whether that counts.
    """

    features: Tensor  # [P, F]
    lengths: tuple[int, ...]  # pairs of each text
    begins: tuple[int, ...]  # the pair of each text that its first chain grows from
    tokens: tuple[Tensor, ...]  # per step the token that is taken: [P], later [C]
    hidden: Tensor  # [P + texts * S, H] the target's states that the chains should foresee
    total: Tensor  # [P + texts * S]
    best: Tensor  # [P + texts * S]
    goals: tuple[Tensor, ...]  # per step [C], index of the foreseen state in the three above
    counts: tuple[Tensor, ...]  # per step [C] bool


class TrainingSet:
    """Texts to learn from, and texts held out; a text's side depends on its tokens and the seed alone."""

    def __init__(self, states: SavedStates, target: Llama, plan: TrainingPlan) -> None:
        self._states, self._target, self._plan = states, target, plan
        sides = [_side(states.token_ids(index), plan.seed) < plan.eval_share for index in range(len(states))]
        usable = [index for index, length in enumerate(states.lengths) if length >= 3]
        self.held_out = [index for index in usable if sides[index]]
        self.learned = [index for index in usable if not sides[index]]
        self.wishes: list[Wishes] = []
        if not self.learned or not self.held_out:
            wanted = "at least one of each; give more texts or another --eval-share"
            raise ValueError(f"--data: got {len(self.learned)} texts to learn from and {len(self.held_out)} held out, want {wanted}")

    def prepare(self, cache: Path, num_tokens: int, progress: bool = False) -> None:
        """Ask the target what it wants at every state, or read what was found before. From `num_tokens` on, ids are padding."""
        if cache.exists():
            stored = load_file(cache)
            sizes = [length - 1 for length in self._states.lengths]
            if len(stored["total"]) != sum(sizes):
                raise ValueError(f"{cache}: is of other texts; want the same --data, or a new --out")
            totals, bests = (stored[name].split(sizes) for name in ("total", "best"))
            self.wishes = [Wishes(*pair) for pair in zip(totals, bests, strict=True)]
            return
        bar = tqdm(self._states, desc="wishes", unit="text", disable=not progress)
        self.wishes = [wishes(self._target, text, num_tokens) for text in bar]
        tensors = {"total": torch.cat([each.total for each in self.wishes]), "best": torch.cat([each.best for each in self.wishes])}
        part = cache.with_suffix(".part")
        save_file(tensors, part)
        part.replace(cache)

    def frequencies(self) -> Tensor:
        """[vocab_size] how often each token is to be foreseen in what is learned from: in the texts, and by the target's wish."""
        found = torch.zeros(self._target.vocab_size, dtype=torch.int64)
        for index in self.learned:
            text = self._states[index]
            first = max(2, text.prompt_length)
            for tokens in (text.token_ids[first:], self.wishes[index].best[first - 1 :]):
                found += torch.bincount(tokens, minlength=len(found))
        return found

    def order(self) -> Iterator[list[int]]:
        """The texts of every batch, for ever: a pass over all of them in an order of its own follows the other."""
        epoch = 0
        while True:
            made = torch.Generator().manual_seed(self._plan.seed * 1_000_003 + epoch)
            places = torch.randperm(len(self.learned), generator=made).tolist()
            yield from self.grouped([self.learned[position] for position in places])
            epoch += 1

    def grouped(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Whole texts, in this order, up to the tokens of a batch."""
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
        """The texts' pairs and what each chain should say."""
        steps = self._plan.unrolled
        parts: list[tuple[Tensor, ...]] = []
        tokens: list[list[Tensor]] = [[] for _ in range(steps)]
        goals: list[list[Tensor]] = [[] for _ in range(steps)]
        counts: list[list[Tensor]] = [[] for _ in range(steps)]
        lengths: list[int] = []
        begins: list[int] = []
        base = 0
        for index in indices:
            text, wish = self._states[index], self.wishes[index]
            ids = text.token_ids[: self._plan.longest]
            states, pairs = len(ids) - 1, len(ids) - 2
            features = text.features if self._plan.kind == "eagle3" else text.hidden
            parts.append((features[:pairs], text.hidden[:states], wish.total[:states], wish.best[:states]))
            begin = min(pairs, max(0, text.prompt_length - 1 - steps))  # its last step foresees the answer's first token
            for step in range(steps):
                position = torch.arange(begin if step else 0, pairs)
                tokens[step].append(ids[(position + 1 + step).clamp(max=len(ids) - 1)])
                foreseen = position[len(position) - (pairs - begin) :] + 1 + step
                goals[step].append(base + foreseen.clamp(max=states - 1))
                counts[step].append((foreseen < states) & (foreseen + 1 >= text.prompt_length))
            lengths.append(pairs)
            begins.append(begin)
            base += states
        features, hidden, total, best = (torch.cat(column) for column in zip(*parts, strict=True))
        columns = (tuple(torch.cat(each) for each in column) for column in (tokens, goals, counts))
        taken, aims, counted = columns
        return Batch(features, tuple(lengths), tuple(begins), taken, hidden, total, best, aims, counted)

    def prompts(self, most: int, longest: int) -> list[list[int]]:
        """Beginnings of texts that were held out, to decode from."""
        found = []
        for index in self.held_out[:most]:
            text = self._states[index]
            cut = text.prompt_length if text.prompt_length > 1 else len(text.token_ids) // 2
            found.append(text.token_ids[: max(1, min(cut, longest))].tolist())
        return found


@torch.no_grad()
def wishes(target: Llama, text: SavedText, num_tokens: int) -> Wishes:
    """In the target's own dtype, as an engine computes them."""
    device = target.embedding.device
    totals, bests = [], []
    for part in text.hidden.split(_SLICE):
        logits = target.logits(part.to(device, target.config.dtype))[:, :num_tokens].float()
        totals.append(logits.logsumexp(-1).cpu())
        bests.append(logits.argmax(-1).cpu())
    return Wishes(torch.cat(totals), torch.cat(bests))


def moved(batch: Batch, device: torch.device) -> Batch:
    parts = [part if isinstance(part, tuple) and isinstance(part[0], int) else _to(part, device) for part in batch]
    return Batch(*parts)  # type: ignore[arg-type]


def _to(part: Tensor | tuple[Tensor, ...], device: torch.device) -> Tensor | tuple[Tensor, ...]:
    return part.to(device) if isinstance(part, Tensor) else tuple(each.to(device) for each in part)


def _side(token_ids: Tensor, seed: int) -> float:
    """From 0 to 1: the same wherever and whenever the text is met."""
    digest = hashlib.sha256(str(seed).encode() + token_ids.numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def embed(target: Llama, tokens: Tensor) -> Tensor:
    return functional.embedding(tokens, target.embedding).float()
