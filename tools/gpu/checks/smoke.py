"""The first minute of a run: tools of the host, every Triton program in a process of its own, captures, constrained rounds."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from stepgraph import Constraint, Engine, EngineConfig
from stepgraph.graphs import BufferSpec, Recorded, StaticBuffers
from stepgraph.sampling import kernels
from tools.gpu.checks.context import CONSTRAINTS, VOCABULARY, Context, Figures, Skipped, random_requests, serve, toy_draft, toy_target
from tools.gpu.checks.rounds import check_against_oracle

ROOT = Path(__file__).resolve().parent.parent.parent.parent
HOST_TOOLS = ("cc", "c++", "ptxas", "nvcc", "nvidia-smi", "nsys", "compute-sanitizer")
MAX_PROCESSES = min(12, os.cpu_count() or 1)  # at once: each imports torch and creates a context
PROCESS_SECONDS = 40.0  # time limit of one process
PYTHON_ARGUMENTS: tuple[str, ...] = ("-m", "tools.gpu.checks.short_kernels")  # of Python
ROUNDS = 50


def tools_of_this_host(context: Context) -> Figures:
    """Compilers and profilers on the path, and the implementation of the sampling kernels; the document has the versions of packages."""
    return {"kernels": kernels.describe(context.device), **{name: shutil.which(name) or "missing" for name in HOST_TOOLS}}


def every_program_equals_its_reference(context: Context) -> Figures:
    """Every Triton program through the JIT on small inputs, each in a process of its own: a crash or a hang affects one program."""
    try:
        from tools.gpu.checks import short_kernels
    except ImportError as missing:
        raise Skipped(f"triton is not installed: {missing}") from None
    # programs_stay_in_bounds rehearses all, in one process
    programs = ["masked_argmax"] if context.rehearsal else list(short_kernels.programs(context.device))
    with ThreadPoolExecutor(MAX_PROCESSES) as pool:
        results = dict(zip(programs, pool.map(partial(_run_program, context.on_tape), programs), strict=True))
    context.failures.extend(f"{name}: {result}" for name, result in results.items() if result != "equal")
    return {**results}


def _run_program(interpreted: bool, name: str) -> str:
    """`equal`, or the error."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_INTERPRET")}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    command = [sys.executable, *PYTHON_ARGUMENTS, name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROCESS_SECONDS, env=environment, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return f"no result within {PROCESS_SECONDS:.0f} s"
    documents = [line for line in result.stdout.splitlines() if line.startswith('{"interpreted"')]
    if not documents:
        return f"exit code {result.returncode}: {result.stderr[-300:]}"
    return str(json.loads(documents[-1])["programs"][name])


def capture_drop_capture(context: Context) -> Figures:
    """A captured step is dropped and captured again, three times in one backend; every replay has the results of the first."""
    results, kept = [], list[weakref.ref[Recorded]]()
    with context.backend() as backend:
        buffers = StaticBuffers([BufferSpec(name, (64,), torch.float32) for name in ("x", "y")], backend.device)

        def step(b: StaticBuffers) -> None:
            b.y.copy_(torch.softmax(b.x * 2, 0).cumsum(0))

        for _ in range(3):
            recorded = backend.capture(step, buffers)
            buffers.x.copy_(torch.linspace(-1, 1, 64))
            recorded.replay()
            backend.synchronize()
            results.append(buffers.y.cpu())
            buffers.y.zero_()
            kept.append(weakref.ref(recorded))
            del recorded
            gc.collect()
    assert all(reference() is None for reference in kept), "a dropped recording is alive"
    assert all(torch.equal(results[0], each) for each in results[1:]), "a later capture has other results"
    return {"captures": len(results)}


def default_capture(context: Context) -> Figures:
    """Engine.capture() with default settings, twice: the second after the first engine was closed. Rehearsals have one row."""
    config = EngineConfig(max_rows=1) if context.rehearsal else EngineConfig()
    found, answers = context.figures, list[list[int]]()
    for turn in ("first", "second"):
        target, draft = toy_target(context.device), toy_draft(context.device, 0.7)
        with Engine(target, draft, vocabulary=VOCABULARY, config=config) as engine:
            report = engine.capture()
            answers.append(engine.generate([1, 2, 3], constraint=CONSTRAINTS[1], max_new_tokens=40).tokens)
            found[turn] = {"graphs": len(report.keys), "seconds": round(report.seconds, 2), "tokens": len(answers[-1])}
    assert answers[0] == answers[1] != [], f"got {answers[0]}, then {answers[1]}"
    return found


def constrained_rounds_match_oracle(context: Context) -> Figures:
    """At least fifty rounds in which every request has a grammar: every job equals plain greedy decoding under the same masks."""
    constraints: tuple[Constraint, ...] = tuple(filter(None, CONSTRAINTS))
    jobs = 0
    with context.engine(4) as engine:
        for seed in range(100):
            reqs = [req._replace(cancel_after=None) for req in random_requests(700 + seed, 8, 4, constraints)]
            for req, job in zip(reqs, serve(engine, reqs), strict=True):
                check_against_oracle(req, job)
                jobs += 1
            if engine.stats().rounds >= ROUNDS:
                break
        stats = engine.stats()
    return {"rounds": stats.rounds, "jobs": jobs, "tokens": stats.tokens}
