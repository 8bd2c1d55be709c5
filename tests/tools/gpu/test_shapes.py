"""Models, vocabulary and grammars of the measurements of gpu_check: public sizes, and long enough texts."""

from __future__ import annotations

import pytest
import torch

from stepgraph.graphs.context import MAIN
from stepgraph.graphs.spans import NO_ROUND, Span
from stepgraph.runtime.models.eagle3 import Eagle3
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.trace import Timeline
from stepgraph.sampling.grammar import GrammarCompiler, MaskStatus
from tools.gpu.checks.cases import GRAMMARS
from tools.gpu.checks.numbers import MAX_NOISE, Excess, gaps_between_rounds, hidden, worst_of
from tools.gpu.checks.shapes import CONTROL_TOKENS, SHAPES, Pair, vocabulary_of

META = torch.device("meta")


@pytest.mark.parametrize(("size", "parameters"), [("1B", 1_235_814_400), ("8B", 8_030_261_248)])
def test_targets_have_public_parameter_counts(size: str, parameters: int) -> None:
    shape = SHAPES[size]
    target = Llama(shape.target, feature_layers=shape.feature_layers, device=META)
    assert sum(weight.numel() for weight in target.parameters()) == parameters
    head = Eagle3(shape.head, embedding=target.embedding, device=META)
    pair = Pair(target, head, vocabulary_of(160))
    looked_up = 0 if shape.target.tied else target.embedding.nbytes
    assert pair.round_bytes(0) == 2 * parameters - looked_up
    assert pair.round_bytes(1) - pair.round_bytes(0) > pair.round_bytes(3) - pair.round_bytes(2), "states are fused at the first draft only"


def test_gaps_between_rounds_consider_all_streams() -> None:
    def span(round_number: int, start: int, end: int, stream: str = MAIN, kind: str = "stage") -> Span:
        return Span(stream, "x", kind, round_number, start, end)  # type: ignore[arg-type]

    spans = (
        span(1, 0, 4_000),
        span(1, 1_000, 6_000, "side", "host"),
        span(NO_ROUND, 6_000, 8_000),
        span(2, 9_000, 12_000),
        span(3, 11_000, 15_000),
        span(3, 0, 1, "launcher", "launch"),
    )
    assert gaps_between_rounds(Timeline(spans)) == [3.0, 0.0]


def test_each_cell_is_judged_by_its_own_noise() -> None:
    quiet, noisy = Excess(p50=1.03, noise=0.01, p99=1.1, noise_p99=0.02), Excess(p50=1.04, noise=0.2, p99=1.2, noise_p99=0.15)
    assert worst_of([noisy, quiet]) == {"p50": 1.03, "noise": 0.01, "p99": 1.1, "noise_p99": 0.02}


def test_hidden_share_follows_from_round_times() -> None:
    assert hidden([101.0, 111.0, 121.0], [100.0, 110.0, 120.0], 50.0) == {"exposed_us": 1.0, "share_hidden": 0.98, "noise": 0.0}
    assert hidden([99.0, 100.0], [100.0, 101.0], 50.0)["share_hidden"] == 1.0, "a round that is shorter by chance"
    assert hidden([160.0, 260.0], [100.0, 100.0], 50.0) == {"exposed_us": 110.0, "share_hidden": 0.0, "noise": MAX_NOISE}


@pytest.mark.soak
def test_vocabulary_has_the_public_size_and_grammars_last_600_tokens() -> None:
    """600 random legal tokens, as in the GPU checks."""
    vocabulary = vocabulary_of(128_256)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == vocabulary.logits_width == 128_256
    assert len(vocabulary.control_token_ids) + len(vocabulary.stop_token_ids) == CONTROL_TOKENS
    compiler, masks = GrammarCompiler(vocabulary), torch.zeros(1, vocabulary.mask_words, dtype=torch.int32)
    for name, constraint in GRAMMARS.items():
        made = torch.Generator().manual_seed(1)
        matcher = compiler.compile(constraint).matcher()
        for _ in range(600):
            assert matcher.fill_next_token_bitmask(masks, 0) == MaskStatus.OK, name
            bits = (masks[0][:, None] >> torch.arange(32)) & 1
            legal = bits.flatten().nonzero().flatten()
            assert matcher.accept_token(int(legal[torch.randint(0, len(legal), (1,), generator=made)]))
