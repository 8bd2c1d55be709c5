"""A program of one rank: decodes with the engine that its arguments describe, and prints what it got as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, SamplingParams
from stepgraph.runtime.models.files.checkpoint import open_checkpoint
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.parallel.llama import ShardedLlama, shard


def requests() -> list[dict[str, Any]]:
    """Plain, with a grammar, and sampled."""
    repeated = [5, 6, 7, 5, 6, 7, 5, 6]
    return [
        {"prompt": repeated},
        {"prompt": [9, 8, 7], "constraint": Constraint.regex("[a-f]{6,20}")},
        {"prompt": [4, 5], "sampling": SamplingParams(temperature=0.8, seed=3)},
        {"prompt": [11, 12, 11, 12, 11], "constraint": Constraint.choice(["abc", "abd", "xyz"])},
    ]


def target_of(engine: Engine) -> Llama:
    target = engine._parts.models.target
    assert isinstance(target, Llama)
    return target


def refused_calls(engine: Engine, path: str) -> list[tuple[Callable[[], object], str]]:
    target, checkpoint = target_of(engine), open_checkpoint(path)
    assert isinstance(target, ShardedLlama)
    image, other = {0: torch.zeros(1, target.embedding_size)}, replace(checkpoint, config=replace(checkpoint.config, fused=True))
    return [
        (lambda: shard(other, target.ranks), "path"),
        (lambda: engine.submit([1], sampling=SamplingParams(temperature=1.0)), "SamplingParams.seed"),
        (lambda: engine.submit([1, 2, 3], prompt_embeddings=image), "prompt_embeddings"),
        (lambda: AsyncEngine(engine), "AsyncEngine.engine"),
    ]


def decode(path: str, draft: str, size: int, count: int = 4, **changes: Any) -> dict[str, Any]:
    config = EngineConfig(max_rows=4, max_length=64, num_speculative_tokens=3, draft_length=3, compile_isolation="none", **changes)
    with Engine.from_pretrained(path, draft, config=config, tensor_parallel=size) as engine:
        if size > 1:
            for call, field in refused_calls(engine, path):
                with pytest.raises(ValueError, match=f"^{field}: got"):
                    call()
        jobs = [engine.submit(max_new_tokens=24, **request) for request in requests()[:count]]
        error = ""
        try:
            while engine.has_work:
                engine.step()
                print("step", flush=True)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        weights = sum(parameter.nbytes for parameter in target_of(engine).parameters())
        found = [(job.tokens, str(job.finish_reason), bool(job.error)) for job in jobs]
        return {"jobs": found, "error": error, "weights": weights}


if __name__ == "__main__":
    path, draft, *rest = sys.argv[1:]
    started = time.monotonic()
    found = decode(path, draft, int(os.environ.get("WORLD_SIZE", "1")), **json.loads(rest[0] if rest else "{}"))
    print(json.dumps(found | {"seconds": time.monotonic() - started}), flush=True)
