"""Where an engine's models and memory are: the device, the backend for it, all static buffers, and who drives its matchers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from stepgraph.graphs.attention.choose import AttentionChoice, choose_attention
from stepgraph.graphs.backends import make_backend
from stepgraph.graphs.buffers import StaticBuffers, forced_specs, look_up_specs, round_specs, state_specs
from stepgraph.graphs.capture import Backend
from stepgraph.graphs.model import ModelPair
from stepgraph.graphs.proposing import text_specs
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.extras.states_folder import StatesLayout
from stepgraph.runtime.host_drafts import FunctionProposer
from stepgraph.runtime.models.forced import ForcedDrafts
from stepgraph.runtime.scheduler import RequestObserver
from stepgraph.runtime.slots import Sharing
from stepgraph.sampling import kernels
from stepgraph.sampling.grammar.link.native import open_host_link
from stepgraph.sampling.grammar.link.protocol import HostLink
from stepgraph.sampling.grammar.matchers.forced import Forcing, token_table
from stepgraph.sampling.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from stepgraph.runtime.extras.record import Recording


def backend_for(name: str, models: ModelPair, nvtx: bool = False) -> Backend:
    """`auto` goes where the target is; for a target without tensors, to a GPU where there is one. STEPGRAPH_NVTX=1 is nvtx=True."""
    devices = _devices(models.target)
    if name == "auto" and devices:
        name = "cuda" if devices[0].type == "cuda" else "tape"
    try:
        return make_backend(name, asynchronous=True, nvtx=nvtx or os.environ.get("STEPGRAPH_NVTX") == "1")
    except ValueError as error:
        raise ValueError(f"EngineConfig.{error}") from None


def device_of(model: object) -> torch.device:
    """Where a model's tensors are; the CPU for one without any."""
    return next(iter(_devices(model)), torch.device("cpu"))


def check_device(models: ModelPair, backend: Backend) -> None:
    for name, model in (("target", models.target), ("draft", models.drafter)):
        wrong = [device for device in _devices(model) if device != backend.device]
        if wrong:
            raise ValueError(f"Engine.{name}: got tensors on {wrong[0]}, want {backend.device}, where the {backend.name} backend is")


def attention_for(device: torch.device, config: EngineConfig, models: ModelPair) -> AttentionChoice:
    """Choose what attention runs as for these models; ValueError where what was wished for cannot be."""
    shapes = tuple(shape for model in models for shape in getattr(model, "attends", ()))
    try:
        return choose_attention(device, config.attention, shapes, config.page_size)
    except ValueError as error:
        raise ValueError(f"EngineConfig.{error}") from None


def kernel_notes(device: torch.device, config: EngineConfig, models: ModelPair, attention: AttentionChoice) -> tuple[str, ...]:
    """Choose what the filters run as, before they are captured if any graph has them, and say what the kernels are."""
    told = (f"kernels: {kernels.describe(device)}", *(note for model in models for note in getattr(model, "notes", ())))
    if models.proposer is not None:
        told = (*told, "drafts are proposed whole: no mask guides them, one host node walks them")
    if attention.rounds:
        told = (*told, f"attention: {attention}")
    if config.greedy_only:
        return told
    try:
        return (*told, f"filters: {kernels.choose_filters(device, config.filters)}")
    except ValueError as error:
        raise ValueError(f"EngineConfig.{error}") from None


def check_mode(models: ModelPair) -> None:
    """Dropout is refused here: a graph would freeze it on one device and refuse it on the other."""
    for name, model in (("target", models.target), ("draft", models.drafter)):
        if not isinstance(model, nn.Module):
            continue
        for inner, module in model.named_modules():
            if isinstance(module, _DropoutNd) and module.training and module.p > 0:
                raise ValueError(f"Engine.{name}: {inner or type(module).__name__} drops out in training mode; call .eval() first")


def check_draft(config: EngineConfig, draft: object) -> int:
    """The drafts of a round; ValueError where nobody would make them."""
    drafts = config.num_speculative_tokens
    if drafts and draft is None:
        raise ValueError(f"Engine.draft: got None with num_speculative_tokens={drafts}, want a drafter, or num_speculative_tokens=0")
    return drafts


def sharing_for(config: EngineConfig, models: ModelPair) -> Sharing:
    """How far requests share pages: as asked for, and as the models allow."""
    named = {"target": models.target, "draft": models.draft}
    refused = [name for name, model in named.items() if not getattr(model, "shares_prefix", True)]
    lookahead = int(getattr(models.draft, "lookahead", 0))
    again = int(models.draft is not None and lookahead == 0)
    off = "" if config.prefix_reuse else "EngineConfig.prefix_reuse is False"
    off = off or ("the states of whole texts are saved" if config.save_hidden_states else "")
    off = off or (f"the {refused[0]} has shares_prefix = False" if refused else "")
    return Sharing(off, config.prefix_cache_pages, again, lookahead)


def check_vocabularies(models: ModelPair, vocabulary: Vocabulary | None) -> int:
    """The number of tokens. A draft shares the target's vocabulary, or tells which of its tokens each of its own stands for."""
    target, draft = models.target, models.draft
    if vocabulary is not None and vocabulary.logits_width != target.vocab_size:
        wanted = f"the target's vocab_size {target.vocab_size}"
        raise ValueError(f"Engine.vocabulary: its logits_width is {vocabulary.logits_width}, want {wanted}")
    num_tokens = len(vocabulary.tokens) if vocabulary else target.vocab_size
    if draft is None:
        return num_tokens
    if draft.d2t is None:
        if draft.vocab_size != target.vocab_size:
            wanted = f"the target's {target.vocab_size}, or a d2t that maps the draft's tokens to the target's"
            raise ValueError(f"Engine.draft: its vocab_size is {draft.vocab_size}, want {wanted}")
        return num_tokens
    ids = draft.d2t.tolist()
    if len(ids) != draft.vocab_size or draft.d2t.dtype != torch.int64:
        raise ValueError(f"Engine.draft.d2t: got {len(ids)} entries of {draft.d2t.dtype}, want {draft.vocab_size} of torch.int64")
    if len(set(ids)) != len(ids) or not all(0 <= token < num_tokens for token in ids):
        raise ValueError(f"Engine.draft.d2t: got repeated ids or ids beyond the vocabulary, want distinct ids from 0 to {num_tokens - 1}")
    return num_tokens


def forces_drafts(config: EngineConfig, models: ModelPair, vocabulary: Vocabulary | None) -> bool:
    """Whether grammars propose the drafts that they force: each mask has to be there before its draft is chosen."""
    if not config.draft_masks or models.drafter is None or vocabulary is None or isinstance(models.proposer, FunctionProposer):
        return False
    unset = models.proposer is not None if config.forced_drafts is None else config.forced_drafts
    return unset or isinstance(models.draft, ForcedDrafts)


def make_buffers(
    limits: Limits, models: ModelPair, backend: Backend, greedy_only: bool, saved: StatesLayout | None = None, forced: bool = False
) -> StaticBuffers:
    """The round's spec table, the models' own caches and what is saved; the models' weights as constants."""
    everybody = (("target", models.target), ("draft", models.drafter), ("look_up", models.look_up))
    named = {name: model for name, model in everybody if model is not None}
    drawn = not greedy_only and models.proposer is None
    specs = [*round_specs(limits, drawn), *[spec for model in named.values() for spec in model.cache_specs(limits)]]
    specs += text_specs(limits) if models.reads_text else ()
    specs += look_up_specs(limits) if models.look_up is not None else ()
    if saved:
        specs += state_specs(limits, saved.width, models.target.feature_dtype)
    specs += forced_specs(limits) if forced else ()
    constants = {name: model for name, model in named.items() if isinstance(model, nn.Module)}
    return StaticBuffers(specs, backend.device, constants)


def make_host_link(config: EngineConfig, buffers: StaticBuffers, limits: Limits, vocabulary: Vocabulary | None = None) -> HostLink:
    pinned = (buffers.state_host, buffers.drafts_host, buffers.masks_host, buffers.tags_host)
    forcing = Forcing(token_table(vocabulary), buffers.forced_host) if vocabulary and "forced_host" in buffers else None
    return open_host_link(config.host_link, *pinned, depth=limits.ring_depth, forcing=forcing, check_masks=config.check_masks)


def observer_for(
    record: Recording | str | Path | None, config: EngineConfig, models: ModelPair, vocabulary: Vocabulary | None, backend: Backend
) -> RequestObserver | None:
    """The recorder for Engine(record=...); its module is imported only if something is recorded."""
    if record is None:
        return None
    from stepgraph.runtime.extras.record import open_recorder

    return open_recorder(record, config, models, vocabulary, backend)


def _devices(model: object) -> list[torch.device]:
    return [tensor.device for tensor in (*model.parameters(), *model.buffers())] if isinstance(model, nn.Module) else []
