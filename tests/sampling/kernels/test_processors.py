"""Penalties, biases and stop tokens at every position of a round, against an oracle in plain Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stepgraph import SamplingParams
from stepgraph.sampling import kernels
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import processors
from stepgraph.sampling.kernels.processors import RowSettings
from stepgraph.sampling.sampler import Param
from tests.helpers.oracles import processed

VOCAB = 9


def settings_of(sampling: SamplingParams, prompt: list[int], output: list[int], stops: list[int]) -> RowSettings:
    """The settings of one row after admission and earlier rounds."""
    params = torch.zeros(1, len(Param))
    for column in (Param.REPETITION_PENALTY, Param.PRESENCE_PENALTY, Param.FREQUENCY_PENALTY, Param.MIN_NEW_TOKENS):
        params[0, column] = getattr(sampling, column.name.lower())
    biases, width = sampling.biases, 2 * VOCAB
    unused = [-1] * (width - len(biases))
    return RowSettings(
        params=params,
        bias_ids=torch.tensor([[*biases, *unused]]),
        biases=torch.tensor([[*biases.values(), *[0.0] * len(unused)]]),
        stop_ids=torch.tensor([[*stops, -1]]),
        prompt_seen=torch.bincount(torch.tensor(prompt), minlength=VOCAB)[None] > 0,
        output_counts=torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=VOCAB)[None].to(torch.int32),
        generated=torch.tensor([len(output)]),
    )


tokens = st.integers(0, VOCAB - 1)
numbers = st.integers(-40, 40).map(lambda value: value / 8)
samplings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 2.0, 100.0, 0.01]),
    presence_penalty=st.sampled_from([0.0, 0.5, -2.0, 1.1]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.7, 2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.3, 0.0, 0.1, 100.0]), max_size=4),
    bad_token_ids=st.lists(tokens, max_size=3).map(tuple),
    min_new_tokens=st.integers(0, 9),
)
rows = st.tuples(
    samplings,
    st.lists(tokens, min_size=1, max_size=4),  # prompt
    st.lists(tokens, max_size=6),  # output
    st.lists(tokens, max_size=2, unique=True),  # stop ids
    st.lists(tokens, min_size=3, max_size=3),  # drafts
    st.integers(0, 3),  # number of drafts
    st.lists(st.lists(st.one_of(numbers, st.just(-math.inf)), min_size=VOCAB, max_size=VOCAB), min_size=4, max_size=4),
)


def pair(settings: list[RowSettings]) -> RowSettings:
    """Rows of one batch."""
    padded = max(one.stop_ids.shape[1] for one in settings)
    fields: dict[str, Any] = {
        name: torch.cat([getattr(one, name) for one in settings]) for name in RowSettings._fields if name != "stop_ids"
    }
    stops = [torch.nn.functional.pad(one.stop_ids, (0, padded - one.stop_ids.shape[1]), value=-1) for one in settings]
    return RowSettings(stop_ids=torch.cat(stops), **fields)


@settings(max_examples=100)
@given(batch=st.lists(rows, min_size=1, max_size=2), ids=st.one_of(st.none(), st.permutations(range(VOCAB)).map(lambda ids: ids[:5])))
def test_processed_logits_equal_the_oracle_at_every_position(batch: list[Any], ids: list[int] | None) -> None:
    before = torch.tensor([[*drafts[:count], *[-1] * (3 - count)] for *_, drafts, count, _ in batch])
    settings = pair([settings_of(*row[:4]) for row in batch])
    logits = torch.tensor([row[-1] for row in batch])
    own = torch.arange(VOCAB) if ids is None else torch.tensor(ids)
    d2t = None if ids is None else own
    result = processors.apply_settings(logits[..., own], settings, before, ids=d2t)
    for index in range(4):  # one position at a time, as in the steps of a draft model
        alone = processors.apply_settings(logits[:, index : index + 1, own], settings, before[:, :index], index, d2t)
        assert torch.equal(alone[:, 0], result[:, index])
    for row, (sampling, prompt, output, stops, drafts, count, positions) in enumerate(batch):
        for index in range(count + 1):
            expected = processed(positions[index], sampling, prompt, [*output, *drafts[:index]], stops)
            assert torch.equal(result[row, index], torch.tensor(expected)[own]), (row, index)


def test_defaults_change_no_bit() -> None:
    logits = torch.randn(1, 4, VOCAB, generator=torch.Generator().manual_seed(1))
    settings = settings_of(SamplingParams(temperature=1), [1, 2], [3, 3, 4], [5])
    assert torch.equal(processors.apply_settings(logits, settings, torch.tensor([[3, 1, -1]])), logits)


def test_large_vocabularies_and_half_precision() -> None:
    width = 151_936
    counts = torch.zeros(1, width, dtype=torch.int32)
    counts[0, [7, width - 1]] = torch.tensor([2, 1], dtype=torch.int32)
    settings = settings_of(SamplingParams(frequency_penalty=1.5), [0], [], [])
    settings = settings._replace(prompt_seen=torch.zeros(1, width, dtype=torch.bool), output_counts=counts)
    result = processors.apply_settings(torch.ones(1, 2, width, dtype=torch.bfloat16), settings, torch.tensor([[width - 1]]))
    assert result.dtype == torch.float32
    assert (result[0, :, 7].tolist(), result[0, :, width - 1].tolist()) == ([-2.0, -2.0], [-0.5, -2.0])
    assert float(result.sum()) == 2 * width - 6 - 1.5 - 3


def test_banning_everything_is_a_dead_end_unlike_bad_logits() -> None:
    processed_logits = torch.tensor([[[-math.inf, -math.inf], [-math.inf, 1.0], [-math.inf, math.nan], [-math.inf, -math.inf]]])
    finite = torch.tensor([[True, True, False, False]])
    status = torch.tensor([[MaskStatus.OK] * 4])
    dead = processors.mark_dead_ends(status, finite, processed_logits)
    assert dead.finite.tolist() == [[False, True, False, False]]
    assert dead.status.tolist() == [[MaskStatus.DEAD_END, MaskStatus.OK, MaskStatus.OK, MaskStatus.OK]]
    none = torch.tensor([[MaskStatus.NONE] * 4])
    assert processors.mark_dead_ends(none, finite, processed_logits).status.tolist() == none.tolist()


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_log_probabilities_equal_float64(scale: float) -> None:
    made = torch.Generator().manual_seed(3)
    logits: Tensor = torch.randn(2, 3, VOCAB, generator=made) * scale
    probs = torch.rand(2, 3, VOCAB, generator=made).softmax(-1)
    chosen = torch.randint(0, VOCAB, (2, 3), generator=made)
    found = torch.full((2, 5, 2), -9.0)
    kernels.log_probabilities(logits, probs, chosen, found[:, :3])
    raw, masked = found[:, :3].unbind(-1)
    expected = logits.double().log_softmax(-1).gather(2, chosen[..., None])[..., 0]
    assert torch.allclose(raw.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(masked.exp(), probs.gather(2, chosen[..., None])[..., 0])
