"""Profiles rounds of an unchanged script with an engine: under nsys on a GPU, otherwise with the engine's own timeline.

Everything after -- is the script, a .py file or a command. Records the rounds of --rounds of the first engine that it creates,
without loading, capture and warm-up. Prints the report of nsys_report.py and saves it as OUT.report.json. The environment variables
that it sets are printed; set them by hand to profile a server that is started in another way.
Exit codes: 0 done, 1 the script failed or did not reach these rounds, 2 bad input, 130 Ctrl-C.

    python tools/nsys_profile.py --rounds 20-40 --out /tmp/bench --bench
    python tools/nsys_profile.py --bench --print
    python tools/nsys_profile.py --rounds 100-200 --out /tmp/mine -- serve.py --port 8000
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools.profiling import command, figures, sources, tables

WORKLOAD = Path(__file__).resolve().parent / "profiling" / "workload.py"
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
STDERR = 2


def parse(arguments: list[str]) -> argparse.Namespace:
    here = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="nsys_profile.py [flags] (--bench | -- SCRIPT ...)",
    )
    add = parser.add_argument
    add("--rounds", default="20-40", metavar="FIRST-LAST", help="which rounds, counted from 0, both included (default: %(default)s)")
    add("--out", type=Path, default=Path("profile"), metavar="PATH", help="prefix of the output files (default: ./%(default)s)")
    add(
        "--with",
        dest="tool",
        choices=("auto", "nsys", "trace"),
        default="auto",
        help="recorder: nsys, or the engine's trace (default: auto)",
    )
    add("--nsys", default="nsys", metavar="PATH", help="nsys executable (default: the one on the path)")
    add("--print", dest="only_print", action="store_true", help="print the command with the reason for each flag, and run nothing")
    add("--json", action="store_true", help="print the report as one JSON document instead of a table")
    add("--bench", action="store_true", help="profile the built-in bench: requests for JSON over the toy pair, or over --model")
    add("--model", metavar="PATH", help="for --bench: a model folder or .gguf file (default: the toy pair)")
    add("--draft", metavar="DRAFT", help="for --bench with --model: draft of Engine.from_pretrained (default: ngram)")
    add("--rows", type=int, default=4, metavar="N", help="for --bench: concurrent requests (default: %(default)s)")
    add("-k", "--drafts", type=int, default=4, metavar="K", help="for --bench: drafts per round (default: %(default)s)")
    lanes = ("auto", "device", "host")
    add("--grammar-lane", choices=lanes, default="auto", help="for --bench: where its grammar is followed (default: %(default)s)")
    options = parser.parse_args(arguments[:here])
    options.script = arguments[here + 1 :]
    return options


def script_of(options: argparse.Namespace, rounds: tuple[int, int]) -> list[str]:
    if options.bench == bool(options.script):
        raise ValueError("got " + ("both" if options.bench else "neither") + " of --bench and -- SCRIPT, expected one of them")
    if not options.bench:
        return list(options.script)
    if options.draft and not options.model:
        raise ValueError("--draft: got one without --model, expected both: the toy pair has a draft of its own")
    model = ["--model", options.model, "--draft", options.draft or "ngram"] if options.model else []
    return [
        str(WORKLOAD),
        "--rounds",
        str(rounds[1] + 1 + command.EXTRA_ROUNDS),
        "--rows",
        str(options.rows),
        "-k",
        str(options.drafts),
        "--grammar-lane",
        options.grammar_lane,
        *model,
    ]


def uses_nsys(tool: str, nsys: str) -> bool:
    """True if nsys should record. nsys needs CUDA and a driver; ValueError if it was requested and is missing."""
    if tool == "nsys" and shutil.which(nsys) is None:
        raise ValueError(f"--with nsys: found no {nsys!r} here; expected it on the path, --nsys PATH, or --with trace, which needs none")
    return tool == "nsys" or (tool == "auto" and shutil.which(nsys) is not None and has_driver())


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        rounds = command.parse_rounds(options.rounds)
        script = script_of(options, rounds)
        with_nsys = True if options.only_print and options.tool != "trace" else uses_nsys(options.tool, options.nsys)
        variables = command.environment(rounds, options.out, with_nsys)
        command_line = command.nsys_command(options.nsys, options.out, script) if with_nsys else command.python_command(script)
        if options.only_print:
            print("\n".join([*(command.flag_reasons(options.out) if with_nsys else []), command.shell_command(command_line, variables)]))
            return 0
        return profile(options, command_line, variables, with_nsys)
    except (ValueError, OSError) as error:
        print(f"nsys_profile: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("nsys_profile: interrupted", file=sys.stderr)
        return INTERRUPTED


def profile(options: argparse.Namespace, command_line: list[str], variables: dict[str, str], with_nsys: bool) -> int:
    """Run the script and report. The script's output goes to stderr, so that stdout has the report only."""
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rounds_file, report_file = command.rounds_file(options.out), options.out.with_name(options.out.name + ".report.json")
    rounds_file.unlink(missing_ok=True)  # left by an earlier run
    print(f"nsys_profile: {command.shell_command(command_line, variables)}", file=sys.stderr)
    result = subprocess.run(command_line, env={**os.environ, **variables}, stdout=STDERR, check=False)
    if not rounds_file.is_file():
        why = f"the script ended with {result.returncode}" if result.returncode else "no engine reached these rounds"
        print(f"nsys_profile: {why}; nothing was recorded of rounds {options.rounds}", file=sys.stderr)
        return FAILED
    source = options.out.with_name(options.out.name + ".2.nsys-rep") if with_nsys else rounds_file
    report = figures.document(sources.read_profile([source], rounds_file, options.nsys))
    report_file.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2) if options.json else tables.text(report))
    print(f"nsys_profile: saved {report_file}; times are in {source}", file=sys.stderr)
    if result.returncode:
        print(f"nsys_profile: the script ended with {result.returncode}", file=sys.stderr)
    return FAILED if result.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
