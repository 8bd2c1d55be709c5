"""README's section about GPUs is generated from tools/results/."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tools import gpu_table
from tools.gpu.checks.document import compose
from tools.gpu_table import CHANGED, HEADING, NO_RESULTS, README, RESULTS, replace_section, section

ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEMA = json.loads((RESULTS / "gpu_check.schema.json").read_text(encoding="utf-8"))


def document(device: str = "NVIDIA H200", date: str = "2026-11-21", **changes: Any) -> dict[str, Any]:
    """A document of a complete run with few figures."""
    versions = {"torch": "2.11", "triton": "3.6", "xgrammar": "0.2.8", "llguidance": "1.9.1", "flashinfer-python": "0.6.6"}
    facts = {
        "mode": "gpu",
        "device": device,
        "device_bytes": 1,
        "driver": "580.1",
        "cuda": "13.0",
        "python": "3.12.1",
        "commit": "0123456789ab",
    }
    facts |= {"platform": "Linux x86_64", "processors": 16, "host_link": "native", "versions": versions, "date": f"{date}T01:02:03+00:00"}
    over = {"schema": {"median": 1.004}, "recursive": {"median": 1.012}}
    cell = {"over_free": over, "variants": {"free": {"p50_us": 1234.5}}}
    rounds = {"1B batch 1 K=3": cell, "cut": [], "1B": {"p50": 1.012, "noise": 0.02, "p99": 1.08, "noise_p99": 0.01}}
    loop = {"8B batch 1 free": {"ratio": {"median": 1.21, "p25": 1.2, "p75": 1.25}}, "cut": []}
    checked = {"constrained_rounds": rounds, "against_hand_written_loop": loop}
    rows = [
        {"name": name, "verdict": "passed", "seconds": 1.0, "budget": 2.0, "figures": figures, "error": ""}
        for name, figures in checked.items()
    ]
    rows.append({"name": "gil_hold", "verdict": "timed out", "seconds": 9.0, "budget": 2.0, "figures": {}, "error": "no answer"})
    made = compose(facts, rows, quick=False, whole=True, seconds=300.0) | changes
    jsonschema.Draft202012Validator(SCHEMA).validate(made)
    return made


def keep(folder: Path, name: str, made: dict[str, Any]) -> None:
    (folder / f"{name}.json").write_text(json.dumps(made), encoding="utf-8")


def test_readme_section_is_up_to_date() -> None:
    assert gpu_table.main(["--check"]) == 0, "python tools/gpu_table.py --write"
    assert replace_section(README.read_text(encoding="utf-8"), section(RESULTS)).count(HEADING) == 1


def test_section_without_documents(tmp_path: Path) -> None:
    assert section(tmp_path) == f"{HEADING}\n\n{NO_RESULTS}\n"
    keep(tmp_path, "rehearsal", document(mode="rehearsal"))
    keep(tmp_path, "quick", document(quick=True))
    keep(tmp_path, "part", document(whole=False))
    keep(tmp_path, "another", {"throughput": 1})
    assert section(tmp_path) == f"{HEADING}\n\n{NO_RESULTS}\n", "rehearsals, quick runs and parts of runs are no results"


def test_checks_that_a_whole_run_did_not_complete_come_from_parts(tmp_path: Path) -> None:
    whole, old, new = document(), document(whole=False, date="2026-11-20"), document(whole=False, commit="ba9876543210")
    del old["checks"][0], new["checks"][0]
    whole["checks"][1] |= {"verdict": "not run", "figures": {}}
    old["checks"][0]["figures"]["8B batch 1 free"]["ratio"]["median"] = 1.99
    for name, made in (("whole", whole), ("old-part", old), ("new-part", new), ("other-part", document(device="NVIDIA B200", whole=False))):
        keep(tmp_path, name, made)
    text = section(tmp_path)
    assert "They passed in others: against_hand_written_loop at commit ba9876543210 ([new-part.json](tools/results/new-part.json))." in text
    assert "| hand-written loop, 8B batch 1 free | 1.21 | 1.20 to 1.25 |" in text and "1.99" not in text


def test_a_newer_run_of_some_checks_is_named_with_what_did_not_pass(tmp_path: Path) -> None:
    keep(tmp_path, "whole", document())
    assert "The newest run" not in section(tmp_path) and section(tmp_path).rstrip().endswith(CHANGED)
    newer = document(whole=False, date="2026-11-22", commit="ba9876543210")
    newer["checks"][1]["verdict"] = "failed"
    others = document(whole=False, date="2026-11-20"), document(whole=False, date="2026-11-23", device="NVIDIA B200")
    for name, made in (("newer-part", newer), ("old-part", others[0]), ("other-part", others[1])):
        keep(tmp_path, name, made)
    run = "The newest run, 2026-11-22 at commit ba9876543210 ([newer-part.json](tools/results/newer-part.json)): 1 of 3 checks passed;"
    assert f"{run} against_hand_written_loop failed; gil_hold timed out. {CHANGED}" in section(tmp_path)


def test_shares_are_explained_beside_the_goals(tmp_path: Path) -> None:
    made = document()
    shares = {name: {"share_hidden": share} for name, share in (("1B batch 1", 1.0), ("1B batch 16", 0.61), ("8B batch 1", 0.98))}
    made["checks"][0] |= {"name": "mask_time_is_hidden", "figures": shares | {"share_hidden": 0.61}}
    made["checks"][1] |= {"name": "weights_per_second", "figures": {"copy_gigabytes_per_second": 2719.8}}
    keep(tmp_path, "whole", made)
    assert "the least of 3 rounds whose grammars host nodes follow: 1B batch 16. The median of these rounds is 0.98." in section(tmp_path)
    assert "Copy bandwidth, 2,720 GB/s, counts the bytes that a copy reads and those that it writes." in section(tmp_path)


def test_section_has_the_latest_whole_run_of_each_device(tmp_path: Path) -> None:
    keep(tmp_path, "old", document(date="2026-11-20"))
    keep(tmp_path, "new", document())
    keep(tmp_path, "b", document(device="NVIDIA B200", host_link="python: no compiler"))
    text = section(tmp_path)
    assert "old.json" not in text and text.index("NVIDIA B200") < text.index("NVIDIA H200")
    assert "**NVIDIA H200**, driver 580.1, CUDA 13.0, Python 3.12.1, torch 2.11, triton 3.6, xgrammar 0.2.8, llguidance 1.9.1" in text
    assert (
        "2026-11-21, commit 0123456789ab ([tools/results/new.json](tools/results/new.json)): 2 of 3 checks passed; gil_hold timed out."
        in text
    )
    assert text.count("host link") == text.count("gil_hold timed out; host link python: no compiler.") == 1
    assert "| 1B: constrained / unconstrained round, p50 | <= 1 + noise | 1.01 | met |" in text
    assert "| 1.08 | **missed**: found 1.08, expected <= 1.02 + noise of 0.01 |" in text
    assert "**not run**: its check was not selected" in text
    assert "| 1B batch 1 K=3 | 1234 | 1.004 | 1.012 |  |" in text
    assert "| hand-written loop, 8B batch 1 free | 1.21 | 1.20 to 1.25 |" in text


def test_section_replaces_the_old_one() -> None:
    text = f"# a\n\n{HEADING}\n\nold\n\n| x |\n\n## Limits\n\nrest\n"
    assert replace_section(text, f"{HEADING}\n\nnew\n") == f"# a\n\n{HEADING}\n\nnew\n\n## Limits\n\nrest\n"
    assert replace_section(f"{HEADING}\n\nold\n", f"{HEADING}\n\nnew\n") == f"{HEADING}\n\nnew\n"
    with pytest.raises(ValueError, match="got no line '### On a GPU'"):
        replace_section("# a\n", "")
