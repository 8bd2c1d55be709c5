"""Soak test: a long mixed load on many engines. Checks every output and whether memory, threads, files or objects grow.

    python -m tools.soak --minutes 20                      prints one JSON document last
    python -m tools.soak --minutes 5 --seed 3 --out soak.json

Engines with every drafter run in turn; some are closed and created again. Threads submit and cancel while a loop or an AsyncEngine steps
the engine. Most grammars are new. Events are compared with jobs, texts with fresh matchers, a share of them with plain decoding and with
earlier answers to the same request. Ctrl-C ends the run with the report so far. Exit codes: 0 passed, 1 wrong output or growth, 2 bad
input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))  # for tools.* and tests.*

import torch
from tqdm import tqdm

from tools.soak.process import share_one_heap
from tools.soak.report import report, to_json
from tools.soak.soak import Plan, Soak

INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, required=True, metavar="N", help="duration, more than 0")
    add("--seed", type=int, default=0, help="of engines and requests; thread timing stays random (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="also write the JSON document to this file")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """Raise a ValueError that names the flag, before the run starts."""
    if not 0 < options.minutes <= 100_000:
        raise ValueError(f"--minutes: got {options.minutes:g}, expected a number above 0, at most 100,000")
    if options.out is not None and (options.out.is_dir() or not options.out.absolute().parent.is_dir()):
        raise ValueError(f"--out: got {options.out}, expected a file in an existing folder")


def run(options: argparse.Namespace, stop: threading.Event) -> int:
    torch.set_num_threads(1)
    share_one_heap()
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bar = tqdm(total=round(60 * options.minutes), unit="s", disable=not sys.stderr.isatty())

    def progress(soak: Soak) -> None:
        bar.n = min(round(soak.seconds), bar.total)
        last = soak.last_sample(settled=True)
        resident = last and last.resident_bytes
        bar.set_postfix(
            jobs=sum(counts["jobs"] for counts in soak.by_kind.values()), problems=soak.num_problems, MiB=resident and resident >> 20
        )

    soak = Soak(Plan(60 * options.minutes, options.seed), stop, device, progress)
    with bar:
        soak.run()
    document = report(soak, stop.is_set())
    if options.out is not None:
        options.out.write_text(to_json(document) + "\n", encoding="utf-8")
    print(to_json(document))
    print(f"soak: {'passed' if document['passed'] else 'FAILED'}: {document['reason']}", file=sys.stderr)
    return INTERRUPTED if stop.is_set() else int(not document["passed"])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    stop = threading.Event()

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # a second Ctrl-C skips the report
        stop.set()

    try:
        check(options)
        before = signal.signal(signal.SIGINT, interrupted)  # a KeyboardInterrupt inside a round would fail its engine
    except ValueError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    try:
        return run(options, stop)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
