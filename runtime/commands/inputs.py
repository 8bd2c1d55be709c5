"""What commands are given, read: schemas, grammars, prompts, token ids. ValueError names the flag, what it got and what it wanted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from stepgraph.sampling.fields import clip_repr

MOST_THREADS = 1024
THREADS = "threads of torch (default: OMP_NUM_THREADS; else 1 where layers run in C, as doctor tells; else torch's own choice)"


def read_schema(flag: str, given: str) -> dict[str, Any]:
    """A JSON schema: the text itself where it begins like an object, else the path of a file with it."""
    text = given if given.lstrip().startswith("{") else read_file(flag, given, "a JSON schema: the path of a file, or the text itself")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: got {clip_repr(given)}, which is not JSON ({error}), want a JSON schema") from None
    if not isinstance(schema, dict):
        raise ValueError(f"{flag}: got {clip_repr(given)}, which holds {type(schema).__name__}, want an object")
    return schema


def read_file(flag: str, path: str, wanted: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except OSError as error:
        raise ValueError(f"{flag}: got {clip_repr(path)} ({error.strerror or error}), want {wanted}") from None
    except ValueError as error:
        raise ValueError(f"{flag}: got {clip_repr(path)} ({error}), want {wanted}") from None


def token_ids(flag: str, given: str) -> list[int]:
    """Ids between commas or blanks."""
    try:
        return [int(word) for word in given.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{flag}: got {clip_repr(given)}, want token ids such as 1,2,3") from None


def read_standard_input(flag: str) -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag}: got what is no UTF-8 ({error}), want text") from None


def set_threads(count: int | None) -> None:
    if count is None:
        return
    if not 1 <= count <= MOST_THREADS:  # torch dies of more than the system gives
        raise ValueError(f"--threads: got {count}, want a whole number from 1 to {MOST_THREADS}")
    import torch

    torch.set_num_threads(count)


def settle_threads(count: int | None, model: object) -> None:
    """Where nobody said how many: one, where layers run in C on the thread that calls them. With several, products are torch's."""
    import torch

    from stepgraph.graphs.layers import cpu as cpu_kernels

    if count is not None or "OMP_NUM_THREADS" in os.environ or not isinstance(model, torch.nn.Module):
        return
    weight = next((tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()), None)
    if weight is not None and cpu_kernels.serves(weight):
        torch.set_num_threads(1)
