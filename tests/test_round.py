"""The round and its stages: replay equals eager bit for bit, at random states; nothing moves and nothing is allocated."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graphs import GraphKey, StaticBuffers, TapeBackend, run_eager, stages
from stepgraph.graphs.buffers import Column
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar.host_link import MatcherRow
from stepgraph.sampling.grammar.status import HostColumn, MaskStatus
from tests.round_states import GRAMMAR, ROWS, Bench
from tests.toy_engines import COMPILER, TARGET, VOCABULARY


@pytest.mark.parametrize(("k", "draft_masks"), [(0, True), (1, True), (3, True), (3, False), (8, True), (8, False)])
def test_round_replays_as_eager_for_every_key(k: int, draft_masks: bool) -> None:
    bench = Bench(k, draft_masks)
    for rows, constrained in itertools.product((1, 2, 4), (False, True)):
        key = GraphKey(rows, constrained)
        bench.compare(bench.round.step(key), functools.partial(bench.announce, rows) if constrained else lambda: None)


@pytest.mark.parametrize("constrained", [False, True])
def test_every_stage_replays_as_eager(constrained: bool) -> None:
    bench = Bench(3)
    limits, models = bench.limits, bench.models
    assert models.draft is not None
    draft = models.draft

    def verify(b: StaticBuffers) -> None:
        logits, features = stages.target_verify(b, stages.read_batch(b, ROWS), models.target, limits)
        b.out_logits.copy_(logits)
        b.out_features.copy_(features)

    def accept(b: StaticBuffers) -> None:
        batch = stages.read_batch(b, ROWS)
        logits = models.target.logits(b.in_features)
        stages.accept(b, batch, logits, constrained)

    def prefill(b: StaticBuffers) -> None:
        batch = stages.read_batch(b, ROWS)
        emission, _ = stages.accept(b, batch, models.target.logits(b.in_features), constrained)
        logits, features = stages.draft_prefill(b, batch, emission, b.in_features, draft, limits)
        b.out_logits[:, 0].copy_(logits)
        b.out_features[:, :1].copy_(features)

    def decode(b: StaticBuffers) -> None:
        batch = stages.read_batch(b, ROWS)
        logits, features = stages.draft_decode(b, batch, 2, batch.drafts[:, 0], b.in_features[:, :1], draft, limits)
        b.out_logits[:, 0].copy_(logits)
        b.out_features[:, :1].copy_(features)
        b.out_tokens.copy_(stages.choose_draft(b, batch, 3, logits, stages.drafting(batch), constrained))

    def place(b: StaticBuffers) -> None:
        b.batch_tags[1, :, 2].copy_(b.batch_rows % 4)
        b.batch_masks[1].copy_(b.row_masks[:ROWS, 0])
        stages.place_masks(b, ROWS, 1)

    for step in (verify, accept, prefill, decode, place):
        bench.compare(step)


class Allocating(TorchDispatchMode):
    """Counts operations that return new memory: everything but in-place, out= and view calls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        Allocating.count += not (func._schema.is_mutable or func.is_view)
        return result


def test_a_hundred_replays_move_nothing_and_allocate_nothing() -> None:
    bench = Bench(4)
    backend = TapeBackend()
    key = GraphKey(4, constrained=True)
    with Allocating():
        bench.announce(4)
        run_eager(bench.round.step(key), bench.buffers)
    assert Allocating.count > 100, "the counter counts"
    recorded = backend.capture(bench.round.step(key), bench.buffers)
    assert recorded.report.nodes.get("copied", 0) == 0, "an operation without an out= overload allocates at every replay"
    bench.randomise(1)
    pointers = bench.buffers.fingerprint()
    start = bench.state()
    bench.announce(4)
    recorded.replay()  # the first replay poisons the intermediates
    for _ in range(100):
        bench.restore(start)
        bench.announce(4)
        Allocating.count = 0
        with Allocating():
            recorded.replay()
        assert Allocating.count == 0
    assert bench.buffers.fingerprint() == pointers
    assert (backend.stats.replays, backend.stats.syncs) == (101, 0)
    backend.close()


def test_free_graphs_have_no_host_nodes_and_constrained_ones_k_plus_one() -> None:
    for k, draft_masks, expected in ((0, True, 1), (1, True, 2), (4, True, 5), (4, False, 1)):
        bench = Bench(k, draft_masks)
        backend = TapeBackend()
        free = backend.capture(bench.round.step(GraphKey(2, False)), bench.buffers)
        ruled = backend.capture(bench.round.step(GraphKey(2, True)), bench.buffers)
        assert free.report.host_nodes == ()
        assert len(ruled.report.host_nodes) == expected
        backend.close()


@pytest.mark.parametrize("draft_masks", [True, False])
def test_nothing_of_the_host_is_baked_into_a_round(draft_masks: bool) -> None:
    """Recorded twice, at two states of rows, masks and matchers: the same operations with the same scalars."""
    bench = Bench(3, draft_masks)
    bench.randomise(1)
    bench.announce(4)
    backend = TapeBackend()
    for constrained in (False, True):
        backend.capture(bench.round.step(GraphKey(4, constrained)), bench.buffers, check="twice", between=lambda: bench.randomise(2))
    backend.close()


def test_padding_rows_stay_inert() -> None:
    bench = Bench(3)
    bench.randomise(5)
    bench.buffers.batch_rows.fill_(bench.limits.dummy_row)
    before = bench.state()
    run_eager(bench.round.step(GraphKey(4, False)), bench.buffers)
    page = bench.limits.page_size
    for name, tensor in bench.state().items():
        if name.endswith("_cache"):  # the scratch page may hold anything
            assert torch.equal(tensor[page:], before[name][page:]), name
        elif name.startswith("row_"):
            assert torch.equal(tensor, before[name]), name
    assert bench.buffers.results[:, 0].tolist() == [0] * ROWS


def test_what_host_nodes_see_is_the_head_of_the_row_table() -> None:
    assert [column.name for column in HostColumn] == [column.name for column in Column][: len(HostColumn)]


@pytest.mark.parametrize("wrong", ["owner", "history", "index", "status"])
@pytest.mark.parametrize("index", [0, 1])
def test_a_stale_mask_row_is_never_sampled_from(wrong: str, index: int) -> None:
    """Plant a mask that allows one poison token, under a tag that is not this row's: the token must not come out."""
    bench = Bench(2)
    bench.randomise(3)
    b, owner, generated, poison = bench.buffers, 1, 7, 50
    limits = bench.limits
    likeliest = stages.target_verify(b, stages.read_batch(b, 1), TARGET, limits)[0].argmax(-1)
    draft = int(likeliest[0, 0])
    state = {
        Column.OWNER: owner,
        Column.GENERATED: generated,
        Column.LAST_TOKEN: 5,
        Column.FINISH: FinishCode.RUNNING,
        Column.DRAFT_COUNT: 2,
        Column.LENGTH: 12,
        Column.MAX_LENGTH: 40,
        Column.CONSTRAINED: 1,
        Column.DRAFT_LIMIT: 2,
    }
    b.batch_rows[0] = 0
    b.row_state[0] = torch.tensor([state.get(column, 0) for column in Column])
    b.row_stop_ids[0] = -1
    likeliest = stages.target_verify(b, stages.read_batch(b, 1), TARGET, limits)[0].argmax(-1)
    draft = int(likeliest[0, 0])
    b.row_drafts[0] = torch.tensor([draft, draft])
    b.row_masks[0] = 0
    for place in range(3):
        b.row_tags[0, place] = torch.tensor([owner, generated, place, MaskStatus.OK])
        b.row_masks[0, place, draft // 32] |= 1 << (draft % 32) if draft % 32 < 31 else -(2**31)
    b.row_masks[0, index] = 0
    b.row_masks[0, index, poison // 32] = 1 << (poison % 32)
    bad = {
        "owner": [owner + 1, generated, index, 1],
        "history": [owner, generated - 1, index, 1],
        "index": [owner, generated, index + 1, 1],
        "status": [owner, generated, index, int(MaskStatus.FAULT)],
    }
    b.row_tags[0, index] = torch.tensor(bad[wrong])
    batch = stages.read_batch(b, 1)
    logits, _ = stages.target_verify(b, batch, TARGET, limits)
    emission, after = stages.accept(b, batch, logits, True)
    emitted = emission.tokens[0, : int(emission.emitted[0])].tolist()
    assert poison not in emitted
    if index == 0:
        assert emitted == [] and int(after.state[0, Column.FINISH]) == FinishCode.MASK_FAULT
    else:
        assert emitted == [draft] and int(after.state[0, Column.FINISH]) == FinishCode.RUNNING


def test_one_walk_covers_all_of_a_states_legal_drafts_and_the_illegal_one_ends_it() -> None:
    bench = Bench(3, draft_masks=False)
    b = bench.buffers
    legal, illegal = VOCABULARY.tokens.index(b"a"), VOCABULARY.tokens.index(b"z")
    b.state_host[0] = torch.tensor([9, 0, 5, 0, FinishCode.RUNNING])
    b.drafts_host[:, 0] = torch.tensor([legal, illegal, legal])
    row = MatcherRow(9, COMPILER.compile(GRAMMAR).matcher())
    bench.host.announce([row])
    bench.host.begin()
    bench.host.commit()
    for index in (1, 2, 3):
        bench.host.advance(index)
    assert b.tags_host[:, 0].tolist() == [[9, 0, 0, 1], [9, 0, 1, 1], [9, 0, 2, int(MaskStatus.ILLEGAL)], [0, 0, 3, 0]]
    assert (row.walked, row.fills) == (1, 2)
