"""`python -m stepgraph`, and the `stepgraph` command."""

import importlib
import sys

from stepgraph.runtime.commands.terminal import run_command


def main() -> int:
    """Imports the command line where Ctrl-C is reported in one line: on a slow disk that takes seconds."""
    return run_command("stepgraph", lambda: int(importlib.import_module("stepgraph.runtime.cli").main()))


if __name__ == "__main__":
    sys.exit(main())
