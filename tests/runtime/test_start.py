"""Time and memory of the start: imports, the demonstration's GGUF of 93 MB, the first token of `stepgraph generate`, counted memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.c_library import needs_c

pytestmark = pytest.mark.models
ATTEMPTS = 3
LOAD = """
import json, time
from stepgraph import Engine
Engine.from_pretrained  # imports the engine: only the load is measured
seconds = []
for _ in range(3):
    before = time.process_time()
    with Engine.from_pretrained("demo", "none", weights="WEIGHTS"):
        seconds.append(time.process_time() - before)
print(json.dumps(min(seconds)))
"""
FIRST_TOKEN = """
import io, json, sys, time
from stepgraph.runtime.cli import main

class Output(io.StringIO):
    first = None

    def write(self, text):
        if text and self.first is None:
            self.first = time.process_time()  # of the whole process, imports included
        return super().write(text)

output = sys.stdout = Output()
code = main(["generate", "demo", "What is the capital of France?", "--max-new-tokens", "12"])
print(json.dumps([code, output.first, output.getvalue(), "transformers" in sys.modules]), file=sys.__stdout__)
"""
MEMORY = """
import json, tracemalloc
from stepgraph import Engine, EngineConfig
from stepgraph.graphs.memory import resident_bytes
from stepgraph.runtime.models.files.loading import load_models

config = EngineConfig(max_rows=2, num_speculative_tokens=3, draft_length=3, max_length=1024, greedy_only=True)
loaded, found, kept = load_models("demo", "auto", config), [], []
for attempt in range(3):
    before = resident_bytes()
    engine = Engine(loaded.target, loaded.draft, vocabulary=loaded.vocabulary, config=loaded.config)
    if attempt == 2:
        tracemalloc.start()  # its own memory grows the process: only Python objects are measured here
    report = engine.capture()
    for name in engine.buffers:
        engine.buffers[name].copy_(engine.buffers[name].clone())  # makes pages resident that no round has written yet
    recorded = [one for _, one in (*report.keys, *report.prompts)]
    objects = sum(one.host_bytes for one in recorded)
    found.append([resident_bytes() - before, report.buffer_bytes, report.resident_bytes, sum(one.nbytes for one in recorded) + objects])
    kept.append(engine)
print(json.dumps([*found[1], objects, tracemalloc.get_traced_memory()[0]]))
"""


def run(program: str, **variables: str) -> Any:
    """The JSON that a program prints, in a process of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = inherited | {"OMP_NUM_THREADS": "1"} | variables
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("weights", ["dequantised", pytest.param("quantised", marks=needs_c)])
def test_gguf_of_93_mb_loads_in_two_seconds_of_processor_time(weights: str) -> None:
    assert run(LOAD.replace("WEIGHTS", weights)) <= 2.0


def test_first_token_of_generate_takes_four_seconds_of_processor_time() -> None:
    found = [run(FIRST_TOKEN) for _ in range(ATTEMPTS)]
    assert all(code == 0 and "Paris" in text and not transformers for code, _, text, transformers in found), found
    assert min(first for _, first, *_ in found) <= 4.0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system has no /proc")
def test_counted_memory_is_the_growth_of_the_process() -> None:
    """Measures a second engine: the growth of the first one includes libraries and threads. A third one gives the size of the Python
    objects of its recordings, which is counted by the number of nodes. They are allocated by malloc: Python's own allocator puts a varying
    part of them into memory that the process had before."""
    grown, buffers, while_recording, graphs, counted_objects, objects = run(MEMORY, PYTHONMALLOC="malloc")
    assert grown == pytest.approx(buffers + graphs, rel=0.1), "static buffers and graphs: what capture_bytes limits"
    assert while_recording == pytest.approx(graphs, rel=0.25), "static buffers are allocated before capture()"
    assert objects == pytest.approx(counted_objects, rel=0.25)
