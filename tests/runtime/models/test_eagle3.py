"""EAGLE-3 heads compared with a reference implementation of the paper."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama_config import Eagle3Config, LlamaConfig, RopeConfig
from tests.helpers.draft_oracles import CachedDraft, check_chunking, close, eagle3_logits, text
from tools.random_weights import randomised
from tools.train.saving import layer_fields, save_eagle3

LAYER = LlamaConfig(60, 32, 40, 4, 2, 8, (None,), norm_epsilon=1e-5, rope=RopeConfig(500.0))
D2T = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:24].sort().values


def head(norm_before_residual: bool = False) -> Eagle3:
    config = Eagle3Config(LAYER, (1, 0, 3), 20, len(D2T), norm_before_residual)
    return randomised(Eagle3(config, d2t=D2T), 3)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_logits_equal_the_reference_at_every_step(tmp_path: Path, norm_before_residual: bool) -> None:
    """The reference reads the saved file, so this also checks the tensor names."""
    model = head(norm_before_residual)
    tensors = load_file(save_eagle3(tmp_path, model, own_embedding=True) / "model.safetensors")
    fields = layer_fields(LAYER) | {"norm_before_residual": norm_before_residual}
    tokens, features = text(60)
    drafts = torch.tensor([[5, 9, 0, 59, 7, 7], [1, 1, 2, 30, 31, 8]])
    drafting = CachedDraft(model, 60)
    logits, last = drafting.read(tokens, features, 41)
    reference = drafting.draft(41, drafts, last)
    for row in range(2):
        history, drafted = tokens[row].tolist(), drafts[row].tolist()
        whole, *chain = eagle3_logits(tensors, fields, features[row], history, drafted, tensors["embed_tokens.weight"])
        assert close(logits[row, 1:], whole)
        assert all(close(ours[row], theirs) for ours, theirs in zip(reference, chain, strict=True)), row


def test_bits_are_independent_of_chunking_and_batch() -> None:
    check_chunking(CachedDraft(head(), 60), 60, torch.tensor([[5, 9, 0], [1, 1, 2]]))
