"""Models of public sizes with random weights, created on the device, and vocabularies of matching size."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from stepgraph import Vocabulary
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig, RopeConfig
from tools.gpu.checks.context import Context

CONTROL_TOKENS = 256
_WORDS = "the of and to in name value type id list item user date time code text data true false null 0 1 12 2024 é ü 漢 字 \\n".split()
_SIGNS = ['"', '": ', '", "', '": "', "{", '{"', "}", "}]", '"}', "},", "[", "]", "[]", "((", "))", "\n\n", ", ", " - "]


@dataclass(frozen=True)
class Shape:
    """A target and an EAGLE-3 head, with the sizes of public checkpoints."""

    target: LlamaConfig
    feature_layers: tuple[int, ...]
    draft_vocabulary: int

    @property
    def head(self) -> Eagle3Config:
        layer = replace(self.target, windows=(None,), tied=False)
        return Eagle3Config(layer, self.feature_layers, self.target.hidden_size, self.draft_vocabulary)


def _llama(hidden: int, middle: int, layers: int, head: int, tied: bool) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=middle,
        num_heads=32,
        num_kv_heads=8,
        head_size=head,
        windows=(None,) * layers,
        norm_epsilon=1e-5,
        rope=RopeConfig(500_000.0),
        tied=tied,
        dtype=torch.bfloat16,
    )


SHAPES = {
    "1B": Shape(_llama(2048, 8192, 16, 64, tied=True), (2, 8, 13), 32_000),  # Llama-3.2-1B
    "8B": Shape(_llama(4096, 14_336, 32, 128, tied=False), (2, 16, 29), 32_000),  # Llama-3.1-8B
}
TINY = Shape(LlamaConfig(160, 64, 96, 4, 2, 16, (None, None), dtype=torch.float32, tied=True), (0, 1, 2), 64)


class Pair(NamedTuple):
    target: Llama
    draft: Eagle3
    vocabulary: Vocabulary

    def round_bytes(self, drafts: int) -> int:
        """Bytes of weights that a round reads: the target once, the head once per draft. Embedding look-ups are negligible."""
        target = sum(weight.nbytes for name, weight in self.target.named_parameters() if name != "embedding" or self.target.config.tied)
        head = {name: weight.nbytes for name, weight in self.draft.named_parameters() if name != "embedding"}
        return target + drafts * sum(head.values()) - max(0, drafts - 1) * head["fuse"]


def shape_of(context: Context, size: str) -> Shape:
    """A rehearsal uses one shape for all sizes, so that checks share its models."""
    return TINY if context.rehearsal else SHAPES[size]


@functools.cache
def pair_of(shape: Shape, device: torch.device) -> Pair:
    target, head = Llama(shape.target, feature_layers=shape.feature_layers, device=device), shape.head
    vocabulary = vocabulary_of(shape.target.vocab_size)
    rng = torch.Generator().manual_seed(shape.draft_vocabulary)
    stops = list(vocabulary.stop_token_ids)
    others = torch.randperm(stops[0], generator=rng)[: head.draft_vocab_size - len(stops)]
    d2t = torch.cat([others, torch.tensor(stops)]).sort().values
    fill(target, 1)
    draft = Eagle3(head, d2t=d2t, embedding=target.embedding, device=device)
    fill(draft, 2, spare=target.embedding)
    return Pair(target, draft, vocabulary)


@torch.no_grad()
def fill(model: nn.Module, seed: int, spare: nn.Parameter | None = None) -> None:
    """Like `randomised`, but on the device: billions of values take minutes on a CPU."""
    weights = [weight for weight in model.parameters() if weight is not spare]
    rng = torch.Generator(device=weights[0].device).manual_seed(seed)
    for weight in weights:
        if weight.dim() > 1:
            weight.normal_(0.0, float(weight.shape[-1]) ** -0.5, generator=rng)
        else:
            weight.fill_(1.0)


@functools.cache
def vocabulary_of(size: int) -> Vocabulary:
    """All bytes, then sequences of words, signs and letters, then control tokens, the first of which is the stop token."""
    if size < 1000:
        return Vocabulary.printable(logits_width=size)
    pick, tokens = random.Random(0), {bytes([code]): None for code in range(256)} | {sign.encode(): None for sign in _SIGNS}
    letters = "abcdefghijklmnopqrstuvwxyz ABCDE_0123456789-()"
    text = size - CONTROL_TOKENS
    while len(tokens) < text:
        pieces = pick.choices([*_WORDS, *_SIGNS, " "], k=pick.randint(1, 2)) + pick.choices(letters, k=pick.randint(0, 5))
        tokens["".join(pieces).encode()] = None
    control = [f"<|control {index}|>".encode() for index in range(CONTROL_TOKENS)]
    return Vocabulary([*tokens, *control], [text], size, [*range(text + 1, size)])
