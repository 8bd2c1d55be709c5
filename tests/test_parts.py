"""The selection of `pytest --part`, and of files by `pytest -m`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.helpers.marked import HELPERS, may_have
from tests.helpers.parts import in_part, parse_part


def test_each_test_is_in_exactly_one_part(request: pytest.FixtureRequest) -> None:
    names = [item.nodeid for item in request.session.items] + [f"test_{number}" for number in range(100)]
    parts = [{name for name in names if in_part(name, parse_part(f"{index}/5"))} for index in range(5)]
    assert sum(map(len, parts)) == len(set(names))
    assert set.union(*parts) == set(names)
    assert all(parts)


@pytest.mark.parametrize("text", ["", "3", "5/5", "0/0", "-1/5", "1/5/2", "a/b"])
def test_a_part_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"got .*, expected I/N"):
        parse_part(text)


def test_a_run_with_one_marker_reads_the_files_that_name_it_or_its_helpers(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    for name, text in {"direct": "@pytest.mark.slow", "helped": "from tests.helpers.pairs import pairs", "neither": "slow = 1"}.items():
        (tmp_path / f"{name}.py").write_text(text)
    paths = [tmp_path / f"{name}.py" for name in ("direct", "helped", "neither")]
    assert [may_have(path, "slow") for path in paths] == [True, True, False]
    assert [may_have(path, "models") for path in paths] == [False, False, False] and "mark.slow" in (HELPERS / "pairs.py").read_text()
    left_out = []
    for marker in ("slow", "not slow"):
        with pytest.MonkeyPatch.context() as changed:
            changed.setattr(pytestconfig.option, "markexpr", marker)
            left_out.append([pytestconfig.hook.pytest_ignore_collect(collection_path=path, config=pytestconfig) for path in paths])
    assert left_out == [[None, None, True], [None, None, None]]
