"""Training: steps over batches, bit-exact checkpoints, and evaluation on held-out texts.

The loss is cross-entropy against the target's distribution, not the text's tokens, at every step of the unrolled chain; later
steps have less weight.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from stepgraph.graphs.layers.dense import product
from tools.train.batches import Batch, TrainingSet, embed, moved
from tools.train.heads import Head
from tools.train.plan import TrainingPlan
from tools.train.unroll import unroll

DECAY = 0.8  # weight of a chain step relative to the one before
CLIP = 1.0  # gradient norm limit
WEIGHT_DECAY = 0.01
WARM_UP = 0.05  # warm-up share of the steps


class Lesson(NamedTuple):
    """Loss of one batch. A chain step without counted positions is zero."""

    loss: Tensor
    losses: list[Tensor]  # per step of the chain
    hits: list[Tensor]  # per step: share of positions where the head's best token is the target's


class Trainer:
    """A head, its optimiser and progress."""

    def __init__(self, head: Head, data: TrainingSet, plan: TrainingPlan) -> None:
        self.head, self.data, self.plan = head, data, plan
        self.device = head.target.embedding.device
        self.done = self.tokens = 0  # steps, and tokens of this run
        self._named = head.parameters
        self._optimizer = torch.optim.AdamW(self._named.values(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
        self._places = torch.full((head.target.vocab_size,), -1, device=self.device)  # index of each token among the proposed ones
        self._places[head.proposed.to(self.device)] = torch.arange(len(head.proposed), device=self.device)

    def train(self, checkpoint: Path, every: int, progress: bool = False, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the plan's last step; stop after the current step when `stop()` is true. True if finished."""
        plan = self.plan
        batches = itertools.islice(self.data.order(), self.done, plan.steps)
        bar = tqdm(total=plan.steps, initial=self.done, desc="train", unit="step", disable=not progress)
        with bar:
            for indices in batches:
                batch = self.data.batch(indices)
                lesson = self._step(batch)
                self.done += 1
                self.tokens += sum(batch.lengths)
                if progress:
                    hits = " ".join(f"{float(hit):.2f}" for hit in lesson.hits)
                    bar.set_postfix_str(f"loss {float(lesson.loss.detach()):.3f} hits {hits}", refresh=False)
                    bar.update()
                stopped = stop()
                if self.done % every == 0 or self.done == plan.steps or stopped:
                    self.save(checkpoint)
                if stopped:
                    break
        return self.done == plan.steps

    def judge(self, batch: Batch) -> Lesson:
        """Loss of a batch."""
        head, batch = self.head, moved(batch, self.device)
        with self._precision():
            expected, best = self._wanted(batch)
            embedded = [embed(head.target, tokens) for tokens in batch.tokens]
            losses, hits = [], []
            for step, hidden in enumerate(unroll(head.learner, batch.features.float(), embedded, batch.lengths, batch.begins)):
                positions = batch.counts[step].nonzero().squeeze(1)
                goals = batch.goals[step][positions]
                logits = product(hidden[positions], head.out).float()
                target_probs = expected[goals]
                lost = target_probs.sum(-1) * logits.logsumexp(-1) - (target_probs * logits).sum(-1)
                losses.append(lost.sum() / max(1, len(positions)))
                hits.append((logits.argmax(-1) == best[goals]).sum() / max(1, len(positions)))
        weights = [DECAY**step for step in range(len(losses))]
        loss = torch.stack([weight * lost for weight, lost in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return Lesson(loss, [lost.detach() for lost in losses], hits)

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Loss and top-1 agreement per chain step, over the held-out texts."""
        totals = torch.zeros(2, self.plan.unrolled)
        weights = torch.zeros(self.plan.unrolled)
        for indices in self.data.grouped(self.data.held_out):
            batch = self.data.batch(indices)
            lesson = self.judge(batch)
            counted = torch.tensor([float(each.sum()) for each in batch.counts])
            totals += counted * torch.tensor([[float(value) for value in row] for row in (lesson.losses, lesson.hits)])
            weights += counted
        losses, hits = (totals / weights.clamp(min=1)).tolist()
        return {"losses": losses, "hits": hits}

    def save(self, path: Path) -> None:
        """Save weights, moments and step atomically."""
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self._named.items()}
        for name, parameter in self._named.items():
            state = self._optimizer.state.get(parameter) or {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            tensors |= {f"mean.{name}": state["exp_avg"], f"square.{name}": state["exp_avg_sq"]}
        tensors["proposed"] = self.head.proposed
        part = path.with_suffix(".part")
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            part,
            metadata={"step": str(self.done), "plan": json.dumps(asdict(self.plan))},
        )
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Load a checkpoint of the same plan."""
        try:
            with safe_open(path, framework="pt") as file:
                target_probs, stored = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            plan, step = json.loads(target_probs["plan"]), int(target_probs["step"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: no checkpoint to resume from: {error}") from None
        changed = [f"{name} {plan.get(name)!r} -> {value!r}" for name, value in asdict(self.plan).items() if plan.get(name) != value]
        if changed:
            raise ValueError(f"{path}: belongs to another plan: {', '.join(changed)}; expected the same flags, or a new --out")
        expected = {"proposed", *(f"{kind}.{name}" for name in self._named for kind in ("weight", "mean", "square"))}
        if stored.keys() != expected or not torch.equal(stored["proposed"], self.head.proposed):
            raise ValueError(f"{path}: belongs to another head; expected the same target and data, or a new --out")
        with torch.no_grad():
            for name, parameter in self._named.items():
                parameter.copy_(stored[f"weight.{name}"])
                moments = {"exp_avg": stored[f"mean.{name}"], "exp_avg_sq": stored[f"square.{name}"]}
                if step:
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(step)),
                        **{key: each.to(parameter) for key, each in moments.items()},
                    }
        self.done = step

    def _step(self, batch: Batch) -> Lesson:
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.rate * scale(self.done, self.plan.steps)
        lesson = self.judge(batch)
        self._optimizer.zero_grad(set_to_none=True)
        lesson.loss.backward()
        torch.nn.utils.clip_grad_norm_(self._named.values(), CLIP)
        self._optimizer.step()
        return lesson

    @torch.no_grad()
    def _wanted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[N, D] target probabilities of the proposed tokens, [N] index of the most probable token, -1 if it is not proposed."""
        rows = self.head.target_rows
        logits = functional.linear(batch.hidden.to(rows.dtype), rows).float()
        return (logits - batch.total[:, None]).exp(), self._places[batch.best]

    def _precision(self) -> AbstractContextManager[None]:
        low = self.plan.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=low)


def scale(step: int, steps: int) -> float:
    """Learning rate factor: linear warm-up to one, then cosine decay to zero."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
