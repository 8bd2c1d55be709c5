"""A GPU check run with this file as its worker: the name of each requested check selects a crash, hang, device loss or interrupt."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from tools import gpu_check
from tools.gpu.checks.catalogue import Entry

NAMES = ("exits", "answers", "hangs", "loses_the_device", "is_a_new_worker", "is_interrupted", "answers")
ENDINGS = {"is_interrupted": signal.SIGTERM, "is_killed": signal.SIGKILL}
FACTS = {name: "" for name in ("driver", "cuda", "platform", "commit")} | {
    "mode": "rehearsal",
    "device": "none",
    "device_bytes": 0,
    "python": "3.x",
    "processors": 1,
    "host_link": "native",
    "versions": {name: "" for name in ("torch", "triton", "xgrammar", "llguidance", "flashinfer-python")},
    "date": "2026-11-20T08:00:00+00:00",
}


class Impatient(Entry):
    """A check with short time limits, so that tests do not wait."""

    def limit_seconds(self, quick: bool, rehearsal: bool) -> float:
        return 0.5 if self.name == "hangs" else 60.0


def answer(request: dict[str, Any], answered: int) -> dict[str, Any]:
    name = request["name"]
    if name == "exits":
        os._exit(7)
    if name == "hangs":
        time.sleep(60)
    if name in ENDINGS:
        os.kill(os.getppid(), ENDINGS[name])
        time.sleep(60 if name == "is_interrupted" else 0)
    passed = name != "is_a_new_worker" or answered == 0
    row = {"name": name, "verdict": "passed" if passed else "failed", "error": "" if passed else "the worker was not restarted"}
    return {**row, "seconds": 0.0, "budget": request["budget"], "figures": {}, "device_lost": name == "loses_the_device"}


def serve(answers: int) -> None:
    answered = 0
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        for line in sys.stdin:
            request = json.loads(line)
            print(json.dumps(answer(request, answered) if "name" in request else FACTS), file=out, flush=True)
            answered += "name" in request


if __name__ == "__main__":
    if sys.argv[1] == "--slow":  # to start
        time.sleep(float(sys.argv[2]))
    elif sys.argv[1] == "--once":  # a start after the first one fails
        Path(sys.argv[2]).touch(exist_ok=False)
    if "--worker" in sys.argv:
        serve(int(sys.argv[-1]))
    else:
        options = gpu_check.parse(["--rehearse", "--out", sys.argv[1]])
        requested = [Impatient(name, "none", 1.0) for name in sys.argv[2:] or NAMES]
        sys.exit(gpu_check.run(options, requested, [sys.executable, __file__, "--worker"]))
