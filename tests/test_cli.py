"""The `stepgraph` command, as a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import stepgraph


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # without a C compiler there is a warning of that kind, which has a test of its own
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "stepgraph.runtime.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_demo_prints_the_report_and_the_texts() -> None:
    result = run("demo")
    assert (result.returncode, result.stderr) == (0, "")
    assert "6 graphs captured on tape" in result.stdout
    assert "all variants gave the same tokens" in result.stdout
    assert "\x1b" not in result.stdout, "no colours in a pipe"


def test_demo_as_json_obeys_a_schema_of_ones_own(tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}))
    result = run("demo", "--json", "--schema", str(schema), "-k", "2")
    document = json.loads(result.stdout)
    assert (result.returncode, result.stderr) == (0, "")
    assert document["same_tokens"] is True
    answer = json.loads(document["outputs"]["JSON schema"][0])
    assert len(answer) == 2 and set(answer) <= {1, 2}
    assert all(row["host_syncs"] == 0 and row["rounds"] == row["replays"] for row in document["variants"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "-k", "9"), "EngineConfig.num_speculative_tokens: got 9, want 0 to 8"),
        (("demo", "--agreement", "2"), "ToyDraft.agreement: got 2.0, want 0 to 1"),
        (("demo", "--schema", "/nowhere.json"), "--schema: got '/nowhere.json' (No such file or directory), want a JSON schema"),
        (("demo", "--schema", '{"type": "object"'), """--schema: got '{"type": "object"', which is not JSON"""),
        (("demo", "-k", "many"), "invalid int value"),
        (("fly",), "invalid choice"),
        ((), "COMMAND"),
    ],
)
def test_bad_flags_exit_with_2_and_say_why(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_schema_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{")
    assert "not JSON" in run("demo", "--schema", str(path)).stderr
    path.write_text("[1]")
    assert "which holds list, want an object" in run("demo", "--schema", str(path)).stderr


def test_help_and_version() -> None:
    assert "--agreement" in run("demo", "--help").stdout
    assert run("--version").stdout == f"stepgraph {stepgraph.__version__}\n"
