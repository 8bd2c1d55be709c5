"""Which drafter an engine has: a draft model, a proposer, a function, or one of the words for those without weights of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from stepgraph.graphs.model import DraftModel, ModelPair, Proposer, TargetModel
from stepgraph.runtime.build import check_draft, device_of
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.host_drafts import DraftFunction, FunctionProposer
from stepgraph.runtime.models.forced import ForcedDrafts
from stepgraph.runtime.models.ngram import NgramLookup

AUTO, FORCED, NGRAM, NONE = "auto", "forced", "ngram", "none"
WORDS = (AUTO, FORCED, NGRAM, NONE)
Drafter = DraftModel | Proposer | DraftFunction


def resolve_drafter(target: TargetModel, draft: Drafter | str | None, config: EngineConfig) -> tuple[ModelPair, EngineConfig]:
    """The models of an engine, and its config, in which "none" leaves no drafts. ValueError where nobody would make them."""
    check_config(config)
    if draft == NONE:
        config = without_drafts(config)
    drafter = checked_drafter(named_proposer(draft) if isinstance(draft, str) else draft, config)
    if not config.num_speculative_tokens or drafter is None:
        return ModelPair(target, None), config
    if isinstance(drafter, Proposer):
        return ModelPair(target, None, drafter), config
    if isinstance(drafter, ForcedDrafts):
        drafter.to(device_of(target))
    look_up = NgramLookup(min_ngram=config.look_up, why="beside the draft model") if config.look_up else None
    return ModelPair(target, drafter, look_up=look_up), config


def check_config(config: object) -> None:
    """None is the usual one."""
    if config is not None and not isinstance(config, EngineConfig):
        raise ValueError(f"Engine.config: got {type(config).__name__}, want an EngineConfig")


def checked_drafter(draft: Drafter | None, config: EngineConfig) -> DraftModel | Proposer | None:
    """A drafter that goes with the config, a function as a proposer; ValueError where it does not, or there has to be one."""
    if isinstance(draft, ForcedDrafts) and not config.draft_masks:
        raise ValueError(f"Engine.draft: got {FORCED!r} with draft_masks=False, want draft_masks=True: nothing else is drafted")
    if draft is not None and not isinstance(draft, Proposer) and not hasattr(draft, "forward"):
        draft = _function_proposer(draft, config)
    if config.look_up and isinstance(draft, (Proposer, ForcedDrafts)):
        wanted = "want 0: it stands in for a draft model; draft='ngram' looks up by itself"
        raise ValueError(f"EngineConfig.look_up: got {config.look_up} with the drafter {type(draft).__name__}, {wanted}")
    check_draft(config, draft)
    return cast("DraftModel | Proposer | None", draft)


def named_proposer(word: str, why: str = "") -> Proposer | ForcedDrafts | None:
    """What a word stands for. "auto" is the look-up where no folder offers more, which a loader knows, and says in `why`."""
    if word not in WORDS:
        wanted = f"a draft model, a proposer, a function, or one of {', '.join(map(repr, WORDS))}"
        raise ValueError(f"Engine.draft: got {word!r}, want {wanted}")
    if word == NONE:
        return None
    if word == FORCED:
        return ForcedDrafts()
    return NgramLookup(why=why or AUTO if word == AUTO else "")


def without_drafts(config: EngineConfig | None) -> EngineConfig:
    return replace(config or EngineConfig(), num_speculative_tokens=0)


def only_looks_up(models: ModelPair) -> bool:
    """Whether whatever no grammar forces is looked up."""
    return isinstance(models.proposer, NgramLookup)


def _function_proposer(function: DraftFunction, config: EngineConfig) -> FunctionProposer:
    if not callable(function):
        raise ValueError(f"Engine.draft: got {type(function).__name__}, want a draft model, a proposer, a function or a word")
    if config.num_speculative_tokens and config.rounds_in_flight != 1:
        wanted = "want rounds_in_flight=1: a function is shown no tokens of rounds on their way"
        raise ValueError(f"Engine.draft: got a function with rounds_in_flight={config.rounds_in_flight}, {wanted}")
    if config.num_speculative_tokens and config.forced_drafts:
        wanted = "want forced_drafts=False: it brings whole chains between rounds"
        raise ValueError(f"Engine.draft: got a function with forced_drafts=True, {wanted}")
    return FunctionProposer(function)
