"""The selection of `pytest --part`."""

from __future__ import annotations

import argparse

import pytest

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
