"""A model from a folder or a GGUF file: opened and checked first, its memory stated, then loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stepgraph.graphs.shapes import Limits
from stepgraph.runtime.config import EngineConfig
from stepgraph.runtime.models.gguf_file import GgufSource
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig, read_config
from stepgraph.runtime.models.tokens import folder_vocabulary, gguf_vocabulary
from stepgraph.runtime.models.weights import SafetensorsSource, Source, check_numbers, check_tensors, load_tensors, places, read_json
from stepgraph.sampling.grammar.vocabulary import Vocabulary


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found whole, and takes no memory yet."""

    path: Path
    config: LlamaConfig
    vocabulary: Vocabulary
    source: Source

    def outline(self, feature_layers: Sequence[int] = ()) -> Llama:
        """The model without memory behind its weights."""
        return Llama(self.config, feature_layers=feature_layers, device="meta")

    def memory(self, limits: Limits) -> str:
        """What loading will take, for people to read."""
        outline = self.outline()
        count = sum(parameter.numel() for parameter in outline.parameters())
        weights, cache = count * self.config.dtype.itemsize, sum(spec.nbytes for spec in outline.cache_specs(limits))
        dtype, unit = str(self.config.dtype).removeprefix("torch."), 2**30
        made_of = f"{count / 1e6:.1f}M weights of {dtype}, {weights / unit:.2f} GiB"
        return f"{self.path.name}: {made_of}; cache for {limits.cache_slots} tokens, {cache / unit:.2f} GiB"

    def load(self, device: str | torch.device, feature_layers: Sequence[int] = (), progress: bool = False) -> Llama:
        wanted = dict(places(self.outline()))
        check_numbers(wanted, self.source, self.path, progress)
        model = Llama(self.config, feature_layers=feature_layers, device=device)
        load_tensors(model, wanted, self.source, self.path, progress)
        return model.eval()


def open_checkpoint(path: str | Path, dtype: torch.dtype | None = None) -> Checkpoint:
    """Read and check everything but the numbers themselves. ValueError names the file, the field or the tensor.

    path: a Hugging Face folder (config.json, tokenizer.json, safetensors) or a .gguf file. dtype: of the loaded weights and
    the cache; None: as the config says, bfloat16 for GGUF. Nothing is downloaded, and no code in the folder is run.
    """
    path = Path(path)
    source: Source
    if path.suffix == ".gguf" and path.is_file():
        source = gguf = GgufSource(path)
        config = read_config(gguf.config)
        vocabulary = gguf_vocabulary(gguf, path, config.vocab_size)
    elif path.is_dir():
        told = read_json(path / "config.json")
        config = read_config(told)
        source = SafetensorsSource(path)
        vocabulary = folder_vocabulary(path, told, config.vocab_size)
    else:
        raise ValueError(f"path: got {str(path)!r}, want a local folder with a config.json, or a .gguf file")
    checkpoint = Checkpoint(path, config if dtype is None else replace(config, dtype=dtype), vocabulary, source)
    outline = checkpoint.outline()
    check_tensors(outline, dict(places(outline)), source, path, {"lm_head.weight"} if config.tied else ())
    return checkpoint


def load_target(
    path: str | Path,
    config: EngineConfig,
    *,
    dtype: torch.dtype | None = None,
    feature_layers: Sequence[int] = (),
    progress: bool = False,
) -> tuple[Llama, Vocabulary]:
    """A target for an engine with this config, on the device of its backend, and its token table."""
    checkpoint = open_checkpoint(path, dtype)
    outline = checkpoint.outline(feature_layers)
    limits = config.limits(outline.vocab_size, len(checkpoint.vocabulary.tokens), outline.feature_size)
    stated = checkpoint.memory(limits)
    if progress:
        print(stated, file=sys.stderr, flush=True)  # where the bar goes
    on_cuda = config.backend == "cuda" or (config.backend == "auto" and torch.cuda.is_available())
    model = checkpoint.load("cuda:0" if on_cuda else "cpu", feature_layers, progress)
    return model, checkpoint.vocabulary
