"""Which drafter an engine has: a draft model, a proposer, or one of the words for those that need no weights."""

from __future__ import annotations

from dataclasses import replace

from stepgraph.graphs.model import DraftModel, ModelPair, Proposer, TargetModel
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.runtime.placement import check_draft

WORDS = ("ngram", "none", "auto")


def take_drafter(target: TargetModel, draft: DraftModel | Proposer | str | None, config: EngineConfig) -> tuple[ModelPair, EngineConfig]:
    """The models of an engine, and its config, in which "none" leaves no drafts. ValueError where nobody would make them."""
    if isinstance(draft, str):
        draft, config = named_drafter(draft, config)
    drafts = check_draft(config, draft)
    if not drafts or draft is None:
        return ModelPair(target, None), config
    return (ModelPair(target, None, draft) if isinstance(draft, Proposer) else ModelPair(target, draft)), config


def named_drafter(word: str, config: EngineConfig, why: str = "auto") -> tuple[Proposer | None, EngineConfig]:
    """What a word stands for. "auto" is the look-up, for the reason `why`; where a folder may tell better, its loader asks it first."""
    if word not in WORDS:
        raise ValueError(f"Engine.draft: got {word!r}, want a draft model, a proposer, or one of {', '.join(map(repr, WORDS))}")
    if word == "none":
        return None, replace(config, num_speculative_tokens=0)
    return NgramLookup(why=why if word == "auto" else ""), config
