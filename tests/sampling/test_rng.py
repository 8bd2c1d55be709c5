"""Random numbers: equal to the same function in Python integers, uniform, and independent between purposes, seeds and positions."""

from __future__ import annotations

import math

import pytest
import torch

from stepgraph.sampling.rng import Purpose, exponential, uniform
from tests.helpers.chi_square import chi_square_p

MASK = (1 << 64) - 1


def by_hand(seed: int, position: int, purpose: int, index: int | None) -> float:
    golden = 0x9E3779B97F4A7C15

    def mix(value: int) -> int:
        value &= MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    key = mix(mix(seed + purpose * golden) + position * golden)
    if index is not None:
        key = mix(key + index * golden)
    return (key >> 1) * 2.0**-63


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 1])
@pytest.mark.parametrize("purpose", list(Purpose))
def test_random_numbers_equal_integer_arithmetic(seed: int, purpose: Purpose) -> None:
    positions = torch.tensor([0, 1, 1000, 2**40])
    vocabulary = torch.tensor([0, 1, 131_071])
    drawn = uniform(torch.tensor(seed), positions[:, None], purpose, vocabulary)
    coins = uniform(torch.tensor(seed), positions, purpose)
    for row, position in enumerate(positions.tolist()):
        assert math.isclose(float(coins[row]), by_hand(seed, position, purpose, None), rel_tol=1e-6)
        for column, token in enumerate(vocabulary.tolist()):
            assert math.isclose(float(drawn[row, column]), by_hand(seed, position, purpose, token), rel_tol=1e-6)


@pytest.mark.parametrize("axis", ["seed", "position", "index"])
def test_uniform_along_every_argument(axis: str) -> None:
    many, one = torch.arange(200_000), torch.tensor(7)
    seed, position, index = (many if name == axis else one for name in ("seed", "position", "index"))
    numbers = uniform(seed, position, Purpose.ACCEPT, index)
    assert float(numbers.min()) > 0 and float(numbers.max()) < 1
    cells = torch.bincount((numbers * 64).long(), minlength=64)
    assert chi_square_p(cells, torch.full((64,), 1 / 64)) > 1e-6
    pairs = (numbers[:-1] * 8).long() * 8 + (numbers[1:] * 8).long()
    assert chi_square_p(torch.bincount(pairs, minlength=64), torch.full((64,), 1 / 64)) > 1e-6


def test_purposes_are_independent() -> None:
    seeds, position = torch.arange(200_000), torch.tensor(3)
    draws = {purpose: uniform(seeds, position, purpose) for purpose in Purpose}
    for left in Purpose:
        for right in Purpose:
            pairs = (draws[left] * 8).long() * 8 + (draws[right] * 8).long()
            p = chi_square_p(torch.bincount(pairs, minlength=64), torch.full((64,), 1 / 64))
            assert (p > 1e-6) == (left != right)


def test_race_follows_its_rates() -> None:
    rates = torch.cat([torch.tensor([0.5, 0.3, 0.15, 0.04]), torch.full((10,), 0.001), torch.zeros(3)])
    noise = exponential(torch.arange(300_000)[:, None], torch.tensor(9), Purpose.TARGET, torch.arange(len(rates)))
    counts = torch.bincount((rates / noise).argmax(-1), minlength=len(rates))
    assert counts[-3:].tolist() == [0, 0, 0]
    assert chi_square_p(counts[:-3], rates[:-3]) > 1e-6
