"""Reads a folder of hidden states that `EngineConfig.save_hidden_states` wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from stepgraph.runtime.hidden_states import SHARDS, SavedText, open_shard


class SavedStates:
    """The texts of a folder in the order in which they were saved. Tensors are read on access. ValueError for a wrong folder or file."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        files = [open_shard(path) for path in sorted(self.folder.glob(SHARDS))]
        if not files:
            raise ValueError(f"{self.folder}: got no {SHARDS}, expected a folder written by EngineConfig.save_hidden_states")
        self.layout = files[0][1]
        self._names = ("token_ids", "prompt_length", *(part for part, _ in self.layout.parts))
        if any(layout != self.layout or len(file.keys()) % len(self._names) for file, layout in files):
            expected = f"{len(self._names)} tensors for each text in all of them"
            raise ValueError(f"{self.folder}: got files of different layouts, expected {expected}")
        self._texts = [(file, number) for file, _ in files for number in range(len(file.keys()) // len(self._names))]
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
