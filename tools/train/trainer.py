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
from tools.train.batches import Batch, TrainingSet, embed, to_device
from tools.train.heads import Head
from tools.train.plan import TrainingPlan
from tools.train.unroll import unroll

STEP_DISCOUNT = 0.8  # weight of a chain step relative to the one before
MAX_GRADIENT_NORM = 1.0  # gradient norm limit
WEIGHT_DECAY = 0.01
WARM_UP_SHARE = 0.05  # warm-up share of the steps


class BatchLoss(NamedTuple):
    """Loss of one batch. A chain step without counted positions is zero."""

    loss: Tensor
    losses: list[Tensor]  # per step of the chain
    hits: list[Tensor]  # per step: share of positions where the head's best token is the target's


class Trainer:
    """A head, its optimiser and progress."""

    def __init__(self, head: Head, data: TrainingSet, plan: TrainingPlan) -> None:
        self.head, self.data, self.plan = head, data, plan
        self.device = head.target.embedding.device
        self.step = self.trained_tokens = 0  # steps, and tokens of this run
        self._trained = head.parameters
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
        self._proposed_index = torch.full((head.target.vocab_size,), -1, device=self.device)  # index of each token among the proposed ones
        self._proposed_index[head.d2t.to(self.device)] = torch.arange(len(head.d2t), device=self.device)

    def train(self, checkpoint: Path, every: int, progress: bool = False, stop: Callable[[], bool] = lambda: False) -> bool:
        """Train to the plan's last step; stop after the current step when `stop()` is true. True if finished."""
        plan = self.plan
        batches = itertools.islice(self.data.shuffled_batches(), self.step, plan.steps)
        bar = tqdm(total=plan.steps, initial=self.step, desc="train", unit="step", disable=not progress)
        with bar:
            for indices in batches:
                batch = self.data.batch(indices)
                batch_loss = self._step(batch)
                self.step += 1
                self.trained_tokens += sum(batch.lengths)
                if progress:
                    hits = " ".join(f"{float(hit):.2f}" for hit in batch_loss.hits)
                    bar.set_postfix_str(f"loss {float(batch_loss.loss.detach()):.3f} hits {hits}", refresh=False)
                    bar.update()
                stopped = stop()
                if self.step % every == 0 or self.step == plan.steps or stopped:
                    self.save(checkpoint)
                if stopped:
                    break
        return self.step == plan.steps

    def compute_loss(self, batch: Batch) -> BatchLoss:
        """Loss of a batch."""
        head, batch = self.head, to_device(batch, self.device)
        with self._precision():
            state_probs, best = self._target_probs(batch)
            embedded = [embed(head.target, tokens) for tokens in batch.tokens]
            losses, hits = [], []
            for step, hidden in enumerate(unroll(head.trainable, batch.features.float(), embedded, batch.lengths, batch.chain_starts)):
                positions = batch.loss_masks[step].nonzero().squeeze(1)
                label_indices = batch.label_indices[step][positions]
                logits = product(hidden[positions], head.rows).float()
                target_probs = state_probs[label_indices]
                cross_entropy = target_probs.sum(-1) * logits.logsumexp(-1) - (target_probs * logits).sum(-1)
                losses.append(cross_entropy.sum() / max(1, len(positions)))
                hits.append((logits.argmax(-1) == best[label_indices]).sum() / max(1, len(positions)))
        weights = [STEP_DISCOUNT**step for step in range(len(losses))]
        loss = torch.stack([weight * cross_entropy for weight, cross_entropy in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return BatchLoss(loss, [cross_entropy.detach() for cross_entropy in losses], hits)

    @torch.no_grad()
    def evaluate(self) -> dict[str, list[float]]:
        """Loss and top-1 agreement per chain step, over the held-out texts."""
        totals = torch.zeros(2, self.plan.unrolled)
        weights = torch.zeros(self.plan.unrolled)
        for indices in self.data.group_by_tokens(self.data.held_out):
            batch = self.data.batch(indices)
            batch_loss = self.compute_loss(batch)
            counted = torch.tensor([float(each.sum()) for each in batch.loss_masks])
            totals += counted * torch.tensor([[float(value) for value in row] for row in (batch_loss.losses, batch_loss.hits)])
            weights += counted
        losses, hits = (totals / weights.clamp(min=1)).tolist()
        return {"losses": losses, "hits": hits}

    def save(self, path: Path) -> None:
        """Save weights, moments and step atomically."""
        tensors = {f"weight.{name}": parameter.detach() for name, parameter in self._trained.items()}
        for name, parameter in self._trained.items():
            state = self._optimizer.state.get(parameter) or {
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            tensors |= {f"mean.{name}": state["exp_avg"], f"square.{name}": state["exp_avg_sq"]}
        tensors["proposed"] = self.head.d2t
        part = path.with_suffix(".part")
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            part,
            metadata={"step": str(self.step), "plan": json.dumps(asdict(self.plan))},
        )
        part.replace(path)

    def resume(self, path: Path) -> None:
        """Load a checkpoint of the same plan."""
        try:
            with safe_open(path, framework="pt") as file:
                metadata, stored = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            plan, step = json.loads(metadata["plan"]), int(metadata["step"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: no checkpoint to resume from: {error}") from None
        changed = [f"{name} {plan.get(name)!r} -> {value!r}" for name, value in asdict(self.plan).items() if plan.get(name) != value]
        if changed:
            raise ValueError(f"{path}: belongs to another plan: {', '.join(changed)}; expected the same flags, or a new --out")
        expected = {"proposed", *(f"{kind}.{name}" for name in self._trained for kind in ("weight", "mean", "square"))}
        if stored.keys() != expected or not torch.equal(stored["proposed"], self.head.d2t):
            raise ValueError(f"{path}: belongs to another head; expected the same target and data, or a new --out")
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(stored[f"weight.{name}"])
                moments = {"exp_avg": stored[f"mean.{name}"], "exp_avg_sq": stored[f"square.{name}"]}
                if step:
                    self._optimizer.state[parameter] = {
                        "step": torch.tensor(float(step)),
                        **{key: each.to(parameter) for key, each in moments.items()},
                    }
        self.step = step

    def _step(self, batch: Batch) -> BatchLoss:
        for group in self._optimizer.param_groups:
            group["lr"] = self.plan.rate * learning_rate_factor(self.step, self.plan.steps)
        batch_loss = self.compute_loss(batch)
        self._optimizer.zero_grad(set_to_none=True)
        batch_loss.loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained.values(), MAX_GRADIENT_NORM)
        self._optimizer.step()
        return batch_loss

    @torch.no_grad()
    def _target_probs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[N, D] target probabilities of the proposed tokens, [N] index of the most probable token, -1 if it is not proposed."""
        rows = self.head.target_rows
        logits = functional.linear(batch.hidden.to(rows.dtype), rows).float()
        return (logits - batch.logsumexp[:, None]).exp(), self._proposed_index[batch.best]

    def _precision(self) -> AbstractContextManager[None]:
        low = self.plan.dtype == "bfloat16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=low)


def learning_rate_factor(step: int, steps: int) -> float:
    """Learning rate factor: linear warm-up to one, then cosine decay to zero."""
    warm_up_steps = max(1, round(WARM_UP_SHARE * steps))
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up_steps) / max(1, steps - warm_up_steps)))
