"""MTP modules compared with a reference implementation of the paper."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

from stepgraph.graphs.layers.huge_pages import empty_weight
from stepgraph.graphs.layers.quantised import KINDS, Grouped, pack, unpack
from stepgraph.runtime.models.files.draft_layouts import mtp_slices
from stepgraph.runtime.models.llama_config import LlamaConfig, RopeConfig
from stepgraph.runtime.models.mtp import Mtp
from tests.helpers.draft_oracles import CachedDraft, check_chunking, close, mtp_logits, text
from tools.random_weights import randomised
from tools.train.saving import extract_tensors

LAYER = LlamaConfig(60, 32, 40, 4, 2, 12, (None,), norm_epsilon=1e-5, rope=RopeConfig(500.0), head_norms=True)
FIELDS = {"head_dim": 12, "rope_theta": 500.0, "rms_norm_eps": 1e-5}
DRAFTS = torch.tensor([[5, 9, 0, 59, 7, 7], [1, 1, 2, 30, 31, 8]])


@functools.cache
def modules(count: int) -> Mtp:
    like, made = torch.empty(0), torch.Generator().manual_seed(4)
    embedding, head = empty_weight(like, 60, 32), empty_weight(like, 60, 32)
    with torch.no_grad():
        embedding.copy_(torch.randn(60, 32, generator=made))
        head.copy_(torch.randn(60, 32, generator=made))
    return randomised(Mtp(replace(LAYER, windows=(None,) * count), embedding=embedding, head=head), 2)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_logits_equal_the_reference_at_every_step(count: int) -> None:
    model, (tokens, features) = modules(count), text(32)
    tensors = extract_tensors(model, mtp_slices(model.config, 8))
    drafts = DRAFTS if count == 1 else DRAFTS[:, : count - 1]
    drafting = CachedDraft(model, 32, k=drafts.shape[1] + 1)
    logits, last = drafting.read(tokens, features, 41)
    reference = drafting.draft(41, drafts, last)
    for row in range(2):
        history, drafted = tokens[row].tolist(), drafts[row].tolist()
        layers = range(8, 8 + count)
        whole, *chain = mtp_logits(tensors, FIELDS, layers, features[row], history, drafted, model.embedding, model.head)
        assert close(logits[row, 1:], whole)
        assert len(reference) == len(chain) and all(close(ours[row], theirs) for ours, theirs in zip(reference, chain, strict=True)), row


@pytest.mark.parametrize("count", [1, 3])
def test_bits_are_independent_of_chunking_and_batch(count: int) -> None:
    check_chunking(CachedDraft(modules(count), 32, k=3), 32, DRAFTS[:, :2])


@pytest.mark.parametrize("count", [1, 3])
def test_an_embedding_that_stays_quantised_gives_the_logits_of_its_values(count: int) -> None:
    packed = pack(KINDS["Q8_0"], Grouped(torch.arange(2048).view(64, 32) % 251, torch.full((64, 1), 0.01).half()))
    (tokens, features), found = text(32), []
    for embedding in (packed, unpack(packed)):
        model = copy.deepcopy(modules(count))
        model.embedding = nn.Parameter(embedding, requires_grad=False)
        drafting = CachedDraft(model, 32, k=3)
        logits, last = drafting.read(tokens, features, 41)
        found.append([logits, *drafting.draft(41, DRAFTS[:, :2], last)])
    assert all(torch.equal(kept, dense) for kept, dense in zip(*found, strict=True))
