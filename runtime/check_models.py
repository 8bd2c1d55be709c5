"""The arguments of Engine() -> its models, drafter and config. All are checked before memory is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from stepgraph.graphs.attention.float8 import ENTRIES, FLOAT8
from stepgraph.graphs.buffer_spec import BufferSpec, check_constant
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.layers.vocabulary_shard import VocabularyShard
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model import AttentionShape, DraftModel, Models, Proposer, TargetModel
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.host_drafts import DraftFunction, ForcedDrafts, FunctionProposer
from stepgraph.runtime.models.ngram import NgramLookup
from stepgraph.sampling.fields import BOOL, Check, check_members, check_value, clip_repr, instance_of, optional, whole
from stepgraph.sampling.grammar.vocabulary import Vocabulary

AUTO, FORCED, NGRAM, NONE = "auto", "forced", "ngram", "none"
DRAFTER_NAMES = (AUTO, FORCED, NGRAM, NONE)
Drafter = DraftModel | Proposer | DraftFunction
CONFIG = optional(instance_of(EngineConfig, "an EngineConfig"))


def _iterable_of(kind: type, expected: str) -> Check:
    return Check(lambda found: isinstance(found, Iterable) and all(isinstance(each, kind) for each in found), expected)


_SPECS = _iterable_of(BufferSpec, "a sequence of BufferSpecs")
_ATTRIBUTES = {  # of a target or a draft; all but the first are optional
    "feature_dtype": instance_of(torch.dtype, "a torch.dtype"),
    "notes": _iterable_of(str, "a tuple of sentences"),
    "attends": _iterable_of(AttentionShape, "a tuple of AttentionShapes"),
    "embedding_size": whole(0),
    "lora_weights": instance_of(Mapping, "a mapping of names to LoraWeights"),
    "shard": instance_of(VocabularyShard, "a VocabularyShard"),
    "lookahead": whole(0),
    **dict.fromkeys(("advances", "shares_embeddings", "shares_prefix"), BOOL),
}
_D2T = Check(lambda found: isinstance(found, Tensor) and found.dim() == 1, "a tensor [vocab_size] of torch.int64, or None")


def resolve_drafter(target: TargetModel, draft: Drafter | str | None, config: EngineConfig) -> tuple[Models, EngineConfig]:
    """The models of an engine, and its config, with zero drafts if there is no drafter."""
    check_value("Engine.config", config, CONFIG)
    if isinstance(config.draft_length, int):
        config = replace(config, num_speculative_tokens=config.draft_length)
    if draft is None or draft == NONE:
        config = without_drafts(config)
    drafter = checked_drafter(named_proposer(draft) if isinstance(draft, str) else draft, config)
    if not config.num_speculative_tokens or drafter is None:
        return Models(target, None), config
    if isinstance(drafter, Proposer):
        return Models(target, None, drafter), config
    look_up = NgramLookup(min_ngram=config.look_up, why="beside the draft model") if config.look_up else None
    return Models(target, drafter, look_up=look_up), config


def checked_drafter(draft: Drafter | None, config: EngineConfig) -> DraftModel | Proposer | None:
    """The drafter; a function is wrapped as a proposer. ValueError if it does not fit the config, or is missing."""
    if isinstance(draft, ForcedDrafts) and not config.draft_masks:
        raise ValueError(f"Engine.draft: got {FORCED!r} with draft_masks=False, expected draft_masks=True: its drafts come from the masks")
    if draft is not None and not hasattr(draft, "propose") and not hasattr(draft, "forward"):
        draft = _function_proposer(draft, config)
    if draft is not None:
        check_members("Engine.draft", draft, DraftModel if hasattr(draft, "forward") and not isinstance(draft, Proposer) else Proposer)
    if config.look_up and isinstance(draft, Proposer):
        expected = "expected 0: it needs a draft model; draft='ngram' looks up without one"
        raise ValueError(f"EngineConfig.look_up: got {config.look_up} with the drafter {type(draft).__name__}, {expected}")
    return cast("DraftModel | Proposer | None", draft)


def named_proposer(name: str, reason: str = "") -> Proposer | None:
    """The drafter for one of DRAFTER_NAMES. reason: why "auto" chose look-up, for the capture report."""
    if name not in DRAFTER_NAMES:
        names = ", ".join(map(repr, DRAFTER_NAMES))
        raise ValueError(f"Engine.draft: got {clip_repr(name)}, expected a draft model, a proposer, a function, or one of {names}")
    if name == NONE:
        return None
    if name == FORCED:
        return ForcedDrafts()
    return NgramLookup(why=reason or AUTO if name == AUTO else "")


def without_drafts(config: EngineConfig) -> EngineConfig:
    for name in ("forced_acceptance", "look_up"):
        if value := getattr(config, name):
            raise ValueError(f"EngineConfig.{name}: got {value} without a draft, expected {getattr(EngineConfig, name)}")
    return replace(config, num_speculative_tokens=0, draft_length=0)


def check_models(models: Models, backend: Backend, limits: Limits) -> None:
    """ValueError for tensors on another device, for active dropout, which a CUDA graph would freeze and the tape cannot record, for
    attributes of wrong types, and for the cache of a draft with advances = False."""
    for name, model in (("target", models.target), ("draft", models.drafter)):
        other_devices = [device for device in devices_of(model) if device != backend.device]
        if other_devices:
            expected = f"{backend.device}, the device of the {backend.name} backend"
            raise ValueError(f"Engine.{name}: got tensors on {other_devices[0]}, expected {expected}")
        modules: Iterable[tuple[str, nn.Module]] = model.named_modules() if isinstance(model, nn.Module) else ()
        for module_name, module in modules:
            for tensor_name, tensor in [*module.named_parameters(module_name, False), *module.named_buffers(module_name, False)]:
                check_constant(f"Engine.{name}.{tensor_name}", tensor)
            if isinstance(module, _DropoutNd) and module.training and module.p > 0:
                raise ValueError(f"Engine.{name}: {module_name or type(module).__name__} is dropout in training mode; call .eval() first")
        if model is not None:
            check_value(f"Engine.{name}.cache_specs", model.cache_specs(limits), _SPECS)
        for attribute in (attribute for attribute in _ATTRIBUTES if hasattr(model, attribute)):
            check_value(f"Engine.{name}.{attribute}", getattr(model, attribute), _ATTRIBUTES[attribute])
    for name, model in (("target", models.target), ("draft", models.draft)):
        if limits.kv_cache_dtype == FLOAT8 and model is not None and all(spec.dtype is not ENTRIES for spec in model.cache_specs(limits)):
            why = f"the {name} does not declare its cache by `cache_specs` of stepgraph.graphs.model"
            raise ValueError(f"EngineConfig.kv_cache_dtype: got {FLOAT8!r}, expected 'auto': {why}")
    draft = models.draft
    if draft is not None and not getattr(draft, "advances", True) and (specs := draft.cache_specs(limits)):
        names, reason = ", ".join(spec.name for spec in specs), "drafts would overwrite the entry of the text's last token"
        raise ValueError(f"Engine.draft.cache_specs: got {names} with advances = False, expected none: {reason}")


def checked_vocabulary_size(models: Models, vocabulary: Vocabulary | None) -> int:
    """The number of tokens. ValueError for sizes of the target that are none, and unless the draft has the target's vocabulary, or maps
    its own to it by d2t."""
    target, draft = models.target, models.draft
    check_value("Engine.target.vocab_size", target.vocab_size, whole(1))
    check_value("Engine.target.feature_size", target.feature_size, whole(0))
    if vocabulary is not None and vocabulary.logits_width != target.vocab_size:
        expected = f"the target's vocab_size {target.vocab_size}"
        raise ValueError(f"Engine.vocabulary: its logits_width is {vocabulary.logits_width}, expected {expected}")
    num_tokens = len(vocabulary.tokens) if vocabulary else target.vocab_size
    if draft is None:
        return num_tokens
    if draft.d2t is None:
        if draft.vocab_size != target.vocab_size:
            expected = f"the target's {target.vocab_size}, or a d2t that maps the draft's tokens to the target's"
            raise ValueError(f"Engine.draft: its vocab_size is {draft.vocab_size}, expected {expected}")
        return num_tokens
    check_value("Engine.draft.d2t", draft.d2t, _D2T)
    ids = draft.d2t.tolist()
    if len(ids) != draft.vocab_size or draft.d2t.dtype != torch.int64:
        raise ValueError(f"Engine.draft.d2t: got {len(ids)} entries of {draft.d2t.dtype}, expected {draft.vocab_size} of torch.int64")
    if len(set(ids)) != len(ids) or not all(0 <= token < num_tokens for token in ids):
        expected = f"distinct ids from 0 to {num_tokens - 1}"
        raise ValueError(f"Engine.draft.d2t: got repeated ids or ids beyond the vocabulary, expected {expected}")
    return num_tokens


def forces_drafts(config: EngineConfig, models: Models, vocabulary: Vocabulary | None) -> bool:
    """Whether grammars propose forced drafts. Each mask must then be filled before its draft is chosen."""
    if not config.draft_masks or models.drafter is None or vocabulary is None or isinstance(models.proposer, FunctionProposer):
        return False
    default = models.proposer is not None
    return (default if config.forced_drafts is None else config.forced_drafts) or isinstance(models.proposer, ForcedDrafts)


def _function_proposer(function: DraftFunction, config: EngineConfig) -> FunctionProposer:
    if not callable(function):
        raise ValueError(f"Engine.draft: got {type(function).__name__}, expected a draft model, a proposer, a function or a name")
    if config.num_speculative_tokens and config.rounds_in_flight != 1:
        expected = "expected rounds_in_flight=1: the function needs the tokens of all earlier rounds"
        raise ValueError(f"Engine.draft: got a function with rounds_in_flight={config.rounds_in_flight}, {expected}")
    if config.num_speculative_tokens and config.forced_drafts:
        expected = "expected forced_drafts=False: the function supplies whole chains between rounds"
        raise ValueError(f"Engine.draft: got a function with forced_drafts=True, {expected}")
    return FunctionProposer(function)


def devices_of(model: object) -> list[torch.device]:
    return [tensor.device for tensor in (*model.parameters(), *model.buffers())] if isinstance(model, nn.Module) else []
