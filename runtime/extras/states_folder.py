"""Hidden states on disk: safetensors shards and a JSON index, written by a thread of their own, read by name.

A shard holds whole texts: `3.token_ids`, `3.prompt_length`, `3.features` and `3.hidden` are its fourth. The last token of a
text was never fed to the model, so there is a state less than there are tokens. Every file appears whole or not at all.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from stepgraph.runtime.forks import leave_in_forks
from stepgraph.sampling.fields import clip_error
from stepgraph.sampling.lifetimes import end_at_exit

if sys.platform != "win32":
    import fcntl

FORMAT = "stepgraph hidden states 1"
INDEX = "states.json"
MOST_INDEX_BYTES = 64 << 20


@dataclass(frozen=True)
class StatesLayout:
    """What the states of a folder are of: the same for all its shards."""

    model: str
    vocab_size: int
    feature_layers: tuple[int, ...]  # of the target: whose inputs the features are, side by side
    feature_size: int  # 0: the features are the hidden states, which are kept once
    hidden_size: int  # of what the logits are taken from
    dtype: str

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What is kept for every token but the last, and how many numbers of it."""
        hidden = ("hidden", self.hidden_size)
        return (("features", self.feature_size), hidden) if self.feature_size else (hidden,)

    @property
    def width(self) -> int:
        """Numbers per token."""
        return self.feature_size + self.hidden_size


class SavedText(NamedTuple):
    token_ids: Tensor  # [n] int64
    prompt_length: int  # of these, the first ones
    features: Tensor  # [n - 1, feature_size]
    hidden: Tensor  # [n - 1, hidden_size]

    @property
    def nbytes(self) -> int:
        states = (self.hidden,) if self.features is self.hidden else (self.features, self.hidden)
        return sum(part.nbytes for part in (self.token_ids, *states))


class StatesWriter:
    """Writes texts in the background, a shard at a time. `put` never blocks: what the disk is too slow for is refused.

    Holds at most about twice `shard_bytes`; a crash loses what is held. ValueError where the folder cannot be used.
    """

    def __init__(self, folder: str | Path, layout: StatesLayout, shard_bytes: int) -> None:
        self._folder, self._layout, self._shard_bytes = Path(folder), layout, shard_bytes
        self._shards: list[dict[str, Any]] = []
        self._lock = threading.RLock()  # a finaliser may call `finish` wherever this is held
        self._texts: queue.SimpleQueue[SavedText | None] = queue.SimpleQueue()
        self._held = 0
        self._closed = False
        self.saved = self.unsaved = 0
        self.error = ""
        self._claim = self._prepare()
        self._thread = threading.Thread(target=self._run, name="stepgraph-states", daemon=True)
        self._thread.start()
        end_at_exit(self)
        leave_in_forks(self._leave)

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
        """Have what is held written, and wait for nothing. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._texts.put(None)

    def close(self, seconds: float | None = None) -> None:
        """Write what is held, and wait for it, so long at most. Idempotent."""
        self.finish()
        self._thread.join(seconds)

    def _prepare(self) -> int:
        """Make the folder, continue what it holds, and keep other writers out. Returns the open lock."""
        folder = self._folder
        try:
            folder.mkdir(exist_ok=True)
            claim = os.open(folder / ".writer", os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ValueError(f"{folder}: {error.strerror or error}, want a folder to write to") from None
        try:
            if sys.platform != "win32":
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / INDEX).exists():
                layout, self._shards = read_index(folder)
                if layout != self._layout:
                    raise ValueError(f"{folder}: holds states of {layout}, want an empty folder, or states of {self._layout}")
        except OSError:
            os.close(claim)
            raise ValueError(f"{folder}: another writer is at work there, want a folder for each") from None
        except ValueError:
            os.close(claim)
            raise
        return claim

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
        self._unclaim()

    def _unclaim(self) -> None:
        claim, self._claim = self._claim, -1
        if claim >= 0:
            os.close(claim)

    def _leave(self) -> None:
        self._lock, self._closed = threading.RLock(), True
        self._unclaim()  # or the folder would be taken for as long as the fork lives

    def _flush(self, texts: Sequence[SavedText], size: int) -> None:
        try:
            if not self.error:
                self._write_shard(texts)
        except Exception as error:  # whatever it is, it ends the saving and nothing else
            self.error = f"{self._folder}: {error}"
        with self._lock:
            self._held -= size
            self.saved, self.unsaved = (self.saved, self.unsaved + len(texts)) if self.error else (self.saved + len(texts), self.unsaved)

    def _write_shard(self, texts: Sequence[SavedText]) -> None:
        name = f"states-{len(self._shards):05}.safetensors"
        tensors: dict[str, Tensor] = {}
        for place, text in enumerate(texts):
            tensors |= {f"{place}.token_ids": text.token_ids, f"{place}.prompt_length": torch.tensor(text.prompt_length)}
            tensors |= {f"{place}.{part}": getattr(text, part).contiguous() for part, _ in self._layout.parts}
        with whole_file(self._folder / name) as part:
            save_file(tensors, part)
        shard = {"file": name, "texts": len(texts), "tokens": sum(len(text.token_ids) for text in texts)}
        index = {"format": FORMAT, **asdict(self._layout), "shards": [*self._shards, shard]}
        with whole_file(self._folder / INDEX) as part:
            part.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        self._shards.append(shard)


class SavedStates:
    """The texts of a folder, in the order in which they were saved. Reads headers first, and a text when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.layout, shards = read_index(self.folder)
        self._names = ("token_ids", "prompt_length", *(part for part, _ in self.layout.parts))
        self._files = [self._opened(shard) for shard in shards]
        self._homes = [(file, place) for file, shard in zip(self._files, shards, strict=True) for place in range(shard["texts"])]
        self.lengths = [self._length(index) for index in range(len(self._homes))]

    def __len__(self) -> int:
        return len(self._homes)

    def __getitem__(self, index: int) -> SavedText:
        file, place = self._homes[index]
        token_ids, prompt_length, *states = (file.get_tensor(f"{place}.{part}") for part in self._names)
        return SavedText(token_ids, int(prompt_length), states[0], states[-1])

    def token_ids(self, index: int) -> Tensor:
        """Of one text, without its states."""
        file, place = self._homes[index]
        tokens: Tensor = file.get_tensor(f"{place}.token_ids")
        return tokens

    def __iter__(self) -> Iterator[SavedText]:
        return (self[index] for index in range(len(self)))

    def _opened(self, shard: Mapping[str, Any]) -> Any:
        file = _open(self.folder / shard["file"])
        if len(file.keys()) != shard["texts"] * len(self._names):
            wanted = f"those of {shard['texts']} texts, {len(self._names)} of each"
            raise ValueError(f"{self.folder / shard['file']}: holds {len(file.keys())} tensors, want {wanted}")
        return file

    def _length(self, index: int) -> int:
        """Tokens of a text, once it is certain that all of it is there and fits."""
        file, place = self._homes[index]
        layout = self.layout
        try:
            count, *_ = file.get_slice(f"{place}.token_ids").get_shape()
            for part, size in layout.parts:
                found = tuple(file.get_slice(f"{place}.{part}").get_shape())
                if found != (count - 1, size):
                    raise ValueError(f"{self.folder}: {part} of text {index} have shape {found}, want {(count - 1, size)}")
            file.get_slice(f"{place}.prompt_length")
        except SafetensorError as error:
            raise ValueError(f"{self.folder}: text {index}: {error}") from None
        return int(count)


def read_index(folder: Path) -> tuple[StatesLayout, list[dict[str, Any]]]:
    """What a folder of states says of itself. ValueError where it is none."""
    path = folder / INDEX
    try:
        if path.stat().st_size > MOST_INDEX_BYTES:
            raise ValueError(f"got {path.stat().st_size} bytes, want at most {MOST_INDEX_BYTES}")
        told = json.loads(path.read_text(encoding="utf-8"))
        if told.pop("format") != FORMAT:
            raise ValueError(f"want the format {FORMAT!r}")
        shards = told.pop("shards")
        layout = StatesLayout(**told | {"feature_layers": tuple(told["feature_layers"])})
        for shard in shards:
            if Path(shard["file"]).name != shard["file"] or not isinstance(shard["texts"], int):
                raise ValueError(f"got the shard {shard!r:.100}, want the plain name of a file and how many texts it holds")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}, want what save_hidden_states writes") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: {clip_error(error)}") from None
    return layout, shards


class whole_file:
    """A file that takes its name once it is complete; what fails leaves nothing behind."""

    def __init__(self, path: Path) -> None:
        self._path, self._part = path, path.with_name(path.name + ".part")

    def __enter__(self) -> Path:
        return self._part

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                with self._part.open("rb") as written:
                    os.fsync(written.fileno())
                os.replace(self._part, self._path)
        finally:
            with suppress(OSError):
                self._part.unlink(missing_ok=True)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ValueError(f"{path}: {clip_error(error)}") from None
