"""Measurements kept in tools/results/ state commit, date and machine, match the schema of their kind, and are what the documents quote."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stepgraph.sampling.grammar.compile.backends import BACKENDS, XGRAMMAR_SECONDS_PER_CHAR
from stepgraph.sampling.grammar.schema.formats import FORMATS, NARROWED
from tests.fuzz.doors import DOORS
from tests.helpers import long_runs
from tests.helpers.documents import ROOT
from tests.helpers.format_texts import FORMAT_TEXTS
from tests.helpers.toy_engines import plain
from tests.helpers.vocabularies import VOCABULARIES
from tests.laws.test_draft_chains import MASKS
from tests.runtime import test_engine_processors
from tools.bench_schemas import MASK_TIMES
from tools.gpu_table import RESULTS

SCHEMAS = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.schema.json")}
RECORDS = sorted(path for path in RESULTS.glob("*.json") if path.name not in SCHEMAS)


def check(name: str, record: dict[str, Any]) -> None:
    """Documents of gpu_check.py, which have a mode, are named by the device; others are named after their kind."""
    schema = SCHEMAS["gpu_check.schema.json" if "mode" in record else "record.schema.json"]
    if "mode" not in record:
        schema = {**schema, "$ref": f"#/$defs/{name.split('-')[0]}"}
    jsonschema.Draft202012Validator(schema).validate(record)
    assert "mode" in record or name.endswith(f"-{record['date'][:10]}.json"), f"{name}: the record has another date"


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_record_matches_the_schema_of_its_kind(path: Path) -> None:
    check(path.name, json.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["commit", "machine", "goals"])
def test_a_record_without_a_required_part_is_refused(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=f"'{name}' is a required property"):
        check(max(RESULTS.glob("adaptive-*.json")).name, {key: value for key, value in kept("adaptive").items() if key != name})


def test_every_kind_has_a_record() -> None:
    kinds = {name for name, each in SCHEMAS["record.schema.json"]["$defs"].items() if "required" in each and "properties" in each}
    assert kinds == {path.name.split("-")[0] for path in RECORDS if "mode" not in json.loads(path.read_text(encoding="utf-8"))}


def kept(kind: str) -> dict[str, Any]:
    """The latest record of a kind."""
    found: dict[str, Any] = json.loads(max(RESULTS.glob(f"{kind}-*.json")).read_text(encoding="utf-8"))
    return found


def quoted() -> list[tuple[str, str]]:
    """(document, text that it must contain), from the records that the documents name."""
    variants, compiled, soak = kept("demo")["throughput"]["variants"], kept("automata")["compile"], kept("soak")
    adaptive, measured = kept("adaptive"), kept("quantised")
    packed, on_two = ([value for value, _ in found["ratios"].values()] for found in (measured, measured["two_threads"]))
    chains = {name: each["json"]["tokens_per_round"] for name, each in kept("acceptance")["acceptance"].items() if isinstance(each, dict)}
    trends, late = soak["trends"], soak["trends"]["resident_bytes, last half"]
    speed = {name: math.floor(each["tokens_per_second"] + 0.5) for name, each in variants.items()}
    tokens = {name: each.get("tokens_per_round") for name, each in variants.items()}
    free = {name: math.floor(each["tokens_per_second"] + 0.5) for name, each in kept("demo")["throughput"]["free_text"].items()}
    answers = {
        name: sum(kind[name] for kind in kept("legality")["legality"].values()) for name in ("answers", "complete", "legal_of_complete")
    }
    head = ("head alone, masked", "head alone, not masked")
    bench = kept("maskbench")
    two = kept("twographs")["rounds"]
    by_pair = ([each for each in two if name in each["models"]] for name in ("SmolLM2", "Llama"))
    gains = [sorted(each["gain_apart"] for each in found) for found in by_pair] + [sorted(each["gain_shared"] for each in two)]
    fills = [[batch["over_python_loop"] for batch in each["batches"]] for each in kept("fills")["libraries"]]
    inside = [each["library_calls_over_python_loop"] for each in kept("fills")["libraries"][0]["batches"]]
    shares = {
        "xgrammar in the native link": [each["native link, called from C"] for each in fills[0]],
        "xgrammar's own functions alone, the time of all threads together": inside,
        "llguidance in the native link": [each["native link, called from C"] for each in fills[1]],
        "llguidance's own call for a whole batch": [each["library batch"] for each in fills[1]],
        "automata of the same grammars in the native link, compared with xgrammar's loop": [
            each["native link, automata"] for each in fills[0]
        ],
    }
    alone, by_turns = (kept("automata")["host_link"][name]["automata_over_native_link"].values() for name in ("alone", "by_turns"))
    walked, fuzzed, schedules = kept("masks")["masks"], kept("fuzz"), kept("schedules")["counts"]
    compared = kept("examples")["setups"]
    captures = kept("capture")["captures"]

    def both(other: str, figure: str) -> str:
        one, eight = (captures[rows]["auto_over"][other][figure] for rows in ("1 row", "8 rows"))
        return f"{one:.2f} and {eight:.2f}"

    outcomes, masks = bench["counts"], bench["mask_us"]["all"]["least of three"]
    first, again, _ = (bench["mask_us"]["automaton"][name] for name in MASK_TIMES)
    libraries = sum(bench["backends"].values()) - bench["backends"]["automaton"]
    return [
        ("README.md", f"the same weights | {speed['transformers + grammar']} | 1 |"),
        *(("README.md", f"| {name} | {speed[name]} | 1 |") for name in ("plain", "plain + grammar")),
        *(
            ("README.md", f"| {label} | {speed[name]} | {math.floor(tokens[name] * 10 + 0.5) / 10} |")
            for label, name in (
                ("speculative", "speculative"),
                ("speculative + grammar", "speculative + grammar"),
                ("speculative + grammar, always 7 drafts", "speculative + grammar, always 7"),
            )
        ),
        (
            "README.md",
            " | " + " / ".join(str(speed[name]) for name in head) + " | " + " / ".join(str(tokens[name]) for name in head) + " |",
        ),
        (
            "README.md",
            f"the head alone {chains['head']:.2f}, its drafts not masked {chains['head, drafts not masked']:.2f}, "
            f"with forced drafts and look-up {chains['head, forced drafts, look-up']:.2f}",
        ),
        ("README.md", f"| free text: plain / speculative | {free['plain']} / {free['speculative']} | 1 /"),
        ("README.md", f"{answers['complete']} of {answers['answers']} answers are complete"),
        ("README.md", f"all {answers['legal_of_complete']} validate"),
        (
            "docs/constrain.md",
            f"Of {compiled['schemas']:,} schemas of JSONSchemaBench, {compiled['refused']} are refused and "
            f"{compiled['compiled']:,} of the others fit",
        ),
        ("docs/constrain.md", f"{compiled['compile_ms']['p50']:.1f} ms at the median and {compiled['compile_ms']['p99']:.0f} ms at p99"),
        (
            "docs/constrain.md",
            f'Of MaskBench\'s {bench["schemas"]:,} schemas, read with `objects="standard"` over 131,072 tokens, '
            f"{outcomes['pass']:,} pass, "
            f"{outcomes['refused']} are refused, and {outcomes['valid rejected']} reject a valid instance",
        ),
        ("docs/constrain.md", f"{masks['p50']:.1f} us at the median and {masks['p99.9']:.0f} us at p99.9"),
        (
            "docs/constrain.md",
            f"us at p99.9, {masks['p99.9'] / masks['p50']:.1f} times the median, as the least of three first calls",
        ),
        ("docs/constrain.md", f"first call of an automaton took {first['p99.9']:.0f} us at p99.9 and the same call again at once"),
        ("docs/constrain.md", f"again at once {again['p99.9']:.0f} us"),
        ("docs/constrain.md", f"{libraries} schemas have no automaton"),
        (
            "docs/constrain.md",
            f"all {bench['bytes']['schemas']:,} schemas were measured: {bench['bytes']['counts']['pass']:,} passed",
        ),
        (
            "docs/constrain.md",
            f"{bench['compile_ms']['p50']:.0f} ms at the median and {bench['compile_ms']['p99']:,.0f} ms at p99 on a busy",
        ),
        *(("docs/round.md", " | ".join(f"{share:.2f}" for share in each)) for each in (alone, by_turns)),
        *(("docs/round.md", f"| {name} | {one:.2f} | {many:.2f} |") for name, (one, many) in shares.items()),
        *(("docs/round.md", f"{found[0]:.2f} to {found[-1]:.2f} times") for found in gains),
        *(
            ("docs/round.md", f"| {name} | " + " | ".join(f"{each['variants'][length]['over_plain']:.2f}" for length in ("3", "7", "auto")))
            for name, each in adaptive["workloads"].items()
        ),
        ("tools/results/NOTES.md", f"takes {both('one length', 'first_seconds')} times the processor time of K alone"),
        ("tools/results/NOTES.md", f"grows by {both('one length', 'kept_bytes')} times as much"),
        (
            "tools/results/NOTES.md",
            f"these are {both('0643677', 'first_seconds')}, for later captures of a process {both('0643677', 'later_seconds')}",
        ),
        ("tools/results/NOTES.md", f"and {both('0643677', 'kept_bytes')} of its memory"),
        ("docs/models.md", f"takes {packed[4]:.2f} of the bytes in bfloat16"),
        ("docs/models.md", f"answers have {packed[0]:.2f} times the tokens per second of processor time"),
        ("docs/models.md", f"with plain decoding and {packed[1]:.2f} times with drafts"),
        ("docs/models.md", f"is exceeded by {packed[2]:.2f} and {packed[3]:.2f} times"),
        ("docs/models.md", "By the clock on two threads these are {:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*on_two[:4])),
        ("tools/README.md", f"{sum(goal['met'] for goal in adaptive['goals'])} of {len(adaptive['goals'])} goals are met"),
        ("docs/constrain.md", f"{sum(each['num_masks'] for each in walked):,} masks of three libraries and three vocabularies"),
        (
            "README.md",
            f"{schedules['schedules']:,} simulated schedules with {schedules['jobs']:,} requests and {schedules['faults']:,} faults",
        ),
        (
            "README.md",
            f"{sum(each['examples'] for each in compared):,} random batches of {sum(each['jobs'] for each in compared):,} requests, "
            f"at least {min(each['examples'] for each in compared)} for each of {len(compared)} engine setups",
        ),
        ("SECURITY.md", f"{fuzzed['inputs']:,} inputs at each of {len(fuzzed['doors'])} entry points"),
        ("tools/README.md", f"{soak['wanted_seconds'] / 60:.0f} minutes on two busy cores"),
        *(
            ("tools/README.md", f"{label} {trend['per_hour'] / 1e6:.1f} MB per hour (standard error {trend['error_per_hour'] / 1e6:.1f})")
            for label, trend in (
                ("resident memory changed by", trends["resident_bytes"]),
                ("in the last half by", late),
                ("allocated bytes by", trends["heap_bytes"]),
            )
        ),
    ]


def test_records_of_long_runs_are_complete_and_without_a_find() -> None:
    fuzzed, walked, soak = kept("fuzz"), kept("masks")["masks"], kept("soak")
    assert [each["door"] for each in fuzzed["doors"]] == [*DOORS]
    assert all(each["inputs"] == fuzzed["inputs"] and not each["finds"] for each in fuzzed["doors"])
    assert {(each["vocabulary"], each["library"]) for each in walked} == set(product(VOCABULARIES, BACKENDS))
    assert all(each["num_masks"] >= MASKS and each["differences"] == 0 for each in walked)
    expected = {(oracle, long_runs.name_of(setup)) for oracle, (setups, *_) in long_runs.ORACLES.items() for setup in setups}
    assert {(each["oracle"], each["setup"]) for each in kept("examples")["setups"]} == expected
    assert soak["passed"] and soak["seconds"] >= 3600 and len(soak["kinds"]) == 12


def test_record_of_formats_has_all_of_them_and_rejects_only_what_is_listed() -> None:
    found = kept("formats")["formats"]
    assert list(found) == list(FORMATS) and all(each["accepted"] + each["rejected"] == FORMAT_TEXTS for each in found.values())
    assert {name for name, each in found.items() if each["narrowed"]} <= NARROWED.keys()


def test_record_of_masks_of_schemas_meets_its_goals() -> None:
    found = kept("maskbench")
    times, compiled = found["mask_us"]["all"]["least of three"], found["compile_ms"]
    assert times["p99.9"] <= 5 * times["p50"] and compiled["p50"] <= 20 and compiled["p99"] <= 1000
    assert found["counts"]["pass"] >= 10_515 and found["instances"]["valid rejected"] <= 60 and "invalid accepted" not in found["counts"]


def test_record_of_acceptance_is_of_twenty_prompts_and_meets_its_goals() -> None:
    found = kept("acceptance")
    assert found["acceptance"]["prompts_of_each_kind"] == 20, "as README says"
    assert [name for name, value in found["ratios"].items() if value < float(name[name.index("(") + 1 : -1])] == []


def test_record_of_captures_meets_its_goal_over_the_version_before() -> None:
    found = kept("capture")
    over = [rows["auto_over"]["0643677"] for rows in found["captures"].values()]
    assert len(over) == 2 and all(value < found["goal"] for each in over for value in each.values())


def test_a_record_of_schedules_counts_what_ran() -> None:
    (found,) = long_runs.schedules(1, {})
    assert found["counts"]["schedules"] == 1 and found["counts"]["jobs"] > 1


def test_a_record_of_examples_counts_what_ran_and_a_wrong_output_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = long_runs.ORACLES["processors"][0][0]
    found = long_runs.examples_of("processors", setup, 3)
    assert found["examples"] == 3 and found["jobs"] >= 3 and found["tokens"] > found["jobs"]
    monkeypatch.setattr(test_engine_processors, "plain", lambda prompt, *others, **fields: plain([*prompt, 1], *others, **fields))
    with pytest.raises(AssertionError):
        long_runs.examples_of("processors", setup, 3)


def test_documents_quote_the_latest_records_and_name_all() -> None:
    pages = ["README.md", "SECURITY.md", "tools/README.md", "tools/results/NOTES.md"]
    pages += [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    texts = {name: " ".join((ROOT / name).read_text(encoding="utf-8").split()) for name in pages}
    assert [(name, text) for name, text in quoted() if text not in texts[name]] == []
    assert [path.name for path in RECORDS if not any(path.name in text for text in texts.values())] == [], "no page names these records"


def test_library_of_a_schema_is_chosen_from_measurements() -> None:
    """Automata first, which have the fastest masks; without an automaton, by the measured time of a compilation and a mask."""
    bench = kept("maskbench")
    found = {name: bench["libraries"][name] for name in BACKENDS[1:]}
    masks = {name: library["mask_us_p99_of_each"]["p50"] for name, library in found.items()}
    assert masks == pytest.approx({"xgrammar": 13, "llguidance": 1000}, rel=0.05), "as order_by_cost says"
    masks["automaton"] = bench["mask_us"]["automaton"]["least of three"]["p99"]
    assert sorted(BACKENDS, key=masks.__getitem__) == list(BACKENDS)
    assert found["xgrammar"]["microseconds_per_byte"] * 1e-6 == pytest.approx(XGRAMMAR_SECONDS_PER_CHAR, rel=0.05)
    assert found["llguidance"]["microseconds_per_byte"] * 1e-6 < XGRAMMAR_SECONDS_PER_CHAR / 100
