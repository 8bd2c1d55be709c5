"""Which engines compute the same bits."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stepgraph.runtime.engine import Engine
from stepgraph.runtime.extras.record import model_fingerprints, versions, vocabulary_fingerprint
from stepgraph.sampling import native
from stepgraph.sampling.grammar.vocabulary import Vocabulary

_NO_EFFECT = ("max_rows", "buckets", "num_pages", "prefix_cache_pages", "max_queued", "save_hidden_states", "round_timeout_seconds")


def device_name(engine: Engine) -> str:
    """The processor or GPU that computes the rounds, with what selects its kernels."""
    device = engine.backend.device
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, capability {found.major}.{found.minor}, CUDA {torch.version.cuda}"
    return f"{_processor('model name')}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def identity_of(engine: Engine) -> str:
    """A hash of hardware, package versions, weights, vocabulary and settings."""
    settings = {name: value for name, value in asdict(engine.config).items() if name not in _NO_EFFECT}
    facts: dict[str, Any] = {
        "device": device_name(engine),
        "instructions": _processor("flags", "Features", "cpu family", "model", "stepping", "cache size"),
        "native": not native.why_not(),
        "versions": versions(),
        "models": model_fingerprints(engine._parts.models),
        "vocabulary": vocabulary_fingerprint(vocabulary_of(engine)),
        "settings": settings,
        "loras": engine.list_loras(),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=_stable).encode()).hexdigest()[:16]


def vocabulary_of(engine: Engine) -> Vocabulary | None:
    return engine._parts.compiler.vocabulary if engine._parts.compiler else None


def _stable(value: object) -> str:
    """Of a setting that is no JSON: a function has another address in each process."""
    return str(getattr(value, "__qualname__", value))


def _processor(*fields: str) -> str:
    """These fields of all cores: two processors with equal instruction sets may differ in caches and so in block sizes."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in fields}
    return " ".join([platform.machine(), *sorted(names)])
