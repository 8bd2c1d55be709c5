"""Reads a folder of hidden states that `EngineConfig.save_hidden_states` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from stepgraph.runtime.extras.hidden_states import SavedText, read_index
from stepgraph.sampling.fields import clip_error


class SavedStates:
    """The texts of a folder in the order in which they were saved. Tensors are read on access. ValueError for a wrong folder or file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.layout, shards = read_index(self.folder)
        self._names = ("token_ids", "prompt_length", *(part for part, _ in self.layout.parts))
        self._files = [self._opened(shard) for shard in shards]
        self._texts = [(file, number) for file, shard in zip(self._files, shards, strict=True) for number in range(shard["texts"])]
        self.lengths = [self._checked_length(index) for index in range(len(self._texts))]

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> SavedText:
        file, number = self._texts[index]
        token_ids, prompt_length, *states = (file.get_tensor(f"{number}.{part}") for part in self._names)
        return SavedText(token_ids, int(prompt_length), states[0], states[-1])

    def token_ids(self, index: int) -> Tensor:
        """The tokens of one text, without its states."""
        file, number = self._texts[index]
        tokens: Tensor = file.get_tensor(f"{number}.token_ids")
        return tokens

    def __iter__(self) -> Iterator[SavedText]:
        return (self[index] for index in range(len(self)))

    def _opened(self, shard: Mapping[str, Any]) -> Any:
        file = _open(self.folder / shard["file"])
        if len(file.keys()) != shard["texts"] * len(self._names):
            expected = f"{len(self._names)} for each of {shard['texts']} texts"
            raise ValueError(f"{self.folder / shard['file']}: got {len(file.keys())} tensors, expected {expected}")
        return file

    def _checked_length(self, index: int) -> int:
        """The number of tokens of a text, after its tensors and their shapes are checked."""
        file, number = self._texts[index]
        layout = self.layout
        try:
            count, *_ = file.get_slice(f"{number}.token_ids").get_shape()
            for part, size in layout.parts:
                found = tuple(file.get_slice(f"{number}.{part}").get_shape())
                if found != (count - 1, size):
                    raise ValueError(f"{self.folder}: {part} of text {index}: got the shape {found}, expected {(count - 1, size)}")
            file.get_slice(f"{number}.prompt_length")
        except SafetensorError as error:
            raise ValueError(f"{self.folder}: text {index}: {error}") from None
        return int(count)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, UnicodeError) as error:
        raise ValueError(f"{path}: {clip_error(error)}") from None
