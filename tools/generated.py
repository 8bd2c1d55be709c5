"""The command line of a tool that generates a page of the documentation."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def print_or_write(description: str | None, page: Callable[[], str], path: Path, arguments: Sequence[str] | None) -> int:
    """Print the page, or write it with --write."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {'/'.join(path.parts[-2:])}")
    if parser.parse_args(arguments).write:
        path.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0
