"""The `stepgraph` command: parses, and leaves the work to `commands/`, one module per word."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stepgraph import __version__
from stepgraph.runtime.commands import bench, capture_check, demo, doctor, generate, replay
from stepgraph.runtime.commands.terminal import Command, leave

COMMANDS: dict[str, Command] = {
    "demo": demo,
    "generate": generate,
    "bench": bench,
    "doctor": doctor,
    "capture-check": capture_check,
    "replay": replay,
}


def main(arguments: Sequence[str] | None = None) -> int:
    return leave("stepgraph", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="stepgraph", description="A decoding runtime: one speculative, grammar-constrained round is one recorded graph."
    )
    parser.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    words = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for word, command in COMMANDS.items():
        command.add(words.add_parser(word, help=command.SUMMARY))
    options = parser.parse_args(arguments)
    return leave(f"stepgraph {options.command}", lambda: COMMANDS[options.command].run(options))


if __name__ == "__main__":
    sys.exit(main())
