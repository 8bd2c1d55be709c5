"""Which drafter an engine has: a draft model, a proposer, or one of the words for those that need no weights of their own."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.graphs.model import DraftModel, ModelPair, Proposer, TargetModel
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.placement import check_draft

AUTO, NGRAM, NONE = "auto", "ngram", "none"
WORDS = (AUTO, NGRAM, NONE)


def take_drafter(target: TargetModel, draft: DraftModel | Proposer | str | None, config: EngineConfig) -> tuple[ModelPair, EngineConfig]:
    """The models of an engine, and its config, in which "none" leaves no drafts. ValueError where nobody would make them."""
    if draft == NONE:
        config = without_drafts(config)
    if isinstance(draft, str):
        draft = named_proposer(draft)
    drafts = check_draft(config, draft)
    if not drafts or draft is None:
        return ModelPair(target, None), config
    return (ModelPair(target, None, draft) if isinstance(draft, Proposer) else ModelPair(target, draft)), config


def named_proposer(word: str, why: str = "") -> Proposer | None:
    """What a word stands for. "auto" is the look-up where no folder offers more, which a loader knows, and says in `why`."""
    if word not in WORDS:
        raise ValueError(f"Engine.draft: got {word!r}, want a draft model, a proposer, or one of {', '.join(map(repr, WORDS))}")
    if word == NONE:
        return None
    return NgramLookup(why=why or AUTO if word == AUTO else "")


def without_drafts(config: EngineConfig | None) -> EngineConfig:
    return replace(config or EngineConfig(), num_speculative_tokens=0)
