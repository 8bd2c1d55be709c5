"""Training configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingPlan:
    """Training configuration. The same data and plan give the same weights."""

    kind: str
    draft_vocab: int | None  # None: all of the target's tokens
    steps: int
    batch_tokens: int
    rate: float
    unrolled: int  # steps of the chain
    dtype: str  # dtype of matrix products: float32 or bfloat16
    seed: int
    eval_share: float
    longest: int  # token limit of a text, including its answer
    middle: int | None  # width of the head's perceptron; None: the target's
