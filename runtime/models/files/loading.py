"""What `Engine.from_pretrained` makes an engine of: everything opened and checked first, the memory stated, then loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from stepgraph.runtime.build import AUTO, DRAFTER_NAMES, NONE, Drafter, check_config, checked_drafter, named_proposer, without_drafts
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.files.draft import OWN_MTP, open_draft
from stepgraph.runtime.models.llama import Llama
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class Loaded(NamedTuple):
    target: Llama
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
) -> Loaded:
    """A target and its drafter, on the device of the config's backend. No config: the usual one, as far as the models go.

    "auto" takes the MTP modules of the target's own folder, and n-gram look-up where it has none.
    """
    check_config(config)
    checkpoint = open_checkpoint(path, dtype)
    if draft == AUTO and checkpoint.mtp_modules:
        draft = OWN_MTP
    if draft == NONE:
        config = without_drafts(config)
    given: Drafter | None = None
    opened = None
    if isinstance(draft, str) and draft in DRAFTER_NAMES:
        given = named_proposer(draft, f"auto: {checkpoint.path.name} has no MTP modules")
    elif isinstance(draft, (str, Path)):
        opened = open_draft(draft, checkpoint, dtype)
    else:
        given = draft
    if opened is not None:
        if tuple(feature_layers) not in ((), opened.feature_layers):
            raise ValueError(f"feature_layers: got {tuple(feature_layers)}, want none; the draft takes {opened.feature_layers}")
        feature_layers = opened.feature_layers
    if config is None:
        most = opened.most_drafts if opened else 0 if given is None else EngineConfig.num_speculative_tokens
        lengths = [EngineConfig.max_length, checkpoint.config.max_positions, opened.most_positions if opened else None]
        config = EngineConfig(num_speculative_tokens=min(EngineConfig.num_speculative_tokens, most), max_length=min(filter(None, lengths)))
    if opened is None:
        given = checked_drafter(given, config)
    outline = checkpoint.outline(feature_layers)
    limits = config.limits(outline.vocab_size, len(checkpoint.vocabulary.tokens), outline.feature_size)
    for stated in [checkpoint.memory(limits), *([opened.memory(limits)] if opened else [])]:
        if progress:
            print(stated, file=sys.stderr, flush=True)  # where the bar goes
    checkpoint.check(progress)
    if opened is not None:
        opened.check(progress)
    on_cuda = config.backend == "cuda" or (config.backend == "auto" and torch.cuda.is_available())
    device = "cuda:0" if on_cuda else "cpu"
    target = checkpoint.load(device, feature_layers, progress)
    return Loaded(target, opened.load(target, device, progress) if opened else given, checkpoint.vocabulary, config)
