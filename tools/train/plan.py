"""What a training does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingPlan:
    """What a training does; with the same data and the same plan it ends in the same weights."""

    kind: str
    draft_vocab: int | None  # None: all of the target's tokens
    steps: int
    batch_tokens: int
    rate: float
    unrolled: int  # steps of the chain
    dtype: str  # of the products while training: float32 or bfloat16
    seed: int
    eval_share: float
    longest: int  # tokens of a text that are used, its answer included
    middle: int | None  # width of the head's perceptron; None: the target's
