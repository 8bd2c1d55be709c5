"""A long mixed load on many engines, every output looked at again, and what the process holds measured: does anything grow?

    python -m tools.soak --minutes 20                      about as long; one JSON document last
    python -m tools.soak --minutes 5 --seed 3 --out soak.json

Engines of every way to draft take turns, some of them closed and made again; threads submit and cancel while they are stepped, by a loop
or by an AsyncEngine. Grammars are mostly new. Events are held against jobs, texts against fresh matchers, a share of them against plain
decoding and against what the same request said before. Ctrl-C ends it with the report so far. It exits with 1 where an output was wrong
or a figure grew.
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

from tools.soak.report import report, written
from tools.soak.running import Plan, Soak

INTERRUPTED = 130


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--minutes", type=float, required=True, metavar="N", help="how long, more than 0")
    add("--seed", type=int, default=0, help="of engines and requests; threads still come as they come (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="keep the JSON document there as well")
    return parser.parse_args(arguments)


def check(options: argparse.Namespace) -> None:
    """ValueError names the flag, before hours are spent."""
    if not 0 < options.minutes <= 100_000:
        raise ValueError(f"--minutes: got {options.minutes:g}, want more than 0, at most 100,000")
    if options.out is not None and (options.out.is_dir() or not options.out.absolute().parent.is_dir()):
        raise ValueError(f"--out: got {options.out}, want a file in a folder that is there")


def run(options: argparse.Namespace, stop: threading.Event) -> int:
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bar = tqdm(total=round(60 * options.minutes), unit="s", disable=not sys.stderr.isatty())

    def progress(soak: Soak) -> None:
        bar.n = min(round(soak.seconds), bar.total)
        resident = soak.samples[-1].resident_bytes
        bar.set_postfix(jobs=sum(soak.by_kind.values()), problems=soak.num_problems, MiB=resident and resident >> 20)

    soak = Soak(Plan(60 * options.minutes, options.seed), stop, device, progress)
    with bar:
        soak.run()
    found = report(soak, stop.is_set())
    if options.out is not None:
        options.out.write_text(written(found) + "\n", encoding="utf-8")
    print(written(found))
    print(f"soak: {'passed' if found['passed'] else 'FAILED'}: {found['reason']}", file=sys.stderr)
    return INTERRUPTED if stop.is_set() else int(not found["passed"])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    stop = threading.Event()

    def interrupted(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt  # whoever asks twice does not want the report
        stop.set()

    try:
        check(options)
        before = signal.signal(signal.SIGINT, interrupted)  # an exception would come out of the midst of a round, and fail its engine
    except ValueError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    try:
        return run(options, stop)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
