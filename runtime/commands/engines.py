"""Models, threads and failed answers of the commands that decode."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.files.loading import Loaded
from stepgraph.runtime.parallel.loading import load_part
from stepgraph.runtime.request import Job
from stepgraph.sampling.fields import check_value, whole

MAX_THREADS = 1024


def load(options: argparse.Namespace, config: EngineConfig, progress: bool, **more: Any) -> Loaded:
    """The models of --model and --draft. more: further arguments of load_part."""
    dtype = getattr(torch, options.dtype) if options.dtype else None
    more |= {"dtype": dtype, "weights": options.weights, "implementation": options.implementation, "progress": progress}
    try:
        return load_part(options.model, options.draft, config, getattr(options, "tensor_parallel", 1), **more)
    except ValueError as error:
        if "max_length" not in str(error) or not hasattr(options, "max_new_tokens"):
            raise
        got = f"got {options.max_new_tokens} after a prompt of {config.max_length - options.max_new_tokens} tokens"
        raise ValueError(f"--max-new-tokens: {got}: {str(error).removeprefix('EngineConfig.max_length: ')}") from None


def failure_of(job: Job) -> str:
    """Why the engine ended the answer early; empty if it did not."""
    return f"{job.finish_reason}: {job.error or 'no token is allowed'}" if job.finish_reason in ("error", "dead_end") else ""


def set_threads(options: argparse.Namespace) -> None:
    if options.threads is not None:
        check_value("--threads", options.threads, whole(1, MAX_THREADS))  # torch aborts if the system cannot start them
        torch.set_num_threads(options.threads)
