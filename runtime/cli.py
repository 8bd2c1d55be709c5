"""The `stepgraph` command: parses the command line and runs one of the modules in `commands/`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stepgraph import __version__
from stepgraph.runtime.commands import bench, capture_check, demo, doctor, generate, replay
from stepgraph.runtime.commands.terminal import Command, Parser, run_command

COMMANDS: dict[str, Command] = {
    "demo": demo,
    "generate": generate,
    "bench": bench,
    "doctor": doctor,
    "capture-check": capture_check,
    "replay": replay,
}


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("stepgraph", lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> int:
    parser = Parser(prog="stepgraph", description="A decoding runtime: one speculative, grammar-constrained round is one recorded graph.")
    parser.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add(commands.add_parser(name, help=command.SUMMARY))
    options = parser.parse_args(arguments)
    return run_command(f"stepgraph {options.command}", lambda: COMMANDS[options.command].run(options))


if __name__ == "__main__":
    sys.exit(main())
