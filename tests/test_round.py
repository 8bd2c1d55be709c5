"""The round and its stages: replay equals eager bit for bit, at random states; nothing moves and nothing is allocated."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graphs import BufferSpec, GraphKey, Limits, StaticBuffers, TapeBackend, run_eager, stages
from stepgraph.graphs.buffers import Column, round_specs
from stepgraph.graphs.model import ModelPair
from stepgraph.graphs.round import Round
from stepgraph.runtime.models.toy import ToyDraft
from stepgraph.sampling.acceptance import FinishCode
from stepgraph.sampling.grammar import Constraint
from stepgraph.sampling.grammar.host_link import HostLink, MatcherRow
from stepgraph.sampling.grammar.status import HostColumn, MaskStatus
from tests.toy_engines import COMPILER, TARGET, VOCABULARY

ROWS = 4
GRAMMAR = Constraint.regex("[a-f]{0,12}(x|yy)")


class Bench:
    """A round over its own buffers, and random states to run it from."""

    def __init__(self, k: int, draft_masks: bool = True) -> None:
        draft = ToyDraft(TARGET, 0.8)
        self.limits = Limits(
            max_rows=ROWS,
            num_speculative_tokens=k,
            max_length=48,
            page_size=8,
            num_pages=24,
            vocab_size=VOCABULARY.logits_width,
            feature_size=3,
        )
        self.models = ModelPair(TARGET, draft if k else None)
        width = VOCABULARY.logits_width
        outputs = (
            BufferSpec("out_logits", (ROWS, k + 1, width), torch.float32),
            BufferSpec("out_features", (ROWS, k + 1, 3), torch.float32),
            BufferSpec("in_features", (ROWS, k + 1, 3), torch.float32),
            BufferSpec("out_tokens", (ROWS,), torch.int64),
        )
        specs = [*round_specs(self.limits), *TARGET.cache_specs(self.limits), *draft.cache_specs(self.limits), *outputs]
        self.buffers = StaticBuffers(specs, constants={"target": TARGET, "draft": draft})
        b = self.buffers
        self.host = HostLink(b.state_host, b.drafts_host, b.masks_host, b.tags_host)
        self.round = Round(self.limits, self.models, self.host, draft_masks)

    def randomise(self, seed: int) -> None:
        """A state that rounds could have left: live, finished and fresh rows, masks that fit and masks that do not."""
        pick, b, k = random.Random(seed), self.buffers, self.limits.num_speculative_tokens
        torch.manual_seed(seed)
        for name in ("toy_target_cache", "toy_draft_cache"):
            b[name].random_(0, self.limits.vocab_size)
        b.in_features.copy_(torch.randint(0, 1 << 14, b.in_features.shape))
        b.row_masks.random_(-(2**31), 2**31 - 1)
        pages = torch.randperm(self.limits.num_pages) + 1
        for row in range(ROWS):
            length = pick.randint(1, 40)
            state = {
                Column.OWNER: row + 1,
                Column.GENERATED: pick.choice([0, pick.randint(0, length)]),
                Column.LAST_TOKEN: pick.randrange(self.limits.vocab_size),
                Column.ACCEPTED: 0,
                Column.FINISH: pick.choice([1, 1, 1, 2, 0]),
                Column.DRAFT_COUNT: pick.randint(0, k),
                Column.LENGTH: length,
                Column.MAX_LENGTH: pick.randint(length + 1, 48),
                Column.CONSTRAINED: pick.randint(0, 1),
                Column.DRAFT_LIMIT: pick.randint(0, k),
            }
            b.row_state[row] = torch.tensor([state[column] for column in Column])
            b.row_block_tables[row] = pages[row * 6 : row * 6 + 6]
            b.row_drafts[row] = torch.randint(-1, self.limits.vocab_size, (k,))
            for index in range(k + 1):
                owner = state[Column.OWNER] if pick.random() < 0.8 else 99
                b.row_tags[row, index] = torch.tensor([owner, state[Column.GENERATED], index, pick.choice([1, 1, 1, 1, 2, 3, 4, 5])])
            b.row_stop_ids[row] = torch.randint(-1, self.limits.vocab_size, (self.limits.max_stop_ids,))
        order = list(range(ROWS))
        pick.shuffle(order)
        used = pick.randint(1, ROWS)
        b.batch_rows.copy_(torch.tensor([*order[:used], *[self.limits.dummy_row] * (ROWS - used)]))

    def announce(self, size: int) -> None:
        """Fresh matchers that stand where the random rows say: committed tokens, and no draft walked."""
        rows: list[MatcherRow | None] = []
        for row in self.buffers.batch_rows[:size].tolist():
            state = self.buffers.row_state[row]
            if row == self.limits.dummy_row or not state[Column.CONSTRAINED]:
                rows.append(None)
                continue
            matcher = COMPILER.compile(GRAMMAR).matcher()
            rows.append(MatcherRow(int(state[Column.OWNER]), matcher, committed=int(state[Column.GENERATED])))
        self.host.announce(rows)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: self.buffers[name].clone() for name in self.buffers}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            self.buffers[name].copy_(tensor)

    def compare(self, step: Callable[[StaticBuffers], None], before_run: Callable[[], None] = lambda: None, states: int = 8) -> None:
        backend = TapeBackend(poison="every")
        try:
            recorded = backend.capture(step, self.buffers)
            for seed in range(states):
                self.randomise(seed)
                start = self.state()
                before_run()
                run_eager(step, self.buffers)
                eager = self.state()
                self.restore(start)
                before_run()
                recorded.replay()
                replayed = self.state()
                changed = [name for name in eager if not torch.equal(start[name], eager[name])]
                assert changed, "the step did nothing at this state"
                for name in eager:
                    assert torch.equal(eager[name].view(torch.uint8), replayed[name].view(torch.uint8)), name
        finally:
            backend.close()


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

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
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
