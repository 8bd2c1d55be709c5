"""Training of the demonstration's draft: prompts, figures, model card."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepgraph import Constraint, DraftCounts, StepEvent, Vocabulary
from stepgraph.runtime.demo.pair import HEAD_FOLDER
from stepgraph.sampling.grammar.compile.compiler import GrammarCompiler
from tools import bench_demo, train_demo, train_head
from tools.train.demo import words
from tools.train.demo.card import card
from tools.train.demo.measure import VARIANTS, acceptance
from tools.train.demo.prompts import KINDS, make_prompt
from tools.train.demo.schemas import MEASURED, SCHEMAS, TOOLS, tool_schema
from tools.train.demo.words import WordSampler

LISTS = {name: value for name, value in vars(words).items() if name.isupper() and isinstance(value, list)}


def test_a_prompt_follows_from_its_seed() -> None:
    assert make_prompt(7) == make_prompt(7)
    assert make_prompt(7, "person").messages[0]["content"].endswith("I am a lawyer. My address is wei.petrova@alderandsons.example."), (
        "the same in every process and release of Python, as stored answers are answers to it"
    )
    assert len({str(make_prompt(seed).messages) for seed in range(200)}) > 180


def test_measured_schemas_and_tools_occur_in_no_training_prompt() -> None:
    trained = [make_prompt(seed) for seed in range(1500)]
    schemas = {json.dumps(each.schema) for each in trained if each.schema}
    assert len(schemas) > 600
    assert not schemas & {json.dumps(SCHEMAS[kind]) for kind in MEASURED}
    tools = set(re.findall(r"^- (\w+)", "\n".join(str(each.messages[0]["content"]) for each in trained if each.kind == "tool call"), re.M))
    measured = [make_prompt(seed, "tool call", held_out=True).messages[0]["content"] for seed in range(40)]
    assert tools == {each["name"] for index, each in enumerate(TOOLS) if index % 5}
    assert tools.isdisjoint(re.findall(r"^- (\w+)", "\n".join(measured), re.M))


def test_schemas_of_every_prompt_kind_compile() -> None:
    compiler = GrammarCompiler(Vocabulary.printable(), isolation="none")
    for kind in KINDS:
        requested = make_prompt(1, kind)
        assert requested.kind == kind and requested.messages[-1]["role"] == "user"
        assert (requested.schema is None) == (kind in ("talk", "code"))
    for schema in [*SCHEMAS.values(), tool_schema(TOOLS)]:
        compiler.compile(Constraint.json_schema(schema)).matcher()
    assert set(MEASURED) <= set(SCHEMAS) and len(MEASURED) == 5


@pytest.mark.parametrize("name", sorted(LISTS))
def test_a_fifth_of_every_list_is_held_out(name: str) -> None:
    listed = LISTS[name]
    drawn = {side: {WordSampler(random.Random(seed), side).pick(listed) for seed in range(900)} for side in (True, False)}
    assert drawn[True] | drawn[False] == set(listed) and len(set(listed)) == len(listed)
    assert not drawn[True] & drawn[False]
    assert len(drawn[True]) == -(-len(listed) // 5)


def test_held_out_names_occur_in_no_training_prompt() -> None:
    trained = " ".join(str(make_prompt(seed).messages) for seed in range(500))
    for name in [word for index, word in enumerate(words.LAST) if index % 5 == 0]:
        assert f" {name}" not in trained.replace(f"'{name}", ""), name


def test_acceptance_counts_offered_drafts_only() -> None:
    def job(*accepted: int) -> list[StepEvent]:
        return [StepEvent(1, tuple(range(number + 1)), DraftCounts(number)) for number in accepted]

    figures = acceptance([job(0, 4, 1, 0), job(0, 2, 3)])
    assert figures["held"][:5] == [1.0, 0.667, 0.333, 0.333, 0.0], "the first and the last round of each job do not count"
    assert figures["tokens_per_round"] == round(17 / 7, 3)


def test_card_has_the_measured_figures() -> None:
    row = {"tokens_per_round": 2.345, "held": [0.9, 0.5, 0.25, 0.1]}
    measured: dict[str, Any] = {"drafts": 4, "prompts_of_each_kind": 20, "new_tokens": 96}
    measured |= {name: {"person": row, "json": row} for name in VARIANTS}
    training = {
        "plan": {"batch_tokens": 2048, "rate": 1e-3, "unrolled": 4, "seed": 0},
        "feature_layers": [2, 15, 27],
        "proposed": 2944,
        "parameters": 5_900_000,
        "texts": {"learned": 2500, "held_out": 120},
        "trained": {"steps": 3000},
        "held_out": {"losses": [1.0, 1.5, 2.0, 2.5], "hits": [0.7, 0.6, 0.5, 0.4]},
    }
    text = card({"training": training, "measured": measured, "bytes": 6_300_000, "answers": 112, "command": "python tools/train_demo.py"})
    for sentence in (
        "2,944",
        "2,500 answers",
        "3,000 steps",
        "1.00 1.50 2.00 2.50",
        "| person | 2.35 (0.90 0.50 0.25 0.10)",
        "**the five unseen schemas**",
    ):
        assert sentence in text
    cards = text, (HEAD_FOLDER / "README.md").read_text(encoding="utf-8")
    without_figures = [re.sub(r"\|.*\||python tools.*|[\d.,]+", "", each).split() for each in cards]
    assert without_figures[0] == without_figures[1], "--install replaces all of it; other lines are in tools/train/demo/NOTES.md"


def options(work: Path, **changed: Any) -> Any:
    return SimpleNamespace(**vars(train_demo.parse(["--work", str(work)])) | changed)


def test_training_flags_are_valid_and_resume_works(tmp_path: Path) -> None:
    head = tmp_path / "head"
    flags = train_demo.training_flags(options(tmp_path), tmp_path / "model", tmp_path / "states", head)
    assert not train_head.parse(flags).resume
    (head / "training").mkdir(parents=True)
    flags = train_demo.training_flags(options(tmp_path), tmp_path / "model", tmp_path / "states", head)
    assert train_head.parse(flags).resume
    assert "--steps 3000" in train_demo.command_line(options(tmp_path))


def test_benchmark_ratios_match_the_targets() -> None:
    rates = {"plain": 30, "plain + grammar": 25, "speculative + grammar": 60, "transformers + grammar": 20}
    found: dict[str, Any] = {name: {"tokens_per_second": rate} for name, rate in rates.items()}
    found |= {"head alone, masked": {"tokens_per_second": 40, "tokens_per_round": 2.4}}
    found |= {"head alone, not masked": {"tokens_per_second": 40, "tokens_per_round": 2.0}}
    free = {"plain": {"tokens_per_second": 50}, "speculative": {"tokens_per_second": 60}}
    assert list(bench_demo.ratios({"variants": found, "free_text": free}).values()) == [2.4, 1.2, 1.2, 1.25, 3.0]


def test_benchmark_validates_answers() -> None:
    schema = SCHEMAS["review"]
    good = b'{"product": "tent", "sentiment": "positive", "rating": 5, "summary": "fine", "would_recommend": true}'
    assert bench_demo.valid(good, schema)
    assert not bench_demo.valid(good.replace(b"5", b"6"), schema)
    assert not bench_demo.valid(b"{", schema)
