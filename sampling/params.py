"""Per-request sampling settings. What is not honoured is refused by name, never ignored."""

from __future__ import annotations

import math
from dataclasses import dataclass


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses among the tokens that its grammar allows. Applied in this order; defaults are the ecosystem's."""

    temperature: float = 1.0  # 0: greedy, the likeliest token
    min_p: float = 0.0  # drop tokens less likely than this share of the likeliest
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the likeliest until they sum to this share
    seed: int | None = None  # the same seed gives the same tokens; None: a fresh one
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check("temperature", 0.0, math.inf)
        self._check("min_p", 0.0, 1.0)
        self._check("top_p", 0.0, 1.0, open_below=True)
        for name, most in (("top_k", 2**24), ("seed", 2**63 - 1)):
            value = getattr(self, name)
            if not (name == "seed" and value is None) and not (_is_int(value) and 0 <= value <= most):
                raise ValueError(f"SamplingParams.{name}: got {value!r}, want a whole number from 0 to {most}")
        if not isinstance(self.stop_token_ids, (tuple, list)):
            raise ValueError(f"SamplingParams.stop_token_ids: got {type(self.stop_token_ids).__name__}, want a tuple of token ids")
        for place, token in enumerate(self.stop_token_ids):
            if not _is_int(token) or token < 0:
                raise ValueError(f"SamplingParams.stop_token_ids[{place}]: got {token!r}, want a token id >= 0")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    def _check(self, name: str, low: float, high: float, open_below: bool = False) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not low <= value <= high or (open_below and value == low):
            bounds = f"{'above' if open_below else 'from'} {low:g}" + (f" to {high:g}" if math.isfinite(high) else " on, finite")
            raise ValueError(f"SamplingParams.{name}: got {value!r}, want a number {bounds}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = SamplingParams(temperature=0.0)
