"""Operations over the tokens of one rank, against the operations over all tokens. The ranks are threads with gloo groups."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stepgraph.graphs.layers.parallel import RankGroups, register_group
from stepgraph.graphs.layers.vocabulary_shard import VocabularyShard, rank_slice
from stepgraph.runtime.parallel.ranks import process_group
from stepgraph.sampling import bitmask, kernels, rng
from stepgraph.sampling.grammar.status import MaskStatus
from stepgraph.sampling.kernels import GrammarMask
from stepgraph.sampling.kernels.processors import RowSettings
from stepgraph.sampling.sampler import Param

SIZE, VOCABULARY, DRAFTS = 3, 1001, 2  # shards of 333, 334 and 334 tokens; the last two do not begin at a word of a mask
ROWS = [
    # temperature, top_k, top_p, min_p
    [1.0, 0, 1, 0],
    [0.7, 5, 1, 0],
    [1.0, 0, 0.9, 0],
    [1.3, 50, 0.5, 0.01],
    [0.0, 0, 1, 0],
    [1.0, 1, 1e-6, 0],
    [2.0, 2**24, 0.999, 1.0],
    [0.3, 700, 0.3, 0],
    [1.0, 0, 1e-50, 0],  # top_p is 0 in float32
]
BATCH = len(ROWS)
Found = dict[str, Tensor]


def on_ranks(folder: Path, run: Callable[[VocabularyShard], Found]) -> list[Found]:
    def one(rank: int) -> Found:
        group = register_group(process_group(str(folder / "store"), rank, SIZE, 30.0), 30.0)
        part = rank_slice(VOCABULARY, rank, SIZE)
        return run(VocabularyShard(torch.arange(part.start, part.stop), part.start, RankGroups(group, group), SIZE, VOCABULARY))

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(one, range(SIZE)))


def logits_of(seed: int) -> Tensor:
    """Many ties; rows with infinity, NaN, and without any legal token."""
    made = torch.randn(BATCH, DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    made[:, 0].round_()
    made[3, 1, 40], made[5, 1, 700], made[2, 2] = float("nan"), float("inf"), float("-inf")
    made[6, 2] = 0.0
    return made


def settings() -> RowSettings:
    made = torch.Generator().manual_seed(5)
    params = torch.zeros(BATCH, len(Param))
    params[:, :4], params[:, Param.REPETITION_PENALTY] = torch.tensor(ROWS), 1.2
    params[:, Param.PRESENCE_PENALTY], params[:, Param.FREQUENCY_PENALTY], params[1, Param.MIN_NEW_TOKENS] = 0.5, 0.25, 9
    bias_ids = torch.stack([torch.randperm(VOCABULARY, generator=made)[:6] for _ in range(BATCH)])
    biases = torch.tensor([[3.0, float("-inf"), -2.0, 1.0, 0.5, 0.25]]).repeat(BATCH, 1)
    seen = torch.rand(BATCH, VOCABULARY, generator=made) < 0.1
    counts = torch.randint(0, 3, (BATCH, VOCABULARY), generator=made, dtype=torch.int32)
    return RowSettings(params, bias_ids, biases, torch.tensor([[2, -1]] * BATCH), seen, counts, torch.arange(BATCH))


def grammar_mask(biases: RowSettings) -> GrammarMask:
    """Row 7 allows only the token that its logit bias forbids; the mask of row 4 has status DEAD_END."""
    legal = torch.rand(BATCH, DRAFTS + 1, VOCABULARY, generator=torch.Generator().manual_seed(6)) < 0.3
    legal[7] = torch.arange(VOCABULARY) == biases.bias_ids[7, 1]
    status = torch.full((BATCH, DRAFTS + 1), int(MaskStatus.OK))
    status[4, 1] = int(MaskStatus.DEAD_END)
    return GrammarMask(bitmask.pack(legal), None, torch.arange(BATCH) % 2 == 1, status)


@pytest.mark.parametrize("seed", range(4))
def test_operations_equal_those_over_all_tokens(tmp_path: Path, seed: int) -> None:
    """Bit for bit, on every rank."""
    logits, given, rows = logits_of(seed), settings(), torch.arange(BATCH)
    mask, seeds, length = grammar_mask(given), torch.arange(BATCH) + 100 * seed, torch.arange(BATCH) * 3
    before = torch.randint(0, VOCABULARY, (BATCH, DRAFTS), generator=torch.Generator().manual_seed(seed))
    drafts, certain = before.clone(), torch.tensor([[True, False]]).repeat(BATCH, 1)
    draft_count, status = torch.full((BATCH,), DRAFTS), torch.full((BATCH, DRAFTS + 1), int(MaskStatus.OK))
    finite = torch.ones(BATCH, DRAFTS + 1, dtype=torch.bool)
    near = logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    draft_distributions = kernels.distribution(near[:, :DRAFTS], given.params)
    drafts[::2] = draft_distributions.argmax(-1)[::2]  # some drafts are accepted

    def part(whole: Tensor, shard: VocabularyShard | None) -> Tensor:
        return whole if shard is None else shard.part(whole).contiguous()

    def run(shard: VocabularyShard | None) -> Found:
        ops, own, row_probs, logprobs = (
            shard or kernels,
            part(logits, shard),
            torch.zeros(BATCH, VOCABULARY),
            torch.zeros(BATCH, DRAFTS + 1, 2),
        )
        found: Found = dict(zip(("finite", "best"), ops.most_probable(own, None), strict=True))
        found |= dict(zip(("legal", "best legal"), ops.most_probable(own, mask), strict=True))
        for name, its in (("", None), (" masked", mask)):
            processed = ops.process(own, given, None, before, 0, its)
            found |= {f"processed{name}": processed.logits, f"finite{name}": processed.finite, f"status{name}": processed.status}
        probs = ops.distribution(processed.logits, given.params)
        found["probs"] = probs
        found["drawn"] = ops.draw(processed.logits[:, 1], given.params, seeds, length, int(rng.Purpose.DRAFT), rows, row_probs)
        found["row_probs"] = part(row_probs, shard)
        target, others = ops.distribution(own, given.params), (finite, drafts, draft_count, status, seeds, length)
        found["tokens"], found["accepted"] = ops.reject_sample(target, draft_distributions, rows, certain, *others)
        found["plain tokens"], _ = ops.reject_sample(target, draft_distributions[:, :0], rows, certain, *others)
        ops.log_probabilities(own, target, found["tokens"], logprobs)
        found["logprobs"] = logprobs
        return found

    expected = run(None)
    assert {0, DRAFTS} <= set(expected["accepted"].tolist()) and MaskStatus.DEAD_END in expected["status masked"][7]
    assert not expected["finite"].all() and not expected["legal"].all()
    found = on_ranks(tmp_path, run)
    for name in ("processed", "processed masked", "probs", "row_probs"):
        whole = torch.cat([each.pop(name) for each in found], -1)
        assert torch.equal(whole.nan_to_num(7.0), expected.pop(name).nan_to_num(7.0)), name
    logprobs = expected.pop("logprobs")
    for rank, each in enumerate(found):
        torch.testing.assert_close(each["logprobs"], logprobs, equal_nan=True)
        assert torch.equal(each["logprobs"].nan_to_num(7.0), found[0]["logprobs"].nan_to_num(7.0))
        for name, value in expected.items():
            assert torch.equal(each[name], value), (rank, name, each[name], value)


@pytest.mark.parametrize("most", [5, VOCABULARY + 2])  # the second is more than all tokens
def test_most_probable_tokens_and_whole_logits_equal_those_of_one_process(tmp_path: Path, most: int) -> None:
    """Ids exactly, log-probabilities within rounding, at positions with finite logits."""
    logits, given, rows = logits_of(0), settings(), torch.arange(BATCH)
    probs = kernels.distribution(logits, given.params)
    asks = given.params.clone()
    asks[:, Param.TOP_LOGPROBS] = torch.arange(BATCH) * most // (BATCH - 1)

    def run(shard: VocabularyShard | None) -> Found:
        ops, own = (kernels, [logits, probs]) if shard is None else (shard, [shard.part(each).contiguous() for each in (logits, probs)])
        ids, values = torch.zeros(2, BATCH, DRAFTS + 1, 2 * most, dtype=torch.int32), torch.zeros(2, BATCH, DRAFTS + 1, 2 * most)
        ops.top_logprobs(own[0], own[1], rows, asks, torch.tensor([3]), ids, values)
        finite = logits.amax(-1, keepdim=True).isfinite()
        found = {"ids": torch.where(finite, ids, 0), "values": torch.where(finite, values, 0.0)}
        if shard is not None:
            found["whole"], found["small"] = shard.whole(own[0]), shard.whole(own[0].bfloat16())
        return found

    expected = run(None)
    assert (expected["ids"][0] == 0).all() and len(expected["ids"][1, -1].unique()) >= min(most, VOCABULARY)
    for each in on_ranks(tmp_path, run):
        assert torch.equal(each["ids"], expected["ids"])
        torch.testing.assert_close(each["values"], expected["values"])
        assert torch.equal(each["whole"].nan_to_num(7.0), logits.nan_to_num(7.0))
        assert torch.equal(each["small"].nan_to_num(7.0), logits.bfloat16().nan_to_num(7.0))
