"""`pytest --part I/N`: one of N parts of the selected tests. A part depends on the names of the tests alone."""

from __future__ import annotations

import argparse
import re
from zlib import crc32


def parse_part(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or int(numbers[1]) >= int(numbers[2]):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected I/N with 0 <= I < N, such as 0/8")
    return int(numbers[1]), int(numbers[2])


def in_part(name: str, part: tuple[int, int]) -> bool:
    index, parts = part
    return crc32(name.encode()) % parts == index
