"""Uploads the settings that few requests have, with tables of their own: round_specs.option_specs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stepgraph.graphs.accept_options import LogitsProcessor
from stepgraph.graphs.buffers import StaticBuffers
from stepgraph.graphs.limits import Limits
from stepgraph.runtime.request import Job


def bad_words(job: Job, limits: Limits) -> list[int]:
    """Each word at the end of its line."""
    size, words = limits.max_bad_word_tokens, [[int(token) for token in word] for word in job.sampling.bad_words]
    words += [[]] * (limits.max_bad_words - len(words))
    return [token for word in words for token in (*[-1] * (size - len(word)), *word)]


def recent_tokens(job: Job, limits: Limits) -> list[int]:
    """The end of the output so far."""
    size = limits.max_bad_word_tokens - 1
    return [*[-1] * size, *job.given_ids[len(job.prompt_ids) :]][-size:]


def relaxed(job: Job, _: Limits) -> list[int]:
    return float_bits([job.sampling.relaxed_top_n, job.sampling.relaxed_delta])


def processor_settings(processors: Sequence[LogitsProcessor], job: Job, _: Limits) -> list[int]:
    settings = list[float]()
    for processor in processors:
        arguments = job.sampling.logits_processors.get(processor.name)
        settings += [float(arguments is not None), *(arguments or [0.0] * processor.num_arguments)]
    return float_bits(settings)


def uploaded_options(
    buffers: StaticBuffers, limits: Limits, processors: Sequence[LogitsProcessor], job: Job, row: int
) -> tuple[list[int], Callable[[Tensor], None]]:
    """The line of the ring for a request, and what copies it to the tables."""
    makers: dict[str, Callable[[Job, Limits], list[int]]] = {
        "row_bad_words": bad_words,
        "row_recent": recent_tokens,
        "row_relaxed": relaxed,
        "row_processors": functools.partial(processor_settings, processors),
    }
    parts = {name: make(job, limits) for name, make in makers.items() if name in buffers}

    def copy(slot: Tensor) -> None:
        line = slot.to(buffers.device, non_blocking=True)
        for name, part in zip(parts, line.split([len(part) for part in parts.values()]), strict=True):
            table = buffers[name][row]
            table.copy_((floats(part) if table.is_floating_point() else part).view_as(table))

    return list(itertools.chain.from_iterable(parts.values())), copy


def float_bits(values: Sequence[float]) -> list[int]:
    """The bits of float32 values as integers, for rings of int64."""
    bits: list[int] = np.array(values, dtype=np.float32).view(np.int32).tolist()
    return bits


def floats(bits: Tensor) -> Tensor:
    """The inverse of float_bits, on the device."""
    return bits.to(torch.int32).view(torch.float32)
