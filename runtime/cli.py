"""The `stepgraph` command: parses the command line and runs one of the modules in `commands/`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

from stepgraph import __version__
from stepgraph.runtime.commands.flag_names import flag_hint, flag_names, naming_flags
from stepgraph.runtime.commands.flags import COMMANDS, check_ranges
from stepgraph.runtime.commands.terminal import Parser, keeping_interrupt, run_command, waiting


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command("stepgraph", lambda: _main(arguments))


def make_parser() -> Parser:
    parser = Parser(prog="stepgraph", description="A decoding runtime: one speculative, grammar-constrained round is one recorded graph.")
    parser.add_argument("--version", action="version", version=f"stepgraph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        examples = "examples:\n" + "\n".join(f"  {example}" for example in command.examples)
        raw = argparse.RawDescriptionHelpFormatter
        subparser = commands.add_parser(name, help=command.summary, description=command.description, epilog=examples, formatter_class=raw)
        command.add_flags(subparser)
        subparser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        subparser.set_defaults(flags=flag_names(subparser), parser=subparser)
    return parser


def _main(arguments: Sequence[str] | None) -> int:
    options, unknown = make_parser().parse_known_args(arguments)
    if unknown:
        hint = flag_hint(unknown[0], options.flags) if unknown[0].startswith("--") else ""
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint and f'; expected {hint}'}")
    return run_command(f"stepgraph {options.command}", lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    with naming_flags(options.flags):
        check_ranges(options)
        COMMANDS[options.command].check_flags(options)
        with waiting("loading libraries ..."), keeping_interrupt():
            command = importlib.import_module(f"stepgraph.runtime.commands.{options.command.replace('-', '_')}")
        code: int = command.run(options)
        return code
