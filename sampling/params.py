"""Per-request sampling settings. What is not honoured is refused by name, never ignored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Greedy decoding, with extra stop ids."""

    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.temperature != 0.0:
            raise ValueError(f"SamplingParams.temperature: got {self.temperature!r}, want 0.0: this version decodes greedily")
        if not isinstance(self.stop_token_ids, (tuple, list)):
            raise ValueError(f"SamplingParams.stop_token_ids: got {type(self.stop_token_ids).__name__}, want a tuple of token ids")
        for place, token in enumerate(self.stop_token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise ValueError(f"SamplingParams.stop_token_ids[{place}]: got {token!r}, want a token id >= 0")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
