"""How many nodes a round has on CUDA: counted on the meta device. tests/stub_cuda compares these counts with captured graphs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from stepgraph.graphs.graph_key import GraphKey
from stepgraph.graphs.layers.quantised import KINDS
from tests.helpers.node_counts import count_round
from tools.gpu.checks.shapes import SHAPES

ONE = GraphKey(1, constrained=False)


def test_a_layer_has_ten_nodes() -> None:
    shape = SHAPES["1B"]
    fewer = replace(shape, target=replace(shape.target, windows=(None,) * (shape.target.num_layers - 1)))
    assert count_round(shape, ONE).stages.total() - count_round(fewer, ONE).stages.total() == 10


def test_adapters_add_two_nodes_to_each_product_of_a_layer() -> None:
    shape = SHAPES["1B"]
    counts = [count_round(shape, ONE, loras=loras).operations for loras in (0, 4)]
    assert counts[1] - counts[0] == {("target_verify", "stepgraph::slot_product"): 8 * shape.target.num_layers}


def test_products_with_packed_weights_have_one_node_each() -> None:
    shape = SHAPES["1B"]
    plain, packed = (count_round(shape, ONE, packed=kind) for kind in (None, KINDS["INT4_128"]))
    assert plain.stages == packed.stages
    products, rows = 4 * shape.target.num_layers + 1, 1 + 3  # of the target and of three drafts
    assert packed.operations["target_verify", "stepgraph::product"] == products
    assert sum(count for (_, name), count in packed.operations.items() if name == "stepgraph::quantised_rows") == rows


@pytest.mark.parametrize(
    ("size", "constrained", "sampled", "most"),
    [
        ("1B", False, False, 255),
        ("1B", True, False, 274),
        ("1B", False, True, 281),
        ("1B", True, True, 301),
        ("8B", False, False, 415),
        ("8B", True, False, 434),
        ("8B", False, True, 441),
        ("8B", True, True, 461),
    ],
)
def test_nodes_of_a_round(size: str, constrained: bool, sampled: bool, most: int) -> None:
    counter = count_round(SHAPES[size], GraphKey(1, constrained, sampled))
    assert counter.stages.total() <= most, counter.operations


def test_plain_round_beside_a_draft_model_has_no_draft_stage_and_one_node_more() -> None:
    """The node stores the tokens that the draft model has to process later."""
    counter = count_round(SHAPES["1B"], replace(ONE, draft_length=0))
    assert [stage for stage in counter.stages if "draft" in stage] == []
    assert counter.stages["propose"] == 2 and counter.operations["propose", "stepgraph::keep_skipped"] == 1, counter.operations
    assert counter.stages.total() == 183


@pytest.mark.parametrize(("sampled", "more"), [(False, 5), (True, 6)])
def test_grammars_on_the_device_take_at_most_one_node_per_mask_and_one_more(sampled: bool, more: int) -> None:
    """One kernel for each of the K + 1 masks, and one that checks the masks of verification; a greedy round has one fill less. No stage of
    the main stream has more nodes."""
    drafts, shape = 4, SHAPES["1B"]
    counts = [count_round(shape, GraphKey(1, on, sampled, device=on), drafts) for on in (True, False)]
    constrained, free = (counter.stages for counter in counts)
    assert constrained.total() - free.total() == more <= drafts + 2, counts[0].operations - counts[1].operations
    assert free - constrained == ({} if sampled else {"accept": 1}), counts[1].operations - counts[0].operations
    assert {name: nodes for name, nodes in (constrained - free).items() if name in free} == {}


def test_notes_state_these_node_counts() -> None:
    notes = (Path(__file__).parents[2] / "tools/results/NOTES.md").read_text(encoding="utf-8")
    found = re.search(
        r"it has (\d+) nodes at 1B and (\d+) at 8B, (\d+) and (\d+) with a grammar; sampled (\d+), (\d+), (\d+) and (\d+)", notes
    )
    assert found is not None
    keys = [(size, GraphKey(1, *key)) for key in ((False,), (True,), (False, True), (True, True)) for size in ("1B", "8B")]
    counts = [count_round(SHAPES[size], key).stages.total() for size, key in keys]
    assert [int(number) for number in found.groups()] == counts
    one, eight, constrained = counts[:3]
    for phrase in (f"{one} nodes, 1 to 1.5 us", f"launches {eight} operations", f"42 then, {constrained - one} now"):
        assert phrase in notes, phrase
