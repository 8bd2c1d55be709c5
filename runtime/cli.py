"""The `stepgraph` command: parses the command line and runs one of the modules in `commands/`.

Errors name the flags, also where another part of the runtime refuses their values.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence

from stepgraph import __version__
from stepgraph.runtime.commands.flags import COMMANDS, check_ranges
from stepgraph.runtime.commands.terminal import Parser, keeping_interrupt, run_command, waiting

# Names in errors of the runtime -> dest of the flag that sets them, where that has another name.
_OTHER_NAMES = {
    "num_speculative_tokens": "drafts",
    "max_loras": "lora_modules",
    "marker": "after",
    "path": "model",
    "prompt": "token_ids",
    **dict.fromkeys(("ebnf", "lark"), "grammar"),  # kinds of constraints
    "json_schema": "schema",
}
_OF_SERVERS = {  # flags of vLLM's and llama.cpp's servers -> dest
    **dict.fromkeys(("served_model_name", "alias"), "name"),
    **{"ctx_size": "max_length", "parallel": "max_rows", "data_parallel_size": "replicas", "draft_max": "drafts"},
    **{"tool_call_parser": "tool_format", "enable_lora": "lora_modules", "disable_log_requests": "log", "timeout": "answer_seconds"},
}
_FIELD = r"(?:(?:EngineConfig|SamplingParams|Constraint|sampling)\.)?"
_SUBJECT = re.compile(rf"(?:constraint |Constraint\.payload of )?{_FIELD}(\w+)(?:\.grammar|\[\d+\])*(?=:)")
_SETTING = re.compile(rf"'[^']*'|\"[^\"]*\"|\b{_FIELD}(\w+)=(?=\S)")  # quoted text is input


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
        names = {action.dest: "/".join(action.option_strings) or str(action.metavar) for action in subparser._actions}  # as in argparse
        subparser.set_defaults(flags=names, parser=subparser)
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


def flag_hint(argument: str, flags: Mapping[str, str]) -> str:
    """The flag for one that has this name in another library, or a similar one; empty if there is none."""
    from stepgraph.runtime.validate import ENGINE_NAMES, REQUEST_NAMES  # imports torch, for an error only

    name = argument[2:].partition("=")[0].replace("-", "_")
    words = re.findall(r"\w+", {**ENGINE_NAMES, **REQUEST_NAMES}.get(name, ""))
    dests = [_OTHER_NAMES.get(f"constraint {word}", _OTHER_NAMES.get(word, word)) for word in words]
    longer = [dest for dest in flags if dest.startswith(name)]  # of an abbreviation
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, flags, 1, 0.8)
    return next((flags[dest] for dest in (_OF_SERVERS.get(name, ""), *dests, *close) if dest in flags), "")


@contextlib.contextmanager
def naming_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Within the block, a ValueError that names a field of the runtime names its flag instead. flags: their names in errors, by dest."""

    def flag_of(name: str) -> str | None:
        return flags.get(_OTHER_NAMES.get(name, name))

    try:
        yield
    except ValueError as error:
        message = str(error)
        if "lower max_rows" in message:
            from stepgraph.graphs.errors import MEMORY_SETTINGS

            names = filter(None, map(flag_of, (*re.findall(r"\w+", MEMORY_SETTINGS), "max_new_tokens")))
            message = message.replace(MEMORY_SETTINGS, ", ".join(dict.fromkeys(names)))
        if (subject := _SUBJECT.match(message)) and (flag := flag_of(subject[1])):
            message = flag + message[subject.end() :]
        raise ValueError(_SETTING.sub(lambda found: f"{flag} " if (flag := flag_of(found[1])) else found[0], message)) from None
