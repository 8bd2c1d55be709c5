"""A program of one rank: decodes with the engine that its arguments describe, and prints the results as JSON."""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stepgraph import AsyncEngine, Constraint, Engine, EngineConfig, LogitsProcessor, ProcessorInput, SamplingParams, Vocabulary
from stepgraph.runtime.models.files.checkpoint import WeightsMode
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.request_queue import QueuedRequest, RequestQueue
from stepgraph.sampling.grammar.compile.compiler import Claim


def requests() -> list[dict[str, Any]]:
    """Plain, with a grammar, and sampled."""
    repeated = [5, 6, 7, 5, 6, 7, 5, 6]
    return [
        {"prompt": repeated},
        {"prompt": [9, 8, 7], "constraint": Constraint.regex("[a-f]{6,20}")},
        {"prompt": [4, 5], "sampling": SamplingParams(temperature=0.8, seed=3)},
        {"prompt": [11, 12, 11, 12, 11], "constraint": Constraint.choice(["abc", "abd", "xyz"])},
        {"prompt": [9, 8, 7], "constraint": Constraint.regex("[a-f]{6,20}"), "sampling": SamplingParams(seed=1, top_k=5, top_p=0.8)},
        {"prompt": repeated, "sampling": SamplingParams(seed=2, min_p=0.02, repetition_penalty=1.2, logit_bias={72: 3.0})},
        {"prompt": repeated, "sampling": SamplingParams(seed=3, top_p=0.5, frequency_penalty=0.5, bad_token_ids=(131, 7))},
        {"prompt": [4, 5], "sampling": SamplingParams(temperature=0.0, logprobs=True, presence_penalty=1.0, min_new_tokens=12)},
    ]


def add_to_one(logits: Tensor, inputs: ProcessorInput) -> Tensor:
    """Adds the second argument to the logit of the first."""
    token, bias = inputs.arguments[:, None, None].unbind(-1)
    return logits + bias * (torch.arange(logits.shape[-1], device=logits.device) == token)


class AboveMean(nn.Module):
    """Allows tokens with a logit above the mean of all, which depends on every logit."""

    margin: Tensor

    def __init__(self, margin: float) -> None:
        super().__init__()
        self.register_buffer("margin", torch.tensor(margin))

    def forward(self, logits: Tensor, inputs: ProcessorInput) -> Tensor:
        return logits.masked_fill(logits < logits.mean(-1, keepdim=True) + self.margin, float("-inf"))


PROCESSORS = (LogitsProcessor("add_to_one", add_to_one, 2), LogitsProcessor("above_mean", AboveMean(0.05)))
RELEASED = threading.Event()  # ends the calls that hang in this process


def hang(logits: Tensor, inputs: ProcessorInput) -> Tensor:
    """Does not return in rank 0, or in the others, once a file exists. HANG: the PID of rank 0, `first` or `others`, and the file."""
    pid, which, flag = os.environ["HANG"].split(" ", 2)
    if (str(os.getpid()) == pid) == (which == "first") and Path(flag).exists():
        RELEASED.wait(600)
    return logits


def delay_compiles(found: Vocabulary) -> Vocabulary:
    """Grammars become ready after random times, different in each process that loads a part of a model."""
    rng, compiled = random.Random(os.getpid()), RequestQueue.prepare

    def delayed(queue: RequestQueue, queued: QueuedRequest, claim: Claim) -> None:
        time.sleep(rng.random() / 5)
        compiled(queue, queued, claim)

    RequestQueue.prepare = delayed  # type: ignore[method-assign,assignment]
    return found


OPTIONS: dict[str, Any] = {"max_bad_words": 6, "max_bad_word_tokens": 3, "relaxed_acceptance": True, "max_top_logprobs": 100}


def option_requests(bad_words: tuple[tuple[int, ...], ...]) -> list[dict[str, Any]]:
    """Each uses one or several of the options."""
    repeated, far = [5, 6, 7, 5, 6, 7, 5, 6], 300  # a token of the last rank
    return [
        {"prompt": repeated, "sampling": SamplingParams(temperature=0, bad_words=bad_words)},
        {"prompt": repeated, "sampling": SamplingParams(seed=5, bad_words=bad_words, top_p=0.7, top_logprobs=3, logprobs=True)},
        {"prompt": repeated, "sampling": SamplingParams(temperature=0, relaxed_top_n=40, relaxed_delta=0.5)},
        {"prompt": [4, 5, 4, 5], "sampling": SamplingParams(temperature=0, relaxed_top_n=200, relaxed_delta=1.0, bad_words=bad_words)},
        {"prompt": [9, 8, 7], "sampling": SamplingParams(temperature=0, logprobs=True, top_logprobs=100)},
        {"prompt": repeated, "sampling": SamplingParams(temperature=0, prompt_logprobs=100)},
        {
            "prompt": [9, 8, 7],
            "constraint": Constraint.regex("[a-f]{6,20}"),
            "sampling": SamplingParams(seed=1, logprobs=True, top_logprobs=9),
        },
        {"prompt": [4, 5], "sampling": SamplingParams(temperature=0, logits_processors={"add_to_one": (far, 0.05), "above_mean": ()})},
        {"prompt": repeated, "sampling": SamplingParams(seed=2, logits_processors={"above_mean": ()}, logprobs=True, top_logprobs=2)},
    ]


def target_of(engine: Engine) -> Llama:
    target = engine._parts.models.target
    assert isinstance(target, Llama)
    return target


def refused_calls(engine: Engine) -> list[tuple[Callable[[], object], str]]:
    image = {0: torch.zeros(1, target_of(engine).embedding_size)}
    return [
        (lambda: engine.submit([1], sampling=SamplingParams(temperature=1.0)), "SamplingParams.seed"),
        (lambda: engine.submit([1, 2, 3], prompt_embeddings=image), "prompt_embeddings"),
        (lambda: engine.submit([1], timeout_seconds=1.0), "timeout_seconds"),
        (lambda: engine.update_weights({}), "Engine.update_weights"),
        (engine.reset_prefix_cache, "Engine.reset_prefix_cache"),
        (lambda: AsyncEngine(engine), "AsyncEngine.engine"),
    ]


def open_engine(path: Path, draft: str | Path, size: int, weights: WeightsMode = "dequantised", **changes: Any) -> Engine:
    config = EngineConfig(max_rows=4, max_length=64, num_speculative_tokens=3, draft_length=3, compile_isolation="none", **changes)
    return Engine.from_pretrained(path, draft, config=config, tensor_parallel=size, weights=weights)


def results(engine: Engine, count: int = 8) -> dict[str, Any]:
    """LOST: a rank of torchrun, and the signal that it sends itself after its first step."""
    lost, signal = os.environ.get("LOST", " ").split(" ")
    jobs = [engine.submit(max_new_tokens=24, **request) for request in requests()[:count]]
    error = ""
    try:
        while engine.has_work:
            engine.step()
            print("step", flush=True)
            if lost and os.environ["RANK"] == lost:
                os.kill(os.getpid(), int(signal))
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    found = [(job.tokens, str(job.finish_reason), bool(job.error)) for job in jobs]
    return {"jobs": found, "error": error, "weights": sum(parameter.nbytes for parameter in target_of(engine).parameters())}


def decode(path: Path, draft: str, size: int, count: int = 8, **changes: Any) -> dict[str, Any]:
    with open_engine(path, draft, size, **changes) as engine:
        if size > 1 and "RANK" in os.environ:
            for call, field in refused_calls(engine):
                with pytest.raises(ValueError, match=f"^{field}: got"):
                    call()
        return results(engine, count)


if __name__ == "__main__":
    path, draft, size, changes = sys.argv[1:]
    started = time.monotonic()
    found = decode(Path(path), draft, int(size), **json.loads(changes))
    print(json.dumps(found | {"seconds": time.monotonic() - started}), flush=True)
