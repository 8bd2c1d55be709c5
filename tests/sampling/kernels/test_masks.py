"""The operations on tags, masks and processors: registration, values, tape; invalid masks are ignored."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from stepgraph.graphs import BufferSpec, StaticBuffers, TapeBackend, drafting, run_eager
from stepgraph.graphs.batch import read_batch
from stepgraph.graphs.row_layout import Column
from stepgraph.sampling import acceptance, bitmask, kernels
from stepgraph.sampling.grammar.status import FinishCode, MaskStatus
from stepgraph.sampling.kernels import GrammarMask, choice, processors
from stepgraph.sampling.kernels.processors import RowSettings, process_logits
from stepgraph.sampling.sampler import Param
from tools.gpu.checks.masks import make_case, tag_inputs
from tools.gpu.checks.states import RoundBench

CPU = torch.device("cpu")


@pytest.fixture
def backend() -> Iterator[TapeBackend]:
    backend = TapeBackend(poison="every")
    yield backend
    backend.close()


def test_operations_pass_opcheck() -> None:
    tags, owner, generated, constrained, rows = tag_inputs(5, 3, CPU)
    for some, chosen in ((tags, rows), (tags[:5], None)):
        opcheck(choice.mask_status.out, (some, owner, generated, constrained, 1, chosen, torch.empty(5, 3, dtype=torch.int64), rows < 0))
    for case in (make_case(4, 2, 90, torch.bfloat16), make_case(4, 1, 90, torch.float32, draft_vocabulary=20, masked=False, first=2)):
        opcheck(process_logits.out, case.arguments(case.outputs()))


def test_mask_status_of_permuted_rows() -> None:
    tags, owner, generated, constrained, rows = tag_inputs(60, 4, CPU)
    expected = acceptance.mask_status(tags[rows], owner, generated, constrained != 0, 2)
    assert len(expected.unique()) == len(MaskStatus)
    for given, chosen in ((tags, rows), (tags[rows], None)):
        status, has_grammar = kernels.mask_status(given, owner, generated, constrained, 2, chosen)
        assert torch.equal(status, expected) and torch.equal(has_grammar, constrained != 0)


@pytest.mark.parametrize("own", [0, 50])
@pytest.mark.parametrize("constrained", [True, False])
def test_process_equals_plain_functions(constrained: bool, own: int) -> None:
    for seed in range(4):
        case = make_case(8, 1 if own else 3, 150, torch.float32, draft_vocabulary=own, masked=constrained, first=2 if own else 0, seed=seed)
        assert case.rows is not None
        masked, status = case.logits, torch.full(case.logits.shape[:2], int(MaskStatus.OK))
        if case.mask is not None:
            status = case.mask.status
            masked = bitmask.apply(masked, case.mask.masks[case.mask.rows], case.mask.constrained, case.ids)
            shut = case.mask.constrained[:, None] & (status != MaskStatus.OK)
            masked[shut] = -math.inf
        settings = RowSettings._make([*(table[case.rows] for table in case.settings[:-1]), case.settings.generated])
        logits = processors.apply_settings(masked, settings, case.before, case.first, case.ids)
        expected = processors.mark_dead_ends(status, masked.amax(-1).isfinite(), logits)
        found = kernels.process(*case)
        torch.testing.assert_close(found.logits, logits, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.finite, expected.finite) and torch.equal(found.status, expected.status)


def test_arguments_of_wrong_shapes_are_refused() -> None:
    case = make_case(4, 2, 90, torch.float32)
    assert case.mask is not None
    with pytest.raises(AssertionError, match="masks"):
        kernels.process(*case._replace(mask=case.mask._replace(masks=case.mask.masks[..., :2])))
    with pytest.raises(AssertionError, match="status"):
        kernels.process(*case._replace(mask=case.mask._replace(status=case.mask.status[:, :1])))
    with pytest.raises(AssertionError, match="output_counts"):
        kernels.process(*case._replace(logits=case.logits[..., :80]))
    numbers = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(AssertionError, match=r"tags torch\.int32"):
        kernels.mask_status(torch.zeros(2, 1, 4, dtype=torch.int32), numbers, numbers, numbers)


def test_tape_replays_the_operations_in_place(backend: TapeBackend) -> None:
    """Logits, tags and counts differ at every replay; masks are read through rows."""
    case = make_case(4, 2, 90, torch.float32)
    tags, owner, generated, constrained, rows = tag_inputs(4, 2, CPU)
    assert case.mask is not None
    tables = dict(zip(RowSettings._fields, case.settings, strict=True)) | {"generated": generated}
    held = {
        "logits": case.logits,
        "masks": case.mask.masks,
        "tags": tags,
        "owner": owner,
        "constrained": constrained,
        "rows": rows,
        **tables,
    }
    specs = [BufferSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()]
    outputs = [BufferSpec("processed", (4, 2, 90), torch.float32), BufferSpec("finite", (4, 2), torch.bool)]
    buffers = StaticBuffers([*specs, *outputs, BufferSpec("status", (4, 2), torch.int64)], backend.device)
    buffers.rows.copy_(rows)

    def step(b: StaticBuffers) -> None:
        status, has_grammar = kernels.mask_status(b.tags, b.owner, b.generated, b.constrained, 2, b.rows)
        mask = GrammarMask(b.masks, None, has_grammar, status)
        found = kernels.process(b.logits, RowSettings(*(b[name] for name in tables)), b.rows, b.owner[:, None], mask=mask)
        b.processed.copy_(found.logits)
        b.finite.copy_(found.finite)
        b.status.copy_(found.status)

    recorded = backend.capture(step, buffers)
    assert recorded.report.nodes == {"kernel": 2, "copy": 3}
    seen = set()
    for seed in range(4):
        for name, tensor in held.items():
            buffers[name].copy_(tensor)
        buffers.logits.normal_(generator=torch.Generator().manual_seed(seed))
        buffers.tags[rows, :, 3] = 1 + seed
        recorded.replay()
        replayed = [buffers[name].clone() for name in ("processed", "finite", "status")]
        run_eager(step, buffers)
        assert all(torch.equal(buffers[name], tensor) for name, tensor in zip(("processed", "finite", "status"), replayed, strict=True))
        seen.add(float(buffers.processed[buffers.processed.isfinite()].sum()))
    assert len(seen) == 4


@pytest.mark.parametrize("status", list(MaskStatus))
def test_masks_with_another_status_than_ok_allow_nothing(status: MaskStatus) -> None:
    case = make_case(2, 2, 64, torch.float32)
    statuses = torch.tensor([[int(MaskStatus.OK), int(status)]] * 2)
    mask = GrammarMask(torch.full((2, 2, 2), -1, dtype=torch.int32), None, torch.tensor([True, False]), statuses)
    case = case._replace(logits=torch.zeros(2, 2, 64), mask=mask)
    finite, _ = kernels.masked_argmax(case.logits, mask.masks, None, mask.constrained, status=statuses)
    expected = [[True, status == MaskStatus.OK], [True, True]]
    assert finite.tolist() == kernels.process(*case).finite.tolist() == expected
    assert kernels.process(*case).logits.isfinite().any(-1).tolist() == expected


def plant(bench: RoundBench, poison: int) -> Tensor:
    """Row 0 has a grammar; the mask of its first draft allows `poison` only. Returns the tag that makes the mask valid."""
    bench.randomise(3)
    b = bench.buffers
    state = {Column.OWNER: 1, Column.GENERATED: 7, Column.FINISH: FinishCode.RUNNING, Column.LENGTH: 12, Column.MAX_LENGTH: 40}
    state |= {Column.CONSTRAINED: 1, Column.DRAFT_LIMIT: 3}
    b.batch_rows[0] = 0
    b.row_state[0] = torch.tensor([state.get(column, 0) for column in Column])
    b.row_params[0] = torch.tensor(
        [1.0 if column in (Param.TEMPERATURE, Param.TOP_P, Param.REPETITION_PENALTY) else 0.0 for column in Param]
    )
    b.row_bias_ids[0] = -1
    b.row_masks[0, 0] = bitmask.pack(torch.arange(bench.limits.vocab_size) == poison)
    return torch.tensor([1, 7, 0, int(MaskStatus.OK)])


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_stale_mask_is_not_used_for_a_draft(backend: TapeBackend, wrong: int | None, sampled: bool) -> None:
    bench, poison = RoundBench(backend, 3), 50
    tag = plant(bench, poison)
    if wrong is not None:
        tag[wrong] += 1  # the status OK becomes COMPLETE
    bench.buffers.row_tags[0, 0] = tag
    batch = read_batch(bench.buffers, 1)
    logits = torch.zeros(1, bench.limits.num_tokens)
    mask = drafting.grammar_mask_of(bench.buffers, batch, 1)
    draft = drafting.choose_draft(bench.buffers, batch, 1, logits, batch.live, mask, sampled=sampled)
    assert draft.tolist() == [poison if wrong is None else -1]
