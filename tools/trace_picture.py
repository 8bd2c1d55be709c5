"""Draws some rounds of a timeline that `Timeline.save_perfetto` or `stepgraph demo` wrote, and one of them in detail. Needs matplotlib.

Exit codes: 0 done, 2 unusable file or option, with a message on stderr.

    python tools/trace_picture.py rounds.json rounds.png
    python tools/trace_picture.py stepgraph-demo/timeline.json rounds.png --rounds 2
    python tools/trace_picture.py rounds.json lengths.png --lengths
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for tools.*

from stepgraph.graphs.spans import Span
from stepgraph.runtime.trace import ChosenLength, Timeline
from tools.profiling import picture

BAD_INPUT = 2
PROCESS = "stepgraph ("  # the process name is this and the backend


def read_perfetto(path: Path) -> Timeline:
    """The timeline of a file written by `save_perfetto`; its times count from the first span. ValueError for another file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        events: list[dict[str, Any]] = content["traceEvents"]
        backend = events[0]["args"]["name"].removeprefix(PROCESS).removesuffix(")")
        streams = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        lengths = tuple(ChosenLength(*each) for each in content["otherData"]["draft_lengths"])
        return Timeline(tuple(_span(event, streams) for event in events if event["ph"] == "X"), backend, lengths)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: got {error!r:.100}, expected a file written by Timeline.save_perfetto") from None


def _span(event: dict[str, Any], streams: dict[int, str]) -> Span:
    start, kind = round(event["ts"] * 1000), event["cat"]
    name = event["name"].removeprefix("wait for ") if kind == "wait" else event["name"]
    return Span(streams[event["tid"]], name, kind, event["args"]["round"], start, start + round(event["dur"] * 1000))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="FILE", help="the timeline")
    parser.add_argument("png", type=Path, metavar="PNG", help="the picture to write")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds from the middle (default: %(default)s)")
    parser.add_argument("--title", default="", help="title of the picture (default: the totals)")
    parser.add_argument("--lengths", action="store_true", help="draft length and account of all rounds, instead of stages")
    options = parser.parse_args(arguments)
    try:
        if options.lengths:
            picture.draw_lengths(read_perfetto(options.file), options.png, options.title)
        else:
            picture.draw(read_perfetto(options.file), options.png, rounds=options.rounds, title=options.title)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"trace_picture: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
