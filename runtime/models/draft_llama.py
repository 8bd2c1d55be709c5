"""A whole model of the Llama family that drafts, and how its vocabulary meets the target's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.model import ModelInput, ModelOutput
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class Translation(NamedTuple):
    """Between a target's tokens and a draft's."""

    own_ids: Tensor  # [target's logits_width] int64, the draft's id of each of the target's tokens
    kept: Tensor  # int64, the draft's ids that it may propose
    d2t: Tensor  # int64, the target's id of each of those


class DraftLlama(Llama):
    """A model that reads the text itself: it has no use for the target's states. Without a translation it has the target's ids."""

    def __init__(self, config: LlamaConfig, translation: Translation | None = None, *, device: str | torch.device = "cpu") -> None:
        super().__init__(config, name="draft", device=device)
        own_ids, kept, d2t = (None, None, None) if translation is None else (each.to(device) for each in translation)
        for name, ids in (("own_ids", own_ids), ("kept", kept), ("d2t", d2t)):
            self.register_buffer(name, ids, persistent=False)
        self.own_ids: Tensor | None
        self.kept: Tensor | None
        self.d2t: Tensor | None
        if kept is not None:
            self.vocab_size = len(kept)

    @property
    def notes(self) -> tuple[str, ...]:
        """For the capture report."""
        shared = "the target's vocabulary" if self.d2t is None else f"{self.vocab_size} tokens whose bytes are a target's token's"
        return (f"draft: a model of {self.config.num_layers} layers with {shared}",)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        tokens = inputs.tokens if self.own_ids is None else self.own_ids[inputs.tokens]
        return super().forward(inputs._replace(tokens=tokens), buffers)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        return logits if self.kept is None else logits[..., self.kept]


def translate(draft: Vocabulary, target: Vocabulary) -> Translation | None:
    """Tokens of the same bytes stand for each other; None where all ids already do. ValueError where a token of the target has no equal.

    Text and markers are kept apart. A token of no bytes is never part of a text: it stands for its own id, or for id 0.
    """
    if draft.tokens == target.tokens and draft.logits_width == target.logits_width:
        return None
    known: dict[tuple[bytes, bool], int] = {}
    for own, spelled in enumerate(draft.tokens):
        known.setdefault((spelled, own in draft.non_text_ids), own)
    own_ids, missing = [0] * target.logits_width, []
    meanings: dict[int, int] = {}
    for token, spelled in enumerate(target.tokens):
        key = (spelled, token in target.non_text_ids)
        same = token < len(draft.tokens) and (draft.tokens[token], token in draft.non_text_ids) == key
        found = token if same else known.get(key)
        if spelled and found is None:
            missing.append(token)
        elif spelled and found is not None:
            own_ids[token] = found
            meanings.setdefault(found, token)
        elif same:
            own_ids[token] = token
    if missing:
        first = f"{missing[0]} {target.tokens[missing[0]]!r:.60}"
        raise ValueError(f"got a vocabulary that lacks {len(missing)} of the target's {len(target.tokens)} tokens, such as {first}")
    kept = sorted(meanings)
    return Translation(*(torch.tensor(ids, dtype=torch.int64) for ids in (own_ids, kept, [meanings[own] for own in kept])))
