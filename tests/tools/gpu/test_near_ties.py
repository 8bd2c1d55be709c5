"""The check of bfloat16 texts with and without drafts, rehearsed: equal texts, near ties, and a wrong token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from stepgraph import Job
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from tools.gpu.checks import llama
from tools.gpu.checks.context import Context
from tools.random_weights import randomised


def test_the_check_passes_on_the_tape_where_texts_are_equal() -> None:
    found = llama.drafts_change_bfloat16_texts_at_near_ties(Context(rehearsal=True, quick=True))
    assert (found["texts"], found["different"], found["largest gap"]) == (2, 0, 0.0)
    assert isinstance(found["accepted drafts"], int) and found["accepted drafts"] > 0


def test_the_check_finds_a_wrong_token(monkeypatch: pytest.MonkeyPatch) -> None:
    real = llama._jobs

    def jobs(target: Llama, prompts: Sequence[list[int]], drafts: int, **options: Any) -> list[Job]:
        found = real(target, prompts, drafts, **options)
        if drafts:
            found[0].tokens[7] ^= 1
        return found

    monkeypatch.setattr(llama, "_jobs", jobs)
    with pytest.raises(AssertionError, match="no near tie: the tokens differ by"):
        llama.drafts_change_bfloat16_texts_at_near_ties(Context(rehearsal=True, quick=True))


def test_gaps_are_those_of_the_log_probabilities() -> None:
    """Against the reported alternatives of another job. The gap of a token that is not among them is infinite."""
    target = randomised(Llama(LlamaConfig(160, 256, 384, 4, 2, 64, (None, 40, None), dtype=torch.float32)))
    one, other = (llama._jobs(target, [llama.PROMPTS[0]], 0, 6, 20)[0] for _ in range(2))
    (first, top), (second, less), *_ = one.logprobs[3].top_raw
    assert one.tokens[3] == first
    other.tokens[3] = second
    assert llama._gap(target, llama.PROMPTS[0], one, other) == pytest.approx(top - less, abs=1e-6)
    other.tokens[3] = next(token for token in range(160) if token not in dict(one.logprobs[3].top_raw))
    assert llama._gap(target, llama.PROMPTS[0], one, other) == math.inf
