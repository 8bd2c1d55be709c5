"""A folder of hidden states: safetensors shards and a JSON index, written by a background thread.

A shard holds complete texts; the tensors of its fourth text are `3.token_ids`, `3.prompt_length`, `3.features` and `3.hidden`. The last
token of a text was never fed to the model, so a text of n tokens has n - 1 states. Every file appears complete or not at all.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from stepgraph.sampling.fields import clip_error, clip_repr
from stepgraph.sampling.lifetimes import call_after_fork, close_at_exit

if sys.platform != "win32":
    import fcntl

FORMAT = "stepgraph hidden states 1"
INDEX = "states.json"
MOST_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class StatesLayout:
    """Model and sizes of the states in a folder, the same for all shards."""

    model: str
    vocab_size: int
    feature_layers: tuple[int, ...]  # of the target; the features are the concatenated inputs of these layers
    feature_size: int  # 0: the features are the hidden states, which are saved once
    hidden_size: int  # of the states that the logits are computed from
    dtype: str

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Name and width of each tensor that is saved per token."""
        hidden = ("hidden", self.hidden_size)
        return (("features", self.feature_size), hidden) if self.feature_size else (hidden,)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.feature_size + self.hidden_size


class SavedText(NamedTuple):
    token_ids: Tensor  # [n] int64
    prompt_length: int
    features: Tensor  # [n - 1, feature_size]
    hidden: Tensor  # [n - 1, hidden_size]

    @property
    def nbytes(self) -> int:
        states = (self.hidden,) if self.features is self.hidden else (self.features, self.hidden)
        return sum(part.nbytes for part in (self.token_ids, *states))


class StatesWriter:
    """Writes texts in a background thread, one shard at a time. `put` never blocks; it refuses texts if the disk is too slow.

    Holds at most about twice `shard_bytes` in memory, which a crash loses. ValueError if the folder cannot be used.
    """

    def __init__(self, folder: str | Path, layout: StatesLayout, shard_bytes: int) -> None:
        self._folder, self._layout, self._shard_bytes = Path(folder), layout, shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # reentrant, as a finaliser may call `finish` while its thread holds it
        self._texts: queue.SimpleQueue[SavedText | None] = queue.SimpleQueue()
        self._held = 0
        self._closed = False
        self.saved = self.unsaved = 0
        self.error = ""
        self._lock_file = self._prepare()
        self._thread = threading.Thread(target=self._run, name="stepgraph-states", daemon=True)
        self._thread.start()
        close_at_exit(self)
        call_after_fork(self._detach)

    def put(self, text: SavedText) -> bool:
        with self._lock:
            full = self._held and self._held + text.nbytes > 2 * self._shard_bytes
            if self.error or self._closed or full:
                self.unsaved += 1
                return False
            self._held += text.nbytes
            self._texts.put(text)
            return True

    def finish(self) -> None:
        """Have the texts in memory written, without waiting. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._texts.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Write the texts in memory, and wait at most so long. Idempotent."""
        self.finish()
        self._thread.join(seconds)

    def _prepare(self) -> int:
        """Create or reopen the folder and lock out other writers. Returns the open lock file."""
        folder = self._folder
        try:
            folder.mkdir(exist_ok=True)
            lock_file = os.open(folder / ".writer", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror or error}, expected a writable folder") from None
        try:
            if sys.platform != "win32":
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / INDEX).exists():
                layout, self._shards = read_index(folder)
                if layout != self._layout:
                    raise ValueError(f"{folder}: got states of {layout}, expected an empty folder or states of {self._layout}")
        except OSError:
            os.close(lock_file)
            raise ValueError(f"{folder}: got a folder that another writer uses, expected a folder for each writer") from None
        except ValueError:
            os.close(lock_file)
            raise
        return lock_file

    def _run(self) -> None:
        waiting: list[SavedText] = []
        size = 0
        for text in iter(self._texts.get, None):
            waiting.append(text)
            size += text.nbytes
            if size >= self._shard_bytes:
                self._flush(waiting, size)
                waiting, size = [], 0
        if waiting:
            self._flush(waiting, size)
        self._unlock()

    def _unlock(self) -> None:
        lock_file, self._lock_file = self._lock_file, -1
        if lock_file >= 0:
            os.close(lock_file)

    def _detach(self) -> None:
        self._lock, self._closed = threading.RLock(), True
        self._unlock()  # otherwise the folder stays locked until the fork ends

    def _flush(self, texts: Sequence[SavedText], size: int) -> None:
        try:
            if not self.error:
                self._write_shard(texts)
        except Exception as error:  # of any kind: it ends the saving and nothing else
            self.error = f"{self._folder}: {error}"
        with self._lock:
            self._held -= size
            self.saved, self.unsaved = (self.saved, self.unsaved + len(texts)) if self.error else (self.saved + len(texts), self.unsaved)

    def _write_shard(self, texts: Sequence[SavedText]) -> None:
        name = f"states-{len(self._shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for index, text in enumerate(texts):
            tensors |= {f"{index}.token_ids": text.token_ids, f"{index}.prompt_length": torch.tensor(text.prompt_length)}
            tensors |= {f"{index}.{part}": getattr(text, part).contiguous() for part, _ in self._layout.parts}
        with whole_file(self._folder / name) as part:
            save_file(tensors, part)
        shard = {"file": name, "texts": len(texts), "tokens": sum(len(text.token_ids) for text in texts)}
        content = {"format": FORMAT, **asdict(self._layout), "shards": [*self._shards, shard]}
        with whole_file(self._folder / INDEX) as part:
            part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        self._shards.append(shard)


def read_index(folder: Path) -> tuple[StatesLayout, list[dict[str, Any]]]:
    """Layout and shards of a folder. ValueError if it is not a folder of states."""
    path = folder / INDEX
    try:
        if path.stat().st_size > MOST_INDEX_BYTES:
            raise ValueError(f"got {path.stat().st_size} bytes, expected at most {MOST_INDEX_BYTES}")
        content = json.loads(path.read_text(encoding="utf-8"))
        found = content.pop("format")
        if found != FORMAT:
            raise ValueError(f"format: got {clip_repr(found)}, expected {FORMAT!r}")
        shards = content.pop("shards")
        layout = StatesLayout(**content | {"feature_layers": tuple(content["feature_layers"])})
        for shard in shards:
            if Path(shard["file"]).name != shard["file"] or not isinstance(shard["texts"], int):
                raise ValueError(f"shards: got {shard!r:.100}, expected a file name without a folder and the number of its texts")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}, expected a folder written by EngineConfig.save_hidden_states") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {clip_error(error)}") from None
    return layout, shards


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path that is renamed to `path` at the end of the block, or removed if the block raises."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        with part.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
