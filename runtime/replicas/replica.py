"""Messages between a replica and its callers, requests in the replica, and which replicas compute the same bits. Needs no Ray."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stepgraph.runtime.aio import AsyncEngine
from stepgraph.runtime.engine import Engine
from stepgraph.runtime.job import FinishReason
from stepgraph.runtime.record import model_fingerprints, versions, vocabulary_fingerprint
from stepgraph.runtime.request import EngineClosedError, StepEvent
from stepgraph.runtime.request_queue import QueueFullError
from stepgraph.sampling import native
from stepgraph.sampling.grammar.vocabulary import Vocabulary

REPORTED = ("num_cached_tokens", "queue_seconds", "rounds", "num_preemptions", "grammar_lane")  # fields of a Job that a replica reports
_IGNORED_SETTINGS = ("max_rows", "buckets", "num_pages", "prefix_cache_pages", "max_queued", "save_hidden_states", "round_timeout_seconds")


@dataclass(frozen=True)
class ReplicaRequest:
    """A request, or the rest of one."""

    prompt_ids: tuple[int, ...]
    options: dict[str, Any]  # of Engine.submit()
    pages: tuple[bytes, ...] = ()  # hashes of the prompt's pages
    avoid: frozenset[str] = frozenset()  # replicas that could not serve it
    identity: str = ""  # only a replica with this identity may answer; empty: any


class Refusal(NamedTuple):
    """The replica has not accepted the request, or its engine has failed."""

    replica: str
    why: str  # value: the request is wrong; full: too many wait; identity: not that of the request; failed: the engine failed
    message: str


class Tokens(NamedTuple):
    """New tokens of a request. The first part says which replica has accepted the request."""

    event: StepEvent  # the last one has a finish reason
    reported: tuple[Any, ...] = ()  # the values of REPORTED; empty: none changed
    replica: str = ""
    identity: str = ""
    prompt_scores: Tensor | None = None  # of the job, in the first part


AnswerPart = Refusal | Tokens


@dataclass(frozen=True)
class EngineInfo:
    """Properties of an engine for callers. All replicas of a deployment have equal ones, except replica, device and process."""

    max_rows: int
    max_length: int
    num_tokens: int  # ids from 0 on that requests may contain
    page_size: int
    vocabulary: Vocabulary | None
    lora_names: tuple[str, ...]
    num_drafts: int  # most drafts of a round
    exact: bool  # the target's results do not depend on sizes of batches and chunks
    replica: str
    device: str
    process: int  # process id


def device_name(engine: Engine) -> str:
    """The processor or GPU that computes the rounds, with what selects its kernels."""
    device = engine.backend.device
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, capability {found.major}.{found.minor}, CUDA {torch.version.cuda}"
    return f"{_cpu_fields('model name')}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def identity_of(engine: Engine) -> str:
    """A hash of hardware, package versions, weights, vocabulary and settings."""
    settings = {name: value for name, value in asdict(engine.config).items() if name not in _IGNORED_SETTINGS}
    properties: dict[str, Any] = {
        "device": device_name(engine),
        "instructions": _cpu_fields("flags", "Features", "cpu family", "model", "stepping", "cache size"),
        "native": not native.why_not(),
        "versions": versions(),
        "models": model_fingerprints(engine._parts.models),
        "vocabulary": vocabulary_fingerprint(engine._parts.vocabulary),
        "settings": settings,
        "loras": engine.list_loras(),
    }
    # For settings that are not JSON: the repr of a function or an object contains an address, which differs between processes.
    text = json.dumps(properties, sort_keys=True, default=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cpu_fields(*fields: str) -> str:
    """These fields of /proc/cpuinfo: two processors with equal instruction sets may differ in caches and so in block sizes."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() in fields}
    return " ".join([platform.machine(), *sorted(names)])


async def answer(async_engine: AsyncEngine, request: ReplicaRequest, replica: str, identity: str) -> AsyncGenerator[AnswerPart, None]:
    """The parts of an answer. Closing the generator cancels the job. replica, identity: those of this process."""
    if request.identity not in ("", identity):
        yield Refusal(replica, "identity", f"replica {replica} has other hardware, packages, weights or settings")
        return
    try:
        stream = await async_engine.submit(request.prompt_ids, **request.options)
    except (ValueError, QueueFullError, EngineClosedError) as error:
        why = "value" if isinstance(error, ValueError) else "full" if isinstance(error, QueueFullError) else "failed"
        yield Refusal(replica, why, str(error))
        return
    accepted: dict[str, Any] = {"replica": replica, "identity": identity}
    async with stream:
        async for event in stream:
            if event.finish_reason == FinishReason.ERROR and async_engine.failure is not None:
                yield Refusal(replica, "failed", event.error)  # an error of the engine and not of this request
                return
            reported = tuple(getattr(stream.job, name) for name in REPORTED)
            yield Tokens(event, reported, **accepted, prompt_scores=stream.job.prompt_scores if accepted else None)
            accepted = {}


def info_of(engine: Engine, replica: str) -> EngineInfo:
    config, exact = engine.config, getattr(engine._parts.models.target, "batch_invariant", False)
    return EngineInfo(
        max_rows=config.max_rows,
        max_length=engine.limits.max_length,
        num_tokens=engine.limits.num_tokens,
        page_size=config.page_size,
        vocabulary=engine._parts.vocabulary,
        lora_names=tuple(engine.list_loras()),
        num_drafts=config.num_speculative_tokens,
        exact=exact and engine.backend.device.type == "cpu",
        replica=replica,
        device=device_name(engine),
        process=os.getpid(),
    )
