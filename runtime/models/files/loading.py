"""Loads the models of `Engine.from_pretrained`: opens and checks all files, reports the memory they need, then loads the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from stepgraph.graphs.errors import MEMORY_SETTINGS
from stepgraph.graphs.layers.quantised import count_weights
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.memory import available_bytes, check_memory
from stepgraph.graphs.model import TargetModel
from stepgraph.runtime.check_models import AUTO, CONFIG, DRAFTER_NAMES, NONE, Drafter, checked_drafter, named_proposer, without_drafts
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.demo.pair import DEMO, DRAFTS, head_path, model_path
from stepgraph.runtime.models.files.checkpoint import DEQUANTISED, QUANTISED, WeightsMode
from stepgraph.runtime.models.files.draft import OWN_MTP, StoredDraft, open_draft
from stepgraph.runtime.models.files.transformers_folder import AUTO as AUTO_CLASS
from stepgraph.runtime.models.files.transformers_folder import Implementation, Target, open_target
from stepgraph.runtime.printing import print_error
from stepgraph.sampling.fields import BOOL, Check, check_value, checked_path, is_int, one_of
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.kernels.triton import why_no_triton

Divide = Callable[[Target, StoredDraft | None], tuple[Target, StoredDraft | None]]
_LAYERS = Check(lambda value: isinstance(value, (tuple, list)) and all(map(is_int, value)), "a tuple of layer numbers")


class Loaded(NamedTuple):
    target: TargetModel
    draft: Drafter | None
    vocabulary: Vocabulary
    config: EngineConfig


def load_models(
    path: str | Path,
    draft: Drafter | str | Path | None,
    config: EngineConfig | None,
    *,
    dtype: torch.dtype | None = None,
    feature_layers: Sequence[int] = (),
    progress: bool = False,
    weights: WeightsMode = DEQUANTISED,
    implementation: Implementation = AUTO_CLASS,
    divide: Divide = lambda target, draft: (target, draft),
    vocabulary: Callable[[Vocabulary], Vocabulary] = lambda found: found,
) -> Loaded:
    """A target and its drafter on the device of the config's backend. "demo" is the pair of the demonstration.

    config: None for the defaults, reduced to the positions and drafts that the models support. draft: "auto" uses the MTP
    modules in the target's folder, or n-gram look-up if there are none. weights: quantised ones are kept QUANTISED or DEQUANTISED.
    implementation: of the target, as in `open_target`. divide: returns the parts of the opened target and draft to load.
    vocabulary: maps the vocabulary in the files to that of the engine.
    """
    check_value("Engine.config", config, CONFIG)
    check_value("progress", progress, BOOL)
    check_value("feature_layers", feature_layers, _LAYERS)
    if isinstance(draft, Path) or (isinstance(draft, str) and draft not in (*DRAFTER_NAMES, OWN_MTP)):
        checked_path("draft", draft)
    if draft == AUTO and config is not None and not config.num_speculative_tokens:
        draft = NONE
    if path == DEMO:
        draft, dtype = head_path() if draft == AUTO else draft, dtype or torch.bfloat16
    backend = "auto" if config is None else config.backend
    on_cuda = uses_cuda(backend)
    _check_weights(weights, on_cuda)
    checkpoint = open_target(model_path(path), dtype, weights, implementation)
    if draft in (None, NONE) and config is not None:
        config = without_drafts(config)
    drafter, draft_checkpoint = _open_drafter(draft, checkpoint, dtype, weights)
    checkpoint, draft_checkpoint = divide(checkpoint, draft_checkpoint)
    if draft_checkpoint is not None:
        draft_layers = draft_checkpoint.feature_layers
        if tuple(feature_layers) not in ((), draft_layers):
            raise ValueError(f"feature_layers: got {tuple(feature_layers)}, expected none, as the draft determines them: {draft_layers}")
        feature_layers = draft_layers
    if config is None:
        config = _default_config(checkpoint, draft_checkpoint, drafter, DRAFTS if path == DEMO else EngineConfig.num_speculative_tokens)
    if draft_checkpoint is None:
        drafter = checked_drafter(drafter, config)
    outline = checkpoint.outline(feature_layers)
    limits = config.limits(outline.vocab_size, len(checkpoint.vocabulary.tokens), outline.feature_size)
    needs = [memory_need(checkpoint.path.name, outline, limits)]  # raises ValueError if a model does not support these limits
    if draft_checkpoint is not None:
        name = f"{draft_checkpoint.path.name}: {draft_checkpoint.kind}"
        needs.append(memory_need(name, draft_checkpoint.outline(outline), limits, shared=outline))
    if progress:
        print_error("\n".join(need.note for need in needs))
    device = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0) if on_cuda else torch.device("cpu")
    _check_memory(config, limits, sum(need.weights for need in needs), sum(need.cache for need in needs), device)
    target = checkpoint.load(device, feature_layers, progress)
    if draft_checkpoint is not None:
        drafter = draft_checkpoint.load(target, device, progress)
    return Loaded(target, drafter, vocabulary(checkpoint.vocabulary), config)


class MemoryNeed(NamedTuple):
    weights: int  # bytes
    cache: int
    note: str  # one line for the user


def memory_need(name: str, outline: Any, limits: Limits, shared: nn.Module | None = None) -> MemoryNeed:
    """outline: the model on the meta device, counted without the parameters that it shares with the module `shared`."""
    own = own_parameters(outline, shared)
    weights, cache = sum(parameter.nbytes for parameter in own), sum(spec.nbytes for spec in outline.cache_specs(limits))
    kinds, unit = {str(parameter.dtype).removeprefix("torch.") for parameter in own}, 2**30
    types = " and ".join(sorted("quantised numbers" if kind == "uint8" else kind for kind in kinds))
    parameters = f"{sum(map(count_weights, own)) / 1e6:.1f}M weights of {types}, {weights / unit:.2f} GiB"
    return MemoryNeed(weights, cache, f"{name}: {parameters}; cache for {limits.cache_slots} tokens, {cache / unit:.2f} GiB")


def own_parameters(model: nn.Module, shared: nn.Module | None = None) -> list[nn.Parameter]:
    """The parameters that a model does not share with the module `shared`."""
    others = set() if shared is None else set(shared.parameters())
    return [parameter for parameter in model.parameters() if parameter not in others]


def _check_memory(config: EngineConfig, limits: Limits, weights: int, cache: int, device: torch.device) -> None:
    """ValueError if weights and cache do not fit on the device; it names the settings of the cache if the weights alone fit."""
    available = available_bytes(device)
    if available is not None and weights <= available < weights + cache:
        names = ("max_rows", "max_length") if config.num_pages is None else ("num_pages", "page_size")
        settings = " and ".join(f"{name}={getattr(config, name)}" for name in names)
        most = (available - weights) * limits.cache_slots // cache
        raise ValueError(
            f"EngineConfig: got {settings}, a cache of {limits.cache_slots:,} tokens with {cache:,} bytes on {device}, expected at most "
            f"{most:,} tokens: {available:,} bytes are available, of which the weights take {weights:,}; lower {MEMORY_SETTINGS}"
        )
    check_memory("path", weights + cache, device, "; load a smaller model")


def uses_cuda(backend: str) -> bool:
    """Whether an EngineConfig.backend is a GPU."""
    return backend == "cuda" or (backend == "auto" and torch.cuda.is_available())


def _check_weights(weights: WeightsMode, on_cuda: bool) -> None:
    check_value("weights", weights, one_of(get_args(WeightsMode)))
    if weights == QUANTISED and on_cuda and (why_not := why_no_triton(torch.device("cuda"))):
        raise ValueError(f"weights: got {weights!r}, expected {DEQUANTISED!r}: the product on a GPU is a Triton program: {why_not}")


def _open_drafter(
    draft: Drafter | str | Path | None, checkpoint: Target, dtype: torch.dtype | None, weights: WeightsMode
) -> tuple[Drafter | None, StoredDraft | None]:
    """A drafter that needs no files, or the opened and checked files of a draft."""
    if draft == AUTO and checkpoint.mtp_modules:
        draft = OWN_MTP
    if isinstance(draft, str) and draft in DRAFTER_NAMES:
        return named_proposer(draft, f"auto: {checkpoint.path.name} has no MTP modules"), None
    if isinstance(draft, (str, Path)):
        return None, open_draft(draft, checkpoint, dtype, weights)
    return draft, None


def _default_config(checkpoint: Target, draft: StoredDraft | None, drafter: Drafter | None, drafts: int) -> EngineConfig:
    max_drafts = draft.max_drafts if draft else 0 if drafter is None else drafts
    lengths = [EngineConfig.max_length, checkpoint.config.max_positions, draft.max_positions if draft else None]
    return EngineConfig(
        num_speculative_tokens=min(drafts, max_drafts),
        max_length=min(length for length in lengths if length is not None),
    )
