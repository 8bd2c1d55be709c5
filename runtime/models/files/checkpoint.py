"""A model from a folder or a GGUF file: opened and checked first, then loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from stepgraph.graphs.buffers import BufferSpec
from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.models.files.gguf import GgufSource
from stepgraph.runtime.models.files.tokens import folder_vocabulary, gguf_vocabulary
from stepgraph.runtime.models.files.weights import SafetensorsSource, Source, check_numbers, check_tensors, load_tensors, places, read_json
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import DTYPES, LlamaConfig, mtp_count, read_config
from stepgraph.sampling.grammar.vocabulary import Vocabulary


class Weighed(Protocol):
    """What has weights and a cache."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def cache_specs(self, limits: Limits) -> Sequence[BufferSpec]: ...


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found whole, and takes no memory yet."""

    path: Path
    config: LlamaConfig
    vocabulary: Vocabulary
    source: Source
    mtp_modules: int = 0  # whose tensors are there beside the model's

    def outline(self, feature_layers: Sequence[int] = ()) -> Llama:
        """The model without memory behind its weights."""
        return Llama(self.config, feature_layers=feature_layers, device="meta")

    @property
    def mtp_tensors(self) -> frozenset[str]:
        """They are called as layers behind the model's."""
        behind = tuple(f"model.layers.{self.config.num_layers + index}." for index in range(self.mtp_modules))
        return frozenset(name for name in self.source.tensors if name.startswith(behind))

    def memory(self, limits: Limits) -> str:
        """What loading will take, for people to read."""
        return memory(self.path.name, self.outline(), limits)

    def check(self, progress: bool = False) -> None:
        """Read every number. ValueError names the tensor that holds none."""
        check_numbers(dict(places(self.outline())), self.source, self.path, progress)

    def load(self, device: str | torch.device, feature_layers: Sequence[int] = (), progress: bool = False) -> Llama:
        """After `check`."""
        model = Llama(self.config, feature_layers=feature_layers, device=device)
        load_tensors(model, dict(places(model)), self.source, self.path, progress)
        model.origin = self.path.name
        return model.eval()


def memory(name: str, outline: Weighed, limits: Limits, shared: nn.Module | None = None) -> str:
    """What loading a model will take, for people to read. `shared`: whose weights count there."""
    counted = set() if shared is None else set(shared.parameters())
    own = [parameter for parameter in outline.parameters() if parameter not in counted]
    weights, cache = sum(parameter.nbytes for parameter in own), sum(spec.nbytes for spec in outline.cache_specs(limits))
    dtype, unit = str(own[0].dtype).removeprefix("torch."), 2**30
    made_of = f"{sum(parameter.numel() for parameter in own) / 1e6:.1f}M weights of {dtype}, {weights / unit:.2f} GiB"
    return f"{name}: {made_of}; cache for {limits.cache_slots} tokens, {cache / unit:.2f} GiB"


def open_checkpoint(path: str | Path, dtype: torch.dtype | None = None) -> Checkpoint:
    """Read and check everything but the numbers themselves. ValueError names the file, the field or the tensor.

    path: a Hugging Face folder (config.json, tokenizer.json, safetensors) or a .gguf file. dtype: of the loaded weights and
    the cache; None: as the config says, bfloat16 for GGUF. Nothing is downloaded, and no code in the folder is run.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype: got {dtype!r:.100}, want one of {', '.join(map(str, DTYPES.values()))}, or None")
    if not isinstance(path, (str, Path)):
        raise ValueError(f"path: got {type(path).__name__}, want the path of a model's folder or .gguf file")
    path = Path(path)
    source: Source
    mtp_modules = 0
    if path.suffix == ".gguf" and path.is_file():
        source = gguf = GgufSource(path)
        config = read_config(gguf.config)
        vocabulary = gguf_vocabulary(gguf, path, config.vocab_size)
    elif path.is_dir():
        told = read_json(path / "config.json")
        config = read_config(told)
        mtp_modules = mtp_count(told)
        source = SafetensorsSource(path)
        vocabulary = folder_vocabulary(path, told, config.vocab_size)
    else:
        raise ValueError(f"path: got {str(path)!r}, want a local folder with a config.json, or a .gguf file")
    checkpoint = Checkpoint(path, config if dtype is None else replace(config, dtype=dtype), vocabulary, source, mtp_modules)
    outline = checkpoint.outline()
    spare = checkpoint.mtp_tensors | ({"lm_head.weight"} if config.tied else set())
    check_tensors(outline, dict(places(outline)), source, path, spare)
    return checkpoint
