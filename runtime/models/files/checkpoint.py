"""A target model from a folder or a GGUF file: opened and checked first, then loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch

from stepgraph.graphs.layers.quantised import KINDS, TILE, QuantKind
from stepgraph.runtime.models.files.config_fields import DTYPES, read_config
from stepgraph.runtime.models.files.draft_layouts import count_mtp_modules
from stepgraph.runtime.models.files.gguf import GgufSource
from stepgraph.runtime.models.files.quantised_folder import quantised_source
from stepgraph.runtime.models.files.weights import FLOATS, SafetensorsSource, Source, StoredModel, llama_slices, read_json
from stepgraph.runtime.models.llama import Llama
from stepgraph.runtime.models.llama_config import LlamaConfig, RopeConfig
from stepgraph.sampling.fields import checked_path, clip_repr
from stepgraph.sampling.grammar.tokenizers.gguf import table_of_gguf_metadata
from stepgraph.sampling.grammar.tokenizers.readers import read_folder, refuse_path
from stepgraph.sampling.grammar.vocabulary import Vocabulary
from stepgraph.sampling.kernels.c_kernel import why_no_c

WeightsMode = Literal["quantised", "dequantised"]
QUANTISED, DEQUANTISED = get_args(WeightsMode)


@dataclass(frozen=True)
class Checkpoint(StoredModel):
    """A model whose config, vocabulary and tensor table were checked; its weights are not in memory yet."""

    config: LlamaConfig
    vocabulary: Vocabulary
    mtp_modules: int = 0  # number of MTP modules in the same files

    def outline(self, feature_layers: Sequence[int] = ()) -> Llama:
        """The model on the meta device."""
        return self.allocate_packed(self.make("meta", feature_layers))

    def make(self, device: str | torch.device, feature_layers: Sequence[int]) -> Llama:
        """The model, whose weights are uninitialised and not packed."""
        # Packed weights replace empty ones, for which a GPU would have to allocate memory; on the host untouched memory costs nothing.
        on_host = self.packed and device != "meta"
        return Llama(self.config, feature_layers=feature_layers, device="cpu" if on_host else device)

    @property
    def mtp_tensors(self) -> frozenset[str]:
        """Names of the MTP modules' tensors: the modules are stored as layers after the model's last one."""
        prefixes = tuple(f"model.layers.{self.config.num_layers + index}." for index in range(self.mtp_modules))
        return frozenset(name for name in self.source.tensors if name.startswith(prefixes))

    def load(self, device: str | torch.device, feature_layers: Sequence[int] = (), progress: bool = False) -> Llama:
        model = self.allocate_packed(self.make(device, feature_layers)).to(device)
        self.fill(model, progress)
        model.origin = self.path.name
        return model


def open_checkpoint(path: str | Path, dtype: torch.dtype | None = None, weights: WeightsMode = DEQUANTISED) -> Checkpoint:
    """Read and check everything except the weights. Raises ValueError that names the file, and the field or tensor.

    path: a Hugging Face folder (config.json, tokenizer.json, safetensors) or a .gguf file. dtype: of the loaded weights and
    the cache; None: the config's dtype, bfloat16 for GGUF. weights: "quantised" keeps quantised matrices as they are in
    memory. Nothing is downloaded, and no code in the folder is run.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise ValueError(f"dtype: got {clip_repr(dtype)}, expected one of {', '.join(map(str, DTYPES.values()))}, or None")
    path = checked_path("path", path)
    source: Source
    mtp_modules = 0
    if path.suffix == ".gguf" and path.is_file():
        source = gguf = GgufSource(path, dtype or torch.bfloat16)
        config = read_config(gguf.config)
        kind = gguf.metadata["general.architecture"]
        size = config.rope.rotated_size or config.head_size
        if (rotated := gguf.metadata.get(f"{kind}.rope.dimension_count", size)) != size:
            raise ValueError(f"{path}: {kind}.rope.dimension_count: got {rotated!r:.100}, expected {size}, the size of a head")
        rope, count, divisors = config.rope, config.head_size // 2, gguf.rope_divisors
        if divisors and (rope != RopeConfig(rope.theta) or len(divisors) != count or not all(0 < each < math.inf for each in divisors)):
            raise ValueError(f"{path}: rope_freqs.weight: got {divisors!r:.200}, expected {count} numbers above 0, and no other scaling")
        config = replace(config, rope=replace(rope, divisors=tuple(divisors) or rope.divisors))
        table = table_of_gguf_metadata(gguf.metadata, path, config.vocab_size)
    elif (path / "config.json").exists():
        fields = read_json(path / "config.json")
        config = read_config(fields)
        source = quantised_source(SafetensorsSource(path), fields)
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        stored = source.tensors
        if config.tied and {head, embedding} <= stored.keys():
            same = stored[head] == stored[embedding] and torch.equal(source.read(head), source.read(embedding))
            config = replace(config, tied=same)  # as in transformers
        mtp_modules = count_mtp_modules(fields, source, config.num_layers)
        table = read_folder(path, fields, config.vocab_size)
    else:
        refuse_path(path, "config.json")
    config = config if dtype is None else replace(config, dtype=dtype)
    checkpoint = Checkpoint(path, source, llama_slices(config), config, Vocabulary.from_table(table), mtp_modules)
    checkpoint.check_header(checkpoint.outline(), checkpoint.mtp_tensors | ({"lm_head.weight"} if config.tied else set()))
    return checkpoint if weights == DEQUANTISED else replace(checkpoint, packed=quantised_parameters(checkpoint))


def quantised_parameters(checkpoint: Checkpoint) -> dict[str, QuantKind]:
    """The parameters that stay quantised, by name. Raises ValueError for a quantised tensor that cannot stay so."""
    packable = checkpoint.packable()
    if not torch.cuda.is_available() and (why_not := why_no_c(checkpoint.config.dtype)):
        raise ValueError(f"weights: got {QUANTISED!r}, expected {DEQUANTISED!r}: the product in C is not available: {why_not}")
    for name, target in checkpoint.slices.items():
        stored = checkpoint.source.tensors[name]
        if stored.kind not in FLOATS and target.parameter not in packable:
            kinds, layout = ", ".join(KINDS), f"two dimensions, rows in multiples of {TILE} and whole groups"
            expected = f"one of {kinds} for all parts of {target.parameter}, in {layout}, or weights={DEQUANTISED!r}"
            raise ValueError(f"{checkpoint.path}: {name}: got type {stored.kind} and shape {stored.shape}, expected {expected}")
    return packable
