"""The round and its stages: replays equal eager runs bit for bit at random states; nothing moves and nothing is allocated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepgraph.graphs import GraphKey, TapeBackend, drafting, run_eager, sampled_stages, stages
from stepgraph.graphs.batch import read_batch
from stepgraph.graphs.row_layout import Column, ResultLayout
from stepgraph.sampling import bitmask, rng, sampler
from stepgraph.sampling import native as c_library
from stepgraph.sampling.grammar.link.protocol import BEGIN_ROUND, COMMIT, advance
from stepgraph.sampling.grammar.status import FinishCode, HostColumn, MaskStatus
from stepgraph.sampling.kernels import processors
from stepgraph.sampling.native import Unavailable
from tests.helpers.toy_engines import use_small_operations
from tools.gpu.checks.context import VOCABULARY, compiled
from tools.gpu.checks.states import GRAMMAR, ROWS, RoundBench


@pytest.fixture
def backend() -> Iterator[TapeBackend]:
    backend = TapeBackend(poison="every")
    yield backend
    backend.close()


@pytest.mark.parametrize(("k", "draft_masks"), [(0, True), (1, True), (3, True), (3, False), (8, True), (8, False)])
def test_round_replays_as_eager_for_every_key(backend: TapeBackend, k: int, draft_masks: bool) -> None:
    bench = RoundBench(backend, k, draft_masks)
    sizes = (1, 2, 4) if k == 3 and draft_masks else (1, 4)
    for rows, constrained, sampled in itertools.product(sizes, (False, True), (False, True)):
        step = bench.round.step(GraphKey(rows, constrained, sampled))
        bench.compare(step, 3, functools.partial(bench.push_batch, rows) if constrained else lambda: None)


@pytest.mark.skipif(bool(c_library.why_not()), reason=c_library.why_not())
@pytest.mark.parametrize(("k", "draft_masks", "forced"), [(0, True, False), (3, True, True), (3, False, False)])
def test_rounds_with_grammars_on_the_device_replay_as_eager(backend: TapeBackend, k: int, draft_masks: bool, forced: bool) -> None:
    """Batches with grammars on the device, on the host or both."""
    bench = RoundBench(backend, k, draft_masks, forced_drafts=forced, device_grammars=True)
    for device, sampled in itertools.product((False, True), (False, True)):
        step = bench.round.step(GraphKey(4, True, sampled, device))
        bench.compare(step, 6, (lambda: None) if device else functools.partial(bench.push_batch, 4))
    written = 0
    for seed in range(6):
        bench.randomise(seed)
        before = bench.buffers.row_masks.clone()
        run_eager(bench.round.step(GraphKey(4, True, device=True)), bench.buffers)
        changed = (bench.buffers.row_masks != before).flatten(1).any(1)
        written += int(changed.sum())
        assert not bool(changed[bench.buffers.row_state[:, Column.IMAGE] == 0].any())
    assert written


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("constrained", [False, True])
def test_every_stage_replays_as_eager(backend: TapeBackend, constrained: bool, sampled: bool) -> None:
    bench = RoundBench(backend, 3)
    for step in bench.stage_steps(constrained, sampled).values():
        bench.compare(step, 8)


class Allocating(TorchDispatchMode):
    """Counts operations that return new memory: all except in-place, out= and view calls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        Allocating.count += not (func._schema.is_mutable or func.is_view)
        return result


@pytest.mark.parametrize("sampled", [False, True])
def test_hundred_replays_move_no_tensor_and_allocate_nothing(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_operations(monkeypatch)
    Allocating.count = 0
    backend = TapeBackend()
    bench = RoundBench(backend, 4)
    key = GraphKey(4, constrained=True, sampled=sampled)
    with Allocating():
        bench.push_batch(4)
        run_eager(bench.round.step(key), bench.buffers)
    assert Allocating.count > 100, "the counter works"
    recorded = backend.capture(bench.round.step(key), bench.buffers)
    assert recorded.report.nodes.get("copied", 0) == 0, "an operation without an out= overload allocates in every replay"
    bench.randomise(1)
    pointers = bench.buffers.fingerprint()
    start = bench.snapshot()
    bench.push_batch(4)
    recorded.replay()  # the first replay poisons the intermediates
    for _ in range(100):
        bench.restore(start)
        bench.push_batch(4)
        Allocating.count = 0
        with Allocating():
            recorded.replay()
        assert Allocating.count == 0
    assert bench.buffers.fingerprint() == pointers
    assert (backend.stats.replays, backend.stats.syncs) == (101, 0)
    backend.close()


def test_free_graphs_have_no_host_nodes_and_constrained_ones_k_plus_one(backend: TapeBackend) -> None:
    for k, draft_masks, expected in ((0, True, 1), (1, True, 2), (4, True, 5), (4, False, 1)):
        bench = RoundBench(backend, k, draft_masks)
        free = backend.capture(bench.round.step(GraphKey(2, False)), bench.buffers)
        constrained = backend.capture(bench.round.step(GraphKey(2, True)), bench.buffers)
        assert free.report.host_nodes == ()
        assert len(constrained.report.host_nodes) == expected


@pytest.mark.parametrize("native", [True, False])
def test_greedy_graph_contains_no_sampling_nodes(backend: TapeBackend, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(c_library, "load", lambda: Unavailable("not now"))
    elif c_library.why_not():
        pytest.skip(c_library.why_not())
    for module, name in ((processors, "process"), (sampler, "distribution"), (rng, "uniform"), (sampled_stages, "row_settings")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("called for a greedy round"))
    use_small_operations(monkeypatch)
    bench = RoundBench(backend, 3)
    keys = [GraphKey(2, constrained) for constrained in (False, True)]
    assert [sum(backend.capture(bench.round.step(key), bench.buffers).report.nodes.values()) for key in keys] == [235, 254]


@pytest.mark.parametrize("draft_masks", [True, False])
def test_round_bakes_in_no_host_state(backend: TapeBackend, draft_masks: bool) -> None:
    """Recorded twice with different rows, masks and matchers: the same operations with the same scalars."""
    bench = RoundBench(backend, 3, draft_masks)
    bench.randomise(1)
    for kind in itertools.product((False, True), (False, True)):
        backend.capture(bench.round.step(GraphKey(4, *kind)), bench.buffers, check="twice", between=lambda: bench.randomise(2))


def test_padding_rows_stay_inert(backend: TapeBackend) -> None:
    bench = RoundBench(backend, 3)
    bench.randomise(5)
    bench.buffers.batch_rows.fill_(bench.limits.dummy_row)
    before = bench.snapshot()
    run_eager(bench.round.step(GraphKey(4, False)), bench.buffers)
    page = bench.limits.page_size
    for name, tensor in bench.snapshot().items():
        if name.endswith("_cache"):  # the scratch page may hold anything
            assert torch.equal(tensor[page:], before[name][page:]), name
        elif name.startswith("row_"):
            assert torch.equal(tensor[:ROWS], before[name][:ROWS]), name
    assert torch.equal(bench.buffers.row_state[ROWS:], before["row_state"][ROWS:])
    assert bench.buffers.results[:, ResultLayout(3).columns["emitted"]].flatten().tolist() == [0] * ROWS


def test_host_columns_are_the_first_row_columns() -> None:
    assert [column.name for column in HostColumn] == [column.name for column in Column][: len(HostColumn)]


@pytest.mark.parametrize("wrong", ["nothing", "owner", "history", "index", "status"])
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("sampled", [False, True])
def test_stale_mask_is_never_used(backend: TapeBackend, wrong: str, index: int, sampled: bool) -> None:
    """A mask that allows only one poison token, under a wrong tag: the token must not be chosen."""
    bench = RoundBench(backend, 2)
    bench.randomise(3)
    b, limits, target = bench.buffers, bench.limits, bench.models.target
    owner, generated, poison = 1, 7, 50
    state = {
        Column.OWNER: owner,
        Column.GENERATED: generated,
        Column.LAST_TOKEN: 5,
        Column.FINISH: FinishCode.RUNNING,
        Column.DRAFT_COUNT: 2,
        Column.LENGTH: 12,
        Column.MAX_LENGTH: 40,
        Column.CONSTRAINED: 1,
    }
    b.batch_rows[0] = 0
    b.row_state[0] = torch.tensor([state.get(column, 0) for column in Column])
    b.row_stop_ids[0] = -1
    b.row_bias_ids[0] = -1
    b.row_params[0, sampler.Param.MIN_NEW_TOKENS] = 0
    draft = int(stages.target_verify(b, read_batch(b, 1), target, limits)[0][0, 0].argmax())
    b.row_drafts[0] = draft
    allowed = torch.zeros(3, limits.vocab_size, dtype=torch.bool)
    allowed[:, draft] = True
    allowed[index, draft], allowed[index, poison] = False, True
    b.row_masks[0] = bitmask.pack(allowed)
    b.row_tags[0] = torch.tensor([[owner, generated, position, MaskStatus.OK] for position in range(3)])
    wrong_values = {"owner": owner + 1, "history": generated - 1, "index": index + 1, "status": int(MaskStatus.FAULT)}
    if wrong != "nothing":
        b.row_tags[0, index, list(wrong_values).index(wrong)] = wrong_values[wrong]
    batch = read_batch(b, 1)
    drafting.check_masks(b, batch.rows, 0, 3)
    emission, after = stages.accept(b, batch, stages.target_verify(b, batch, target, limits)[0], constrained=True, sampled=sampled)
    assert (poison in emission.tokens[0].tolist()) == (wrong == "nothing"), "also at positions that are not emitted"
    emitted, finish = emission.tokens[0, : int(emission.emitted[0])].tolist(), int(after.state[0, Column.FINISH])
    if wrong == "nothing":
        assert emitted == [draft] * index + [poison]
    elif index == 0:
        assert (emitted, finish) == ([], FinishCode.MASK_FAULT)
    else:
        ends = FinishCode.MASK_FAULT if wrong == "status" else FinishCode.RUNNING
        assert (emitted, finish) == ([draft], ends), "an invalid mask ends the round or the text"


def test_unmasked_drafts_are_accepted_up_to_the_first_illegal_one(backend: TapeBackend) -> None:
    bench = RoundBench(backend, 3, draft_masks=False)
    b = bench.buffers
    legal, illegal = VOCABULARY.tokens.index(b"a"), VOCABULARY.tokens.index(b"z")
    b.state_host[0] = torch.tensor([9, 0, 5, 0, FinishCode.RUNNING])
    b.drafts_host[:, 0] = torch.tensor([legal, illegal, legal])
    grammar = compiled(GRAMMAR)
    assert grammar is not None
    row: Any = bench.host.row(9, grammar.matcher())
    bench.host.push_batch([row])
    bench.host.node([BEGIN_ROUND, COMMIT, *(advance(index) for index in (1, 2, 3))])()
    assert b.tags_host[:, 0].tolist() == [[9, 0, 0, 1], [9, 0, 1, 1], [9, 0, 2, int(MaskStatus.ILLEGAL)], [0, 0, 3, 0]]
    assert (bench.host.stats.fills, bench.host.stats.accepts) == (2, 2)
