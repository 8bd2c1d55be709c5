"""Report of profiled rounds: stages, idle gaps, host nodes and how far they are hidden, waits, acceptance.

Reads the files of nsys_profile.py: a report of nsys (.nsys-rep, exported with the nsys on the path; or the .sqlite of
`nsys export --type sqlite`), the engine's own timeline (.rounds.json), a torch profiler trace of the same rounds (.json, with
--sidecar), or an earlier report. Given NAME.2.nsys-rep of the rounds, it finds NAME.1.nsys-rep of the capture and
NAME.rounds.json by itself.
Exit codes: 0 done, 2 unusable file, with a message on stderr.

    python tools/nsys_report.py profile.2.nsys-rep
    python tools/nsys_report.py profile.rounds.json --png timeline.png
    python tools/nsys_report.py profile.1.sqlite profile.2.sqlite --sidecar profile.rounds.json --json > report.json
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from tools.profiling import figures, sources, tables

BAD_INPUT = 2


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="a .nsys-rep, a .sqlite, a .json; see above")
    add("--json", action="store_true", help="print the report as one JSON document instead of a table")
    add("--png", type=Path, metavar="PATH", help="also draw some rounds from the middle (needs matplotlib)")
    add("--sidecar", type=Path, metavar="PATH", help="counters written by the engine (default: NAME.rounds.json beside FILE)")
    add("--nsys", default="nsys", metavar="PATH", help="nsys executable for the export (default: the one on the path)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        report = sources.read_report(options.files[0])
        if report is None:
            profile = sources.read_profile(options.files, options.sidecar, options.nsys)
            report = figures.document(profile)
            if options.png:
                from tools.profiling.timeline import save_picture

                save_picture(profile, options.png)
        elif options.png:
            raise ValueError(f"--png: got {options.files[0]}, expected the profile: a report has no times to draw")
        text = json.dumps(report, indent=2) if options.json else tables.text(report)
    except (ValueError, RuntimeError, OSError, LookupError, sqlite3.Error) as error:
        where = f"{options.files[0]}: incomplete or damaged: " if isinstance(error, (LookupError, sqlite3.Error)) else ""
        print(f"nsys_report: {where}{error}", file=sys.stderr)
        return BAD_INPUT
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
