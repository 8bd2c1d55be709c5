"""Loads one rank's part of the model of `Engine.from_pretrained(tensor_parallel=...)`."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any

import torch

from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.files.draft import StoredDraft
from stepgraph.runtime.models.files.loading import Loaded, load_models, uses_cuda
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.parallel.llama import ShardedCheckpoint, check_divisible, shard, shard_draft
from stepgraph.runtime.parallel.ranks import TIMEOUT_SECONDS, Ranks, under_torchrun
from stepgraph.sampling.fields import clip_repr

_ACCEPTED = {
    **{"save_hidden_states": (None,), "max_loras": (0,), "rounds_per_launch": (1,), "grammar_lane": ("auto", "host")},
    "preemption": (False,),
    "page_allocation": ("reserve",),
}


def load_part(path: str | Path, draft: Any, config: EngineConfig | None, size: int, record: object = None, **options: Any) -> Loaded:
    """Load this rank's part, or all with size 1. ValueError for unsupported settings. With more ranks the loaded config has a time limit of
    rounds, also for sums. options: as for load_models, in which `vocabulary` must be picklable.
    """
    if size == 1:
        return load_models(path, draft, config, **options)
    setting = f"tensor_parallel={size}"
    if record is not None:
        raise ValueError(f"record: got {clip_repr(record)} with {setting}, expected None")
    if not isinstance(draft, (str, Path, NoneType)):
        raise ValueError(f"draft: got {clip_repr(draft)} with {setting}, expected None, a folder or a name")
    backend = "auto" if config is None else config.backend
    on_cuda, local_rank = uses_cuda(backend), int(os.environ.get("LOCAL_RANK", 0)) if under_torchrun() else 0
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size)) if under_torchrun() else size
    if on_cuda and torch.cuda.device_count() < local_size:
        expected = f"'tape', or a GPU for each of {local_size} processes: there are {torch.cuda.device_count()} GPUs"
        raise ValueError(f"EngineConfig.backend: got {backend!r} with {setting}, expected {expected}")
    for name, accepted in _ACCEPTED.items() if config is not None else ():
        if getattr(config, name) not in accepted:
            names = " or ".join(map(repr, accepted))
            raise ValueError(f"EngineConfig.{name}: got {getattr(config, name)!r} with tensor_parallel, expected {names}")
    if config is not None and not under_torchrun():
        _require_picklable(config)
    seconds = (config and config.round_timeout_seconds) or TIMEOUT_SECONDS
    arguments = size, path, draft, config
    for_ranks = (*arguments, options | {"progress": False})
    connect = functools.partial(Ranks.join, size, seconds) if under_torchrun() else functools.partial(Ranks.start, size, seconds, for_ranks)
    return load_rank(functools.partial(connect, on_cuda=on_cuda), local_rank if on_cuda else None, *arguments, options)


def load_rank(
    join: Callable[[], Ranks],
    gpu: int | None,
    size: int,
    path: str | Path,
    draft: Any,
    config: EngineConfig | None,
    options: dict[str, Any],
) -> Loaded:
    """join: called once the files are checked. gpu: index of the GPU that this thread uses."""
    joined = list[Ranks]()
    if gpu is not None:
        torch.cuda.set_device(gpu)

    def divide(target: object, drafts: StoredDraft | None) -> tuple[ShardedCheckpoint, StoredDraft | None]:
        checkpoint = check_divisible(target, size)
        joined.append(join())
        return shard(checkpoint, joined[0]), shard_draft(drafts, joined[0])

    try:
        loaded = load_models(path, draft, config, divide=divide, **options)
        if gpu is not None:
            assert isinstance(loaded.target, Llama)
            rows = loaded.config.max_rows * (loaded.config.num_speculative_tokens + 1)  # of the largest round
            joined[0].choose_sums(loaded.target.norm.new_empty(rows, loaded.target.config.hidden_size))
        return _with_fixed_settings(loaded, joined[0])
    except BaseException:
        for ranks in joined:
            ranks.close()
        raise


def _with_fixed_settings(loaded: Loaded, ranks: Ranks) -> Loaded:
    """Replace settings whose effect depends on measured times, which differ between ranks."""
    fixed = replace(loaded.config, round_timeout_seconds=ranks.timeout_seconds)
    if fixed.grammar_lane == "auto":  # the copy of a grammar to the device ends at different steps
        fixed = replace(fixed, grammar_lane="host")
    if fixed.draft_length == "auto":  # chosen by measured times
        fixed = replace(fixed, draft_length=fixed.num_speculative_tokens)
    processors = [(each.name, each.num_arguments) for each in fixed.logits_processors]  # the repr of a function has its address
    ranks.require_equal("the engine configs", repr((replace(fixed, logits_processors=()), processors)).encode())
    return loaded._replace(config=fixed)


def _require_picklable(config: EngineConfig) -> None:
    """ValueError for a logits processor that cannot be copied to the processes of other ranks."""
    for index, processor in enumerate(config.logits_processors):
        try:
            copied = b"__main__" not in pickle.dumps(processor.function)  # in other processes __main__ is another module
        except Exception:  # raised by pickle, or by a method of the object
            copied = False
        if not copied:
            expected = "expected a function or nn.Module that pickle copies, of a module that other processes can import"
            raise ValueError(
                f"EngineConfig.logits_processors[{index}].function: got {clip_repr(processor.function)} with tensor_parallel, {expected}"
            )
