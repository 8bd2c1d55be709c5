"""Engine kinds: every drafter, for a toy target and a tiny Llama. Page pools are small, so that requests have to wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch

from stepgraph import Engine, EngineConfig, Vocabulary
from stepgraph.runtime.check_models import Drafter
from stepgraph.runtime.models.draft_llama import DraftLlama
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig
from stepgraph.runtime.models.mtp import Mtp
from stepgraph.runtime.models.toy import ToyDraft, ToyTarget
from tests.helpers.proposers import draft_ids_then_noise, parrot
from tools.random_weights import randomised

VOCABULARY = Vocabulary.printable(logits_width=128)
STOP = VOCABULARY.stop_token_ids[0]
MAX_LENGTH, MAX_ROWS, MAX_QUEUED = 160, 4, 12
CACHE_BYTES = 1 << 18  # a few dozen grammars, so that most are evicted
FEATURE_LAYERS = (0, 1, 2)
_LLAMA = LlamaConfig(VOCABULARY.logits_width, 32, 48, 4, 2, 8, (None, None), max_positions=MAX_LENGTH)
_LAYER = replace(_LLAMA, windows=(None,))

_CONFIG = EngineConfig(
    max_rows=MAX_ROWS,
    max_length=MAX_LENGTH,
    page_size=8,
    num_pages=34,  # all rows together could use 80
    prefill_chunk=16,
    max_queued=MAX_QUEUED,
    buckets=(MAX_ROWS,),
    grammar_cache_bytes=CACHE_BYTES,
    grammar_arena_bytes=CACHE_BYTES,  # full before the end of warm-up: the memory of an arena becomes resident when it is first used
    compile_isolation="none",
)

TargetName = Literal["toy", "llama"]


class Models:
    """Models that all engines share, on one device. Both Llamas have the same weights and so the same output distribution."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.toy = ToyTarget(VOCABULARY.logits_width, seed=3, biases={STOP: 2.0}).to(device)
        self.llama, self.llama_with_features = (
            randomised(Llama(_LLAMA, feature_layers=layers, device=device), 1).eval() for layers in ((), FEATURE_LAYERS)
        )

    def toy_draft(self, agreement: float) -> ToyDraft:
        return ToyDraft(self.toy, agreement).to(self.device)

    def eagle3(self) -> Eagle3:
        config = Eagle3Config(_LAYER, FEATURE_LAYERS, _LLAMA.hidden_size, VOCABULARY.logits_width)
        return randomised(Eagle3(config, device=self.device), 3)

    def mtp(self) -> Mtp:
        assert self.llama.head is not None
        return randomised(Mtp(_LAYER, embedding=self.llama.embedding, head=self.llama.head, device=self.device), 3)

    def draft_llama(self) -> DraftLlama:
        draft = DraftLlama(_LAYER, device=self.device)
        randomised(draft, 1)
        return draft


@dataclass(frozen=True, eq=False)
class EngineKind:
    """How to make an engine."""

    name: str
    draft: Callable[[Models], Drafter | str | None]
    drafts: int
    target: TargetName = "toy"
    takes_draft_ids: bool = False  # accepts draft_ids
    grammars: Literal["auto", "llguidance"] = "auto"
    eager: bool = False  # the same for all engines of a kind: capture adds threads
    changes: Mapping[str, Any] = field(default_factory=dict)

    def make(self, models: Models) -> Engine:
        """A captured engine."""
        config = replace(_CONFIG, num_speculative_tokens=self.drafts, grammar_backend=self.grammars, eager=self.eager, **self.changes)
        reads_features = self.name == "EAGLE-3"
        target = models.toy if self.target == "toy" else models.llama_with_features if reads_features else models.llama
        engine = Engine(target, self.draft(models), vocabulary=VOCABULARY, config=config)
        engine.capture()
        return engine


KINDS = (
    EngineKind("toy pair", lambda models: models.toy_draft(0.8), 4, changes={"compile_isolation": "process", "max_compiles": 1}),
    EngineKind(
        "toy pair, not masked", lambda models: models.toy_draft(1.0), 3, eager=True, changes={"draft_masks": False, "rounds_in_flight": 3}
    ),
    EngineKind(
        "toy pair and look-up", lambda models: models.toy_draft(0.7), 3, takes_draft_ids=True, changes={"look_up": 2, "forced_drafts": True}
    ),
    EngineKind(
        "toy pair, matchers in Python",
        lambda models: models.toy_draft(0.9),
        2,
        eager=True,
        changes={"grammar_lane": "host", "host_link": "python"},
    ),
    EngineKind("n-gram", lambda _: "ngram", 3, takes_draft_ids=True, changes={"prefix_cache_pages": 8, "page_allocation": "grow"}),
    EngineKind("forced", lambda _: "forced", 4, grammars="llguidance"),
    EngineKind("proposer", lambda _: parrot(), 3, takes_draft_ids=True, eager=True, changes={"forced_drafts": False}),
    EngineKind("function", lambda _: draft_ids_then_noise, 2, takes_draft_ids=True, changes={"rounds_in_flight": 1}),
    EngineKind("EAGLE-3", lambda models: models.eagle3(), 3, "llama", changes={"page_allocation": "grow"}),
    EngineKind("MTP", lambda models: models.mtp(), 2, "llama", changes={"check_masks": True}),
    EngineKind("draft model", lambda models: models.draft_llama(), 2, "llama", eager=True, changes={"prefix_reuse": False}),
    EngineKind(
        "no drafter", lambda _: None, 0, eager=True, changes={"grammar_lane": "host", "compile_isolation": "process", "rounds_in_flight": 3}
    ),
)
_ONE_ROW = {"max_rows": 1, "rounds_in_flight": 1, "prefix_reuse": False, "buckets": (1,)}
PLAIN_KINDS = {name: EngineKind(f"plain {name}", lambda _: None, 0, name, eager=True, changes=_ONE_ROW) for name in get_args(TargetName)}
