"""Prints the largest anonymous memory that a load took beyond what the process had, in bytes, and the bytes of the weights that it keeps.

`python -m tests.helpers.load_peak PATH WEIGHTS COPIES IMPLEMENTATION`. The model is loaded once before, so that imports and first calls do
not count. COPIES: models that are loaded and kept. With MALLOC_MMAP_THRESHOLD_ in the environment, freed memory is returned at once.
"""

from __future__ import annotations

import gc
import re
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from stepgraph.runtime.models.files.transformers_folder import open_target


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found
    return int(found[1]) << 10


class Peak:
    """Samples the anonymous memory in a thread."""

    def __init__(self) -> None:
        gc.collect()
        self.start_bytes = self.peak_bytes = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self.peak_bytes, anonymous_bytes()) - self.start_bytes

    def _run(self) -> None:
        while not self._done.wait(0.0005):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())


def load(path: Path, weights: Any, implementation: Any) -> torch.nn.Module:
    return open_target(path, torch.bfloat16, weights, implementation).load("cpu")


if __name__ == "__main__":
    path, weights, copies, implementation = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    load(path, weights, implementation)
    peak = Peak()
    models = [load(path, weights, implementation) for _ in range(copies)]
    print(peak.stop(), sum(parameter.nbytes for parameter in models[0].parameters()))
