"""A seeded toy target and draft for tests and examples. Logits are an integer hash of the whole prefix.

The prefix is read back from the paged cache, so a wrong slot, position or length changes the tokens at once. Integer sums
make results independent of batch size, chunking and device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from stepgraph.graphs.buffer_spec import BufferSpec
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.graphs.model_call import ModelInput, ModelOutput

_LIMBS = 3  # a hash of 42 bits as three floats of 14 bits each: exact in float32
_HASH_BITS = 42
_GATE = 0x5851F42D


class ToyTarget(nn.Module):
    """A target whose logits depend on all previous tokens. biases: added to the logits of some tokens, by id."""

    batch_invariant = True

    def __init__(self, vocab_size: int, seed: int = 0, biases: Mapping[int, float] | None = None) -> None:
        super().__init__()
        self.vocab_size, self.seed = vocab_size, seed
        self.feature_size, self.hidden_size, self.feature_dtype = _LIMBS, _LIMBS, torch.float32
        bias = torch.zeros(vocab_size)
        for token, value in (biases or {}).items():
            bias[token] = value
        self.register_buffer("bias", bias)
        self.bias: Tensor

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec("toy_target_cache", (limits.cache_slots,), torch.int64),)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        hidden = _to_limbs(_prefix_hash(inputs, buffers.toy_target_cache))
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return _logits(_from_limbs(hidden), self.vocab_size, self.seed) + self.bias


class ToyDraft(nn.Module):
    """A draft that agrees with its target on a share of all prefixes, if its cache and features are right.

    agreement: that share; for other prefixes it uses another hash. d2t: the target ids of the draft's tokens; None for the
    target's vocabulary.
    """

    batch_invariant = True

    def __init__(self, target: ToyTarget, agreement: float = 1.0, d2t: Sequence[int] | None = None, seed: int = 1) -> None:
        super().__init__()
        if not 0.0 <= agreement <= 1.0:
            raise ValueError(f"ToyDraft.agreement: got {agreement}, expected a number from 0 to 1")
        self.target, self.agreement, self.seed = target, agreement, seed
        self.vocab_size = target.vocab_size if d2t is None else len(d2t)
        self.register_buffer("d2t", None if d2t is None else torch.tensor(d2t, dtype=torch.int64))
        self.d2t: Tensor | None

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec("toy_draft_cache", (limits.cache_slots,), torch.int64),)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        own = _prefix_hash(inputs, buffers.toy_draft_cache)
        expected = _fold(_from_limbs(inputs.features) + _mix(inputs.tokens, inputs.positions))
        hidden = _to_limbs(torch.where(own == expected, own, own ^ 1))  # a wrong feature or cache entry ends all agreement
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        prefix = _from_limbs(hidden)
        other = _logits(prefix, self.target.vocab_size, self.seed)
        agrees = (_mix(prefix, torch.full_like(prefix, _GATE)) >> 12) % 1000 < round(self.agreement * 1000)
        logits = torch.where(agrees[..., None], self.target.logits(hidden), other)
        return logits if self.d2t is None else logits[..., self.d2t]


def _prefix_hash(inputs: ModelInput, cache: Tensor) -> Tensor:
    """[B, Q] hash of the cached tokens up to and including each position."""
    cache.index_put_((inputs.slots,), inputs.tokens)
    pages, page_size = inputs.block_tables.shape[1], inputs.page_size
    offsets = torch.arange(page_size, device=cache.device)
    entries = cache[(inputs.block_tables[:, :, None] * page_size + offsets).flatten(1)]
    positions = torch.arange(pages * page_size, device=cache.device)
    return _fold(_mix(entries, positions).cumsum(1).gather(1, inputs.positions))


def _mix(values: Tensor, salt: Tensor) -> Tensor:
    """Integer hash of a pair. Overflow wraps around on every device."""
    mixed = values * 0x2545F4914F6CDD1D + salt * 0x1B873593CC9E2D51 + 0x165667B19E3779F9
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) & ((1 << _HASH_BITS) - 1)


def _fold(value: Tensor) -> Tensor:
    return value & ((1 << _HASH_BITS) - 1)


def _to_limbs(prefix: Tensor) -> Tensor:
    shifts = torch.arange(_LIMBS, device=prefix.device) * (_HASH_BITS // _LIMBS)
    return ((prefix[..., None] >> shifts) & ((1 << (_HASH_BITS // _LIMBS)) - 1)).to(torch.float32)


def _from_limbs(hidden: Tensor) -> Tensor:
    shifts = torch.arange(_LIMBS, device=hidden.device) * (_HASH_BITS // _LIMBS)
    return (hidden.to(torch.int64) << shifts).sum(-1)


def _logits(prefix: Tensor, vocab_size: int, seed: int) -> Tensor:
    tokens = torch.arange(vocab_size, device=prefix.device) + seed * 1_000_003
    return ((_mix(prefix[..., None], tokens) >> 18) & 0xFFFFFF).to(torch.float32) / (1 << 21)
