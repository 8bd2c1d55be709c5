"""A complete model as a draft, and the mapping between its vocabulary and the target's."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.model_call import ModelInput, ModelOutput
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class TokenMap(NamedTuple):
    """A mapping between the token ids of a target and a draft. N: tokens that the draft can propose."""

    draft_ids: Tensor  # [target's logits_width] int64, the draft's id of each target token
    proposable: Tensor  # [N] int64, the draft ids that have a target token
    d2t: Tensor  # [N] int64, the target ids of `proposable`


class TokenMapped(nn.Module):
    """A draft that reads tokens only and ignores the target's features. A base class, listed before the class of a target model."""

    vocab_size: int

    def set_token_map(self, token_map: TokenMap | None, device: str | torch.device) -> None:
        """Called once, in __init__. token_map: None if the draft has the target's vocabulary."""
        for name in TokenMap._fields:
            self.register_buffer(name, None if token_map is None else getattr(token_map, name).to(device), persistent=False)
        self.draft_ids: Tensor | None
        self.proposable: Tensor | None
        self.d2t: Tensor | None
        if token_map is not None:
            self.vocab_size = len(token_map.proposable)

    @property
    def notes(self) -> tuple[str, ...]:
        tokens = "the target's vocabulary" if self.d2t is None else f"{self.vocab_size} tokens with the bytes of a target token"
        layers = cast("LlamaConfig", self.config).num_layers
        return (f"draft: a model of {layers} layers with {tokens}", *getattr(super(), "notes", ()))

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        tokens = inputs.tokens if self.draft_ids is None else self.draft_ids[inputs.tokens]
        output: ModelOutput = super().forward(inputs._replace(tokens=tokens), buffers)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = super().logits(hidden)  # type: ignore[misc]
        return logits if self.proposable is None else logits[..., self.proposable]


class DraftLlama(TokenMapped, Llama):
    def __init__(self, config: LlamaConfig, token_map: TokenMap | None = None, *, device: str | torch.device = "cpu") -> None:
        super().__init__(config, name="draft", device=device)
        self.set_token_map(token_map, device)


def map_tokens(draft: Vocabulary, target: Vocabulary) -> TokenMap | None:
    """Map tokens with equal bytes onto each other; text tokens and control tokens are kept apart.

    Returns None if the vocabularies are equal. A target token without bytes is never part of a text: it maps to the same id,
    or to id 0. Raises ValueError if the draft lacks another token of the target.
    """
    if draft.tokens == target.tokens and draft.logits_width == target.logits_width:
        return None
    draft_id_of: dict[tuple[bytes, bool], int] = {}
    for draft_id, content in enumerate(draft.tokens):
        draft_id_of.setdefault((content, draft_id in draft.non_text_ids), draft_id)
    draft_ids, missing = [0] * target.logits_width, list[int]()
    target_id_of: dict[int, int] = {}  # by the draft's id
    for token, content in enumerate(target.tokens):
        key = (content, token in target.non_text_ids)
        same_id = token < len(draft.tokens) and (draft.tokens[token], token in draft.non_text_ids) == key
        found = token if same_id else draft_id_of.get(key) if content else 0
        if found is None:
            missing.append(token)
            continue
        draft_ids[token] = found
        if content:
            target_id_of.setdefault(found, token)
    if missing:
        first = f"{missing[0]} {target.tokens[missing[0]]!r:.60}"
        raise ValueError(f"vocabulary: lacks {len(missing)} of the target's {len(target.tokens)} tokens, such as {first}")
    proposable = sorted(target_id_of)
    d2t = [target_id_of[draft_id] for draft_id in proposable]
    return TokenMap(*(torch.tensor(ids, dtype=torch.int64) for ids in (draft_ids, proposable, d2t)))
