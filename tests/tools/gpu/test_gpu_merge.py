"""gpu_check.py --merge: documents of runs with --only become one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_check
from tools.gpu.checks.catalogue import CATALOGUE
from tools.gpu.checks.document import compose

FACTS = {
    "mode": "gpu",
    "device": "NVIDIA X100",
    "driver": "580.1",
    "cuda": "13.0",
    "python": "3.12.3",
    "commit": "0123456789ab",
    "date": "2026-11-26T03:00:00+00:00",
    "versions": {"torch": "2.11.0", "flashinfer-python": "missing"},
}
ROWS = [
    {"name": entry.name, "verdict": "passed", "seconds": 1.0, "budget": 2.0, "figures": {"index": index}, "error": ""}
    for index, entry in enumerate(CATALOGUE)
]


def part(path: Path, rows: list[dict[str, Any]], **facts: Any) -> Path:
    path.write_text(json.dumps(compose(FACTS | facts, rows, quick=False, whole=False, seconds=5.0)), encoding="utf-8")
    return path


def test_parts_in_any_order_become_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    even = part(tmp_path / "even.json", ROWS[::2], date="2026-11-26T04:00:00+00:00")
    odd = part(tmp_path / "odd.json", ROWS[1::2], versions={"torch": "2.11.0", "flashinfer-python": "0.6.6"})
    assert gpu_check.main(["--merge", str(even), str(odd), "--out", str(tmp_path / "merged")]) == 0
    saved = tmp_path / "merged" / "nvidia-x100-2026-11-26.json"
    assert capsys.readouterr().out == f"saved {saved}\n"
    merged = json.loads(saved.read_text(encoding="utf-8"))
    versions = {"torch": "2.11.0", "flashinfer-python": "0.6.6"}
    assert merged == compose(FACTS | {"versions": versions}, ROWS, quick=False, whole=True, seconds=10.0)


def test_missing_and_failed_checks_are_those_of_the_parts(tmp_path: Path) -> None:
    failed = ROWS[0] | {"verdict": "failed", "error": "AssertionError"}
    one, two = part(tmp_path / "one.json", [failed]), part(tmp_path / "two.json", ROWS[5:9])
    assert gpu_check.main(["--merge", str(two), str(one), "--out", str(tmp_path)]) == 1
    merged = json.loads((tmp_path / "nvidia-x100-2026-11-26-part.json").read_text(encoding="utf-8"))
    assert merged["checks"] == [failed, *ROWS[5:9]] and not merged["whole"] and not merged["passed"]


@pytest.mark.parametrize(
    ("rows", "facts", "message"),
    [
        (ROWS[:1], {"commit": "ba9876543210"}, "got commit '0123456789ab' and 'ba9876543210', expected documents of one commit"),
        (ROWS[:1], {"device": "NVIDIA Y"}, "got device 'NVIDIA X100' and 'NVIDIA Y'"),
        (ROWS[:1], {"versions": {"torch": "2.12.0"}}, "got torch 2.11.0 and 2.12.0, expected one version"),
        (ROWS[2:3], {}, f"got {ROWS[2]['name']} more than once, expected each check in one document"),
    ],
)
def test_documents_that_do_not_belong_together_are_refused(
    rows: list[dict[str, Any]], facts: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = part(tmp_path / "one.json", ROWS[1:5]), part(tmp_path / "two.json", rows, **facts)
    assert gpu_check.main(["--merge", str(one), str(two), "--out", str(tmp_path / "merged")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "merged").exists()


@pytest.mark.parametrize(("text", "message"), [("", "none.json"), ("{", "Expecting"), ('{"checks": []}', "without the field 'format'")])
def test_other_files_are_refused(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.json"
    if text:
        path.write_text(text, encoding="utf-8")
    assert gpu_check.main(["--merge", str(path)]) == 2
    assert message in capsys.readouterr().err
