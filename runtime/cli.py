"""The `stepgraph` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgraph import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stepgraph", description="A decoding runtime: one speculative, grammar-constrained round is one recorded graph."
    )
    parser.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="generate constrained text with the toy pair and show what the rounds did",
        description="Decode the same requests plainly and speculatively, compare the tokens, and print the capture report.",
    )
    demo.add_argument("-k", "--drafts", type=int, default=4, help="drafts per round, 0 to 8 (default: 4)")
    demo.add_argument("--agreement", type=float, default=0.8, help="how often the toy draft agrees with its target, 0 to 1 (default: 0.8)")
    demo.add_argument("--schema", type=Path, metavar="FILE", help="a JSON schema to obey (default: a weather report)")
    demo.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    demo.add_argument("--no-colour", action="store_true", help="no colours, even on a terminal")
    options = parser.parse_args(arguments)
    try:
        return _demo(options)
    except (ValueError, OSError) as error:
        print(f"stepgraph {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stepgraph {options.command}: interrupted", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    from stepgraph.runtime.demo import run_demo  # torch takes seconds to load: --help need not wait for it

    terminal = sys.stdout.isatty()
    return run_demo(
        options.drafts,
        options.agreement,
        _schema(options.schema),
        colour=terminal and not options.no_colour and not options.json,
        quiet=options.json or not sys.stderr.isatty(),
        as_json=options.json,
    )


def _schema(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        schema = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--schema {path}: not JSON: {error}") from error
    if not isinstance(schema, dict):
        raise ValueError(f"--schema {path}: got {type(schema).__name__}, want an object")
    return schema


if __name__ == "__main__":
    sys.exit(main())
