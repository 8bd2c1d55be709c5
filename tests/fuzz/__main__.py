"""Fuzz entry points ("doors"), each in its own process, so that crashes and hangs are recorded as finds.

python -m tests.fuzz --inputs 50000                        # all entry points
python -m tests.fuzz --door schema --inputs 5000 --seed 3 --json found.json
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.doors import DOORS
from tests.fuzz.loop import Report, fuzz
from tests.fuzz.values import Value, written
from tests.fuzz.watch import limit_memory
from tools.origin import origin

MEMORY = 3 << 30  # bytes that an entry point may allocate after its setup
STILL = 300.0  # seconds without progress: on one input, or before the first one
_BOX = 1 << 20


class BlackBox:
    """The current input, in a memory-mapped file that survives a crash of the process."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _BOX)

    def note(self, number: int, given: Value) -> None:
        text = f"{number}\n{written(given)}".encode()[: _BOX - 1]
        self._memory[: len(text) + 1] = text + b"\0"

    def noted(self) -> tuple[int, str]:
        """The index of the current input, and the input as JSON."""
        number, _, given = self._memory[:].split(b"\0")[0].decode().partition("\n")
        return int(number or 0), given

    @property
    def number(self) -> bytes:
        return self._memory[:20].split(b"\n")[0]


def child(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    box = BlackBox(Path(options.box))
    home = tempfile.mkdtemp()
    os.chdir(home)
    door = DOORS[options.door]()
    limit_memory(MEMORY)
    report = fuzz(door, options.inputs, options.seed, box.note, options.seconds)
    door.close()
    left = os.listdir(home)
    assert not left, f"files were left behind: {left}"
    Path(options.json).write_text(json.dumps(asdict(report)), encoding="utf-8")
    return 0


def watched(name: str, inputs: int, seed: int, seconds: float) -> dict[str, Any]:
    """The report of an entry point. After a crash or a hang it holds one find: the input that was being tried."""
    with tempfile.TemporaryDirectory() as folder:
        box, result = Path(folder) / "box", Path(folder) / "report"
        box.write_bytes(bytes(_BOX))
        reader = BlackBox(box)
        command = [
            sys.executable,
            "-m",
            "tests.fuzz",
            "--door",
            name,
            "--inputs",
            str(inputs),
            "--seed",
            str(seed),
            "--seconds",
            str(seconds),
        ]
        process = subprocess.Popen([*command, "--json", str(result), "--box", str(box)])
        seen, since = b"", time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            now = reader.number
            seen, since = (now, time.monotonic()) if now != seen else (seen, since)
            if time.monotonic() - since > STILL:
                process.kill()
                process.wait()
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return found
        number, given = reader.noted()
        report = asdict(Report(name, inputs=number))
        what = f"the process ended with {process.returncode}"
        return report | {"finds": [{"door": name, "what": what, "given": json.loads(given or "null"), "traceback": ""}]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--door", choices=[*DOORS], action="append", help="entry point to fuzz (default: all)")
    parser.add_argument("--inputs", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="wall-clock limit for each entry point (default: none)")
    parser.add_argument(
        "--json", help="file to write the reports to, after each entry point; one of the same commit, inputs and seed is continued"
    )
    parser.add_argument("--box", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.box:
        (options.door,) = options.door
        return child(options)
    reports: list[dict[str, Any]] = []
    document = {"what": "fuzz", **origin(), "inputs": options.inputs, "seed": options.seed, "doors": reports}
    if options.json and Path(options.json).exists():
        kept = json.loads(Path(options.json).read_text(encoding="utf-8"))
        if "+" not in document["commit"] and all(kept.get(field) == document[field] for field in ("commit", "inputs", "seed")):
            document = kept | {"doors": reports}
            reports += kept["doors"]
    for name in [name for name in options.door or DOORS if name not in {report["door"] for report in reports}]:
        begun = time.monotonic()
        report = watched(name, options.inputs, options.seed, options.seconds)
        reports.append(report)
        report["clock_seconds"] = round(time.monotonic() - begun, 1)
        print({field: value for field, value in report.items() if field != "finds"}, len(report["finds"]), "finds", flush=True)
        for find in report["finds"][:8]:
            print(f"  {find['what'][:300]}\n    {json.dumps(find['given'])[:600]}\n{find['traceback'][-900:]}")
        if options.json:
            Path(options.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(report["finds"] for report in reports))


if __name__ == "__main__":
    sys.exit(main())
