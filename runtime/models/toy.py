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
from stepgraph.sampling.fields import check_value, number
from stepgraph.sampling.kernels.operation import operation

_HASH_BITS = 42  # exact in float64, the type of hidden states
_MASK = (1 << _HASH_BITS) - 1
_FACTOR, _GATE = 0x2545F4914F6CDD1D, -0x71BA30AC78285ACA  # _GATE is _salted(0x5851F42D)


class ToyTarget(nn.Module):
    """A target whose logits depend on all previous tokens. biases: added to the logits of some tokens, by id."""

    batch_invariant = True

    def __init__(self, vocab_size: int, seed: int = 0, biases: Mapping[int, float] | None = None) -> None:
        super().__init__()
        self.vocab_size, self.seed = vocab_size, seed
        self.feature_size, self.hidden_size, self.feature_dtype = 1, 1, torch.float64
        self.register_buffer("bias", torch.tensor([(biases or {}).get(token, 0.0) for token in range(vocab_size)]))
        self.register_buffer("salts", _salted(torch.arange(vocab_size) + seed * 1_000_003), persistent=False)
        self.bias: Tensor
        self.salts: Tensor

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec("toy_target_cache", (limits.cache_slots,), torch.int64),)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        cache = buffers.toy_target_cache
        cache.index_put_((inputs.slots,), inputs.tokens)
        hidden = toy_target_hidden(inputs.positions, cache.view(-1, inputs.page_size), inputs.block_tables)
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return toy_target_logits(hidden, self.salts, self.bias)


class ToyDraft(nn.Module):
    """A draft that agrees with its target on a share of all prefixes, if its cache and features are right.

    agreement: that share; other prefixes use another hash. d2t: the target ids of the draft's tokens; None for the
    target's vocabulary.
    """

    batch_invariant = True

    def __init__(self, target: ToyTarget, agreement: float = 1.0, d2t: Sequence[int] | None = None, seed: int = 1) -> None:
        super().__init__()
        check_value("ToyDraft.agreement", agreement, number(0, 1))
        self.target, self.agreement, self.seed = target, agreement, seed
        self.vocab_size = target.vocab_size if d2t is None else len(d2t)
        self.register_buffer("d2t", None if d2t is None else torch.tensor(d2t, dtype=torch.int64))
        self.register_buffer("salts", _salted(torch.arange(target.vocab_size) + seed * 1_000_003), persistent=False)
        self.d2t: Tensor | None
        self.salts: Tensor

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]:
        return (BufferSpec("toy_draft_cache", (limits.cache_slots,), torch.int64),)

    def forward(self, inputs: ModelInput, buffers: StaticBuffers) -> ModelOutput:
        assert inputs.features is not None
        cache = buffers.toy_draft_cache
        cache.index_put_((inputs.slots,), inputs.tokens)
        entries = cache.view(-1, inputs.page_size)
        hidden = toy_draft_hidden(inputs.positions, entries, inputs.block_tables, inputs.features, inputs.tokens)
        return ModelOutput(hidden, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = toy_draft_logits(hidden, self.salts, self.target.salts, self.target.bias, round(self.agreement * 1000))
        return logits if self.d2t is None else logits[..., self.d2t]


def _empty_hidden(positions: Tensor, *_: object) -> Tensor:
    return positions.new_empty((*positions.shape, 1), dtype=torch.float64)


def _empty_logits(hidden: Tensor, salts: Tensor, *_: object) -> Tensor:
    return hidden.new_empty((*hidden.shape[:-1], len(salts)), dtype=torch.float32)


# One operation each: a tape takes longer to record their operations of torch than to run them.


@operation(_empty_hidden, whole=True)
def toy_target_hidden(positions: Tensor, pages: Tensor, block_tables: Tensor) -> Tensor:
    """The hash of the prefix up to each position, of the toy target: [B, Q, 1]."""
    return _prefix_hash(positions, pages, block_tables)[..., None].to(torch.float64)


@operation(_empty_hidden, whole=True)
def toy_draft_hidden(positions: Tensor, pages: Tensor, block_tables: Tensor, features: Tensor, tokens: Tensor) -> Tensor:
    """The hash of the prefix up to each position, of the toy draft, which needs the target's hidden states as features: [B, Q, 1]."""
    own = _prefix_hash(positions, pages, block_tables)
    expected = (features[..., 0].to(torch.int64) + hash_pair(tokens, positions)) & _MASK
    return torch.where(own == expected, own, own ^ 1)[..., None].to(torch.float64)  # after a wrong feature or cache entry no draft agrees


@operation(_empty_logits, whole=True)
def toy_target_logits(hidden: Tensor, salts: Tensor, bias: Tensor) -> Tensor:
    """Logits of the toy target [B, Q, V]."""
    return _logits(hidden.to(torch.int64) * _FACTOR, salts) + bias


@operation(_empty_logits, whole=True)
def toy_draft_logits(hidden: Tensor, salts: Tensor, target_salts: Tensor, target_bias: Tensor, agreeing: int) -> Tensor:
    """Logits of the toy draft [B, Q, V]: those of the target after `agreeing` of a thousand prefixes."""
    scaled = hidden.to(torch.int64) * _FACTOR
    agrees = ((_mix(scaled + _GATE) & _MASK) >> 12) % 1000 < agreeing
    logits = _logits(scaled, torch.where(agrees, target_salts, salts))
    return torch.where(agrees, logits + target_bias, logits)


def _prefix_hash(positions: Tensor, pages: Tensor, block_tables: Tensor) -> Tensor:
    """[B, Q] hash of the cached tokens up to and including each position."""
    entries = pages[block_tables].flatten(1)
    places = torch.arange(entries.shape[1], device=pages.device)
    return hash_pair(entries, places).cumsum(1).gather(1, positions) & _MASK


def hash_pair(values: Tensor, salt: Tensor) -> Tensor:
    """An integer hash, of which the low _HASH_BITS are kept. Overflow wraps around on every device."""
    return _mix(values * _FACTOR + _salted(salt))


def _salted(salt: Tensor) -> Tensor:
    return salt * 0x1B873593CC9E2D51 + 0x165667B19E3779F9


def _mix(value: Tensor) -> Tensor:
    mixed = (value ^ (value >> 29)) * 0x3F58476D1CE4E5B9
    return mixed ^ (mixed >> 32)


def _logits(scaled: Tensor, salts: Tensor) -> Tensor:
    return ((_mix(scaled + salts) >> 18) & 0xFFFFFF).to(torch.float32) / (1 << 21)
